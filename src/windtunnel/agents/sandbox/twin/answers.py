"""Forks, the store, and all questions asked of one setting, with their answers together.

*Forks*: the checkpoint lies on the first host. Every other host that gets a fork fetches it once, all over
the first host's network; then each host restores its forks, as many at once as it has workers.

*Store*: how large that of one host gets, turn by turn, under the live rule of retention. Of one sandbox's
images the oldest kept is stored whole, each later one adds what it changed; the same holds for snapshots of
files, over the image that all share. Memory that one image and a later one both change is counted once for
each: the figure is an upper bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from windtunnel.agents.sandbox.costs import SandboxCosts
from windtunnel.agents.sandbox.model import TurnClass
from windtunnel.agents.sandbox.policy import Past, Retention, forgotten
from windtunnel.agents.sandbox.policy.queues import Kept
from windtunnel.agents.sandbox.twin.hosts import ARMS, Arm, CheckpointJob, EmulatedHost, Made, Scheduler
from windtunnel.agents.sandbox.twin.questions import (
    Break,
    Density,
    Failures,
    Setting,
    Spot,
    Urgent,
    breaking,
    class_shares,
    densities,
    failures,
    powers,
    spot,
    urgent,
)
from windtunnel.engines.events import Environment, ProcessGenerator, Shared


@dataclass(frozen=True)
class Fanout:
    """So many forks over so many hosts; seconds until the first, the median and the last run."""

    forks: int
    hosts: int
    first: float
    median: float
    last: float


def fanout(
    machine: EmulatedHost,
    costs: SandboxCosts,
    forks: int,
    hosts: int,
    *,
    memory: float,
    processes: int,
) -> Fanout:
    """Fork a checkpoint of that much memory and so many processes. What is fetched is compressed."""
    env, ready = Environment(), []
    source = Shared(env, machine.network, machine.network)
    work = costs.bring_back(memory=memory, processes=processes, fork=True)
    size = costs.new_per_byte * (costs.image_base + memory)
    shares = [forks // hosts + (place < forks % hosts) for place in range(hosts)]

    def host(place: int, count: int) -> ProcessGenerator:
        if place:
            yield source.use(size)
        cpu = Shared(env, machine.cores, 1.0)
        disk = Shared(env, costs.disk_lanes, 1.0)
        engine = Scheduler(env, machine.lanes)

        def fork() -> ProcessGenerator:
            yield cpu.use(work.seconds * work.cpu)
            yield disk.use(work.seconds * (1 - work.cpu))
            ready.append(env.now)

        for number in range(count):
            engine.submit(CheckpointJob(env, str(number), fork()))

    for place, count in enumerate(shares):
        if count:
            env.process(host(place, count))
    env.run()
    return Fanout(forks, hosts, ready[0], ready[(len(ready) - 1) // 2], ready[-1])


@dataclass(frozen=True)
class Growth:
    """Bytes after so many seconds: what the store holds, and what was written to it until then."""

    policy: str
    at: float
    stored: float
    written: float
    checkpoints: int


def growth(
    policy: str, made: Iterable[Made], costs: SandboxCosts, retention: Retention, *, points: int = 40
) -> list[Growth]:
    """The store over time. As on a live host, retention is applied after every ``keep`` checkpoints."""
    events = sorted(made, key=lambda one: (one.at, one.box, one.turn))
    every = max(1, len(events) // points)
    boxes: dict[int, list[_Checkpoint]] = {}
    rows, written = [], 0.0
    for place, one in enumerate(events, 1):
        own = boxes.setdefault(one.box, [])
        files, image = (own[-1].files, own[-1].image) if own else (None, None)
        if one.turn_class >= TurnClass.FILES:
            files = one
        if one.turn_class is TurnClass.FULL:
            image = one
        own.append(_Checkpoint(one, files, image))
        written += one.written
        if place % retention.keep == 0:
            boxes = {box: _remembered(past, retention) for box, past in boxes.items()}
        if place % every == 0 or place == len(events):
            stored = sum(_stored(past, costs) for past in boxes.values())
            rows.append(Growth(policy, one.at, stored, written, sum(map(len, boxes.values()))))
    return rows


@dataclass(frozen=True)
class _Checkpoint:
    """One that is there, and the checkpoints whose snapshot and image it names."""

    made: Made
    files: Made | None
    image: Made | None


def _remembered(past: list[_Checkpoint], retention: Retention) -> list[_Checkpoint]:
    """What the rule of retention leaves of a sandbox's checkpoints."""
    there = {f"{place:06}": one for place, one in enumerate(past)}
    kept = tuple(Kept(name, one.made.at, named=False, tip=one is past[-1]) for name, one in there.items())
    gone = set(forgotten(Past(kept, exists=True, keep=retention.keep)).checkpoints)
    return [one for name, one in there.items() if name not in gone]


