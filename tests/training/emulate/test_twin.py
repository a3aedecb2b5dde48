"""The twin's times against sums on paper, against brute force, and against itself rank by rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slice_reference import step_ends as reference_ends
from slice_worlds import (
    Script,
    Tracer,
    capture_of,
    cluster_of,
    costs_of,
    ddp,
    mesh_groups,
    pipeline,
    stepping,
)

from windtunnel.base.errors import UserError
from windtunnel.training.emulate.graph import EventKind, Phase
from windtunnel.training.emulate.pictures import timeline
from windtunnel.training.emulate.policy.classes import slice_world
from windtunnel.training.emulate.policy.stitch import stitch
from windtunnel.training.emulate.twin.emulate import Timing, replay_world, step_ends
from windtunnel.training.emulate.twin.job import Slow, parse_slow


def replayed(
    script: Script,
    dims: dict[str, int],
    *,
    host: float = 0.0,
    devices: int = 0,
    kind: str = "gpu",
    **options: object,
) -> Timing:
    groups = mesh_groups(dims)
    size = len(groups[0].ranks)
    devices = devices or size
    world = stitch(slice_world(capture_of(script, groups), size))
    cluster = cluster_of(size // devices, devices, kind)
    timing = replay_world(world, cluster, costs_of(world.classes, host), **options)  # type: ignore[arg-type]
    assert sum(timing.critical_path.values()) == pytest.approx(timing.iteration_time_s)
    return timing


def same_as_reference(script: Script, dims: dict[str, int], host: float = 0.0, kind: str = "gpu") -> None:
    """All steps' ends but for what set-up took, of every rank; the script has three steps."""
    groups = mesh_groups(dims)
    size = len(groups[0].ranks)
    timing = replayed(script, dims, host=host, kind=kind)
    slices = capture_of(script, groups)(list(range(size)))
    expected = reference_ends(slices, host, kind == "cpu")
    ends = step_ends(timing.job, timing.result)[timing.job.colour]
    assert ends.shape == expected.shape
    np.testing.assert_allclose(ends, expected, rtol=1e-12)
    full = replayed(script, dims, host=host, kind=kind, every_rank=True)
    assert full.simulated == size
    assert full.rank_iteration_s.tolist() == timing.rank_iteration_s.tolist()
    assert full.rank_busy_s.tolist() == timing.rank_busy_s.tolist()


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 4, 8, 13])
def test_the_bubble_of_1f1b(stages: int, microbatches: int) -> None:
    """(p - 1) / (m + p - 1) of the iteration: Narayanan et al., SC'21, section 2.2.1."""
    timing = replayed(pipeline({"pp": stages}, microbatches), {"pp": stages})
    assert timing.iteration_time_s == 3.0 * (microbatches + stages - 1)
    assert timing.critical_path["compute"] == 3.0 * microbatches
    assert timing.critical_path["pipeline_bubble"] == 3.0 * (stages - 1)
    assert timing.rank_busy_s.tolist() == [3.0 * microbatches] * stages
    assert "pipeline bubble" in timing.waits[0].what


def test_ddp_exposes_its_last_bucket() -> None:
    timing = replayed(ddp(buckets=3, forward=1.0, transfer=1), {"dp": 8})
    assert timing.iteration_time_s == 3 + 6 + 1 + 0.5
    assert timing.critical_path == {"compute": 9.5, "communication:world": 1.0}
    assert timing.simulated == 1
    slow = replayed(ddp(buckets=3, forward=1.0, transfer=4), {"dp": 8})
    # The first bucket is ready after the third forward and the first backward: 5, 9, 13, 17.
    assert slow.iteration_time_s == 5 + 3 * 4 + 0.5
    assert slow.critical_path["communication:world"] == 12 - 4
    (use, *_) = slow.collectives
    assert (use.call.kind, use.count, use.seconds_each, use.exposed_seconds) == ("all_reduce", 3, 4.0, 8.0)
    assert slow.waits[0].what == "exposed all_reduce over world (8 ranks) in backward"


@pytest.mark.parametrize(("size", "remedy"), [(1 << 10, "Call it less often"), (1 << 20, "HSDP")])
def test_a_small_call_is_no_matter_of_sharding(size: int, remedy: str) -> None:
    """A norm's statistics, a loss that is told: what is waited for is the latency."""

    def script(t: Tracer) -> None:
        for _ in range(3):
            t.phase = Phase.FORWARD
            t.op(1.0)
            t.call("all_gather", "world", size, on=0)
            t.step()

    (wait, *_) = replayed(script, {"dp": 8}).waits
    assert wait.what == "exposed all_gather over world (8 ranks) in forward" and remedy in wait.remedy


