"""Which step a job goes on from, and from where."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from windtunnel.training.checkpoint.model import (
    Commit,
    Copy,
    Log,
    Persisted,
    RestorePlan,
    Shard,
    StoredStep,
    needed_shards,
)
from windtunnel.training.checkpoint.policy.placement import place
from windtunnel.training.checkpoint.policy.restore import BadCopy, plan_restore


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
    digest = checksum if checksum is not None else f"{shard}@{step}"
    return Copy(at, Shard(shard, step, world, shared, generation, "layout", nbytes, digest))


def stored(step: int, world: int = 2, generation: int = 1, bad: str = "", checksum: str = "") -> StoredStep:
    shards = tuple(
        Shard(name, step, world, False, generation, "layout", 100, checksum or f"{name}@{step}")
        for name in needed_shards(world, False)
    )
    return StoredStep(step, generation, shards, bad)


def whole(step: int, world: int = 2) -> list[Copy]:
    """Each shard with its host and the next one."""
    return [copy(at, f"rank{r}", step, world=world) for r in range(world) for at in (r, (r + 1) % world)]


def places(plan: RestorePlan) -> dict[str, list[int | None]]:
    """Where each shard is read, in this order."""
    return {row[0].shard.name: [copy.place for copy in row] for row in plan.sources}


def test_the_newest_whole_step_wins() -> None:
    plan = plan_restore([*whole(7), *whole(8), copy(0, "rank0", 9)], [])
    assert (plan.step, plan.world) == (8, 2)
    assert {name: set(row) for name, row in places(plan).items()} == {"rank0": {0, 1}, "rank1": {0, 1}}
    assert "step 8 from memory" in plan.reason
    assert "step 9 lacks rank1 (1 of 2 shards are left)" in plan.reason


def test_shared_state_is_needed_too() -> None:
    alone = [copy(r, f"rank{r}", 5, shared=True) for r in range(2)]
    assert plan_restore(alone, []).step is None
    plan = plan_restore([*alone, copy(1, "shared", 5, shared=True)], [])
    assert plan.step == 5
    assert places(plan)["shared"] == [1]


def test_a_group_that_is_gone_sends_all_to_storage() -> None:
    left = [copy for copy in whole(9, 4) if copy.place not in (0, 1)]
    plan = plan_restore(left, [stored(4, 4)])
    assert plan.step == 4
    assert all(row == [None] for row in places(plan).values())
    assert "step 9 lacks rank0" in plan.reason


def test_bad_copies_are_passed_over_then_the_step() -> None:
    copies = [*whole(8), *whole(7)]
    bad = frozenset({BadCopy(0, "rank0", 8)})
    plan = plan_restore(copies, [], bad)
    assert plan.step == 8
    assert places(plan)["rank0"] == [1]
    assert "1 bad copy was passed over" in plan.reason
    both = bad | {BadCopy(1, "rank0", 8)}
    assert plan_restore(copies, [], both).step == 7
    assert plan_restore([], [stored(3), stored(2)], frozenset({BadCopy(None, "", 3)})).step == 2


def test_torn_steps_in_storage_are_told() -> None:
    plan = plan_restore([], [StoredStep(5, bad="steps/5-1 was not completed")])
    assert plan.step is None
    assert "steps/5-1 was not completed" in plan.reason
    assert plan_restore([], []).reason == "nothing was saved yet"


def test_only_what_the_log_knows_is_restored() -> None:
    """However new and whole: a forged step, one whose record was lost, one of another course."""
    log = Log((Commit(6, 1), Commit(7, 1)), (Persisted(3, 1, "check"),), newest=7)
    forged = [*whole(7), *whole(50), copy(0, "rank0", 60)]
    plan = plan_restore(forged, [stored(3), stored(70)], log=log)
    assert plan.step == 7
    assert (
        plan.ignored
        == (
            "step 50 in memory (2 of 2 shards) is not in the run's log as committed",
            "step 70 in storage is not in the run's log as written by it",
            "step 3 in storage is not in the run's log as written by it",  # its manifest is another
        )[:2]
    )
    assert "step 60 in memory (1 of 2 shards) is not" in plan.reason
    again = [copy(r, f"rank{r}", 7, generation=2) for r in range(2)]
    assert plan_restore([*again, *whole(6)], [], log=log).step == 6
    assert plan_restore([*again, *whole(6)], [], log=replace(log, committed=(Commit(7, 2),))).step == 7
    ours = replace(stored(3), check="check")
    assert plan_restore(whole(50), [ours, stored(70)], log=log).step == 3
    assert plan_restore(whole(50), [stored(3)], log=log).step is None  # of another manifest


def test_a_job_that_had_a_checkpoint_does_not_begin_anew_unasked() -> None:
    log = Log((Commit(7, 1),), newest=7)
    left = [copy(0, "rank0", 7)]
    plan = plan_restore(left, [], log=log, restart=False)
    assert plan.step is None
    assert plan.failed == (
        "step 7 was committed, and no whole checkpoint is left (step 7 lacks rank1 (1 of 2 shards are left))"
    )
    assert not plan_restore(left, [], log=log).failed
    assert not plan_restore(left, [], log=Log(), restart=False).failed
    assert not plan_restore(left, [], restart=False).failed
    assert plan_restore([], [], log=log, restart=False).failed.endswith("(no host and no storage has a copy)")


def test_what_goes_to_storage_in_place_of_a_write_that_ended() -> None:
    """The last step that was wanted there lies at or before the one that the job goes on from."""
    log = Log((Commit(7, 1),), (Persisted(3, 1, "check"),), newest=7)
    owed = {
        wanted for wanted in range(-1, 10) if plan_restore(whole(7), [], log=replace(log, due=wanted)).store
    }
    assert owed == {0, 1, 2, 4, 5, 6, 7}
    assert not plan_restore(whole(7), []).store


def test_storage_that_cannot_be_read_is_needed_where_it_may_have_more() -> None:
    log = Log(committed=(Commit(7, 1),), persisted=(Persisted(6, 1, "check"),), newest=7)
    assert plan_restore(whole(7), [], log=log, unread=True) == plan_restore(whole(7), [], log=log)
    assert plan_restore([], [], log=log, unread=True).unread and not plan_restore([], [], log=log).unread
    newer = replace(log, persisted=(Persisted(8, 1, "check"),))
    assert plan_restore(whole(7), [], log=newer, unread=True).unread


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
    fitting = [replace(copy, shard=replace(copy.shard, world=3)) for copy in copies]
    plan = plan_restore(fitting, [])
    assert plan.step == 9
    assert set(places(plan)["rank1"]) == {1, 2}
    differing = [
        replace(copy, shard=replace(copy.shard, checksum="other"))
        if (copy.shard.name, copy.shard.generation) == ("rank1", 2)
        else copy
        for copy in fitting
    ]
    assert plan_restore(differing, []).step is None


def test_the_older_course_where_the_newer_is_not_whole() -> None:
    copies = [
        *(copy(0, f"rank{r}", 9, generation=1, checksum=f"old{r}") for r in range(2)),
        copy(1, "rank0", 9, generation=2, checksum="new0"),
    ]
    plan = plan_restore(copies, [])
    assert plan.step == 9
    assert all(row == [0] for row in places(plan).values())


def test_disagreeing_copies_of_one_generation() -> None:
    even = [copy(0, "rank0", 9, world=1, checksum="a"), copy(1, "rank0", 9, world=1, checksum="b")]
    plan = plan_restore(even, [])
    assert plan.step is None
    assert "step 9 has copies of rank0 that disagree" in plan.reason
    plan = plan_restore([*even, copy(2, "rank0", 9, world=1, checksum="b")], [])
    assert set(places(plan)["rank0"]) == {1, 2}


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
    for name, row in places(plan).items():
        holding = {c.place for c in kept if (c.shard.name, c.shard.step) == (name, newest)}
        assert set(row) - {None} == holding
        assert (row[-1] is None) == (in_store == newest)