def _stored(past: list[_Checkpoint], costs: SandboxCosts) -> float:
    """Bytes of the parts that a sandbox's checkpoints name."""
    parts = {part.turn: part for one in past for part in (one.files, one.image) if part}
    total, whole = 0.0, False
    for _, part in sorted(parts.items()):
        if part.turn_class is TurnClass.FULL and not whole:
            # it holds everything, not only what changed before it
            whole = True
            total += max(part.written, costs.new_per_byte * (costs.image_base + part.memory))
        else:
            total += part.written
    return total


MOST = 512
"""Sandboxes on one host up to which a policy's break is searched."""
WORKERS = (1, 4)
"""Engines so narrow that jobs queue, beside one as wide as the host."""


@dataclass(frozen=True)
class Answers:
    """What was asked and found. ``assumed`` and ``origin`` say in words what the figures rest on."""

    setting: str
    assumed: str
    origin: str
    classes: dict[str, float]
    densities: tuple[Density, ...]
    breaks: tuple[Break, ...]
    spots: tuple[Spot, ...]
    fanouts: tuple[Fanout, ...]
    urgents: tuple[Urgent, ...]
    growths: tuple[Growth, ...]
    failures: tuple[Failures, ...] = ()


def answer(
    setting: Setting,
    origin: str,
    *,
    policies: Sequence[Arm],
    numbers: Sequence[int],
    notices: Sequence[float],
    forks: int,
    mtbf: float | None = None,
    retention: Retention | None = None,
    progress: Callable[[str], None] = lambda question: None,
) -> Answers:
    """Ask everything. Breaks, notices and queues are asked of one host: hosts share nothing there.
    ``mtbf``: hours between failures of a host on average; without it none fails."""
    one = replace(setting, hosts=1)
    middle = numbers[len(numbers) // 2]
    progress("density")
    rows = densities(setting, policies, numbers)
    progress("break")
    breaks = [breaking(one, policy, MOST) for policy in policies if policy.name != "conversation"]
    progress("notice")
    spots = spot(one, [policy for policy in policies if not policy.fifo], (0.0, *notices), max(numbers))
    progress("forks")
    shape = setting.shape
    fans = [
        fanout(
            setting.machine,
            setting.costs,
            count,
            setting.hosts,
            memory=shape.memory,
            processes=shape.processes,
        )
        for count in powers(forks)
    ]
    progress("queue")
    lanes = sorted({*WORKERS, setting.machine.lanes})
    queues = urgent(one, sorted({middle, max(numbers)}), lanes)
    progress("store")
    grown = [
        row
        for policy in policies
        if policy.name in ("full", "semantic", "files")
        for row in growth(
            policy.name,
            one.world(ARMS[policy.name], middle).run().made,
            setting.costs,
            retention or Retention(),
        )
    ]
    died = []
    if mtbf is not None:
        progress("failures")
        died = failures(setting, policies, middle, mtbf)
    machine = setting.machine
    played = (
        f"{len(setting.traces)} given traces"
        if setting.traces
        else f"generated sessions of {setting.turns} turns"
    )
    return Answers(
        setting=(
            f"{setting.hosts} hosts of {machine.cores} cores, {machine.memory / 1e9:g} GB, disk "
            f"{machine.disk / 1e9:g} GB/s, network {machine.network / 1e9:g} GB/s, {machine.lanes} workers; "
            f"{played}, seed {setting.seed}; store, queue and notices: one such host, "
            f"{middle} or {max(numbers)} sandboxes"
        ),
        assumed=shape.words,
        origin=origin,
        classes=class_shares(one, max(numbers)),
        densities=tuple(rows),
        breaks=tuple(breaks),
        spots=tuple(spots),
        fanouts=tuple(fans),
        urgents=tuple(queues),
        growths=tuple(grown),
        failures=tuple(died),
    )