def test_collectives_in_place_are_exposed() -> None:
    dims = {"pp": 2, "dp": 2, "tp": 2}
    timing = replayed(pipeline(dims, 4, tensor=1, data=7), dims)
    # Every forward and backward is one longer; the stages' ends differ, the dp groups are within a stage.
    assert timing.iteration_time_s == 5 * (4 + 2 - 1) + 7
    assert timing.critical_path["communication:tp"] == 8
    assert timing.critical_path["communication:dp"] == 7
    assert timing.critical_path["compute"] == 12
    assert timing.critical_path["pipeline_bubble"] == 5
    assert timing.simulated == 2


def launch_bound(t: Tracer) -> None:
    for _ in range(10):
        t.op(1.0)


def launched_ahead(t: Tracer) -> None:
    """Its first half is launch-bound, behind what the step before left on the device."""
    for _ in range(4):
        t.op(0.5)
    t.op(10.0)


def mostly_without_time(t: Tracer) -> None:
    for seconds in (0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0):
        t.op(seconds)


def reads_the_loss(t: Tracer) -> None:
    """Issue and wait for the first operator, issue the second behind it, issue the next step meanwhile."""
    t.op(5.0)
    t.add(EventKind.SYNC, 0, -2)
    t.op(1.0)


def waits_at_the_end(t: Tracer) -> None:
    """The wait after the last operator holds the next step back."""
    t.op(1.0)
    t.join(t.call("all_reduce", "dp", 5))


def waits_for_waits(t: Tracer) -> None:
    """Stream 1 waits for stream 2, does nothing, and is recorded: who waits for that waits for stream 2."""
    t.op(7.0, stream=2)
    t.wait(1, t.record(2))
    t.wait(0, t.record(1))
    t.op(1.0)
    t.op(1.0, stream=1)
    t.wait(2, t.record(0))


def on_the_host(t: Tracer) -> None:
    """On a CPU operators run on the host thread; gloo runs beside it, and the host waits where it says so."""
    t.op(2.0)
    handle = t.call("all_reduce", "dp", 5, on=0, backend="gloo")
    t.op(3.0)
    t.add(EventKind.SYNC, 0, -3, handle)
    t.op(1.0)


@pytest.mark.parametrize(
    ("step", "ranks", "host", "seconds", "path"),
    [
        (launch_bound, 1, 4.0, 40, {"compute": 10, "launch": 30}),
        (launched_ahead, 1, 1.0, 12, {"compute": 12}),
        (reads_the_loss, 1, 1.0, 1 + 5 + 1, {"compute": 6, "launch": 1}),
        (waits_at_the_end, 2, 0.0, 6, {"compute": 1, "communication:dp": 5}),
        (waits_for_waits, 1, 0.0, 8, {"compute": 8}),
        (on_the_host, 4, 0.0, 2 + 5 + 1, {"compute": 6, "communication:dp": 2}),
    ],
)
def test_what_a_step_takes_on_paper(
    step: Callable[[Tracer], None], ranks: int, host: float, seconds: float, path: dict[str, float]
) -> None:
    kind = "cpu" if step is on_the_host else "gpu"
    timing = replayed(stepping(step), {"dp": ranks}, host=host, kind=kind)
    assert timing.iteration_time_s == seconds and timing.critical_path == path
    same_as_reference(stepping(step), {"dp": ranks}, host=host or 0.25, kind=kind)


def test_operators_without_time_cost_the_host_only() -> None:
    timing = replayed(stepping(mostly_without_time), {"dp": 1}, host=1.0)
    assert timing.critical_path == {"compute": 1, "launch": 6}
    assert timing.waits[0].what.startswith("the host thread")
    assert timing.job.programs[0].nodes == 1


def test_waits_reach_over_the_end_of_a_step() -> None:
    """An asynchronous reduction that the next step's first operator waits for."""

    def script(t: Tracer) -> None:
        handle = -1
        for _ in range(3):
            if handle >= 0:
                t.join(handle)
            t.op(1.0)
            handle = t.call("all_reduce", "dp", 5)
            t.step()

    timing = replayed(script, {"dp": 2})
    assert timing.iteration_time_s == 6
    assert timing.critical_path == {"compute": 1, "communication:dp": 5}
    same_as_reference(script, {"dp": 2})


