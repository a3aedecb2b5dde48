"""Tables on two ranks, decided for and decided for again."""

from __future__ import annotations

from pathlib import Path

from support.ranks import run_ranks

PROGRAM = Path(__file__).parent.parent / "data" / "embeddings" / "live" / "programs" / "sharded_ranks.py"


def spread(folder: Path) -> Path:
    """The log of the decisions."""
    done = run_ranks([PROGRAM, "recorded", folder], 2)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "events.jsonl"
