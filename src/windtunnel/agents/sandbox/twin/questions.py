"""What one asks of the twin, each with its answer as plain data.

*Breaks*: a policy breaks the think-time window at the density from which its median overhead is above 1.9 %
(the published figure of Crab, arXiv 2604.28138) or the 95th percentile of its gate waits is above a
millisecond. *Overhead* is against the same sandboxes on the same hosts without any checkpoint, so that it
tells what checkpoints cost and not what a full host costs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from windtunnel.agents.sandbox.costs import SandboxCosts
from windtunnel.agents.sandbox.model import TurnClass
from windtunnel.agents.sandbox.traces.schema import Trace
from windtunnel.agents.sandbox.twin.hosts import ARMS, Arm, EmulatedHost, Loss, SessionsOutcome
from windtunnel.agents.sandbox.twin.loads import Session, Shape, sessions, starts
from windtunnel.agents.sandbox.twin.world import SandboxWorld

MOST_OVERHEAD = 0.019
LEAST_WAIT = 1e-3


@dataclass(frozen=True)
class Setting:
    """What all questions share: hosts, sessions (given traces, or generated ones of so many turns), seed."""

    machine: EmulatedHost
    costs: SandboxCosts
    hosts: int = 1
    seed: int = 0
    turns: int = 40
    traces: tuple[Trace, ...] = ()
    shape: Shape = field(default_factory=Shape)
    _played: dict[int, tuple[list[Session], list[float]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def play(self, density: int) -> tuple[list[Session], list[float]]:
        """The sessions of that many sandboxes on each host, and when they start."""
        count = density * self.hosts
        if count not in self._played:
            self._played[count] = self._play(count)
        return self._played[count]

    def _play(self, count: int) -> tuple[list[Session], list[float]]:
        made = sessions(count, self.seed, traces=self.traces, turns=self.turns, shape=self.shape)
        alone = [turn.run_wall + turn.think for turn in made[0]]
        return made, starts(count, self.seed, sum(alone) / len(alone) * 4)

    def world(self, policy: Arm, density: int) -> SandboxWorld:
        made, begin = self.play(density)
        return SandboxWorld(self.machine, self.costs, policy, made, begin, hosts=self.hosts)


@dataclass(frozen=True)
class Density:
    """One policy at one number of sandboxes on each host; seconds. ``hidden``: part of the checkpoints that
    were safe when the reply came. ``fits``: the sandboxes' memory is within the host's."""

    policy: str
    density: int
    overhead: float
    gate_median: float
    gate_p95: float
    gate_p99: float
    hidden: float
    freeze_p95: float
    checkpoints: int
    written: float
    cpu_busy: float
    fits: bool

    @property
    def broken(self) -> bool:
        return self.overhead > MOST_OVERHEAD or self.gate_p95 > LEAST_WAIT


def quantile(values: Sequence[float], share: float) -> float:
    """The value below or at which that share lies; 0 for none."""
    return float(np.quantile(values, share)) if len(values) else 0.0


def density(setting: Setting, policy: Arm, number: int, free: SessionsOutcome | None = None) -> Density:
    """Run one policy at one density. ``free``: the same without checkpoints, where it is at hand."""
    if free is None:
        free = setting.world(ARMS["conversation"], number).run()
    world = setting.world(policy, number)
    outcome = world.run()
    overhead = np.median(np.array(outcome.ends) / np.array(free.ends) - 1)
    peak = sum(max(turn.memory for turn in box.session) for box in world.boxes)
    length = max(box.start + end for box, end in zip(world.boxes, outcome.ends, strict=True))
    return Density(
        policy=policy.name,
        density=number,
        overhead=float(overhead),
        gate_median=quantile(outcome.gates, 0.5),
        gate_p95=quantile(outcome.gates, 0.95),
        gate_p99=quantile(outcome.gates, 0.99),
        hidden=outcome.hidden / outcome.asked if outcome.asked else 1.0,
        freeze_p95=quantile([made.freeze for made in outcome.made], 0.95),
        checkpoints=len(outcome.made),
        written=sum(made.written for made in outcome.made),
        cpu_busy=outcome.cpu_served / (length * setting.machine.cores * setting.hosts),
        fits=peak <= setting.machine.memory * setting.hosts,
    )


def densities(setting: Setting, policies: Sequence[Arm], numbers: Sequence[int]) -> list[Density]:
    """Every policy at every density."""
    rows: list[Density] = []
    for number in numbers:
        free = setting.world(ARMS["conversation"], number).run()
        rows.extend(density(setting, policy, number, free) for policy in policies)
    return rows


@dataclass(frozen=True)
class Break:
    """The last density found that a policy bears, and the first that it does not (None: none up to
    ``searched``)."""

    policy: str
    bears: int
    breaks: int | None
    searched: int
    fits: int
    """How many such sandboxes the memory of a host holds."""


def breaking(setting: Setting, policy: Arm, most: int = 128) -> Break:
    """Where a policy breaks, by doubling and then halving. The search takes it that a policy that broke
    stays broken; a seed may have a denser host that happens to bear it."""
    return _search(
        lambda number: density(setting, policy, number), policy.name, most, _fitting(setting, most)
    )


def _search(row: Callable[[int], Density], name: str, most: int, fits: int) -> Break:
    good, number = 0, 1
    while number <= most and not row(number).broken:
        good, number = number, number * 2
    if number > most:
        if good == most or not row(most).broken:
            return Break(name, most, None, most, fits)
        number = most
    bad = number
    while bad - good > 1:
        middle = (good + bad) // 2
        if row(middle).broken:
            bad = middle
        else:
            good = middle
    return Break(name, good, bad, most, fits)


def _fitting(setting: Setting, most: int) -> int:
    peaks = [max(turn.memory for turn in session) for session in replace(setting, hosts=1).play(most)[0]]
    return int(np.searchsorted(np.cumsum(peaks), setting.machine.memory, side="right"))


@dataclass(frozen=True)
class Spot:
    """What a policy loses when one host goes after a notice of so many seconds: means over trials. ``saved``:
    part of the sandboxes that lose no turn."""

    policy: str
    notice: float
    turns_lost: float
    seconds_lost: float
    saved: float
    trials: int


def spot(
    setting: Setting, policies: Sequence[Arm], notices: Sequence[float], number: int, trials: int = 5
) -> list[Spot]:
    """One host is taken at times drawn over the middle of the run; the same times for every policy. A policy
    of *conversation* here saves nothing at the end of turns and all at the notice."""
    free = setting.world(ARMS["conversation"], number).run()
    length = float(np.median(free.ends))
    times = np.random.default_rng([setting.seed, 2]).uniform(0.25 * length, 0.75 * length, trials)
    rows = []
    for policy in policies:
        for seconds in notices:
            losses: list[Loss] = []
            for at in times:
                world = setting.world(policy, number)
                if seconds > 0:
                    world.notice(0, float(at), seconds)
                world.kill(0, float(at) + seconds, replace=False)
                losses.extend(world.run(float(at) + seconds).losses)
            rows.append(
                Spot(
                    policy=policy.name,
                    notice=seconds,
                    turns_lost=float(np.mean([loss.turns - loss.kept for loss in losses])),
                    seconds_lost=float(np.mean([loss.seconds for loss in losses])),
                    saved=float(np.mean([loss.kept == loss.turns for loss in losses])),
                    trials=trials,
                )
            )
    return rows


@dataclass(frozen=True)
class Failures:
    """A policy under hosts that die at random: how much longer sessions took than without failures and
    checkpoints, what was done again, and how long a recovery took."""

    policy: str
    deaths: int
    stretch: float
    turns_again: int
    seconds_again: float
    recovery_median: float


def failures(setting: Setting, policies: Sequence[Arm], number: int, mean_hours: float) -> list[Failures]:
    """Hosts die independently, so many hours apart on average; the same deaths for every policy."""
    free = setting.world(ARMS["conversation"], number).run()
    length = max(free.ends)
    rng = np.random.default_rng([setting.seed, 3])
    deaths: list[tuple[int, float]] = []
    for place, stream in enumerate(rng.spawn(setting.hosts)):
        at = 0.0
        while (at := at + float(stream.exponential(mean_hours * 3600))) < length:
            deaths.append((place, at))
    rows = []
    for policy in policies:
        world = setting.world(policy, number)
        for place, at in deaths:
            world.kill(place, at)
        outcome = world.run()
        rows.append(
            Failures(
                policy=policy.name,
                deaths=len(deaths),
                stretch=float(np.mean(np.array(outcome.ends) / np.array(free.ends))) - 1,
                turns_again=sum(loss.turns - loss.kept for loss in outcome.losses),
                seconds_again=sum(loss.seconds for loss in outcome.losses),
                recovery_median=quantile([loss.recovered for loss in outcome.losses], 0.5),
            )
        )
    return rows


@dataclass(frozen=True)
class Urgent:
    """What the urgent queue is worth at one density and number of workers: gate waits with it and without,
    seconds."""

    policy: str
    density: int
    workers: int
    mean: float
    mean_fifo: float
    p95: float
    p95_fifo: float
    p99: float
    p99_fifo: float


def urgent(setting: Setting, numbers: Sequence[int], workers: Sequence[int]) -> list[Urgent]:
    """The policies *semantic* and *full*, each with two queues and with one. A queue matters only where jobs
    wait for a worker: with as many workers as sandboxes all share the disk instead."""
    rows = []
    for number, lanes, name in itertools.product(numbers, workers, ("semantic", "full")):
        narrow = replace(setting, machine=replace(setting.machine, workers=lanes))
        two, one = (narrow.world(ARMS[name + end], number).run().gates for end in ("", "-fifo"))
        rows.append(
            Urgent(
                policy=name,
                density=number,
                workers=lanes,
                mean=float(np.mean(two)) if two else 0.0,
                mean_fifo=float(np.mean(one)) if one else 0.0,
                p95=quantile(two, 0.95),
                p95_fifo=quantile(one, 0.95),
                p99=quantile(two, 0.99),
                p99_fifo=quantile(one, 0.99),
            )
        )
    return rows


def powers(most: int) -> list[int]:
    """1, 2, 4, … and ``most`` itself."""
    return sorted({*(2**power for power in range(int(math.log2(most)) + 1)), most})


def class_shares(setting: Setting, number: int) -> dict[str, float]:
    """Which part of the turns is of which class, as the live policy decides."""
    classes = [turn.turn_class for session in setting.play(number)[0] for turn in session]
    return {one.word: classes.count(one) / len(classes) for one in TurnClass}
