"""The planner: the cut of a model's layers over hosts that takes the least time, exactly.

A *plan* cuts the layers into as many stages as there are hosts, a stage of one layer or more for each host in
order. A stage of layers ``u``..``v`` takes ``sum (forward + backward)`` seconds a microbatch, and holds ``sum
state + (microbatches in flight) sum activations`` bytes, which must fit its host. In 1F1B, stage ``s`` of
``S`` has ``S - s`` of ``N = 4 S`` microbatches in flight. Among all plans, `plan` returns one with the
least `iteration_time`; of equal ones that with the fastest slowest stage.

The published time depends on the cut by two numbers alone. With the rightmost slowest stage ``k``, which
takes ``w`` and begins after layers that take ``t`` of the whole ``T``, it is

    2 T - t + (N - S + k - 1) w

Any range of layers can be that stage if those before it can be cut into ``k`` stages of ``w`` or less, and
those after it into the rest of less than ``w``. Two tables say so: the least slowest stage of the first
layers, and of the last layers, in so many stages. So all plans are looked at, by one range after the other.

Oobleck (Jang et al., SOSP 2023, section 4.2) splits the layers recursively and keeps one best plan of each
part. That is not optimal, since which half is best depends on where the slowest
stage of the whole will be: for layers of 13, 2, 3, 1, 1, 2, 2, 1, 20, 1 in 3 stages it finds 277 where 268 is
possible. Times are rounded to picoseconds, so that stages of equal layers are equal.

*1F1B* is the order in which a stage works on its microbatches. It first runs as many forwards as there are
stages after it, so that the first backward finds it waiting; then it alternates, so that it never holds the
activations of more microbatches than that; then it runs the backwards that are left (PipeDream-Flush,
Narayanan et al., ICML 2021, section 3; the schedule of Oobleck, section 4). Sends do not block, so every
order in which each stage's receives are sent earlier by its neighbour ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from windtunnel.base.errors import UserError
from windtunnel.training.pipelines.model import LayerProfile, Stage, Template

MICROBATCHES_A_STAGE = 4
"""Templates are made for so many microbatches a stage, as published."""
INFINITE = 1 << 62
Table = NDArray[np.int64]
Where = int | slice
"""In a table of layers."""


def plan(profile: Sequence[LayerProfile], hosts: int, memory: float) -> Template | None:
    """The fastest plan for ``hosts`` hosts with ``memory`` bytes each, None where none fits.

    Raises:
        UserError: the profile is empty, or a number is not positive.
    """
    problem = _CutProblem(profile, hosts, memory)
    return problem.template() if problem.feasible else None


def fits(profile: Sequence[LayerProfile], hosts: int, memory: float) -> bool:
    """Whether any plan for ``hosts`` hosts fits their memory."""
    return _CutProblem(profile, hosts, memory).feasible


class _CutProblem:
    """The profile as integers: picoseconds and bytes, summed from the first layer on."""

    def __init__(self, profile: Sequence[LayerProfile], hosts: int, memory: float) -> None:
        if not profile:
            raise UserError("the profile has no layers; at least one is needed")
        for what, value in (("hosts", hosts), ("memory", memory)):
            if not value > 0:
                raise UserError(f"{what} is {value}; a positive number is needed")
        self.layers, self.stages = len(profile), hosts
        self.microbatches = MICROBATCHES_A_STAGE * hosts
        seconds = [layer.forward + layer.backward for layer in profile]
        self.scale = _scale(sum(seconds), self.microbatches + self.layers)
        self.time = _sums([time * self.scale for time in seconds])
        self.state = _sums([layer.state_bytes for layer in profile])
        self.activation = _sums([layer.activation_bytes for layer in profile])
        self.memory = int(min(memory, INFINITE // 2))

    def took(self, stage: int, first: Where, last: Where) -> Table:
        """What layers ``first`` .. ``last - 1`` take as that stage, `INFINITE` where they cannot be it."""
        memory = self.state + (self.stages - stage) * self.activation
        fit = memory[last] - memory[first] <= self.memory
        return np.where(fit, self.time[last] - self.time[first], INFINITE)

    def ranges(self, stage: int, most: int = INFINITE - 1) -> Iterator[tuple[slice, slice, Table]]:
        """All ranges of layers that can be that stage and take no more than ``most``, those of one length at
        once: first, last, `took`."""
        for length in range(1, self.layers - self.stages + 2):
            first, last = slice(None, -length), slice(length, None)
            took = self.took(stage, first, last)
            if took.min() > most:  # longer ones take and hold more
                return
            yield first, last, took

    @cached_property
    def before(self) -> list[Table]:
        """``[stage][last]``: the least slowest of the stages before ``stage``, that end with that layer; -1
        where there are none."""
        rows = [np.where(np.arange(self.layers + 1) == 0, -1, INFINITE)]
        for stage in range(self.stages):
            rows.append(np.full(self.layers + 1, INFINITE))
            for first, last, took in self.ranges(stage, self.longest):
                rows[-1][last] = np.minimum(rows[-1][last], np.maximum(rows[-2][first], took))
        return rows

    @cached_property
    def after(self) -> list[Table]:
        """``[stage][first]``: the least slowest of the stages from ``stage`` on, that begin with that layer;
        -1 where there are none."""
        rows = [np.where(np.arange(self.layers + 1) == self.layers, -1, INFINITE)]
        for stage in reversed(range(self.stages)):
            rows.append(np.full(self.layers + 1, INFINITE))
            for first, last, took in self.ranges(stage):
                rows[-1][first] = np.minimum(rows[-1][first], np.maximum(rows[-2][last], took))
        return rows[::-1]

    @property
    def feasible(self) -> bool:
        return bool(self.stages <= self.layers and self.after[0][0] < INFINITE)

    @cached_property
    def longest(self) -> int:
        """A plan with a stage that takes longer is worse than that with the least slowest one: the first
        takes ``2 T + (N - S - 1) w`` at least, the second ``2 T + (N - 2) w`` at most."""
        return int(self.after[0][0]) * (self.microbatches - 2) // (self.microbatches - self.stages - 1)

    def cost(self, stage: int, first: Where, last: Where, took: Table) -> Table:
        """Of the best plans whose rightmost slowest stage that is, without ``2 T``."""
        can = (took < INFINITE) & (self.before[stage][first] <= took) & (self.after[stage + 1][last] < took)
        cost = (self.microbatches - self.stages + stage - 1) * took - self.time[first]
        return np.where(can, cost, INFINITE)

    def template(self) -> Template:
        """The best plan."""
        best = (
            INFINITE,
            INFINITE,
            0,
            0,
            0,
        )  # its cost; its slowest stage: time, number, first and last layer
        for stage in range(self.stages):
            for first, last, took in self.ranges(stage, self.longest):
                cost = self.cost(stage, first, last, took)
                begin = int(np.where(cost == cost.min(), took, INFINITE).argmin())
                found = int(cost[begin]), int(took[begin]), stage, begin, begin + last.start
                best = min(best, found)
        cuts = self.around(*best[1:])
        times = [int(self.time[q] - self.time[p]) / self.scale for p, q in pairwise(cuts)]
        stages = tuple(Stage(p, q, time) for (p, q), time in zip(pairwise(cuts), times, strict=True))
        return Template(stages, iteration_time(times, self.microbatches))

    def around(self, slowest: int, stage: int, first: int, last: int) -> list[int]:
        """The cuts of a plan in which that range of layers is the rightmost slowest stage."""
        cuts = [first, last]
        for before in reversed(range(stage)):
            took = self.took(before, slice(None, cuts[0]), cuts[0])
            fit = (took <= slowest) & (self.before[before][: cuts[0]] <= slowest)
            cuts.insert(0, int(np.argmax(fit)))
        for after in range(stage + 1, self.stages):
            rest = slice(cuts[-1] + 1, None)
            took = self.took(after, cuts[-1], rest)
            fit = (took < slowest) & (self.after[after + 1][rest] < slowest)
            cuts.append(cuts[-1] + 1 + int(np.argmax(fit)))
        return cuts


def _sums(values: Sequence[float]) -> Table:
    return np.array(list(accumulate(map(round, values), initial=0)), np.int64)


def _scale(seconds: float, rounds: int) -> int:
    """Steps a second that times are counted in: picoseconds, coarser where sums would not fit 64 bits."""
    scale = 10**12
    while scale > 1 and 4 * seconds * rounds * scale > INFINITE // 4:
        scale //= 10
    return scale


@dataclass(frozen=True)
class StageAction:
    """One piece of work of a stage; ``microbatch`` counts from 0 within the pipeline's own share."""

    kind: Literal["forward", "backward"]
    microbatch: int


