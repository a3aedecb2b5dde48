"""Random faults from outside on real small jobs: survived, refused, or wrong?

A job of four hosts, each in a network of its own, is begun by ``windtunnel train --resume-auto --standby …``
and trains with a checkpoint of every step in two copies and now and then one in storage. It is struck with
one fault after the other, in an order and against ranks drawn by chance (seeded); the next one waits until
the job has committed a step after the one before. A fault is *survived* when new steps are committed after
all that followed from it, *refused* when it was a message and not even a new generation followed, *lost*
when no step comes within a minute (then the job is begun anew), *wrong* when any loss that is told after it
differs from that of a run which nothing disturbed. The states of all ranks at the end are compared bit by
bit with that run's.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from benchmarks.harness.measure import median, scratch
from benchmarks.harness.rows import Row, left_out
from benchmarks.training.checkpoint import harness
from benchmarks.training.elastic import strangers, strikes
from benchmarks.training.elastic.commanded import Commanded, training
from benchmarks.training.elastic.strikes import Target, Undo
from windtunnel.linux import mounts, network
from windtunnel.training.elastic.events import Event

SECTION = "faults"
HOSTS = 4
ROUNDS = 5  # of every kind
WITHIN = 60.0  # seconds until a job must have gone on
LEASE = 1.0
ORPHAN = 60
TIMEOUT = 10.0  # seconds of an operation of the process group
MEMORY = "64m"  # size of a memory that is to be full
STORED = "24m"  # size of the storage's file system
QUIET = 3.0  # seconds until what is noticed by silence alone is noticed


@dataclass(frozen=True)
class Kind:
    """``silent``: nobody sees a connection close, so it shows only after a while. ``message``: bytes of a
    stranger, which should do nothing at all. ``bounded``: it needs a job whose hosts share a small memory of
    their own (and one network)."""

    name: str
    strike: Callable[[Target], Undo]
    silent: bool = False
    message: bool = False
    bounded: bool = False


KINDS = (
    Kind("trainer killed", strikes.trainer_killed),
    Kind("trainer stopped", strikes.trainer_stopped, True),
    Kind("trainer: SIGHUP", strikes.trainer_hung_up),
    Kind("trainer: SIGTERM", strikes.trainer_ended),
    Kind("program: exception on one rank", strikes.program_failed, True),
    Kind("program: one rank hangs", strikes.program_hung, True),
    Kind("launcher killed", strikes.launcher_killed, True),
    Kind("agent killed", strikes.agent_killed),
    Kind("agent stopped", strikes.agent_stopped, True),
    Kind("supervisor killed", strikes.supervisor_killed, True),
    Kind("supervisor stopped", strikes.supervisor_stopped, True),
    Kind("standby: supervisor and launcher stopped", strikes.leader_stopped, True),
    Kind("fork server killed", strikes.forkserver_killed),
    Kind("fork server stopped, trainer killed", strikes.forkserver_stopped),
    Kind("store killed", strikes.store_killed),
    Kind("host lost with its memory", strikes.host_lost),
    Kind("second kill in the recovery", strikes.killed_in_recovery),
    Kind("host's memory wiped", strikes.memory_wiped, True),
    Kind("bit flipped in every slot of a host, trainer killed", strikes.bit_flipped),
    Kind("forged newer checkpoint, trainer killed", strikes.checkpoint_forged),
    Kind("storage full", strikes.disk_full, True),
    Kind("shared memory full, trainer killed", strikes.memory_full, bounded=True),
    Kind("link down", strikes.link_down, True),
    Kind("link slow", strikes.link_slow, True),
    Kind("two hosts cut from each other", strikes.link_cut, True),
    Kind("malformed messages on every port", strangers.malformed, message=True),
    Kind("messages without the secret", strangers.without_secret, message=True),
    Kind("handshake with a wrong secret, twice", strangers.wrong_secret, message=True),
    Kind("recorded handshake and message, sent again", strangers.replayed, message=True),
)


@dataclass
class Struck:
    """One fault and what came of it. ``seconds``: until the first new step. ``lost``: committed steps that
    were done again. ``wrong``: a loss that was told afterwards differs."""

    kind: Kind
    rank: int
    outcome: str = ""
    seconds: float | None = None
    lost: int = 0
    wrong: bool = False
    why: str = ""
    begin: float = 0.0
    end: float = float("inf")


@dataclass
class Ran:
    """One job: its faults, the losses it told (step, loss, time), and each rank's state after ``last``."""

    struck: list[Struck] = field(default_factory=list)
    losses: list[tuple[int, str, float]] = field(default_factory=list)
    last: int = -1
    hashes: dict[int, str] = field(default_factory=dict)
    failure: str = ""


