"""Rows of what programs use of the kernel, each with a small program that would notice.

The programs are those of ``kinds``: each makes one thing, waits for the question whether it is still as it
was, and answers once.
"""

from __future__ import annotations

from pathlib import Path

from conformance.sandbox import kinds
from conformance.sandbox.kinds.__main__ import kinds as programs
from conformance.sandbox.matrix.row import MatrixRow

FOLDER = Path(kinds.__file__).parent
REFUSED = {
    **dict.fromkeys(
        ("fanotify", "io-uring", "userfaultfd", "perf-event", "bpf-map", "landlock", "secret-memory",
         "namespaces-inside", "packet-socket", "crypto-socket", "machine-socket"),
        "refused: .*(not permitted|not supported|not implemented)",
    ),
    **dict.fromkeys(("setuid-program", "file-capabilities"), "refused: .*no new privileges"),
    "huge-pages": "refused: huge pages: Cannot allocate memory",
}  # fmt: skip
"""What the programs of a sandbox are refused, and in which words; huge pages only where the host has none."""


def _row(name: str, words: str) -> MatrixRow:
    def ask(order: str) -> str:
        return f"cd /row && PYTHONDONTWRITEBYTECODE=1 python3 -m kinds {order} /row/state {name} 2>&1"

    return MatrixRow(
        name.replace("-", " "),
        "feature",
        words.strip().rstrip(".").replace("\n", " "),
        check=ask("check"),
        setup=ask("start"),
        files=tuple(f"kinds/{path.name}" for path in sorted(FOLDER.glob("*.py"))),
        inside=FOLDER.parent,
        refused=REFUSED.get(name, ""),
    )


FEATURES: tuple[MatrixRow, ...] = tuple(_row(name, body.__doc__ or "") for name, body in programs().items())
