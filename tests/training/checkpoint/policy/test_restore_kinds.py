"""What is restored where the shards of some ranks are lost in every copy, against brute force."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from windtunnel.training.checkpoint.model import Commit, Copy, Log, RestorePlan, Source, Twins
from windtunnel.training.checkpoint.policy import Inventory, decide
from windtunnel.training.checkpoint.policy.restore import StoredShard, StoredStep, needed_shards

WORLD = 4
LOG = Log((Commit(8, 1, True), Commit(9, 1, True)), newest=9)


def plan(left: list[tuple[int, str, int]], twins: tuple[int, ...] | None, log: Log = LOG) -> RestorePlan:
    """``left``: place, shard and step of each copy."""
    copies = tuple(Copy(p, shard, step, WORLD, True, 1, "l", 9, f"{shard}@{step}") for p, shard, step in left)
    tables = () if twins is None else (Twins("l", twins),)
    found = decide(Inventory(copies, (), log=log, restart=False, twins=tables))
    assert isinstance(found, RestorePlan)
    return found


def alive(*ranks: int, step: int = 9) -> list[tuple[int, str, int]]:
    return [(0, "shared", step), *((rank, f"rank{rank}", step) for rank in ranks)]


def test_a_twin_stands_in_for_a_lost_shard() -> None:
    found = plan(alive(2, 3), (0, 0, 0, 0))
    assert (found.step, found.stand_ins) == (9, ((0, 2), (1, 2)))
    assert set(dict(found.sources)) == {"shared", "rank2", "rank3"}
    assert "random states of ranks 0, 1 are lost" in found.reason
    # replicas of HSDP: 0 and 2 have the same pieces, 1 and 3 others
    assert plan(alive(2, 3), (0, 1, 0, 1)).stand_ins == ((0, 2), (1, 3))
    for twins in ((0, 1, 0, 3), (-1, 0, 0, 0), (0, 0), None):
        lost = plan(alive(2, 3), twins)
        assert (lost.step, lost.newer) == (None, (9,)) and lost.failed
    apart = Log((Commit(9, 1, alike=False),), newest=9)
    assert plan(alive(2, 3), (0, 0, 0, 0), apart).step is None
    assert plan([one for one in alive(2, 3) if one[1] != "shared"], (0, 0, 0, 0)).step is None


def test_a_whole_older_step_in_memory_goes_before_one_in_storage_does_not() -> None:
    older = alive(0, 1, 2, 3, step=8)
    found = plan([*alive(2, 3), *older], (0, 0, 0, 0))
    assert (found.step, found.stand_ins) == (8, ())
    copies = tuple(Copy(p, shard, step, WORLD, True, 1, "l", 9, "c") for p, shard, step in alive(2, 3))
    shards = tuple(StoredShard(shard, 9, "c", "l") for shard in needed_shards(WORLD, True))
    stored = (StoredStep(5, WORLD, True, 1, shards),)
    twins = (Twins("l", (0, 0, 0, 0)),)
    both = decide(Inventory(copies, stored, log=None, twins=twins))  # without a log nothing is known alike
    assert isinstance(both, RestorePlan) and (both.step, both.stand_ins) == (5, ())
    from windtunnel.training.checkpoint.model import Persisted

    log = Log(LOG.committed, (Persisted(5, 1, ""),), 9)
    both = decide(Inventory(copies, stored, log=log, twins=twins))
    assert isinstance(both, RestorePlan) and (both.step, both.stand_ins) == (9, ((0, 2), (1, 2)))


@given(
    st.sets(st.sampled_from([*product(range(WORLD), (8, 9))])),
    st.sets(st.sampled_from((8, 9))),
    st.tuples(*[st.integers(-1, rank) for rank in range(WORLD)]),
    st.sets(st.sampled_from((8, 9))),
)
def test_exactly_what_is_left_is_restored(
    left: set[tuple[int, int]], shared: set[int], twins: tuple[int, ...], alike: set[int]
) -> None:
    log = Log(tuple(Commit(step, 1, step in alike) for step in (8, 9)), newest=9)
    copies = [(rank, f"rank{rank}", step) for rank, step in left]
    found = plan([*copies, *((3, "shared", step) for step in shared)], twins, log)

    def at(step: int) -> set[int]:
        return {rank for rank, of in left if of == step}

    def can(step: int, rank: int) -> bool:
        return twins[rank] >= 0 and any(twins[other] == twins[rank] for other in at(step))

    whole = [s for s in (9, 8) if s in shared and len(at(s)) == WORLD]
    parts = [
        s
        for s in (9, 8)
        if s in shared & alike and all(rank in at(s) or can(s, rank) for rank in range(WORLD))
    ]
    assert found.step == next(iter(whole or parts), None)
    if found.step is None:
        assert found.failed
        return
    expected = set() if whole else set(range(WORLD)) - at(found.step)
    assert {rank for rank, _ in found.stand_ins} == expected
    for rank, twin in found.stand_ins:
        assert twin in at(found.step) and twins[twin] == twins[rank] >= 0
    for _, sources in found.sources:
        assert sources and all(isinstance(source, Source) for source in sources)
