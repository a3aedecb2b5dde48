"""Of which kind what ranks save is, and that this is looked at again with every save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_world import Cluster, FakeJob, together
from torch import nn

from windtunnel.training.checkpoint.live import kinds, objects
from windtunnel.training.checkpoint.live.state import put, walk


def state(rank: int) -> dict[str, Any]:
    model = nn.Linear(3, 2)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    return {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        "order": torch.Generator().manual_seed(5),  # of all ranks alike: which samples come next
        "noise": torch.Generator().manual_seed(rank),
        "cursor": {"epoch": 0, "names": ["a", "b"]},
    }


def agreed(folder: Path, states: list[dict[str, Any]]) -> list[kinds.Kinds]:
    cluster = Cluster(folder, len(states))
    shared = frozenset(("model/weight", "model/bias"))

    def one(rank: int) -> kinds.Kinds:
        return kinds.agree(FakeJob(cluster, rank), states[rank], *walk(states[rank]), shared, "1")

    return together(len(states), one)


def test_what_is_alike_random_and_own(tmp_path: Path) -> None:
    states = [state(rank) for rank in range(3)]
    found = agreed(tmp_path / "a", states)
    assert {one.twins for one in found} == {(0, 0, 0)}
    assert found[0].random == ("_rng", "noise")
    assert {"order", "cursor", "optimizer/groups"} <= found[1].alike
    states[2]["mine"] = 7  # only there
    states[1]["much"] = torch.zeros(kinds.MOST_BYTES)
    assert agreed(tmp_path / "b", states)[0].twins == (0, -1, -1)
    states = [{**state(rank), "score": [rank]} for rank in range(2)]
    assert agreed(tmp_path / "c", states)[0].twins == (-1, -1)


def test_a_digest_tells_whether_it_is_alike_still(tmp_path: Path) -> None:
    states = [state(rank) for rank in range(2)]
    found = agreed(tmp_path / "a", states)
    shared = frozenset(("model/weight", "model/bias"))

    def digests() -> list[str]:
        return [kinds.digest(found[rank], rank, *walk(states[rank]), shared) for rank in range(2)]

    def alike() -> bool:
        first, second = digests()
        return first == second

    before = digests()
    assert alike()
    for one in states:
        one["cursor"]["epoch"] += 1
        torch.rand(3, generator=one["order"])
    # equal, however it came about: what was loaded shares no strings with what was made here
    states[1]["cursor"] = objects.unpack(objects.pack(states[1]["cursor"]))
    assert alike() and digests() != before
    torch.rand(3, generator=states[0]["noise"])  # random is random
    assert alike()
    torch.rand(3, generator=states[1]["order"])
    assert not alike()
    torch.rand(3, generator=states[0]["order"])
    assert alike()
    states[0]["new"] = states[1]["new"] = 3  # of no kind, when they agreed
    assert not alike()


@pytest.mark.parametrize("rank", [0, 3])
def test_random_states_follow_from_the_runs_seed_the_rank_and_the_step(rank: int) -> None:
    drawn = []
    for step in (7, 7, 8):
        one = state(1)
        tensors, others = walk(one)
        seed = kinds.seed_for(42, rank, step)
        by_name = {name: tensor.detach().clone() for name, tensor in tensors}
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors}
        put(one, by_name.__getitem__, shapes.__getitem__, others, reseed=seed, random=("_rng", "noise"))
        assert one["order"].get_state().equal(torch.Generator().manual_seed(5).get_state())
        drawn.append([float(torch.rand(())), float(torch.rand((), generator=one["noise"]))])
    assert drawn[0] == drawn[1]
    assert drawn[0][0] != drawn[2][0] and drawn[0][1] != drawn[2][1]
