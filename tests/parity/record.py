"""``make record [NAME=training.elastic]``: record the logs anew.

``--check``: a fresh run is only held to its decisions, and nothing is written. ``--recorded``: so is the log
that lies here. Exit status `OTHERWISE` where it does other than it says.
"""

from __future__ import annotations

import lzma
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from parity import DECIDING, RECORDED, otherwise, parity, recorded

ROOT = Path(__file__).parent.parent.parent
OTHERWISE = 3
"""The exit status of a difference: an interpreter that fails ends with another one."""


def main(words: list[str]) -> int:
    names = [word for word in words if not word.startswith("--")] or DECIDING
    wrong: list[str] = []
    for name in names:
        with TemporaryDirectory() as folder:
            if "--recorded" in words:
                wrong += otherwise(name, recorded(name, Path(folder)))
                continue
            whole = Path(folder) / "whole.jsonl"
            content = b"".join(log.read_bytes() for log in parity(name).record(Path(folder)))
            for place, called in ((folder, b"/run"), (str(ROOT), b"/windtunnel")):
                content = content.replace(place.encode(), called)
            whole.write_bytes(content)
            faults = otherwise(name, whole)
            wrong += faults
            if "--check" not in words and not faults:
                RECORDED.mkdir(exist_ok=True)
                packed = lzma.compress(content, preset=9 | lzma.PRESET_EXTREME)
                (RECORDED / f"{name}.jsonl.xz").write_bytes(packed)
                print(f"{name}: {len(content):,} bytes, {len(packed):,} packed")
    print(*wrong, sep="\n")
    return OTHERWISE if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
