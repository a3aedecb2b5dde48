"""The planner: the cut of a model's layers over hosts that takes the least time, exactly.

A *plan* is a path through the layers and the devices, from the first of both to the last of both: each stage
takes one layer or more and a power of two devices inside one host, every host's devices are all used,
and the stages follow the hosts in order. With one device a host, that is one stage a host. With
several, and a given number of microbatches, there are two of them or more for each stage, unless there are
more hosts than that.

A stage of layers ``u``..``v`` on ``d`` devices takes ``sum (forward + backward) / d + 2 sum all-reduce(d)``
seconds a microbatch, and holds ``sum state + (microbatches in flight) sum activations`` bytes, which must fit
its ``d`` devices. In 1F1B, stage ``s`` of ``S`` has ``min(S - s, N)`` microbatches in flight. Among all
plans, `plan` returns one with the least `times.iteration_time` (a microbatch, where plans of different
numbers of stages are made for different numbers of microbatches); of equal ones that with the fastest slowest
stage, then the fewest stages, then the earliest cuts.

Oobleck (Jang et al., SOSP 2023, section 4.2) splits the layers recursively and keeps one best plan of each
part. That is not optimal, since which half is best depends on where the slowest
stage of the whole will be: for layers of 13, 2, 3, 1, 1, 2, 2, 1, 20, 1 in 3 stages it finds 277 where 268 is
possible. Here the slowest stage's time is guessed instead: every range of layers gives a candidate, and for
each one two tables hold the rest (`fill`). A lower bound ends the guesses early. Times are rounded to
picoseconds, so that stages of equal layers are equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from itertools import accumulate
from typing import Any

from windtunnel.base.errors import UserError
from windtunnel.training.pipelines.model import LayerProfile, Stage, Template
from windtunnel.training.pipelines.policy.schedule import iteration_time

MICROBATCHES_A_STAGE = 4
"""Templates are made for so many microbatches a stage, as published."""

FEWEST_A_STAGE = 2
"""Hosts of several devices are not split into more stages than leave so many microbatches for each."""

_SMALL = 10_000_000
"""Searches of fewer steps than that (at most) are done sooner than Numba is imported."""


def plan(
    profile: Sequence[LayerProfile],
    hosts: int,
    devices_per_host: int,
    memory: float,
    *,
    microbatches: int | None = None,
) -> Template | None:
    """The fastest plan for ``hosts`` hosts with ``memory`` bytes a device, None where none fits.

    ``microbatches``: that the pipeline works on in a step; 4 for each stage unless given. `why_not` says why
    nothing fits.

    Raises:
        UserError: the profile is empty, or a number is not positive.
    """
    problem = _CutProblem(profile, hosts, devices_per_host, memory, microbatches)
    if problem.most < hosts:
        return None
    solution = problem.search()
    if solution is None:
        return None
    return problem.template(*solution)


def fits(
    profile: Sequence[LayerProfile],
    hosts: int,
    devices_per_host: int,
    memory: float,
    *,
    microbatches: int | None = None,
) -> bool:
    """Whether any plan for ``hosts`` hosts fits their memory (one pass, much cheaper than `plan`)."""
    problem = _CutProblem(profile, hosts, devices_per_host, memory, microbatches)
    return problem.most >= hosts and problem.feasible()


def why_not(
    profile: Sequence[LayerProfile],
    hosts: int,
    devices_per_host: int,
    memory: float,
    *,
    microbatches: int | None = None,
) -> str | None:
    """Why `plan` finds nothing, in one sentence; None where it finds something."""
    problem = _CutProblem(profile, hosts, devices_per_host, memory, microbatches)
    if problem.most < hosts:
        return f"{len(profile)} layers make no {hosts} stages, one a host at least"
    if problem.feasible():
        return None
    room = memory * problem.power[-1]
    for layer in profile:
        need = layer.state_bytes + layer.activation_bytes
        if need > room:
            return (
                f"layer {layer.name} needs {need:.4g} bytes, but a stage of {problem.power[-1]} devices"
                f" has {room:.4g}"
            )
    total = sum(layer.state_bytes + layer.activation_bytes for layer in profile)
    have = memory * hosts * devices_per_host
    if total > have:
        return (
            f"the layers need {total:.4g} bytes with one microbatch in flight,"
            f" but {hosts} hosts have {have:.4g}"
        )
    return (
        f"the layers need {total:.4g} of {have:.4g} bytes with one microbatch in flight, but no cut fits:"
        f" the first of {hosts} stages holds {min(hosts, problem.in_flight)} microbatches"
    )


class _CutProblem:
    """The profile as integers: picoseconds and bytes, summed from the first layer on."""

    def __init__(
        self,
        profile: Sequence[LayerProfile],
        hosts: int,
        devices_per_host: int,
        memory: float,
        microbatches: int | None,
    ) -> None:
        if not profile:
            raise UserError("the profile has no layers; at least one is needed")
        for what, value in (("hosts", hosts), ("devices_per_host", devices_per_host), ("memory", memory)):
            if not value > 0:
                raise UserError(f"{what} is {value}; a positive number is needed")
        if microbatches is not None and microbatches < 1:
            raise UserError(f"microbatches is {microbatches}; at least 1 is needed")
        self.layers = len(profile)
        self.hosts, self.per_host = hosts, devices_per_host
        self.devices = hosts * devices_per_host
        self.most = min(self.layers, self.devices)
        if microbatches is not None and self.most > hosts:
            self.most = max(hosts, min(self.most, microbatches // FEWEST_A_STAGE))
        self.least = hosts
        self.given = microbatches
        self.in_flight = self.most if microbatches is None else min(self.most, microbatches)
        self.profile = profile
        self.power = [1 << bit for bit in range(devices_per_host.bit_length())]
        seconds = [[_seconds(layer, d) for layer in profile] for d in self.power]
        self.scale = scale = _scale(seconds, self.microbatches(self.most))
        self.time: list[int] = []
        for row in seconds:
            self.time += accumulate((round(t * scale) for t in row), initial=0)
        # What every plan has to do: each layer where it is fastest.
        self.work = sum(min(round(row[i] * scale) for row in seconds) for i in range(self.layers))
        self.state = list(accumulate((round(layer.state_bytes) for layer in profile), initial=0))
        self.activation = list(accumulate((round(layer.activation_bytes) for layer in profile), initial=0))
        self.memory = int(min(memory, INFINITE // (2 * self.power[-1])))

    def microbatches(self, stages: int) -> int:
        return MICROBATCHES_A_STAGE * stages if self.given is None else self.given

    @cached_property
    def _compiled(self) -> bool:
        """Whether the search is long enough to be worth the import of Numba."""
        guesses = self.layers * self.layers * len(self.power)
        steps = self.most * self.layers * len(self.power) * (self.devices - self.hosts + 1)
        return guesses * steps > _SMALL

    @cached_property
    def _inputs(self) -> tuple[Any, ...]:
        tables = (self.power, self.time, self.state, self.activation)
        if not self._compiled:
            return tables
        import numpy as np

        return tuple(np.array(table, dtype=np.int64) for table in tables)

    @cached_property
    def _outputs(self) -> tuple[Any, Any]:
        size = self.index(self.most, self.devices, self.layers) + 1
        if not self._compiled:
            return [0] * size, [0] * size
        import numpy as np

        return np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.int64)

    def tables(self, w: int, most: int) -> tuple[Any, Any]:
        """Both tables of `fill` for the slowest time ``w`` and up to ``most`` stages (overwritten by
        the next call)."""
        run = _compiled_fill() if self._compiled else fill
        power, time, state, activation = self._inputs
        after, whole = self._outputs
        run(
            w, self.layers, most, self.devices, self.per_host, self.in_flight,
            power, time, state, activation, self.memory, after, whole,
        )  # fmt: skip
        return after, whole

    def index(self, j: int, r: int, p: int) -> int:
        return (j * (self.devices + 1) + r) * (self.layers + 1) + p

    def feasible(self) -> bool:
        longest = max(self.time) + 1
        after, _ = self.tables(longest, self.most)
        return any(after[self.index(s, self.devices, 0)] < INFINITE for s in range(self.least, self.most + 1))

    def candidates(self) -> list[int]:
        """Every time that a slowest stage can have, ascending."""
        width = self.layers + 1
        widths: set[int] = set()
        for d in range(len(self.power)):
            row = self.time[d * width : (d + 1) * width]
            widths.update(row[q] - row[p] for p in range(width) for q in range(p + 1, width))
        # The slowest of at most so many stages takes no less than their mean, nor than any layer at its
        # fastest.
        floor = -(-self.work // self.most)
        for p in range(self.layers):
            floor = max(
                floor,
                min(self.time[d * width + p + 1] - self.time[d * width + p] for d in range(len(self.power))),
            )
        return sorted(w for w in widths if w >= floor)

    def search(self) -> tuple[int, int] | None:
        """The slowest stage's time and the number of stages of the best plan."""
        best, shared, solution = INFINITE, 1, None
        rounds = {s: self.microbatches(s) for s in range(self.least, self.most + 1)}
        monotone = all(rounds[s] >= s for s in rounds)
        for w in self.candidates():
            # Before the slowest stage k, stages take k w at most, so from it on at least what is left.
            floor = self.work + max(0, self.work - w)
            hopeful = [s for s, n in rounds.items() if (floor + (n - s) * w) * shared < best * n]
            if not hopeful:
                if monotone:
                    break
                continue
            _, whole = self.tables(w, hopeful[-1])
            for s in hopeful:
                cost, n = int(whole[self.index(s, self.devices, 0)]), rounds[s]
                if cost < INFINITE and (cost + n * w) * shared < best * n:
                    best, shared, solution = cost + n * w, n, (w, s)
        return solution

    def template(self, w: int, stages: int) -> Template:
        """The plan behind the tables' optimum, the earliest cuts and fewest devices first."""
        after, whole = self.tables(w, stages)
        width = self.layers + 1
        p, r, passed = 0, self.devices, False
        cut: list[Stage] = []
        hosts_of_stage: list[int] = []
        for j in range(stages, 0, -1):
            wanted = (after if passed else whole)[self.index(j, r, p)]
            p, r, passed = self._step(w, after, whole, j, r, p, passed, wanted, cut, hosts_of_stage, width)
        times = [stage.time for stage in cut]
        microbatches = self.microbatches(stages)
        time = iteration_time(times, microbatches)
        return Template(self.hosts, tuple(cut), tuple(hosts_of_stage), time, microbatches)

    def _step(
        self, w: int, after: Any, whole: Any, j: int, r: int, p: int, passed: bool, wanted: int,
        cut: list[Stage], hosts_of_stage: list[int], width: int,
    ) -> tuple[int, int, bool]:  # fmt: skip
        room = (r - 1) % self.per_host + 1
        for d, devices in enumerate(self.power):
            if devices > room:
                break
            for q in range(p + 1, self.layers + 1):
                took = self.time[d * width + q] - self.time[d * width + p]
                held = self.state[q] - self.state[p]
                held += (self.activation[q] - self.activation[p]) * min(j, self.in_flight)
                if took > w or held > self.memory * devices:
                    break
                there = self.index(j - 1, r - devices, q)
                choices = []
                if passed and took < w:
                    choices.append((True, after[there], 2 * took))
                if not passed and took == w:
                    choices.append((True, after[there], (1 - j) * w))
                if not passed:
                    choices.append((False, whole[there], took))
                for then, rest, cost in choices:
                    if rest < INFINITE and rest + cost == wanted:
                        cut.append(Stage(p, q, devices, took / self.scale))
                        hosts_of_stage.append((self.devices - r) // self.per_host)
                        return q, r - devices, then
        raise AssertionError("the tables hold a cost that no stage explains")


@cache
def _compiled_fill() -> Any:
    from windtunnel.base.compiled import jit

    return jit(fill)


def _seconds(layer: LayerProfile, devices: int) -> float:
    """What a layer adds to the time of a stage on so many devices."""
    if devices == 1:
        return layer.forward + layer.backward
    for number, seconds in layer.in_host:
        if number == devices:
            return (layer.forward + layer.backward) / devices + 2.0 * seconds
    raise UserError(
        f"layer {layer.name} has no all-reduce time for {devices} devices in `in_host`;"
        f" times for 2, 4, .. devices are needed, up to as many as a host has"
    )


def _scale(seconds: Sequence[Sequence[float]], microbatches: int) -> int:
    """Steps a second that times are counted in: picoseconds, coarser where sums would not fit 64 bits."""
    largest = max(sum(row) for row in seconds) * 4 * (microbatches + len(seconds[0]))
    scale = 10**12
    while scale > 1 and largest * scale > INFINITE // 4:
        scale //= 10
    return scale


INFINITE = 1 << 62

# A table of integers: a list, or an array of int64 when compiled.
Table = Any


def fill(
    w: int,
    layers: int,
    most: int,
    devices: int,
    per_host: int,
    in_flight: int,
    power: Table,
    time: Table,
    state: Table,
    activation: Table,
    memory: int,
    after: Table,
    whole: Table,
) -> None:
    """The best cut for one bottleneck time ``w``, over all numbers of stages up to ``most`` at once.

    For the slowest stage's time ``w`` the published formula splits into one term for each stage (``j``:
    stages from this one to the end, itself included; ``N``: microbatches):

        before the slowest:  w_i          the slowest itself:  (N + 1 - j) w          after it:  2 w_i

    so two tables, filled from the end of the model, hold the optimum: ``after[j, r, p]``, the least cost of
    layers ``p``.. on the last ``r`` devices in ``j`` stages that are all faster than ``w``; and ``whole[j, r,
    p]``, the same with the slowest among them and none slower before it, without the term ``N w``. Only ``N
    w`` depends on the number of stages, so one pass serves all of them, and the memory of a stage (which
    holds a microbatch for each stage from it to the end) depends on ``j`` alone. Everything is in integers:
    equal stages are equal, and ties are seen.

    Plain Python that Numba can compile: small searches run as they are, large ones compiled. All tables are
    flat; entry ``(j, r, p)`` lies at ``(j * (devices + 1) + r) * (layers + 1) + p``.

    ``power``: devices that a stage may have. ``time[d * (layers + 1) + p]``: what the first ``p`` layers
    take on ``power[d]`` devices. ``state``, ``activation``: bytes of the first ``p`` layers. ``memory``: of
    one device. ``in_flight``: no stage holds more microbatches than that.
    """
    width = layers + 1
    for i in range((devices + 1) * width):
        after[i] = INFINITE
        whole[i] = INFINITE
    after[layers] = 0
    for j in range(1, most + 1):
        held = min(j, in_flight)
        for r in range(devices + 1):
            here = (j * (devices + 1) + r) * width
            for p in range(width):
                after[here + p] = INFINITE
                whole[here + p] = INFINITE
            if r < j or r > j * per_host:
                continue
            room = (r - 1) % per_host + 1
            for d in range(len(power)):
                if power[d] > room:
                    break
                there = ((j - 1) * (devices + 1) + r - power[d]) * width
                limit = memory * power[d]
                for p in range(layers - j + 1):
                    best = after[here + p]
                    best_whole = whole[here + p]
                    for q in range(p + 1, layers - j + 2):
                        took = time[d * width + q] - time[d * width + p]
                        if took > w:
                            break
                        if state[q] - state[p] + (activation[q] - activation[p]) * held > limit:
                            break
                        if took < w:
                            if after[there + q] + 2 * took < best:
                                best = after[there + q] + 2 * took
                        elif after[there + q] < INFINITE and after[there + q] + (1 - j) * w < best_whole:
                            best_whole = after[there + q] + (1 - j) * w
                        if whole[there + q] < INFINITE and whole[there + q] + took < best_whole:
                            best_whole = whole[there + q] + took
                    after[here + p] = best
                    whole[here + p] = best_whole