def test_a_slow_host_is_waited_for() -> None:
    timing = replayed(
        ddp(buckets=2, transfer=1), {"dp": 8}, devices=2, slow=[Slow(host=3, factor=1.5)], every_rank=False
    )
    assert timing.simulated == 2
    assert timing.iteration_time_s == 1.5 * 6 + 1 + 1.5 * 0.5
    assert timing.rank_busy_s.tolist() == [6.5] * 6 + [9.75] * 2
    assert timing.critical_rank == 6  # the one that ends last


def test_imbalance_names_the_late_host() -> None:
    def even(t: Tracer) -> None:
        t.op(4.0)
        t.call("all_reduce", "dp", 1, on=0)
        t.op(8.0)
        t.call("all_reduce", "dp", 1, on=0)

    timing = replayed(stepping(even), {"dp": 4}, devices=2, slow=[Slow(host=1, factor=1.25)])
    assert timing.iteration_time_s == 5 + 1 + 10 + 1
    assert timing.critical_rank == 2  # of those that end last the one that computes most
    assert timing.critical_path == {"compute": 15, "communication:dp": 2}

    def uneven(t: Tracer) -> None:
        t.op(1.0 if t.rank < 2 else 3.0)
        t.call("all_reduce", "dp", 1, on=0)
        t.op(9.0 if t.rank < 2 else 3.0)
        t.call("all_reduce", "dp", 1, on=0)

    timing = replayed(stepping(uneven), {"dp": 4}, devices=2)
    assert timing.critical_path == {"compute": 10, "imbalance": 2, "communication:dp": 2}
    assert "ranks dp=2-3, which have more to compute" in [wait.what for wait in timing.waits]


def test_a_slow_link_slows_what_crosses_it() -> None:
    dims = {"dp": 4, "tp": 2}

    def step(t: Tracer) -> None:
        t.call("all_reduce", "tp", 3, on=0)
        t.call("all_reduce", "dp", 2, on=0)
        t.op(1.0)

    assert replayed(stepping(step), dims, devices=2).iteration_time_s == 6
    timing = replayed(stepping(step), dims, devices=2, slow=[Slow(link=2, factor=4.0)])
    assert timing.iteration_time_s == 3 + 4 * 2 + 1  # within a host nothing changes


def test_jitter_is_drawn_for_every_rank_and_repeats() -> None:
    calm = replayed(ddp(), {"dp": 8})
    first, again, other = (replayed(ddp(), {"dp": 8}, jitter=0.2, seed=seed) for seed in (1, 1, 2))
    assert first.simulated == 8
    assert first.iteration_time_s == again.iteration_time_s != other.iteration_time_s
    assert len(set(first.rank_busy_s.tolist())) == 8
    assert first.iteration_time_s > calm.iteration_time_s  # the slowest of eight is what counts


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_random_worlds_are_as_brute_force_says(data: st.DataObject) -> None:
    """Random streams, events, collectives, messages and host waits over a 3-dimensional mesh."""
    dims = {
        "pp": data.draw(st.integers(1, 3)),
        "dp": data.draw(st.integers(1, 3)),
        "tp": data.draw(st.integers(1, 2)),
    }
    action = st.tuples(st.integers(0, 7), st.integers(0, 2), st.integers(1, 6))
    plans = [data.draw(st.lists(action, max_size=12)) for _ in range(dims["pp"])]
    shared = data.draw(st.lists(action, max_size=6))
    host = data.draw(st.sampled_from([0.0, 0.5, 3.0]))
    carry = data.draw(st.integers(0, 6))

    def script(t: Tracer) -> None:
        ranks = t.groups[t.group("pp")].ranks
        stage = ranks.index(t.rank)
        carried: int | None = None
        for _ in range(3):
            held: list[int] = []
            if carried is not None:
                t.join(carried, carry % 2)
            # What a stage does by itself, then what all do together, then messages down the pipeline.
            for what, stream, amount in plans[stage]:
                act(t, what % 6, stream, amount, held)
            for what, stream, amount in shared:
                act(t, what, stream, amount, held)
            if stage > 0:
                t.join(t.call("recv", "pp", 2, peer=ranks[stage - 1]))
            t.op(1.0)
            if stage + 1 < len(ranks):
                t.call("send", "pp", 2, peer=ranks[stage + 1])
            if carry:
                carried = t.call("all_reduce", "dp", carry)
            t.step()

    def act(t: Tracer, what: int, stream: int, amount: int, held: list[int]) -> None:
        if what <= 1:
            t.op(float(amount), stream)
        elif what == 2:
            t.wait((stream + 1) % 3, t.record(stream))
        elif what == 3:
            held.append(t.call("all_reduce", "dp" if amount % 2 else "tp", amount))
        elif what == 4 and held:
            t.join(held.pop(0), stream)
        elif what == 5:
            t.add(EventKind.SYNC, stream, -1 if amount < 2 else -2)
        elif what == 6:
            t.call("all_reduce", "world", amount, on=0)
        elif what == 7:
            t.call("all_gather", "dp", amount, on=0)

    same_as_reference(script, dims, host=host)


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_stragglers_leave_the_quotient_exact(data: st.DataObject) -> None:
    dims = {"pp": data.draw(st.integers(1, 3)), "dp": data.draw(st.integers(1, 4)), "tp": 2}
    size = dims["pp"] * dims["dp"] * 2
    hosts = size // 2
    slow = [
        Slow(**{what: data.draw(st.integers(0, (size if what == "rank" else hosts) - 1))}, factor=1.5)
        for what in data.draw(st.lists(st.sampled_from(["host", "rank", "link"]), max_size=3))
    ]
    script = pipeline(dims, 3, tensor=1, data=2, message=1)
    small = replayed(script, dims, devices=2, slow=slow, host=0.125)
    full = replayed(script, dims, devices=2, slow=slow, host=0.125, every_rank=True)
    assert small.rank_iteration_s.tolist() == full.rank_iteration_s.tolist()
    assert small.rank_busy_s.tolist() == full.rank_busy_s.tolist()
    assert small.critical_path == pytest.approx(full.critical_path)
    assert small.simulated <= full.simulated == size


