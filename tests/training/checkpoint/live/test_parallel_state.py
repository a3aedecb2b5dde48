"""Sharded and replicated training over real gloo ranks: round trips, and other worlds and meshes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint_ranks import launch

pytestmark = pytest.mark.slow


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(("kind", "world"), [("ddp", 2), ("mesh", 4)])
def test_new_processes_go_on_bit_identical(folder: Path, kind: str, world: int) -> None:
    (folder / "straight").mkdir()
    straight = launch(world, kind, folder / "straight", 4, 1)
    first = launch(world, kind, folder, 2, 1)
    second = launch(world, kind, folder, 4, 2)
    assert second["start"] == 2
    assert same(first["left"], second["found"])
    assert first["losses"] + second["losses"] == straight["losses"]
    assert same(second["left"], straight["left"])
    assert ("shared" in first["shards"]) == (kind == "ddp")


def test_other_worlds_and_meshes_get_the_same_state(folder: Path) -> None:
    begun = launch(3, "fsdp", folder, 2, 1)["left"]
    # One host goes at a time: with two copies its shard is left.
    cuts = [(4, "mesh"), (3, "fsdp"), (2, "fsdp"), (1, "plain")]
    for number, (world, kind) in enumerate(cuts):
        found = launch(world, kind, folder, 2 + number, 2 + number)
        assert found["start"] == 2 + number, (world, kind)
        assert same(found["found"], begun), (world, kind)
        assert found["cursor"] == {"step": 2}
