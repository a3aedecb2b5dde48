"""Scripts that use PyTorch widely run on the absent device; each holds its own assertions."""

from __future__ import annotations

from collections import Counter

import pytest
from capturing import capture

from windtunnel.training.emulate.graph import EventKind


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks"), [("device.py", (0, 3)), ("models.py", (0,)), ("parallel.py", (0, 5))]
)
def test_a_script_of_many_parts_runs(name: str, ranks: tuple[int, ...]) -> None:
    slices = capture(name, ranks=ranks)
    assert [one.rank for one in slices] == list(ranks)
    assert all(len(one.events) > 50 for one in slices)


@pytest.mark.slow
def test_every_way_to_communicate_is_recorded_with_its_bytes() -> None:
    zero, three = capture("communicate.py", ranks=(0, 3))
    for one in (zero, three):
        rows = {(c.kind, c.in_bytes, c.out_bytes, c.peer) for c in one.collectives}
        r, world = one.rank, 8
        # The ring: 1,000 floats to the right, from the left.
        assert ("send", 4000, 0, (r + 1) % world) in rows and ("recv", 0, 4000, (r - 1) % world) in rows
        # Rank r sends r + 1 rows of 4 floats to each rank, and hears 1 + 2 + … + 8 of them.
        assert ("all_to_all", 16 * (r + 1) * world, 16 * 36, -1) in rows
        # Lists of 7 x 3 floats.
        assert ("all_gather", 84, 84 * world, -1) in rows and ("reduce_scatter", 84 * world, 84, -1) in rows
        assert ("reduce", 84, 84, 1) in rows and ("broadcast", 84, 84, 1) in rows
        assert any(kind == "barrier" for kind, *_ in rows)
        gathers = {(c.in_bytes, c.out_bytes) for c in one.collectives if c.kind == "gather"}
        assert gathers == ({(84, 84 * world)} if r == 0 else {(84, 0)})
        backends = Counter(c.backend for c in one.collectives)
        assert backends["gloo"] >= 1 and backends["nccl"] > 10
        kinds = Counter(one.events["kind"].tolist())
        assert kinds[EventKind.COLLECTIVE] == len(
            [1 for k in one.events["kind"] if k == EventKind.COLLECTIVE]
        )
    halves = next(c for c in three.collectives if c.kind == "all_reduce" and c.in_bytes == 44)
    assert three.groups[halves.group].ranks == (0, 1, 2, 3)
    outer = [group.ranks for group in three.world_groups if group.label == "outer"]
    assert outer == [(0, 3), (4, 7)], "the other half is split in the same way"
    pairs = next(c for c in three.collectives if c.kind == "all_reduce" and c.in_bytes == 32)
    assert three.groups[pairs.group].ranks in ((2, 3), tuple(range(1, 8, 2)))
