"""The bench of pipelines: its arithmetic; and what it times is optimal, by a method that shares nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate, combinations, pairwise

from benchmarks.training.pipelines.planner import LAYERS, STAGES, random_layers
from benchmarks.training.pipelines.recovery import random_losses, regular_losses
from benchmarks.training.pipelines.runs import HOSTS, JobRun
from windtunnel.training.pipelines.model import LayerProfile
from windtunnel.training.pipelines.policy.planner import plan

FORMULA_MICROBATCHES = 4  # a stage


def certificate(times: Sequence[int], stages: int) -> int:
    """The least time of any cut of layers that take ``times`` into ``stages``, for four microbatches a stage:
    a second way to the planner's optimum, which shares nothing with it.

    With one device a host and enough memory, a plan is a cut of the layers into so many stages. Its slowest
    stage (the rightmost of equals) is some range of layers ``a..b``, in time ``w``. The stages before it take
    ``w`` at most, those after it less. Packing layers greedily gives the fewest stages on either side, and
    any number up to one a layer is possible too, since a stage can always be split. By the published formula
    (Jang et al., SOSP 2023, section 4.2) the time is then

        sum of all + (N - S + k - 1) w + sum of the layers from a on

    with ``k`` stages before the slowest; it grows with ``k``, so the fewest possible ones are best. That is
    one number for each of L^2 / 2 ranges, in whole microseconds.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    layers = len(times)
    if not 1 <= stages <= layers:
        raise ValueError(f"{layers} layers make no {stages} stages")
    sums = [0, *accumulate(times)]
    rounds = FORMULA_MICROBATCHES * stages
    best: int | None = None
    for a in range(layers):
        for b in range(a + 1, layers + 1):
            slowest = sums[b] - sums[a]
            before = _fewest(times[:a], slowest)
            after = _fewest(times[b:], slowest - 1)
            if before is None or after is None:
                continue
            # k stages before it, and stages - 1 - k after it, of which there may be one a layer at most
            k = max(before, stages - 1 - (layers - b))
            if k > min(a, stages - 1 - after):
                continue
            time = sums[-1] + (rounds - stages + k - 1) * slowest + sums[-1] - sums[a]
            best = time if best is None else min(best, time)
    assert best is not None  # the slowest stage of any cut is among the ranges
    return best


def _fewest(times: Sequence[int], limit: int) -> int | None:
    """The fewest stages of ``limit`` at most; None where a layer alone takes longer."""
    count, room = 0, 0
    for each in times:
        if each > limit:
            return None
        if count == 0 or each > room:
            count, room = count + 1, limit
        room -= each
    return count


def formula(times: Sequence[int], cuts: Sequence[int]) -> int:
    """The published time of the plan with these ``cuts`` (0 and the number of layers among them)."""
    sums = [0, *accumulate(times)]
    stages = [sums[v] - sums[u] for u, v in pairwise(cuts)]
    count = len(stages)
    k = max(range(count), key=lambda stage: (stages[stage], stage))
    rounds = FORMULA_MICROBATCHES * count
    return sum(stages) + (rounds - count + k - 1) * stages[k] + sum(stages[k:])


def profile_of(times: Sequence[int]) -> list[LayerProfile]:
    """Layers that take so many microseconds, backward twice forward."""
    return [LayerProfile(str(index), t * 1e-6 / 3, t * 2e-6 / 3) for index, t in enumerate(times)]


def planned(times: Sequence[int], stages: int) -> int:
    """Microseconds of the planner's plan, by the published formula."""
    pipeline = plan(profile_of(times), stages, 1.0)
    assert pipeline is not None  # memory does not bind
    return formula(times, (0, *(stage.last for stage in pipeline.stages)))


def brute_force(times: Sequence[int], stages: int) -> int:
    """The least time, by trying every cut."""
    inner = combinations(range(1, len(times)), stages - 1)
    return min(formula(times, (0, *cuts, len(times))) for cuts in inner)


def test_the_second_method_equals_brute_force() -> None:
    draw = random.Random(1)
    for _ in range(300):
        layers = draw.randint(1, 9)
        stages = draw.randint(1, layers)
        times = [draw.randint(1, 6) for _ in range(layers)]  # many equal stages: ties count
        assert certificate(times, stages) == brute_force(times, stages)


def test_plans_are_optimal_where_the_published_search_is_not() -> None:
    """That one keeps 277 of these in 3 stages."""
    times = (13, 2, 3, 1, 1, 2, 2, 1, 20, 1)
    assert planned(times, 3) == certificate(times, 3) == 268


def test_large_plans_are_optimal() -> None:
    draw = random.Random(23)
    for _ in range(3):
        times = random_layers(draw, LAYERS)
        assert planned(times, STAGES) == certificate(times, STAGES)


def test_losses_leave_enough_hosts_and_time() -> None:
    draw = random.Random(0)
    for _ in range(50):
        losses = random_losses(draw, 3)
        assert [step for step, _ in losses] == sorted({step for step, _ in losses})
        assert all(0 <= place < HOSTS - index for index, (_, place) in enumerate(losses))
        assert [step for step, _ in regular_losses(draw, 3, 10)] == [5, 15, 25]


def test_a_run_is_read_from_its_events() -> None:
    times = [(1, 8, 1.0), (1, 9, 2.0), (1, 10, 3.5), (2, 10, 6.0), (2, 11, 6.5)]
    events = [{"kind": "step", "generation": g, "step": step, "t": t} for g, step, t in times]
    ran = JobRun(12, (*events[:3], {"kind": "decided", "generation": 2, "t": 4.0}, *events[3:]), {}, {})
    assert ran.paces() == [1.0, 1.5, 0.5]  # the first step of a generation waits for it
    assert ran.times()[10] == 3.5
