"""The twin: hosts full of sandboxes, emulated from the load of their turns and measured costs.

What turns need, the order of checkpoints and what is saved on a notice are decided by the very code that live
sandboxes use (``policy``); only the machine is a model. ``world`` is the hosts and their sandboxes,
``questions`` what is asked of them; ``cost`` prices a single decision. Here stands what the turns of a
session ask of a machine, from traces, from generated sessions, or from what was seen.

A trace says how long the model thinks and, where it was judged or generated, which class a turn truly has; it
does not say how long commands run or how much memory they touch. That is drawn here, from a ``SessionShape``
whose figures are assumptions to be set by the user: no data set that we know holds them all. Classes are not
taken over: each turn becomes the *effects* that an inspector would report of it, and the policy decides.

Of generated turns, the share of *none* is the lower bound that Crab (arXiv 2604.28138) publishes; how the
rest is divided is our choice. How long the model thinks comes from the six gaps between a tool's answer and
the next reply at the start of one public mini-SWE-agent trajectory (deepseek-chat on django-10914, which
records both times): 3.2, 2.6, 2.8, 3.3, 5.7 and 41.2 s, median 3.3 s, standard deviation of the logarithms
1.05. That is little data, and one model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache

import numpy as np

from windtunnel.agents.sandbox.costs import SandboxCosts, load_costs
from windtunnel.agents.sandbox.model import (
    FileChange,
    ProcessEffect,
    References,
    SandboxPart,
    ShellEffect,
    TurnClass,
    TurnEffects,
)  # fmt: skip
from windtunnel.agents.sandbox.policy import (
    BringBack,
    CheckpointPlan,
    CheckpointRequest,
    Decision,
    Notice,
    Observation,
    Restore,
    SaveOrder,
    Settle,
    Shortfall,
    span,
)
from windtunnel.agents.sandbox.policy.effects import class_of
from windtunnel.agents.sandbox.policy.queues import CheckpointHistory, Forget, Pick, Queued
from windtunnel.agents.sandbox.traces import Trace, TraceTurn

SHARES = (0.75, 0.05, 0.12, 0.08)
"""Of the classes none, shell, files and full among generated turns."""
PEEKED = 1 / 8
"""Of the generated turns of class none, the part that asks a service something."""
THINK_MEDIAN, THINK_SIGMA, THINK_LONGEST = 3.3, 1.05, 600.0
"""Of the log-normal, seconds; a draw beyond the longest is cut to it."""


def think_time(normal: float) -> float:
    """The time that belongs to a draw from the standard normal distribution, to the millisecond."""
    return round(min(THINK_LONGEST, THINK_MEDIAN * math.exp(THINK_SIGMA * normal)), 3)


@dataclass(frozen=True)
class TurnLoad:
    """One turn: seconds and bytes, and what the inspector sees of it: with ``cumulative``, of all since the
    last checkpoint; else of this turn alone, to which is added what no checkpoint covers yet.

    ``run_wall``: the command alone on a machine, of which ``run_cpu`` are CPU. ``memory`` and ``processes``:
    what the sandbox holds after the turn, beyond its init and main shell. ``dirty``: bytes of memory that the
    turn changed. ``files``: bytes that it wrote to files.
    """

    run_wall: float
    run_cpu: float
    think: float
    effects: TurnEffects = field(default_factory=TurnEffects)
    memory: float = 0.0
    processes: int = 0
    dirty: float = 0.0
    files: float = 0.0
    references: References = field(default_factory=References)
    cumulative: bool = False

    @cached_property
    def turn_class(self) -> TurnClass:
        """What the turn by itself needs."""
        return class_of(self.effects, self.references)[0]


Session = tuple[TurnLoad, ...]


@dataclass(frozen=True)
class SessionShape:
    """Assumptions about what traces do not hold; medians of log-normals with their ``sigma``.

    ``run``: seconds of a command alone. ``cpu``: its part that is CPU. ``memory``: bytes of a session's
    services at its end, to which every turn adds alike. ``dirty``: part of the memory that a turn of class
    full changes; ``idle_dirty``: that any other turn changes. ``files``: bytes that a turn which changes
    files writes.
    """

    run: float = 1.0
    run_sigma: float = 1.2
    run_longest: float = 120.0
    cpu: float = 0.6
    memory: float = 256e6
    memory_sigma: float = 0.8
    processes: int = 4
    dirty: float = 0.10
    idle_dirty: float = 0.005
    files: float = 64e3
    files_sigma: float = 1.5

    @property
    def words(self) -> str:
        return (
            f"assumed: commands of {self.run:g} s median (sigma {self.run_sigma:g}, {self.cpu:.0%} CPU), "
            f"services of {self.memory / 1e6:g} MB median, a full turn changes {self.dirty:.0%} of the "
            f"memory, a turn that changes files writes {self.files / 1e3:g} kB median"
        )


def effects_of(turn_class: TurnClass, *, peeked: bool = False) -> TurnEffects:
    """The least that an inspector reports of a turn of that class. ``peeked``: a service was asked something
    and nothing changed; its input and its dirty pages cannot be told from a change."""
    if peeked:
        return TurnEffects(processes=(ProcessEffect(100, "service", dirty_pages=1, inputs=1, writes=1),))
    if turn_class is TurnClass.FULL:
        return TurnEffects(processes=(ProcessEffect(100, "service", dirty_pages=1, inputs=1, started=True),))
    if turn_class is TurnClass.FILES:
        return TurnEffects(files=(FileChange("/workspace/file", "modified"),), files_total=1)
    if turn_class is TurnClass.SHELL:
        return TurnEffects(shells=(ShellEffect("main"),))
    return TurnEffects()


def merged(earlier: TurnEffects, later: TurnEffects) -> TurnEffects:
    """Effects of two stretches of time, the one after the other. What both say of one thing is said twice,
    which needs no more than it does once."""
    return TurnEffects(
        earlier.files + later.files,
        earlier.files_total + later.files_total,
        earlier.processes + later.processes,
        earlier.shells + later.shells,
        earlier.doubts + later.doubts,
    )


def uncovered(effects: TurnEffects, turn_class: TurnClass) -> TurnEffects:
    """What of the effects a checkpoint of class ``made`` leaves to be kept."""
    if turn_class is TurnClass.FULL:
        return TurnEffects()
    if turn_class is TurnClass.FILES:
        doubts = tuple(doubt for doubt in effects.doubts if doubt.part is not SandboxPart.FILES)
        return TurnEffects(processes=effects.processes, doubts=doubts)
    return effects if turn_class is TurnClass.NONE else replace(effects, shells=())


def from_trace(trace: Trace, rng: np.random.Generator, shape: SessionShape = SessionShape()) -> Session:
    """The load of a trace. A turn whose true class is not known counts as full: nobody said it is less."""
    memory = shape.memory * math.exp(shape.memory_sigma * rng.standard_normal())
    turns = []
    for place, turn in enumerate(trace.turns):
        true_class = turn.true_class if turn.true_class is not None else TurnClass.FULL
        effects = effects_of(true_class, peeked="peek" in turn.tags)
        needs = class_of(effects, References())[0]
        wall, written = np.exp(np.array([shape.run_sigma, shape.files_sigma]) * rng.standard_normal(2))
        run = min(shape.run_longest, shape.run * float(wall))
        resident = memory * (place + 1) / len(trace.turns)
        changed = resident * (shape.dirty if needs is TurnClass.FULL else shape.idle_dirty)
        turns.append(
            TurnLoad(
                run, run * shape.cpu, turn.think, effects, resident, shape.processes,
                dirty=memory / len(trace.turns) + changed,
                files=shape.files * float(written) if needs >= TurnClass.FILES else 0.0,
            )
        )  # fmt: skip
    return tuple(turns)


@lru_cache(maxsize=2048)
def generate(turns: int, seed: int) -> Trace:
    """A session of so many turns, with nothing to run. A search asks for the same ones again and again."""
    rng = np.random.default_rng(seed)
    classes = rng.choice(len(SHARES), turns, p=SHARES)
    thinks, peeks = rng.standard_normal(turns), rng.random(turns) < PEEKED
    return Trace(
        f"generated-{seed}",
        tuple(
            TraceTurn(
                number + 1, "", think_time(float(thinks[number])) if number + 1 < turns else 0.0,
                tags=("peek",) if peeks[number] and not classes[number] else (),
                true_class=TurnClass(int(classes[number])),
            )
            for number in range(turns)
        ),
    )  # fmt: skip


def sessions(
    count: int,
    seed: int,
    *,
    traces: Sequence[Trace] = (),
    turns: int = 40,
    shape: SessionShape = SessionShape(),
) -> list[Session]:
    """So many sessions: the given traces in turn, else generated ones. The first n of them are the same for
    every count, so that more sandboxes on a host only add to those that were there."""
    played = []
    for place, rng in enumerate(np.random.default_rng(seed).spawn(count)):
        trace = traces[place % len(traces)] if traces else generate(turns, int(rng.integers(2**31)))
        played.append(from_trace(trace, rng, shape))
    return played


def starts(count: int, seed: int, within: float) -> list[float]:
    """When each sandbox begins, spread over ``within`` seconds so that hosts do not work in step."""
    return [float(rng.uniform(0, within)) for rng in np.random.default_rng([seed, 1]).spawn(count)]


PAGE = 4096


def cost(observation: Observation, decision: Decision) -> dict[str, float]:
    """What a decision costs on a host that has nothing else to do, by this machine's measured costs.

    ``seconds`` until it is carried out, and of a checkpoint ``frozen_seconds`` and the ``bytes`` written.
    Empty where it costs nothing by itself: what comes first, what is forgotten, what room there is.

    Raises:
        TypeError: the decision answers another question.
    """
    costs = _costs()
    match observation, decision:
        case CheckpointRequest(), CheckpointPlan():
            return _checkpoint(costs, observation, decision)
        case Notice(), SaveOrder():
            return {"seconds": _saved(observation, decision)}
        case Restore(), BringBack():
            if not decision.processes:
                return {"seconds": costs.create}
            memory = max(0.0, observation.image_bytes - costs.image_bytes(0, observation.processes))
            return {"seconds": costs.bring_back(memory=memory, processes=observation.processes).seconds}
        case Shortfall(), Settle():
            return {"seconds": decision.pause}
        case (Queued(), Pick()) | (CheckpointHistory(), Forget()):
            return {}
    raise TypeError(f"{type(decision).__name__} is no answer to {type(observation).__name__}")


@cache
def _costs() -> SandboxCosts:
    return load_costs().costs


def _checkpoint(costs: SandboxCosts, request: CheckpointRequest, plan: CheckpointPlan) -> dict[str, float]:
    effects = request.effects
    # where it is not known what changed, all may have
    processes = effects.processes if effects else ()
    measured = effects and request.has_image and all(each.dirty_pages is not None for each in processes)
    dirty = PAGE * sum(each.dirty_pages or 0 for each in processes) if measured else request.memory
    files = sum(change.size for change in effects.files) if effects else 0
    work = costs.checkpoint(
        plan.content, memory=request.memory, processes=request.processes, dirty=dirty, files=files
    )
    return {"seconds": work.seconds, "frozen_seconds": work.freeze, "bytes": work.written}


def _saved(notice: Notice, order: SaveOrder) -> float:
    endangered = {sandbox.name: sandbox for sandbox in notice.sandboxes}
    planned = [(endangered[save.name], save.most) for save in order.saves]
    times = [
        sandbox.full if most is sandbox.needs is TurnClass.FULL else sandbox.files
        for sandbox, most in planned
    ]
    return span(times, notice.workers)