def one_forward_one_backward(stage: int, stages: int, microbatches: int) -> tuple[StageAction, ...]:
    """What stage ``stage`` (0-based) of ``stages`` does in a step, in order.

    At most ``min(stages - stage, microbatches)`` microbatches are in flight at once.

    Raises:
        ValueError: there is no such stage, or no microbatch.
    """
    if not 0 <= stage < stages or microbatches < 1:
        raise ValueError(f"stage {stage} of {stages} with {microbatches} microbatches")
    ahead = min(stages - stage - 1, microbatches)
    order = [StageAction("forward", m) for m in range(ahead)]
    for m in range(ahead, microbatches):
        order += [StageAction("forward", m), StageAction("backward", m - ahead)]
    order += [StageAction("backward", m) for m in range(microbatches - ahead, microbatches)]
    return tuple(order)


def iteration_time(times: Sequence[float], microbatches: int) -> float:
    """Oobleck's estimate (seconds) for stages that take ``times`` (seconds) for one microbatch.

    ``sum w + (N - S + k - 1) w_k + sum_{i >= k} w_i`` (Jang et al., SOSP 2023, section 4.2), with ``w_s``
    what stage ``s`` takes, ``N`` microbatches, ``S`` stages and ``k`` the rightmost slowest one, from 0.
    Templates are ranked by it. For equal stages it is exact; for uneven ones it was up to 16 % too low in
    trials with ``N = 4 S``. It means something from about one microbatch a stage; for fewer it can even be
    negative.
    """
    slowest = max(range(len(times)), key=lambda stage: (times[stage], stage))
    rounds = microbatches - len(times) + slowest - 1
    return sum(times) + rounds * times[slowest] + sum(times[slowest:])
