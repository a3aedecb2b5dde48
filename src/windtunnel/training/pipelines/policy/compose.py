"""Which templates run side by side: the sizes of the pipelines that use so many hosts.

A step takes as long as its slowest pipeline:

    max_i (fill_i + b_i step_i)

with ``b_i`` microbatches for pipeline ``i``, ``step_i`` its slowest stage, and ``fill_i`` all its other
stages (forward and backward as one job that passes all stages: 0 to 6 % too high in trials). The sizes sum
to the hosts; there are ``f + 1`` pipelines or more where that is possible, and no more than microbatches.

For a given time, a pipeline of some size has room for so many microbatches, and rooms add up. So the best
sizes for that time are a knapsack, and the least time at which they have room for all microbatches is found
by bisection (times are whole femtoseconds):

* `_ChoiceProblem.exact`: a table over hosts and pipelines. Optimal, for up to some dozens of hosts.
* `_ChoiceProblem.two_sizes`: two neighbouring sizes for each number of pipelines, for large jobs. It always
  has a result; beside the optimum its steps were as long in nine of ten trials, and 2.3 % longer at most.

Oobleck enumerates all sums of sizes (Jang et al., SOSP 2023, section 4.2); their number explodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

from windtunnel.base.errors import UserError
from windtunnel.training.pipelines.model import Layout, Template, TemplateSet
from windtunnel.training.pipelines.policy.templates import covered, largest_size

Kind = TypeVar("Kind", bound=Hashable)
_TICKS = 10**15  # times are compared in femtoseconds: equal pipelines are equal, and ties go to the first
_EXACT = 5_000
"""Up to so many (hosts x pipelines x sizes), the sizes are optimal."""


def compose(set: TemplateSet, hosts: Sequence[int], microbatches: int) -> Layout:
    """The layout of pipelines over ``hosts`` (ids) with the least predicted time of a step.

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
    """The best sizes that sum to ``hosts``, ascending.

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
    problem = _ChoiceProblem(set, hosts, microbatches, low, high)
    best = problem.two_sizes()
    if hosts * high * len(set.templates) <= _EXACT:
        return problem.exact(best)
    return best


class _ChoiceProblem:
    """Sizes to choose, in femtoseconds."""

    def __init__(self, set: TemplateSet, hosts: int, microbatches: int, low: int, high: int) -> None:
        self.hosts, self.microbatches, self.low, self.high = hosts, microbatches, low, high
        self.n0, self.most = set.n0, largest_size(set)
        shapes = [fill_and_step(template) for template in set.templates]
        self.fill = {set.n0 + i: round(fill * _TICKS) for i, (fill, _) in enumerate(shapes)}
        self.step = {set.n0 + i: max(1, round(step * _TICKS)) for i, (_, step) in enumerate(shapes)}
        self.floor = min(self.fill[size] + self.step[size] for size in self.fill)

    def room(self, size: int, time: int) -> int:
        """Microbatches that a pipeline of ``size`` finishes by ``time``, 0 or less: none."""
        return (time - self.fill[size]) // self.step[size]

    def least(self, fits: Callable[[int], bool], high: int) -> int:
        """The least time that fits, if ``high`` does."""
        low = self.floor - 1
        while high - low > 1:
            time = (low + high) // 2
            if fits(time):
                high = time
            else:
                low = time
        return high

    def ceiling(self) -> int:
        """A time in which even one pipeline of any size finishes all microbatches."""
        return max(self.fill[s] + self.step[s] * self.microbatches for s in self.fill)

    def total(self, sizes: Sequence[int]) -> int:
        counts = {size: sizes.count(size) for size in self.fill if size in sizes}

        def fits(time: int) -> bool:
            rooms = [(self.room(size, time), count) for size, count in counts.items()]
            return all(room >= 1 for room, _ in rooms) and sum(r * c for r, c in rooms) >= self.microbatches

        return self.least(fits, self.ceiling())

    def two_sizes(self) -> tuple[int, ...]:
        """The best of one composition for each number of pipelines: sizes as equal as can be."""
        best, choice = self.ceiling() + 1, (0, 0)
        for count in range(self.high, self.low - 1, -1):
            size, more = divmod(self.hosts, count)

            def fits(time: int, size: int = size, more: int = more, count: int = count) -> bool:
                room = self.room(size, time)
                larger = self.room(size + 1, time) if more else 1
                return min(room, larger) >= 1 and room * (count - more) + larger * more >= self.microbatches

            if fits(best - 1):
                best, choice = self.least(fits, best - 1), (count, size)
        count, size = choice
        more = self.hosts - count * size
        return (size,) * (count - more) + (size + 1,) * more

    def rooms(self, time: int) -> list[tuple[int, int]]:
        """(size, room) of the sizes that finish a microbatch by ``time``."""
        pairs = [(size, self.room(size, time)) for size in self.fill]
        return [(size, room) for size, room in pairs if room >= 1]

    def exact(self, start: tuple[int, ...]) -> tuple[int, ...]:
        """The optimum, of equal ones that with most pipelines; ``start``: a composition that is as good or
        worse."""
        tables: dict[int, list[int]] = {}

        def by_count(time: int) -> list[int]:
            """The most room of so many pipelines, by their number, -1 where there is no such sum."""
            if time not in tables:
                tables[time] = [row[self.hosts] for row in self.table(time)]
            return tables[time]

        best, chosen = self.total(start) + 1, 0
        for count in range(self.high, self.low - 1, -1):
            if best > self.floor and by_count(best - 1)[count] >= self.microbatches:

                def fits(time: int, count: int = count) -> bool:
                    return by_count(time)[count] >= self.microbatches

                best, chosen = self.least(fits, best - 1), count
        return self.retrace(best, chosen)

    def table(self, time: int) -> list[list[int]]:
        """``[count][hosts]``: the most room of ``count`` pipelines of so many hosts together."""
        rooms = self.rooms(time)
        rows = [[0] + [-1] * self.hosts]
        for count in range(1, self.high + 1):
            above, row = rows[-1], [-1] * (self.hosts + 1)
            for hosts in range(count * self.n0, min(self.hosts, count * self.most) + 1):
                for size, room in rooms:
                    if size <= hosts and above[hosts - size] >= 0 and above[hosts - size] + room > row[hosts]:
                        row[hosts] = above[hosts - size] + room
            rows.append(row)
        return rows

    def retrace(self, time: int, count: int) -> tuple[int, ...]:
        rows, hosts, sizes = self.table(time), self.hosts, list[int]()
        for row in range(count, 0, -1):
            for size, room in self.rooms(time):
                before = rows[row - 1][hosts - size] if size <= hosts else -1
                if before >= 0 and before + room == rows[row][hosts]:
                    sizes.append(size)
                    hosts -= size
                    break
        return tuple(sorted(sizes))


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
