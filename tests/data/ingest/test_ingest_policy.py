"""Who gets which split, when an epoch is over, and how many workers there should be."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.data.ingest import twin
from windtunnel.data.ingest.policy import (
    DrainWorkers,
    EpochEnd,
    GiveUpSplit,
    LoadHistory,
    PeerClient,
    PoolLoad,
    PoolSize,
    RankProgress,
    ReadAhead,
    RepeatBatch,
    RetrySplit,
    ScalingBounds,
    SplitFault,
    SplitGrant,
    SplitRequest,
    SplitWorker,
    StepLimit,
    WaitForSplit,
    WorkerSurplus,
    decide,
    share,
)  # fmt: skip

WORKERS = (SplitWorker("w1", 1), SplitWorker("w2"), SplitWorker("w10"))


BASE = SplitRequest("uneven", 1, 1, reading=0, steps=0, dry=True, split=7, left=3, open=3, workers=WORKERS)


def ask(**given_: Any) -> SplitRequest:
    return replace(BASE, **given_)


def test_the_first_split_that_is_left_goes_to_the_worker_with_the_fewest() -> None:
    assert decide(ask()) == SplitGrant(7, "w2")
    assert decide(ask(last="w2")) == SplitGrant(7, "w10")
    assert decide(ask(workers=(SplitWorker("w1", 1),), last="w1")) == SplitGrant(7, "w1")
    assert decide(ask(workers=(SplitWorker("w1", 2),), reading=1)) == WaitForSplit()
    assert decide(ask(workers=(SplitWorker("w1", 2),))) == SplitGrant(7, "w1"), "others may wait for it"
    assert decide(ask(workers=())) == WaitForSplit()


def test_nothing_is_given_out_before_all_clients_are_here() -> None:
    assert decide(ask(world=2)) == WaitForSplit()


def test_the_last_splits_go_to_clients_that_have_none() -> None:
    peer = PeerClient(steps=0)
    assert decide(ask(world=2, clients=2, reading=1, left=1, peers=(peer,))) == WaitForSplit()
    assert decide(ask(world=2, clients=2, reading=1, left=2, peers=(peer,))) == SplitGrant(7, "w2")
    assert share(3, 2, 2) == 3 and share(1, 2, 8) == 1


def test_what_is_read_ahead_is_had_by_who_read_it() -> None:
    late = {"left": 0, "split": -1, "after": 4}
    assert decide(ask(**late, dry=False, reading=1)) == ReadAhead(4, "w2")
    assert decide(ask(**late)) == ReadAhead(4, "w2"), "while others may leave theirs"
    assert decide(ask(**late, open=0)) == EpochEnd()
    assert decide(ask(**late, dry=False, ahead=6)) == WaitForSplit(), "as many as it may have at a time"
    assert decide(ask(**late, dry=False, workers=(SplitWorker("w1", 2),))) == WaitForSplit()
    full = (SplitWorker("w1", 2), SplitWorker("w2"))
    assert decide(ask(sender="w1", workers=full)) == SplitGrant(7, "w1")
    assert decide(ask(sender="gone", workers=full)) == SplitGrant(7, "w2")


def test_workers_that_are_all_busy_while_trainers_wait_are_too_few_at_once() -> None:
    slow = LoadHistory(5.0, 40.0, 0.1, 40.0, 4.0)
    load = PoolLoad(ScalingBounds(1, 8), 1.0, 10, 0.7, 0.0, 10, 1.0, 1, 1, 9.0, 9.0, slow)
    size = decide(load)
    assert isinstance(size, PoolSize) and size.workers == 2
    size = decide(replace(load, workers=3, ready=3, busy=2.95, consumed=29, produced=29, stalled=0.05))
    assert isinstance(size, PoolSize) and size.workers == 4
    size = decide(replace(load, workers=3, ready=3, busy=1.5, consumed=15, produced=15, stalled=0.05))
    assert isinstance(size, PoolSize) and size.workers == 3, "more would wait for the trainer, too"


@pytest.mark.parametrize(
    ("ends", "peer", "open_", "decided"),
    [
        ("uneven", PeerClient(5), 1, WaitForSplit()),
        ("uneven", PeerClient(5), 0, EpochEnd()),
        ("pad", PeerClient(5), 0, RepeatBatch()),
        ("pad", PeerClient(4, dry=True), 0, EpochEnd()),
        ("pad", PeerClient(4), 1, WaitForSplit()),
        ("pad", PeerClient(3, dry=True), 0, EpochEnd()),
        ("pad", PeerClient(5, ended=True), 0, RepeatBatch()),
    ],
)
def test_ends(ends: str, peer: PeerClient, open_: int, decided: object) -> None:
    request = ask(ends=ends, world=2, clients=2, steps=4, left=0, split=-1, open=open_, peers=(peer,))
    assert decide(request) == decided


@given(st.lists(st.integers(0, 6), min_size=1, max_size=9), st.integers(1, 4), st.integers(0, 2**32))
def test_ranks_that_drop_take_equally_many_steps_and_wait_for_no_batch(
    splits: list[int], world: int, seed: int
) -> None:
    """Ranks get splits, whose batches come one by one, into short queues, and train in step."""
    random = Random(seed)
    todo, steps, until, last = list(splits), [0] * world, [0] * world, -1
    coming, ready = [0] * world, [0] * world
    while last < 0 or min(steps) < last:
        rank = random.randrange(world)
        match random.choice(["split", "batch", "step", "ask"]):
            case "split" if todo and not coming[rank]:
                coming[rank] = todo.pop()
            case "batch" if coming[rank] and ready[rank] < 2:
                coming[rank], ready[rank] = coming[rank] - 1, ready[rank] + 1
            case "step" if steps[rank] < until[rank] and steps[rank] == min(steps):
                ready[rank], steps[rank] = ready[rank] - 1, steps[rank] + 1
                assert ready[rank] >= 0
            case "ask" if last < 0:
                batches = tuple(map(sum, zip(steps, ready, strict=True)))
                limit = decide(RankProgress(world, batches, tuple(not count for count in coming), len(todo)))
                assert isinstance(limit, StepLimit) and limit.steps >= until[rank]
                until[rank], last = limit.steps, limit.steps if limit.last else last
            case "ask":
                until[rank] = last
    assert set(steps) == {last} and not todo
    assert world > 1 or last == sum(splits)
    assert decide(RankProgress(world + 1, tuple(steps), (True,) * world, 0)) == StepLimit(0)


loads = st.builds(
    PoolLoad,
    settings=st.builds(ScalingBounds, least=st.integers(1, 3), most=st.integers(3, 40)),
    period=st.floats(0.1, 10), consumed=st.integers(0, 10_000), stalled=st.floats(0, 1),
    buffered=st.floats(0, 1), produced=st.integers(0, 10_000), busy=st.floats(0, 100),
    workers=st.integers(1, 40), ready=st.integers(0, 40), up=st.floats(0, 100), down=st.floats(0, 100),
    memory=st.builds(LoadHistory, *[st.floats(0, 1e4)] * 5),
)  # fmt: skip


@given(loads)
def test_scaling_is_bounded_and_gentle(load: PoolLoad) -> None:
    size = decide(load)
    assert isinstance(size, PoolSize)
    known = load.settings
    assert known.least <= size.workers <= known.most
    assert size.workers <= max(2 * load.workers, known.least)
    assert size.workers >= min(load.workers - 1, known.most)
    if size.workers > max(load.workers, known.least):
        assert size.memory.starved > 0 and load.up >= known.start
    if size.workers < min(load.workers, known.most):
        assert min(load.up, load.down) >= known.cooldown
    assert math.isfinite(size.memory.demand) and size.memory.demand >= 0


def test_who_leaves() -> None:
    assert decide(WorkerSurplus(WORKERS, 2)) == DrainWorkers(("w10",))
    assert decide(WorkerSurplus(WORKERS, 0)) == DrainWorkers(("w10", "w2", "w1"))
    assert decide(WorkerSurplus(WORKERS, 5)) == DrainWorkers(())


def test_what_cannot_be_read_is_tried_by_three_workers_or_by_one() -> None:
    assert decide(SplitFault("skip", permanent=False, failures=2)) == RetrySplit()
    assert decide(SplitFault("skip", permanent=False, failures=3)) == GiveUpSplit(skip=True)
    assert decide(SplitFault("fail", permanent=True, failures=1)) == GiveUpSplit(skip=False)


def test_what_a_client_reads_ahead_goes_before_what_others_do() -> None:
    assert decide(ask(own=9)) == SplitGrant(9, "w2")
    assert decide(ask(own=9, sender="w1")) == SplitGrant(9, "w1")


@pytest.mark.parametrize("noise", [0.0, 0.15])
@pytest.mark.parametrize(
    "demand",
    [
        lambda t: 35.0,
        lambda t: 8.0 if t < 60 else 35.0,
        lambda t: 5.0 + t / 6,
        lambda t: 35.0 if t < 60 else 8.0,
    ],
    ids=["step", "late step", "ramp", "step down"],
)
def test_the_twin_is_fed_and_does_not_oscillate(demand: object, noise: float) -> None:
    settings = ScalingBounds(1, 16, start=2.0, cooldown=10.0)
    seconds = 180
    report = twin.run(
        demand, seconds, np.random.default_rng(3), world=twin.IngestWorld(noise=noise), settings=settings
    )  # type: ignore[arg-type]
    assert np.mean(report.stalled[-40:]) <= 0.02
    assert np.mean(report.stalled[20:60]) <= 0.05
    changes = np.sign(np.diff(report.workers))
    reversals = np.count_nonzero(np.diff(changes[changes != 0]))
    assert reversals <= 1 + seconds / settings.cooldown / 4
    wanted = math.ceil(demand(seconds) / 10 / math.exp(-2 * noise))  # type: ignore[operator]
    assert report.workers[-1] <= wanted + 3


def test_the_twin_is_deterministic_and_a_static_pool_starves() -> None:
    from windtunnel.data.ingest.policy import POLICIES

    runs = [
        twin.run(lambda t: 35.0, 30, np.random.default_rng(1), world=twin.IngestWorld(noise=0.2))
        for _ in range(2)
    ]
    assert runs[0] == runs[1]
    still = twin.run(lambda t: 35.0, 30, np.random.default_rng(1), policy=POLICIES["static"])
    assert np.mean(still.stalled) > 0.6
