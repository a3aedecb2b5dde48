"""``make record [NAME=training.elastic]``: record the logs anew.

``--check``: a fresh run is only held to its decisions, and nothing is written; exit status 1 where it did
other than it decided.
"""

from __future__ import annotations

import lzma
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from parity import DECIDING, RECORDED, events, parity
from windtunnel.replay import replay


def main(words: list[str]) -> int:
    check = "--check" in words
    wrong: list[str] = []
    for name in [word for word in words if word != "--check"] or DECIDING:
        with TemporaryDirectory() as folder:
            logs = parity(name).record(Path(folder))
            content = b"".join(log.read_bytes() for log in logs)
            whole = Path(folder) / "recorded.jsonl"
            whole.write_bytes(content)
            faults = parity(name).effects(events(whole))
            faults += [
                f"decision {difference.number} is made otherwise: {difference.fields}"
                for part in replay(whole).parts
                if part.capability == name
                for difference in part.differences
            ]
            wrong += [f"{name}: {fault}" for fault in faults]
            if not check and not faults:
                packed = lzma.compress(content, preset=9 | lzma.PRESET_EXTREME)
                (RECORDED / f"{name}.jsonl.xz").write_bytes(packed)
                print(f"{name}: {len(content):,} bytes, {len(packed):,} packed")
    print(*wrong, sep="\n", file=sys.stderr)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
