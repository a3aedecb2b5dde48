"""Does a continuation lose anything, and how long does it take? Real kills, at random, of a real job.

Jobs of 4 ranks on 4 emulated hosts keep a checkpoint of every step, in two copies, and are struck again
and again: a worker is killed, a whole host is (its agent, its workers, its memory), or a worker freezes.
Who and when is drawn by chance (seeded); every fifth kill falls while the job still recovers from the one
before. Afterwards a run that nothing disturbed, and that kept no checkpoint, tells what the losses of all
steps (also of those that were done twice) and the states of all ranks at the end should have been.

The guarantee is that of two copies: both hosts of a group are never lost before the copies of the first
are made again, so a kill against a host waits for a commit, or takes another group.

Source: GEMINI (Wang et al., SOSP 2023): checkpoints of every iteration, so that at most the iteration under
way is lost.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Literal

from benchmarks.harness import jobs
from benchmarks.harness.measure import conditions, quantile, scratch
from benchmarks.harness.rows import Row, figure, left_out
from benchmarks.training.checkpoint import SOURCE, TRAINER
from windtunnel.base import units
from windtunnel.training.elastic.events import PHASES, Event, Recovery, recoveries
from windtunnel.training.launch import Launched

Kind = Literal["worker killed", "host killed", "worker frozen"]
KINDS: tuple[Kind, ...] = ("worker killed", "host killed", "worker frozen")
SEVERAL = "several at once"
RANKS, GROUP = 4, 2
JOBS, KILLS = 3, 12
QUICK_JOBS, QUICK_KILLS = 1, 5
WITHIN = 5  # every so many kills, one falls into a recovery
PATIENCE = 60.0
MOVES_NOT = 1.0  # seconds without a sign of life until a worker is taken for frozen


@dataclass(frozen=True)
class Kill:
    """``delay``: seconds after the first commit of a generation, or, ``within`` a recovery, after the kill
    before."""

    kind: Kind
    rank: int
    delay: float
    within: bool


@dataclass
class JobRun:
    """What one job gave. ``hashes``: by rank, of its state after step ``last``."""

    kills: list[Kill]
    struck: int = 0
    last: int = -1
    events: list[Event] = field(default_factory=list)
    hashes: dict[int, str] = field(default_factory=dict)
    failure: str = ""


@dataclass(frozen=True)
class Truth:
    """What the undisturbed run gave: the loss of each step, each rank's state by step."""

    losses: dict[int, str]
    hashes: dict[int, dict[str, str]]


def recovery_rows(quick: bool) -> Iterator[Row]:
    load = conditions()
    count, kills = (QUICK_JOBS, QUICK_KILLS) if quick else (JOBS, KILLS)
    with scratch() as folder:
        ran = [run_job(folder / f"job-{number}", plan(kills, seed=number)) for number in range(count)]
        for number, one in enumerate(ran):
            if one.failure:
                yield left_out(f"job {number + 1} (failed)", one.failure)
        truth = undisturbed(folder / "undisturbed", sorted({one.last for one in ran if one.hashes}))
    yield from result_rows(ran, truth, load)
    yield from phase_rows(ran)


def plan(count: int, seed: int) -> list[Kill]:
    """``count`` kills, of each kind alike often, against ranks and at times drawn by chance."""
    random = Random(seed)
    kills: list[Kill] = []
    for number in range(count):
        kind = KINDS[(number + seed) % len(KINDS)]
        within = number % WITHIN == WITHIN - 1
        rank = random.randrange(RANKS)
        if within and rank // GROUP == kills[-1].rank // GROUP:
            rank = (rank + GROUP) % RANKS  # the copies of a group that was just hit are not yet made again
        kills.append(Kill(kind, rank, random.uniform(0.0, 0.4 if within else 0.8), within))
    return kills


def run_job(folder: Path, kills: list[Kill]) -> JobRun:
    """A job that is struck with all ``kills`` and then comes to its end."""
    ran = JobRun(kills)
    with jobs.running(TRAINER, [], folder, hosts=RANKS, frozen_after=MOVES_NOT, lease=MOVES_NOT) as job:
        try:
            done = 0
            for kill in kills:
                if not kill.within:
                    wait_settled(job, done)
                time.sleep(kill.delay)
                inject(job, kill)
                done = len(job.events())
                ran.struck += 1
            wait_settled(job, done)
            results = jobs.end_soon(job)
            ran.last = int((folder / jobs.LAST).read_text())
            ran.hashes = {rank: result["hashes"][str(ran.last)] for rank, result in results.items()}
        except jobs.Failed as error:
            ran.failure = str(error)
        ran.events = job.events()
    return ran


def wait_settled(job: Launched, after: int) -> None:
    """Until `settled`.

    Raises:
        jobs.Failed: it does not come to that.
    """
    jobs.until(job, lambda events: settled(events, after), "commit after a kill", PATIENCE)


def settled(events: Sequence[Event], after: int) -> bool:
    """Whether a generation that was decided after the first ``after`` events (for 0: the first) has committed
    a step."""
    newest = jobs.generation(events[after:])
    if not newest or newest != jobs.generation(events):
        return False
    mine = [event["kind"] for event in events[after:] if event["generation"] == newest]
    return "step" in mine and "committed" in mine[mine.index("step") :]


