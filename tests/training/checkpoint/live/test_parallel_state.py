"""Sharded and replicated training over real gloo ranks: round trips, and other worlds and meshes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from support.ranks import run_ranks

pytestmark = pytest.mark.slow
PROGRAM = Path(__file__).parents[1] / "programs" / "parallel.py"


def launch(world: int, kind: str, folder: Path, steps: int) -> dict[str, Any]:
    """``world`` ranks go on from what is stored up to ``steps``; what rank 0 found and got."""
    out = folder.with_name(f"{folder.name}.pt")
    done = run_ranks([PROGRAM, kind, folder, str(steps), out], world)
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(out)  # type: ignore[no-any-return]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(("kind", "world"), [("ddp", 2), ("mesh", 4)])
def test_new_processes_go_on_bit_identical(tmp_path: Path, kind: str, world: int) -> None:
    straight = launch(world, kind, tmp_path / "straight", 4)
    first = launch(world, kind, tmp_path / "stored", 2)
    second = launch(world, kind, tmp_path / "stored", 4)
    assert second["start"] == 2
    assert same(first["left"], second["found"])
    assert first["losses"] + second["losses"] == straight["losses"]
    assert same(second["left"], straight["left"])


def test_other_worlds_and_meshes_get_the_same_state(tmp_path: Path) -> None:
    begun = launch(3, "fsdp", tmp_path / "stored", 2)["left"]
    for number, (world, kind) in enumerate([(4, "mesh"), (2, "fsdp"), (1, "plain")]):
        result = launch(world, kind, tmp_path / "stored", 2 + number)
        assert result["start"] == 2 + number, (world, kind)
        assert same(result["found"], begun), (world, kind)
        assert result["cursor"] == {"step": 2}
