"""`ShardedEmbedding` on 4 ranks: bits, bytes and faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.ranks import run_ranks

EXAMPLE = Path(__file__).parents[4] / "examples" / "data" / "sharded_embeddings.py"
PROGRAM = Path(__file__).parent / "programs" / "sharded_ranks.py"


@pytest.mark.parametrize("part", ["bits", "faults", "kept"])
def test_ranks(part: str, tmp_path: Path) -> None:
    """``bits``: outputs, weights and state are one table's, whatever lies where, and bytes are as predicted.
    ``faults``: what is wrong on one rank is an error of all, and none hangs. ``kept``: saved and loaded as
    one table, by other ranks too."""
    done = run_ranks([PROGRAM, part, tmp_path], 4, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_example(tmp_path: Path) -> None:
    done = run_ranks([EXAMPLE], 2, cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "rows of items lie on both ranks" in done.stdout
    assert {path.name for path in (tmp_path / "embeddings").iterdir()} == {
        "items.safetensors",
        "tags.safetensors",
    }
