"""Random faults from outside on real small jobs: survived, refused, or wrong?

A job of four hosts, each in a network of its own, is begun by ``windtunnel train`` and trains with a
checkpoint of every step in two copies and now and then one in storage. It is struck with
one fault after the other, in an order and against ranks drawn by chance (seeded); the next one waits until
the job has committed a step after the one before. A fault is *survived* when new steps are committed after
all that followed from it, *refused* when it was a message and not even a new generation followed, *lost*
when no step comes within a minute (then the job is begun anew), *wrong* when any loss that is told after it
differs from that of a run which nothing disturbed. The states of all ranks at the end are compared bit by
bit with that run's. ``ROUNDS=5`` strikes with every kind five times; ``-rP`` shows how long each took.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median

import pytest

from benchmarks.harness import jobs
from conformance.training import strangers, strikes
from conformance.training.commanded import Commanded, training
from conformance.training.followed import count, end_soon, generation, newest, until
from conformance.training.strikes import Target, Undo
from windtunnel.linux import mounts, network
from windtunnel.training.elastic.events import Event

HOSTS = 4
TRAINER = Path(__file__).with_name("fsdp_trainer.py")
ROUNDS = int(os.environ.get("ROUNDS", "1"))  # of every kind
WITHIN = 60.0  # seconds until a job must have gone on
LEASE = 1.0
ORPHAN = 60
TIMEOUT = 10.0  # seconds of an operation of the process group
MEMORY = "64m"  # size of a memory that is to be full
STORED = "128m"  # of the file system of storage, which holds all checkpoints of a job
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
    Kind("launcher stands still", strikes.launcher_stopped, True),
    Kind("fork server killed", strikes.forkserver_killed),
    Kind("fork server stopped, trainer killed", strikes.forkserver_stopped),
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
    were done again."""

    kind: Kind
    rank: int
    outcome: str = ""
    seconds: float | None = None
    lost: int = 0
    why: str = ""

    @property
    def good(self) -> bool:
        return self.outcome in ("survived", "refused")


@dataclass
class Ran:
    """One job: its faults, the losses it told, and each rank's state after ``last``."""

    struck: list[Struck] = field(default_factory=list)
    losses: list[tuple[int, str]] = field(default_factory=list)
    last: int = -1
    hashes: dict[int, str] = field(default_factory=dict)
    failure: str = ""


@pytest.mark.root
@pytest.mark.timeout(1200 * ROUNDS)
@pytest.mark.skipif(network.missing() is not None, reason="networks of hosts need root")
def test_no_fault_loses_a_job_or_a_committed_step_or_changes_a_loss(tmp_path: Path) -> None:
    plan = drawn(ROUNDS)
    ran: list[Ran] = []
    for memory in ("", MEMORY):
        left = [entry for entry in plan if entry[0].bounded == bool(memory)]
        while left:
            job = run_job(tmp_path / f"job-{len(ran)}", left, memory)
            ran.append(job)
            left = left[max(1, len(job.struck)) :]
    lasts = sorted({job.last for job in ran if job.hashes})
    losses, states = undisturbed(tmp_path / "undisturbed", lasts, ran)
    struck = [fault for job in ran for fault in job.struck]
    for kind in KINDS:
        print(summary(kind, [fault for fault in struck if fault.kind == kind]))
    failed = [f"{fault.kind.name}: {fault.why or fault.outcome}" for fault in struck if not fault.good]
    assert not failed and Counter(fault.kind.name for fault in struck) == Counter(
        kind.name for kind, _ in plan
    )
    for job in ran:
        wrong = [step for step, loss in job.losses if loss != losses[step]]
        assert not wrong and not job.failure
        assert all(states[rank][str(job.last)] == hashes for rank, hashes in job.hashes.items())
    assert not [fault.kind.name for fault in struck if fault.lost]


def summary(kind: Kind, struck: Sequence[Struck]) -> str:
    """What came of the faults of a kind, in a line."""
    counts = Counter(fault.outcome for fault in struck)
    outcomes = ", ".join(f"{count} {name}" for name, count in counts.items())
    times = [fault.seconds for fault in struck if fault.seconds is not None]
    first = f"{median(times):.2f} s" if times else "none"
    return f"{kind.name}: {outcomes}; first new step, median: {first}"


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
    words: list[object] = ["--orphan-after", ORPHAN, "--lease", LEASE]
    words += ["--network", "loopback" if memory else "netns"]
    words += ["--timeout", TIMEOUT, "--max-restarts", len(plan), "--persist", stored, "--persist-every", 20]
    try:
        with training(words, folder / "run", HOSTS, TRAINER, memory=memory) as job:
            target = Target(job, stored, Random(0))
            try:
                until(job, lambda events: count(events, "persisted"), "in storage", 120.0)
                for kind, rank in plan:
                    fault = Struck(kind, rank)
                    ran.struck.append(fault)
                    target.rank = rank
                    strike(target, fault)
                    if fault.outcome == "lost":
                        raise jobs.Failed(f"{kind.name}: {fault.why}")
                known = count(job.events(), "persisted")  # one that was due may have gone with its host
                until(job, lambda events: count(events, "persisted") > known, "in storage", 120.0)
                results = end_soon(job)
                ran.last = int((job.folder / jobs.LAST).read_text())
                ran.hashes = {rank: result["hashes"][str(ran.last)] for rank, result in results.items()}
            except jobs.Failed as error:
                ran.failure = str(error)
            ran.losses = [(e["step"], e["loss"]) for e in job.events() if e["kind"] == "step"]
    finally:
        mounts.unmount(stored)
    return ran


def strike(target: Target, fault: Struck) -> None:
    """Do it, and see what becomes of the job."""
    job = target.job
    before = job.events()
    committed = newest(before, "committed")
    begin = time.time()
    try:
        undo = fault.kind.strike(target)
    except strikes.Impossible as error:
        fault.outcome, fault.why = "not struck", str(error)
        return
    except strangers.Answered as error:
        fault.outcome, fault.why, undo = "answered", str(error), lambda: None
    quiet = begin + (QUIET if fault.kind.silent else 0.5)
    try:
        events = until(job, lambda _: _went_on(job, len(before), quiet), "step", WITHIN)
    except jobs.Failed as error:
        fault.outcome, fault.why = "lost", str(error)
        events = []
    finally:
        with contextlib.suppress(OSError):
            undo()
    if fault.outcome not in ("lost", "answered"):
        noticed = any(event["kind"] == "decided" for event in events)
        fault.outcome = "refused" if fault.kind.message and not noticed else "survived"
    restored = [event["step"] for event in events if event["kind"] == "restored"]
    fault.lost = max([committed - step for step in restored if step is not None] + [0])
    first = _first_step(events)
    fault.seconds = None if first is None else first - begin


def _went_on(job: Commanded, after: int, quiet: float) -> list[Event]:
    """The events since the first ``after``, once the newest generation has done a step after all that
    followed from the strike, and committed it (an earlier one may have copies that the strike took), else [].
    """
    if time.time() < quiet:
        return []
    events = job.events()
    latest = generation(events)
    later = [e for e in events[after:] if e["generation"] == latest and e["t"] > quiet - 0.5]
    first = next((event["step"] for event in later if event["kind"] == "step"), None)
    return events[after:] if first is not None and newest(later, "committed") >= first else []


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
    jobs.end_at(folder, max([step for job in ran for step, _ in job.losses] + [0]))
    words = ["--mode", "none", "--hashes", *lasts]
    results, events = jobs.finished(TRAINER, words, folder, 600.0, hosts=HOSTS)
    return jobs.losses(events), {rank: result["hashes"] for rank, result in results.items()}
