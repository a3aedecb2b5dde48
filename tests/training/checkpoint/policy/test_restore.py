"""Which step a job goes on from, and from where."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from windtunnel.training.checkpoint.model import Copy, Source
from windtunnel.training.checkpoint.policy.placement import place
from windtunnel.training.checkpoint.policy.restore import (
    BadCopy,
    StoredShard,
    StoredStep,
    local_first,
    needed_shards,
    plan_restore,
)


def copy(
    at: int,
    shard: str,
    step: int,
    *,
    world: int = 2,
    shared: bool = False,
    generation: int = 1,
    checksum: str | None = None,
    nbytes: int = 100,
) -> Copy:
    told = checksum if checksum is not None else f"{shard}@{step}"
    return Copy(at, shard, step, world, shared, generation, "layout", nbytes, told)


def stored(step: int, world: int = 2, generation: int = 1, bad: str = "", checksum: str = "") -> StoredStep:
    shards = tuple(
        StoredShard(shard, 100, checksum or f"{shard}@{step}", "layout")
        for shard in needed_shards(world, False)
    )
    return StoredStep(step, world, False, generation, shards, bad)


def whole(step: int, world: int = 2) -> list[Copy]:
    """Each shard with its host and the next one."""
    return [copy(at, f"rank{r}", step, world=world) for r in range(world) for at in (r, (r + 1) % world)]


def test_the_newest_whole_step_wins() -> None:
    plan = plan_restore([*whole(7), *whole(8), copy(0, "rank0", 9)], [])
    assert (plan.step, plan.world) == (8, 2)
    assert dict(plan.sources).keys() == {"rank0", "rank1"}
    assert {s.tier for _, sources in plan.sources for s in sources} == {"peer"}
    assert "step 8 from memory" in plan.reason
    assert "step 9 lacks rank1 (1 of 2 shards are left)" in plan.reason


def test_own_memory_first() -> None:
    plan = local_first(plan_restore(whole(7), []), 1)
    for _, sources in plan.sources:
        assert sources[0] == Source("memory", 1)
        assert sources[1] == Source("peer", 0)


def test_shared_state_is_needed_too() -> None:
    alone = [copy(r, f"rank{r}", 5, shared=True) for r in range(2)]
    assert plan_restore(alone, []).step is None
    plan = plan_restore([*alone, copy(1, "shared", 5, shared=True)], [])
    assert plan.step == 5
    assert dict(plan.sources)["shared"] == (Source("peer", 1),)


def test_storage_newer_than_memory() -> None:
    plan = plan_restore(whole(5), [stored(3), stored(6)])
    assert plan.step == 6
    assert dict(plan.sources)["rank0"] == (Source("storage", None),)
    assert "from storage" in plan.reason


def test_memory_beats_storage_of_the_same_step_which_stays_the_last_resort() -> None:
    plan = plan_restore(whole(6), [stored(6)])
    for _, sources in plan.sources:
        assert [s.tier for s in sources] == ["peer", "peer", "storage"]


def test_a_group_that_is_gone_sends_all_to_storage() -> None:
    left = [one for one in whole(9, 4) if one.place not in (0, 1)]
    plan = plan_restore(left, [stored(4, 4)])
    assert plan.step == 4
    assert all(sources == (Source("storage", None),) for _, sources in plan.sources)
    assert "step 9 lacks rank0" in plan.reason


def test_storage_fills_what_memory_lacks_of_the_same_step() -> None:
    plan = plan_restore([copy(0, "rank0", 6)], [stored(6)])
    assert plan.step == 6
    assert dict(plan.sources)["rank0"][0] == Source("peer", 0)
    assert dict(plan.sources)["rank1"] == (Source("storage", None),)


def test_bad_copies_are_passed_over_then_the_step() -> None:
    copies = [*whole(8), *whole(7)]
    one = frozenset({BadCopy(0, "rank0", 8)})
    plan = plan_restore(copies, [], one)
    assert plan.step == 8
    assert dict(plan.sources)["rank0"] == (Source("peer", 1),)
    assert "1 bad copy was passed over" in plan.reason
    both = one | {BadCopy(1, "rank0", 8)}
    assert plan_restore(copies, [], both).step == 7
    assert plan_restore([], [stored(3), stored(2)], frozenset({BadCopy(None, "", 3)})).step == 2


def test_torn_steps_in_storage_are_told() -> None:
    plan = plan_restore([], [StoredStep(5, bad="steps/5-1 was not completed")])
    assert plan.step is None
    assert "steps/5-1 was not completed" in plan.reason
    assert plan_restore([], []).reason == "nothing was saved yet"


def test_courses_are_not_mixed() -> None:
    """Step 9 was done twice: rank 0 has the old one, rank 1 the new one. They may differ."""
    copies = [
        *whole(8),
        copy(0, "rank0", 9, generation=1, checksum="old"),
        copy(1, "rank1", 9, generation=2, checksum="new"),
    ]
    assert plan_restore(copies, []).step == 8


def test_courses_that_made_the_same_may_be_mixed() -> None:
    copies = [
        copy(0, "rank0", 9, generation=1),
        copy(1, "rank1", 9, generation=1),
        copy(2, "rank1", 9, generation=2),
        copy(2, "rank2", 9, generation=2),
    ]
    fitting = [Copy(**{**vars(one), "world": 3}) for one in copies]
    plan = plan_restore(fitting, [])
    assert plan.step == 9
    assert {s.place for s in dict(plan.sources)["rank1"]} == {1, 2}
    differing = [
        Copy(**{**vars(one), "checksum": "other"}) if one.shard == "rank1" and one.generation == 2 else one
        for one in fitting
    ]
    assert plan_restore(differing, []).step is None


def test_the_newest_generation_first() -> None:
    copies = [
        *(copy(0, f"rank{r}", 9, generation=1, checksum=f"old{r}") for r in range(2)),
        *(copy(1, f"rank{r}", 9, generation=2, checksum=f"new{r}") for r in range(2)),
    ]
    plan = plan_restore(copies, [])
    assert plan.step == 9
    assert all(sources == (Source("peer", 1),) for _, sources in plan.sources)


def test_the_older_course_where_the_newer_is_not_whole() -> None:
    copies = [
        *(copy(0, f"rank{r}", 9, generation=1, checksum=f"old{r}") for r in range(2)),
        copy(1, "rank0", 9, generation=2, checksum="new0"),
    ]
    plan = plan_restore(copies, [])
    assert plan.step == 9
    assert all(sources == (Source("peer", 0),) for _, sources in plan.sources)


def test_disagreeing_copies_of_one_generation() -> None:
    even = [copy(0, "rank0", 9, world=1, checksum="a"), copy(1, "rank0", 9, world=1, checksum="b")]
    plan = plan_restore(even, [])
    assert plan.step is None
    assert "step 9 has copies of rank0 that disagree" in plan.reason
    plan = plan_restore([*even, copy(2, "rank0", 9, world=1, checksum="b")], [])
    assert {s.place for s in dict(plan.sources)["rank0"]} == {1, 2}


def test_replicas_that_differ_go_by_the_first() -> None:
    copies = [
        copy(0, "rank0", 9, world=1, shared=True),
        copy(2, "shared", 9, world=1, shared=True, checksum="a"),
        copy(1, "shared", 9, world=1, shared=True, checksum="b"),
    ]
    assert dict(plan_restore(copies, []).sources)["shared"] == (Source("peer", 1),)


def test_another_world_is_restored_as_it_was_saved() -> None:
    plan = plan_restore([*whole(9, 4), *whole(7, 2)], [])
    assert (plan.step, plan.world) == (9, 4)


def test_first_choices_are_spread() -> None:
    copies = [copy(at, f"rank{r}", 3, world=8) for r in range(8) for at in range(4)]
    plan = plan_restore(copies, [])
    first = Counter(sources[0].place for _, sources in plan.sources)
    assert set(first.values()) == {2}


@given(st.data())
def test_any_loss_that_the_placement_survives_comes_back(data: st.DataObject) -> None:
    """Against the definition: the newest step whose every shard is left somewhere."""
    world = data.draw(st.integers(1, 6))
    copies = data.draw(st.integers(1, world))
    holders = place(world, copies, "mixed").holders
    kept: list[Copy] = []
    left: dict[int, set[int]] = {}
    for step in range(data.draw(st.integers(0, 4))):
        left[step] = set()
        for r in range(world):
            for at in holders[r]:
                if data.draw(st.booleans()) or data.draw(st.booleans()):
                    kept.append(copy(at, f"rank{r}", step, world=world))
                    left[step].add(r)
    in_store = data.draw(st.none() | st.integers(0, 4))
    steps = [step for step, ranks in left.items() if len(ranks) == world]
    newest = max([*steps, *([in_store] if in_store is not None else [])], default=None)
    stores = [stored(in_store, world)] if in_store is not None else []
    plan = plan_restore(kept, stores)
    assert plan.step == newest
    assert plan == plan_restore(kept[::-1], stores)
    for shard, sources in plan.sources:
        holding = {c.place for c in kept if c.shard == shard and c.step == newest}
        assert {s.place for s in sources if s.tier == "peer"} == holding
        assert (sources[-1].tier == "storage") == (in_store == newest)