def faults_rows(quick: bool) -> Iterator[Row]:
    """Rows of the section."""
    reason = network.missing()
    if reason is not None:
        yield left_out(SECTION, "faults", f"no networks can be emulated here: {reason}")
        return
    plan = drawn(1 if quick else ROUNDS)
    ran: list[Ran] = []
    with scratch() as folder:
        for memory in ("", MEMORY):
            left = [one for one in plan if one[0].bounded == bool(memory)]
            while left:
                one = run_job(folder / f"job-{len(ran)}", left, memory)
                ran.append(one)
                left = left[max(1, len(one.struck)) :]
        truth = undisturbed(folder / "undisturbed", sorted({one.last for one in ran if one.hashes}), ran)
    yield from rows(plan, ran, truth)


def drawn(rounds: int, seed: int = 11) -> list[tuple[Kind, int]]:
    """Every kind so many times, each against a rank, in an order drawn by chance."""
    random = Random(seed)
    plan = [(kind, random.randrange(HOSTS)) for kind in KINDS for _ in range(rounds)]
    random.shuffle(plan)
    return plan


def run_job(folder: Path, plan: Sequence[tuple[Kind, int]], memory: str) -> Ran:
    """A job that is struck with ``plan`` until that is done, or it does not go on. ``memory``: size of what
    its hosts share, "" for that of this computer."""
    ran, stored = Ran(), folder / "stored"
    stored.mkdir(parents=True)
    mounts.mount("tmpfs", stored, "tmpfs", options=f"size={STORED}")
    words: list[object] = ["--resume-auto", "--orphan-after", ORPHAN, "--lease", LEASE]
    # whoever wakes up to find another leader ends, and stands by no more
    followed = sum(kind.strike is strikes.leader_stopped for kind, _ in plan)
    words += ["--standby", ",".join(f"standby-{number}" for number in range(1 + followed))]
    words += ["--network", "loopback" if memory else "netns"]
    words += ["--timeout", TIMEOUT, "--max-restarts", len(plan), "--persist", stored, "--persist-every", 20]
    try:
        with training(words, folder / "run", HOSTS, "fsdp_trainer", memory=memory) as job:
            target = Target(job, stored, Random(0))
            try:
                harness.until(job, _stored, "checkpoint in storage", 120.0)
                for kind, rank in plan:
                    one = Struck(kind, rank)
                    ran.struck.append(one)
                    target.rank = rank
                    strike(target, one)
                    if one.outcome == "lost":
                        raise harness.Failed(f"{kind.name}: {one.why}")
                results = harness.end_soon(job)
                ran.last = int((job.folder / harness.LAST).read_text())
                ran.hashes = {rank: found["hashes"][str(ran.last)] for rank, found in results.items()}
            except harness.Failed as error:
                ran.failure = str(error)
            ran.losses = [(e["step"], e["loss"], e["t"]) for e in job.events() if e["kind"] == "step"]
    finally:
        mounts.unmount(stored)
    return ran


def _stored(events: Sequence[Event]) -> bool:
    return any(event["kind"] == "persisted" for event in events)


def strike(target: Target, one: Struck) -> None:
    """Do it, and see what becomes of the job."""
    job = target.job
    before = job.events()
    committed = max((event["step"] for event in before if event["kind"] == "committed"), default=-1)
    one.begin = time.time()
    try:
        undo = one.kind.strike(target)
    except strikes.Impossible as error:
        one.outcome, one.why, one.end = "not struck", str(error), time.time()
        return
    except strangers.Answered as error:
        one.outcome, one.why, undo = "answered", str(error), lambda: None
    quiet = one.begin + (QUIET if one.kind.silent else 0.5)
    try:
        found = harness.until(job, lambda _: _went_on(job, len(before), quiet), "step", WITHIN)
    except harness.Failed as error:
        one.outcome, one.why = "lost", str(error)
        found = []
    finally:
        with contextlib.suppress(OSError):
            undo()
    if one.outcome not in ("lost", "answered"):
        noticed = any(event["kind"] == "decided" for event in found)
        one.outcome = "refused" if one.kind.message and not noticed else "survived"
    restored = [event["step"] for event in found if event["kind"] == "restored"]
    one.lost = max([committed - step for step in restored if step is not None] + [0])
    first = _first_step(found)
    one.seconds = None if first is None else first - one.begin
    one.end = time.time()


