"""What one asks of the twin, each with its answer as plain data, and all of one setting together.

*Breaks*: a policy breaks the think-time window at the density from which its median overhead is above 1.9 %
(the published figure of Crab, arXiv 2604.28138) or the 95th percentile of its gate waits is above a
millisecond. *Overhead* is against the same sandboxes on the same hosts without any checkpoint, so that it
tells what checkpoints cost and not what a full host costs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from windtunnel.agents.sandbox.costs import SandboxCosts
from windtunnel.agents.sandbox.model import TurnClass
from windtunnel.agents.sandbox.policy import PolicyName
from windtunnel.agents.sandbox.traces import Trace
from windtunnel.agents.sandbox.twin import Session, SessionShape, sessions, starts
from windtunnel.agents.sandbox.twin.world import (
    EmulatedHost,
    Loss,
    SandboxWorld,
    SessionsOutcome,
)  # fmt: skip

MOST_OVERHEAD = 0.019
LEAST_WAIT = 1e-3
MOST = 512
"""Sandboxes on one host up to which a policy's break is searched."""
TRIALS = 5
"""How often a host is taken, for what a notice saves."""


@dataclass(frozen=True)
class EmulationSetting:
    """What all questions share: hosts, sessions (given traces, or generated ones of so many turns), seed."""

    machine: EmulatedHost
    costs: SandboxCosts
    hosts: int = 1
    seed: int = 0
    turns: int = 40
    traces: tuple[Trace, ...] = ()
    shape: SessionShape = field(default_factory=SessionShape)
    _played: dict[int, tuple[list[Session], list[float]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def play(self, density: int) -> tuple[list[Session], list[float]]:
        """The sessions of that many sandboxes on each host, and when they start."""
        count = density * self.hosts
        if count not in self._played:
            played = sessions(count, self.seed, traces=self.traces, turns=self.turns, shape=self.shape)
            alone = [turn.run_wall + turn.think for turn in played[0]]
            self._played[count] = played, starts(count, self.seed, sum(alone) / len(alone) * 4)
        return self._played[count]

    def world(self, policy: PolicyName, density: int) -> SandboxWorld:
        return SandboxWorld(self.machine, self.costs, policy, *self.play(density), hosts=self.hosts)


def quantile(values: Sequence[float], share: float) -> float:
    """The value below or at which that share lies; 0 for none."""
    return float(np.quantile(values, share)) if len(values) else 0.0


@dataclass(frozen=True)
class Density:
    """One policy at one number of sandboxes on each host; seconds. ``hidden``: part of the checkpoints that
    were safe when the reply came. ``fits``: the sandboxes' memory is within the host's."""

    policy: str
    density: int
    overhead: float
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


def density(
    setting: EmulationSetting, policy: PolicyName, number: int, free: SessionsOutcome | None = None
) -> Density:
    """Run one policy at one density. ``free``: the same without checkpoints, where it is at hand."""
    if free is None:
        free = setting.world("conversation", number).run()
    world = setting.world(policy, number)
    outcome = world.run()
    overhead = np.median(np.array(outcome.ends) / np.array(free.ends) - 1)
    peak = sum(max(turn.memory for turn in box.session) for box in world.boxes)
    length = max(box.start + end for box, end in zip(world.boxes, outcome.ends, strict=True))
    return Density(
        policy=policy,
        density=number,
        overhead=float(overhead),
        gate_p95=quantile(outcome.gates, 0.95),
        gate_p99=quantile(outcome.gates, 0.99),
        hidden=outcome.hidden / outcome.awaited if outcome.awaited else 1.0,
        freeze_p95=quantile([checkpoint.freeze for checkpoint in outcome.checkpoints], 0.95),
        checkpoints=len(outcome.checkpoints),
        written=sum(checkpoint.written for checkpoint in outcome.checkpoints),
        cpu_busy=outcome.cpu_served / (length * setting.machine.cores * setting.hosts),
        fits=peak <= setting.machine.memory * setting.hosts,
    )


@dataclass(frozen=True)
class Break:
    """The last density found that a policy bears, and the first that it does not (None: none up to
    ``searched``). ``fits``: how many such sandboxes the memory of a host holds."""

    policy: str
    bears: int
    breaks: int | None
    searched: int
    fits: int


def breaking(setting: EmulationSetting, policy: PolicyName, most: int = 128) -> Break:
    """Where a policy breaks, by doubling and then halving. The search takes it that a policy that broke
    stays broken; a seed may have a denser host that happens to bear it."""
    peaks = [max(turn.memory for turn in session) for session in replace(setting, hosts=1).play(most)[0]]
    fits = int(np.searchsorted(np.cumsum(peaks), setting.machine.memory, side="right"))
    bears, breaks = search(lambda number: density(setting, policy, number).broken, most)
    return Break(policy, bears, breaks, most, fits)


def search(broken: Callable[[int], bool], most: int) -> tuple[int, int | None]:
    """The last number that is not ``broken``, and the first that is (None: none up to ``most``)."""
    good, bad = 0, 1
    while not broken(bad):
        if bad == most:
            return most, None
        good, bad = bad, min(bad * 2, most)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (good, middle) if broken(middle) else (middle, bad)
    return good, bad


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
    setting: EmulationSetting, policies: Sequence[PolicyName], notices: Sequence[float], number: int,
    trials: int = TRIALS,
) -> list[Spot]:  # fmt: skip
    """One host is taken at times drawn over the middle of the run; the same times for every policy. A policy
    of *conversation* here saves nothing at the end of turns and all at the notice."""
    length = float(np.median(setting.world("conversation", number).run().ends))
    times = np.random.default_rng([setting.seed, 2]).uniform(0.25 * length, 0.75 * length, trials)
    rows = []
    for policy in policies:
        for seconds in notices:
            losses: list[Loss] = []
            for time in map(float, times):
                world = setting.world(policy, number)
                if seconds > 0:
                    world.notice(0, time, seconds)
                world.kill(0, time + seconds)
                losses.extend(world.run(time + seconds).losses)
            turns = float(np.mean([loss.turns - loss.covered for loss in losses]))
            again = float(np.mean([loss.seconds for loss in losses]))
            saved = float(np.mean([loss.covered == loss.turns for loss in losses]))
            rows.append(Spot(policy, seconds, turns, again, saved, trials))
    return rows


@dataclass(frozen=True)
class EmulationAnswers:
    """What was asked and found. ``assumed`` and ``origin`` say in words what the figures rest on;
    ``classes``: which part of the turns is of which class, as the live policy decides."""

    setting: str
    assumed: str
    origin: str
    classes: dict[str, float]
    densities: tuple[Density, ...]
    breaks: tuple[Break, ...]
    spots: tuple[Spot, ...]


def answer(
    setting: EmulationSetting, origin: str, *, policies: Sequence[PolicyName], numbers: Sequence[int],
    notices: Sequence[float], progress: Callable[[str], None] = lambda question: None,
) -> EmulationAnswers:  # fmt: skip
    """Ask everything. Breaks and notices are asked of one host: hosts share nothing there."""
    alone, machine = replace(setting, hosts=1), setting.machine
    progress("density")
    rows: list[Density] = []
    for number in numbers:
        free = setting.world("conversation", number).run()
        rows.extend(density(setting, policy, number, free) for policy in policies)
    progress("break")
    breaks = [breaking(alone, policy, MOST) for policy in policies if policy != "conversation"]
    progress("notice")
    spots = spot(alone, policies, (0.0, *notices), max(numbers))
    classes = [turn.turn_class for session in alone.play(max(numbers))[0] for turn in session]
    played = f"{len(setting.traces)} given traces" if setting.traces else f"sessions of {setting.turns} turns"
    return EmulationAnswers(
        setting=(
            f"{setting.hosts} hosts of {machine.cores} cores, {machine.memory / 1e9:g} GB, disk "
            f"{machine.disk / 1e9:g} GB/s, {machine.lanes} workers; "
            f"{played}, seed {setting.seed}; notices: one such host, {max(numbers)} sandboxes"
        ),
        assumed=setting.shape.words,
        origin=origin,
        classes={kind.word: classes.count(kind) / len(classes) for kind in TurnClass},
        densities=tuple(rows),
        breaks=tuple(breaks),
        spots=tuple(spots),
    )