def test_reading_slow() -> None:
    cluster = replace(cluster_of(4, 8), name="c")
    assert parse_slow("host=3:1.3, rank=17:1.5,link=host3:4,nic=2:2", cluster) == [
        Slow(host=3, factor=1.3), Slow(rank=17, factor=1.5), Slow(link=3, factor=4.0),
        Slow(link=2, factor=2.0),
    ]  # fmt: skip
    for wrong, words in {
        "host=4:2": "names host 4, cluster c has 0 to 3",
        "rank=32:2": "names rank 32, cluster c has 0 to 31",
        "host=1:0": "accepted is a number above 0",
        "host=1:-2": "accepted is a number above 0",
        "host=1:1e999": "accepted is a number above 0",
        "host=1:.": "is no factor",
        "host=1": "accepted are host=3:1.3",
        "rank=host3:2": "is not understood",
        "3:2": "is not understood",
    }.items():
        with pytest.raises(UserError, match=words):
            parse_slow(wrong, cluster)


def test_phases_have_host_costs_of_their_own() -> None:
    groups = mesh_groups({"dp": 1})
    world = stitch(slice_world(capture_of(ddp(buckets=2), groups), 1))
    costs = costs_of(world.classes)
    costs.host_operators[0][:, Phase.OPTIMIZER] = 100.0
    timing = replay_world(world, cluster_of(1, 1), costs)
    assert timing.iteration_time_s == 100


def test_what_runs_beside_a_collective_takes_longer() -> None:
    """Of three transfers of a second the first two run beside backwards, the last beside nothing."""
    groups = mesh_groups({"dp": 8})
    world = stitch(slice_world(capture_of(ddp(buckets=3, forward=1.0, transfer=1), groups), 8))
    costs = replace(costs_of(world.classes), beside=0.5)
    timing = replay_world(world, cluster_of(1, 8), costs)
    assert timing.iteration_time_s == 3 + (6 + 2 * 0.5) + 1 + 0.5
    assert timing.critical_path == {"compute": 10.5, "communication:world": 1.0}


def test_the_timeline_of_a_pipeline() -> None:
    timing = replayed(pipeline({"pp": 2}, 2, message=1), {"pp": 2})
    drawn = timeline(timing, [0, 1])
    tracks = {(track.rank, track.queue): track for track in drawn.tracks}
    assert set(tracks) == {(r, q) for r in (0, 1) for q in ("compute", "nccl pp send", "nccl pp recv")}
    for rank in (0, 1):
        compute = tracks[rank, "compute"]
        assert (compute.end - compute.start).sum() == timing.rank_busy_s[rank] == 6
        assert compute.start.min() >= 0
        assert max(track.end.max() for track in drawn.tracks) == timing.iteration_time_s
    spans = tracks[0, "nccl pp recv"]
    kinds = [drawn.kinds[kind] for kind in spans.kind]
    lengths = (spans.end - spans.start).tolist()
    assert sum(s for s, kind in zip(lengths, kinds, strict=True) if kind == "communication") == 2
    assert {drawn.names[name] for name in spans.name} == {"recv pp", "wait for recv pp"}
