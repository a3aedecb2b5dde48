"""Which templates run side by side: the sizes of the pipelines that use so many hosts.

A step takes as long as its slowest pipeline:

    max_i (fill_i + b_i step_i)

with ``b_i`` microbatches for pipeline ``i``, ``step_i`` its slowest stage, and ``fill_i`` all its other
stages (forward and backward as one job that passes all stages: 0 to 6 % too high in trials). The sizes sum
to the hosts; there are ``f + 1`` pipelines or more where that is possible, and no more than microbatches.

Of each number of pipelines the sizes that are as equal as can be are looked at, two neighbouring ones: beside
the best of all sums of sizes its steps were as long in nine of ten trials, and 2.3 % longer at most. For a
given time a pipeline of some size has room for so many microbatches, so the least time at which all have room
is found by bisection (times are whole femtoseconds).

Oobleck enumerates all sums of sizes (Jang et al., SOSP 2023, section 4.2); their number explodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

from windtunnel.base.errors import UserError
from windtunnel.training.pipelines.model import Layout, Template, TemplateSet
from windtunnel.training.pipelines.policy.templates import covered, largest_size

Kind = TypeVar("Kind", bound=Hashable)
_TICKS = 10**15  # times are compared in femtoseconds: equal pipelines are equal, and ties go to the first


def compose(set: TemplateSet, hosts: Sequence[int], microbatches: int) -> Layout:
    """The layout of pipelines over ``hosts`` (ids) with a predicted step as short as sizes as equal as can be
    make it.

    Fewer than ``f + 1`` pipelines run where the hosts are too few. Hosts that are part of no sum of
    sizes, the last ones, are left out (never where the set has all sizes up to ``2 n0 - 1``, unless there are
    fewer microbatches than pipelines).

    Raises:
        UserError: there are fewer hosts than the model needs, or no microbatch.
    """
    if len(hosts) < set.n0:
        raise UserError(f"{len(hosts)} hosts do not hold the model, which needs {set.n0}")
    if microbatches < 1:
        raise UserError(f"microbatches is {microbatches}; at least 1 is needed")
    sizes = choose_sizes(set, usable(set, len(hosts), microbatches), microbatches)
    pipelines: list[tuple[int, ...]] = []
    first = 0
    for size in sizes:
        pipelines.append(tuple(hosts[first : first + size]))
        first += size
    return Layout(tuple(pipelines), share(set, sizes, microbatches))


def usable(set: TemplateSet, hosts: int, microbatches: int) -> int:
    """The most of ``hosts`` hosts (n0 or more) that pipelines can use."""
    hosts = min(hosts, microbatches * largest_size(set))
    while not covered(set, hosts):
        hosts -= 1
    return hosts


def share(set: TemplateSet, sizes: Sequence[int], microbatches: int) -> tuple[int, ...]:
    """Microbatches for pipelines of these ``sizes``."""
    shapes = {size: fill_and_step(set.of(size)) for size in dict.fromkeys(sizes)}
    return distribute(sizes, {size: (step, fill) for size, (fill, step) in shapes.items()}, microbatches)


def fill_and_step(template: Template) -> tuple[float, float]:
    """Seconds that a step of the template takes beside its microbatches, and for each of them."""
    step = max(stage.time for stage in template.stages)
    return sum(stage.time for stage in template.stages) - step, step


def step_seconds(set: TemplateSet, layout: Layout) -> float:
    """The predicted time of a step."""
    # of thousands of pipelines most are alike
    kinds = dict.fromkeys(zip(map(len, layout.pipelines), layout.microbatches, strict=True))
    shapes = {size: fill_and_step(set.of(size)) for size in dict.fromkeys(size for size, _ in kinds)}
    return max((shapes[size][0] + b * shapes[size][1] for size, b in kinds), default=0.0)


def choose_sizes(set: TemplateSet, hosts: int, microbatches: int) -> tuple[int, ...]:
    """Sizes that sum to ``hosts``, as equal as can be, ascending; of equally fast ones those with most
    pipelines.

    Raises:
        UserError: no sum of sizes is ``hosts``, with at most as many pipelines as microbatches.
    """
    largest = largest_size(set)
    high = min(hosts // set.n0, microbatches)
    low = max(min(set.failures + 1, high), -(-hosts // largest))
    if not 1 <= low <= high:
        raise UserError(
            f"{hosts} hosts are no sum of at most {microbatches} sizes from {set.n0} to {largest}"
        )
    fill, step = {}, {}
    for size in range(set.n0, largest + 1):
        beside, each = fill_and_step(set.of(size))
        fill[size], step[size] = round(beside * _TICKS), max(1, round(each * _TICKS))

    def fits(count: int, time: int) -> bool:
        """Whether so many pipelines finish all microbatches by ``time``, each at least one."""
        size, more = divmod(hosts, count)
        room = (time - fill[size]) // step[size]
        larger = (time - fill[size + 1]) // step[size + 1] if more else 1
        return min(room, larger) >= 1 and room * (count - more) + larger * more >= microbatches

    # in which even one pipeline of any size finishes all
    best, chosen = max(fill[size] + step[size] * microbatches for size in fill) + 1, high
    for count in range(high, low - 1, -1):
        if fits(count, best - 1):
            least, best, chosen = 0, best - 1, count
            while best - least > 1:
                middle = (least + best) // 2
                least, best = (least, middle) if fits(count, middle) else (middle, best)
    size, more = divmod(hosts, chosen)
    return (size,) * (chosen - more) + (size + 1,) * more


def distribute(
    pipelines: Sequence[Kind], shapes: Mapping[Kind, tuple[float, float]], total: int
) -> tuple[int, ...]:
    """``total`` microbatches over no more ``pipelines`` than that, with the least time of the last to
    finish; at least 1 for each.

    ``shapes``: of each kind of pipeline, the seconds for each microbatch, and those beside them. The next
    microbatch always goes to the pipeline that would finish first with it, which makes the last one to finish
    as early as it can be: any other division gives some pipeline a microbatch that this one has put later.
    (Oobleck solves a mixed-integer program for the least variance of ``b times[i]``, Jang et al., SOSP 2023,
    section 4.3; the least maximum is what a synchronous step waits for.) Pipelines that are alike are served
    at once, and only what does not go round is handed out one by one.

    Raises:
        UserError: a microbatch takes no time.
    """
    counts = Counter(pipelines)
    kinds = {kind: (round(step * _TICKS), round(base * _TICKS)) for kind, (step, base) in shapes.items()}
    if min(step for step, _ in kinds.values()) < 1:
        least = min(step for step, _ in shapes.values())
        raise UserError(f"a microbatch takes {least} seconds; a positive time is needed")
    # Up to this level, were microbatches divisible; what is whole of them is handed out at once.
    speed = sum(count / kinds[kind][0] for kind, count in counts.items())
    behind = sum(count * kinds[kind][1] / kinds[kind][0] for kind, count in counts.items())
    level = int((total + behind) / speed * (1.0 - 1e-9))
    each = {kind: max(1, (level - base) // step) for kind, (step, base) in kinds.items()}
    left = total - sum(count * each[kind] for kind, count in counts.items())
    if left < 0:  # some are past that level with one
        each = dict.fromkeys(kinds, 1)
        left = total - len(pipelines)
    while True:
        ends = {kind: base + (each[kind] + 1) * step for kind, (step, base) in kinds.items()}
        first = min(ends.values())
        ready = {kind for kind, end in ends.items() if end == first}
        more = sum(counts[kind] for kind in ready)
        if more > left:
            break
        each |= {kind: each[kind] + 1 for kind in ready}
        left -= more
    shares = list(map(each.__getitem__, pipelines))
    for i, kind in enumerate(pipelines):
        if not left:
            break
        if kind in ready:
            shares[i] += 1
            left -= 1
    return tuple(shares)