def _went_on(job: Commanded, after: int, quiet: float) -> list[Event]:
    """The events since the first ``after``, once a step was committed in the newest generation after all that
    followed from the strike; [] before."""
    if time.time() < quiet:
        return []
    events = job.events()
    since = events[after:]
    newest = max((event["generation"] for event in events if event["kind"] == "decided"), default=0)
    stepped: float | None = None
    for event in since:
        if event["generation"] == newest and event["t"] > quiet - 0.5:
            if event["kind"] == "step":
                stepped = event["t"]
            if event["kind"] == "committed" and stepped is not None:
                return since
    return []


def _first_step(events: Sequence[Event]) -> float | None:
    """When the newest generation among ``events``, or else the present one, did its first step."""
    decided = [event["generation"] for event in events if event["kind"] == "decided"]
    times = [
        event["t"]
        for event in events
        if event["kind"] == "step" and (not decided or event["generation"] == decided[-1])
    ]
    return min(times, default=None)


def undisturbed(
    folder: Path, lasts: Sequence[int], ran: Sequence[Ran]
) -> tuple[dict[int, str], dict[int, dict[str, str]]]:
    """The losses of all steps, and each rank's state after each of ``lasts``, of a run without faults."""
    newest = max([step for one in ran for step, _, _ in one.losses] + [0])
    harness.end_at(folder, newest)
    with harness.running(
        "fsdp_trainer", ["--mode", "none", "--hashes", *lasts], folder, hosts=HOSTS
    ) as launched:
        results = harness.ended(launched, 600.0)
        losses = {event["step"]: event["loss"] for event in launched.events() if event["kind"] == "step"}
    return losses, {rank: found["hashes"] for rank, found in results.items()}


def rows(
    plan: Sequence[tuple[Kind, int]],
    ran: Sequence[Ran],
    truth: tuple[dict[int, str], dict[int, dict[str, str]]],
) -> Iterator[Row]:
    """What came of all, and of each kind."""
    losses, states = truth
    differ = 0
    for one in ran:
        for struck in one.struck:
            struck.wrong = any(
                loss != losses[step] for step, loss, t in one.losses if struck.begin < t <= struck.end
            )
        differ += any(states[rank][str(one.last)] != found for rank, found in one.hashes.items())
    all_struck = [struck for one in ran for struck in one.struck]
    done = [one for one in all_struck if one.outcome != "not struck"]
    good = [one for one in done if one.outcome in ("survived", "refused")]
    bad = [f"{one.kind.name}: {one.why or one.outcome}" for one in done if one not in good]
    yield Row(
        SECTION, f"{len(plan)} faults of {len(KINDS)} kinds: survived or refused", "faults",
        measured=len(good), target=f"all {len(plan)}", met=len(good) == len(plan), note="; ".join(bad)[:600],
    )  # fmt: skip
    wrong = sum(one.wrong for one in done)
    yield Row(
        SECTION, "wrong losses, or states at the end of a job", "", measured=wrong + differ,
        target="0", met=wrong + differ == 0,
        note=f"{sum(len(one.losses) for one in ran)} steps of {len(ran)} jobs against an undisturbed run",
    )  # fmt: skip
    lost = sum(one.lost for one in done)
    yield Row(SECTION, "committed steps done again", "steps", measured=lost, target="0", met=lost == 0)
    by_kind: defaultdict[str, list[Struck]] = defaultdict(list)
    for struck in all_struck:
        by_kind[struck.kind.name].append(struck)
    for kind in KINDS:
        found = by_kind[kind.name]
        outcomes = ", ".join(
            f"{sum(one.outcome == name for one in found)} {name}"
            for name in sorted({f.outcome for f in found})
        )
        times = [one.seconds for one in found if one.seconds is not None]
        told = f"{len(found)} struck: {outcomes}; {sum(one.wrong for one in found)} wrong"
        yield Row(
            SECTION, f"{kind.name}: to the first new step, median", "s", measured=median(times),
            note=f"{told}, {sum(one.lost for one in found)} committed steps lost"
            + "".join(f"; {why}" for why in sorted({one.why for one in found if one.why}))[:300],
        )  # fmt: skip
