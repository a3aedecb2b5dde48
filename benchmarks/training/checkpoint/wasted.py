"""What a failure wastes: checkpoints in peers' memory against checkpoints in storage, on the same real job.

4 ranks on 4 emulated hosts, a real state of 48 MiB each, computing stood for by a wait. Each way of saving
runs in turn, as often as it can: torch.save to a store that all hosts share (rate-limited), and
`PeerCheckpointer` with two copies.

Wasted time is the work since the state that is gone on from, and getting that state back. The work is looked
up for random instants in the logged times of the real run's saves; getting it back is measured in real
recoveries, after hosts were really killed, at random steps. GEMINI's mean (section 2) is
``complete + interval / 2 + load``.

The store's rate is what makes the headline. GEMINI's 13 times are of 16 hosts whose network moves 80 to
320 times what their shared store of 20 Gb/s does, so that a save takes about 8 steps where a copy to a peer
takes less than one: (8 + 8/2 + 8) / (1 + 1/2) = 13.3. Here the rate is such that a save takes 8 steps, and
the rows say which ratio of network to store that is on this host. On the raw disk the ratio is another.

Source: GEMINI (Wang et al., SOSP 2023), sections 2 and 7; "high frequency" is a save as soon as the store is
free.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import mean, median

from benchmarks.harness import jobs
from benchmarks.harness.measure import scratch
from benchmarks.harness.rows import Row, figure
from benchmarks.training.checkpoint import PROGRAMS, SOURCE
from windtunnel.base import units
from windtunnel.training.elastic.events import Event, Recovery, recoveries

RANKS = 4
MIB, QUICK_MIB = 48.0, 8.0
COMPUTE, QUICK_COMPUTE = 0.6, 0.25
STEPS_A_SAVE = 8  # steps that a save to the shared store takes
INSTANTS = 200
PATIENCE = 400.0
TARGET = 13.0


@dataclass(frozen=True)
class Way:
    """One way of saving. ``kills``: real ones."""

    name: str
    saver: str
    kills: int = 1


STORE = Way("torch.save to a shared store, high frequency", "store", 2)
PEERS = Way("PeerCheckpointer, 2 copies", "peer", 3)


@dataclass
class Killed:
    """A real kill: ``lost`` work and ``load`` (s), and its recovery."""

    lost: float
    load: float
    recovery: Recovery

    @property
    def whole(self) -> float:
        """Seconds until the job is where it was: the lost work and the time to the first new step."""
        return self.lost + (self.recovery.seconds or 0.0)


@dataclass
class Measured:
    """What one way gave. Seconds; ``stalls`` of all steps, ``step``: of one without a stall."""

    way: Way
    saves: list[Save]
    stalls: list[float]
    step: float
    lost: list[float]
    kills: list[Killed] = field(default_factory=list)

    @property
    def load(self) -> float:
        return mean(kill.load for kill in self.kills)

    @property
    def wasted(self) -> float:
        return mean(self.lost) + self.load

    @property
    def formula(self) -> float:
        return complete(self.saves) + interval(self.saves) / 2 + self.load


def wasted_rows(quick: bool) -> Iterator[Row]:
    with scratch() as folder:
        store, peers = (
            measure(way, folder / way.saver, quick, seed) for seed, way in enumerate((STORE, PEERS))
        )
    yield from way_rows(store, quick)
    yield from way_rows(peers, quick)
    yield from headline_rows(store, peers, quick)


def rate(quick: bool) -> float:
    """Bytes/s of the shared store, for all hosts together."""
    mib, compute = (QUICK_MIB, QUICK_COMPUTE) if quick else (MIB, COMPUTE)
    return RANKS * mib * 2**20 / (STEPS_A_SAVE * compute)


def measure(way: Way, folder: Path, quick: bool, seed: int) -> Measured:
    """A run of ``way``: undisturbed for some saves, then real kills of hosts, each when a further save is
    whole.

    Raises:
        jobs.Failed: it did not come through.
    """
    mib, compute = (QUICK_MIB, QUICK_COMPUTE) if quick else (MIB, COMPUTE)
    arguments: list[object] = ["--saver", way.saver, "--mib", mib, "--compute", compute]
    arguments += ["--store", folder / "store", "--rate", rate(quick)]
    random = Random(seed)
    first, between = STEPS_A_SAVE * (4 if quick else 6), 3 * STEPS_A_SAVE
    kills = 1 if quick else way.kills
    at = [first + number * between + random.randrange(STEPS_A_SAVE) for number in range(kills)]
    faults = [f"kill:host={random.randrange(RANKS)},step={step}" for step in at]
    jobs.end_at(folder, at[-1] + STEPS_A_SAVE)
    # a worker that waits for a slow disk is not frozen
    options = {"frozen_after": 5.0, "lease": 5.0, "faults": faults}
    program = PROGRAMS / "saving_trainer.py"
    _, events = jobs.finished(program, arguments, folder, PATIENCE, hosts=RANKS, **options)
    saves = saves_of(events, RANKS)
    steps = [event for event in events if event["kind"] == "step" and event["generation"] == 1]
    stalls = [event["stall"] for event in steps[1:]]  # memory is made at the first save
    undisturbed = median(
        after["ended"] - before["ended"] - before["stall"] for before, after in pairwise(steps)
    )
    struck = killed(events)
    if not struck:
        raise jobs.Failed("no recovery after a kill is in the log")
    lost = [lost_work(saves, at) for at in instants(saves, INSTANTS, seed)]
    return Measured(way, saves, stalls, undisturbed, lost, struck)


def killed(events: Sequence[Event]) -> list[Killed]:
    """The real kills: the work since the state that was gone on from was (first) reached, and the load."""
    reached = [(event["ended"], event["step"]) for event in events if event["kind"] == "step"]
    kills = []
    for recovery in recoveries(events):
        loads = [
            event["seconds"]
            for event in events
            if event["kind"] == "restored" and event["generation"] == recovery.generation
        ]
        if not recovery.complete or recovery.injected is None or recovery.resumed is None or not loads:
            continue
        before = [(at, step) for at, step in reached if step <= recovery.resumed and at <= recovery.injected]
        # a job may be killed after a state was safe and before its step was told: then since the step before
        newest = max((step for _, step in before), default=None)
        times = [at for at, step in before if step == newest]
        if times:
            kills.append(Killed(recovery.injected - max(times), max(loads), recovery))
    return kills


def way_rows(measured: Measured, quick: bool) -> Iterator[Row]:
    """What one way costs: for a failure, for every step, and in the real kills."""
    way, saves = measured.way, measured.saves
    store = f"; the store moves {rate(quick) / 1e6:.0f} MB/s for all" if way == STORE else ""
    yield figure(
        f"{way.name}: wasted by a failure", "s", measured.wasted, emulated=measured.formula,
        note=f"{len(measured.lost)} random instants in the log of {len(saves)} real saves, and the mean load"
        f" of {len(measured.kills)} killed hosts; emulated: complete + interval/2 + load ="
        f" {units.seconds(complete(saves))} + {units.seconds(interval(saves))}/2 +"
        f" {units.seconds(measured.load)}; {RANKS} x {QUICK_MIB if quick else MIB:g} MiB of state{store}",
    )  # fmt: skip
    each = f"a save every {(saves[-1].step - saves[0].step) / (len(saves) - 1):.1f} steps"
    note = f"mean of {len(measured.stalls)} steps of {units.seconds(measured.step)} each without it; {each}"
    yield figure(f"{way.name}: stall of a step", "s", mean(measured.stalls), note=note)
    really, note = mean(kill.lost + kill.load for kill in measured.kills), f"mean of {len(measured.kills)}"
    yield figure(f"{way.name}: wasted by a host really killed", "s", really, note=note)


def headline_rows(store: Measured, peers: Measured, quick: bool) -> Iterator[Row]:
    """The ratio, what it is made of, and what is left of it in a whole recovery."""
    mib = QUICK_MIB if quick else MIB
    network = RANKS * mib * 2**20 / complete(peers.saves)
    ratio = store.wasted / peers.wasted
    yield figure(
        "wasted by a failure, shared store over peers' memory", "x", ratio, "at least 13 x", published=TARGET,
        source=SOURCE, judged=not quick,
        note=f"store {rate(quick) / 1e6:.0f} MB/s, and {network / 1e6:.0f} MB/s from state to committed"
        f" copies, all hosts together: a ratio of {network / rate(quick):.0f} (published: 80 to 320), which"
        f" is what makes this row; by the formula {store.formula / peers.formula:.1f} x; lost work counts"
        f" from the state, load is up to the state, detection and replacement are not in it"
        f"{'; too small a state for the target' * quick}",
    )  # fmt: skip
    name, steps = "steps between checkpoints, shared store over peers' memory", interval(store.saves)
    yield figure(name, "x", steps / interval(peers.saves), published=8.0, source=SOURCE)
    whole = [mean(kill.whole for kill in way.kills) for way in (store, peers)]
    yield figure(
        "whole failure, shared store over peers' memory", "x", whole[0] / whole[1],
        note=f"{units.seconds(whole[0])} over {units.seconds(whole[1])}: lost work, detection, decision,"
        " regrouping, load and the first new step. Hosts are at hand, processes fork from a warm one",
    )  # fmt: skip


@dataclass(frozen=True)
class Save:
    """``reached``: when ``step`` was done; ``whole``: when all ranks' checkpoints of it were
    (time.time())."""

    step: int
    reached: float
    whole: float


def saves_of(events: Sequence[Event], world: int, generation: int = 1) -> list[Save]:
    """The saves that became whole in ``generation``, in order. A step is whole when it was committed, or when
    ``world`` ranks said that theirs is."""
    mine = [event for event in events if event["generation"] == generation]
    reached = {event["step"]: event["ended"] for event in mine if event["kind"] == "step"}
    committed = {event["step"]: event["t"] for event in mine if event["kind"] == "committed"}
    saved: dict[int, list[float]] = {}
    for event in mine:
        if event["kind"] == "saved":
            saved.setdefault(event["step"], []).append(event["t"])
    whole = {step: max(times) for step, times in saved.items() if len(times) == world}
    saves = [
        Save(step, reached[step], at)
        for step, at in sorted({**whole, **committed}.items())
        if step in reached
    ]
    return sorted(saves, key=lambda save: save.whole)


def instants(saves: Sequence[Save], count: int, seed: int) -> list[float]:
    """Moments drawn evenly from the whole periods that ``saves`` span."""
    random = Random(seed)
    return [random.uniform(saves[0].whole, saves[-1].whole) for _ in range(count)]


def lost_work(saves: Sequence[Save], instant: float) -> float:
    """Seconds of work that a failure at ``instant`` loses: those since the newest state whose checkpoint was
    whole by then was reached."""
    at = bisect_right([save.whole for save in saves], instant) - 1
    return instant - max(save.reached for save in saves[: at + 1])


def complete(saves: Sequence[Save]) -> float:
    """Mean seconds from a state to its whole checkpoint."""
    return mean(save.whole - save.reached for save in saves)


def interval(saves: Sequence[Save]) -> float:
    """Mean seconds between states that were saved."""
    return mean(after.reached - before.reached for before, after in pairwise(saves))