def inject(job: Launched, kill: Kill) -> None:
    """Do it; a host that is only being replaced is waited for.

    Raises:
        jobs.Failed: whom it should strike does not come.
    """
    strikes: dict[Kind, Callable[[int], None]] = {
        "host killed": job.kill_host, "worker frozen": job.stop_worker, "worker killed": job.kill_worker
    }  # fmt: skip
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and job.outcome is None:
        with contextlib.suppress(KeyError, ProcessLookupError):
            strikes[kill.kind](kill.rank)
            return
        time.sleep(0.005)
    raise jobs.Failed(f"rank {kill.rank} did not come, to be struck")


def undisturbed(folder: Path, lasts: Sequence[int]) -> Truth:
    """The run that nothing disturbs, with every rank's state after each of the steps ``lasts``."""
    if not lasts:
        return Truth({}, {})
    jobs.end_at(folder, max(lasts))
    results, events = jobs.finished(TRAINER, ["--mode", "none", "--hashes", *lasts], folder, hosts=RANKS)
    return Truth(jobs.losses(events), {rank: result["hashes"] for rank, result in results.items()})


def result_rows(ran: Sequence[JobRun], truth: Truth, load: str) -> Iterator[Row]:
    """Whether all went on, and lost nothing."""
    wanted, struck = sum(len(one.kills) for one in ran), sum(one.struck for one in ran)
    kills = [kill for one in ran for kill in one.kills[: one.struck]]
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(kill.kind for kill in kills).items())
    survived = struck if all(not one.failure for one in ran) else struck - 1
    yield figure(
        "kills survived", "kills", survived, f"all {wanted}", met=survived == wanted,
        note=f"{kinds}; {sum(kill.within for kill in kills)} while the job still recovered; {len(ran)} jobs"
        f" of {RANKS} ranks on {RANKS} hosts, 2 copies of every step; {load}",
    )  # fmt: skip
    found = [recovery.steps_lost for one in ran for recovery in recoveries(one.events)]
    lost = Counter(steps for steps in found if steps is not None)
    each = ", ".join(f"{lost[n]} lost {n}" for n in sorted(lost))
    yield figure(
        "finished steps lost by a failure, most", "steps", max(lost, default=None), "at most 1", published=1,
        source=SOURCE, note=f"of {lost.total()} recoveries: {each}; besides, the step under way",
    )  # fmt: skip
    steps = [event for one in ran for event in one.events if event["kind"] == "step"]
    same = sum(truth.losses.get(event["step"]) == event["loss"] for event in steps)
    yield figure(
        "losses as in a run that nothing disturbed", "", same / len(steps) if steps else None, "100 %",
        note=f"{len(steps)} steps of rank 0's loss (sum over ranks), to the last bit, those done twice"
        " counted twice; FSDP2, AdamW, learning-rate schedule, dropout, data cursor",
    )  # fmt: skip
    ends = sum(
        truth.hashes.get(rank, {}).get(str(one.last)) == state
        for one in ran
        for rank, state in one.hashes.items()
    )
    yield figure(
        "final states as in a run that nothing disturbed", "", ends / (RANKS * len(ran)), "100 %",
        note="of all ranks of all jobs: parameters, moments, schedule, generators and cursor, to the bit",
    )  # fmt: skip


def phase_rows(ran: Sequence[JobRun]) -> Iterator[Row]:
    """From the kill to the first new step, by kind of kill."""
    by_kind = kinds_of(ran)
    for kind in (*KINDS, SEVERAL):
        found = [one for one in by_kind.get(kind, []) if one.injected is not None]
        totals = [one.seconds for one in found if one.seconds is not None]
        if not totals:
            yield left_out(f"{kind}: recovery", "no such recovery in this run")
            continue
        tiers = Counter(tier for one in found for tier in one.tiers.values())
        read = ", ".join(f"{tier} {count}" for tier, count in sorted(tiers.items()))
        yield figure(
            f"{kind}: to the first new step", "s", quantile(totals, 0.5),
            note=f"p95 {units.seconds(quantile(totals, 0.95))} of {len(totals)}; shards read from {read};"
            " workers fork from a warm process, hosts are at hand: no boot, no import in it",
        )  # fmt: skip
        for phase in PHASES if kind != SEVERAL else ():
            values = [value for one in found if (value := one.phases[phase]) is not None]
            yield figure(f"{kind}: {phase.replace('_', ' ')}", "s", quantile(values, 0.5) if values else None)


def kinds_of(ran: Sequence[JobRun]) -> dict[str, list[Recovery]]:
    """Recoveries by the kind of their kill; `SEVERAL` where more than one fell into one."""
    out: dict[str, list[Recovery]] = {}
    for one in ran:
        injected = [event for event in one.events if event["kind"] == "injected"]
        since = 0.0
        for recovery in recoveries(one.events):
            if recovery.first_step is None:
                continue
            mine = [i for i, event in enumerate(injected) if since < event["t"] <= recovery.first_step]
            since = recovery.first_step
            if mine:
                out.setdefault(one.kills[mine[0]].kind if len(mine) == 1 else SEVERAL, []).append(recovery)
    return out
