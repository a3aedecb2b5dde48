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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Literal

from benchmarks.harness.measure import conditions, quantile, scratch
from benchmarks.harness.rows import Row, left_out
from benchmarks.training.checkpoint import harness
from benchmarks.training.checkpoint.harness import SOURCE, Failed
from windtunnel.base import units
from windtunnel.training.elastic.events import PHASES, Event, Recovery, recoveries
from windtunnel.training.launch import Launched

SECTION = "recovery"
row = partial(Row, SECTION)
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
    told = conditions()
    jobs, kills = (QUICK_JOBS, QUICK_KILLS) if quick else (JOBS, KILLS)
    with scratch() as folder:
        ran = [run_job(folder / f"job-{number}", plan(kills, seed=number)) for number in range(jobs)]
        for number, one in enumerate(ran):
            if one.failure:
                yield left_out(SECTION, f"job {number + 1} (failed)", one.failure)
        truth = undisturbed(folder / "undisturbed", sorted({one.last for one in ran if one.hashes}))
    yield from result_rows(ran, truth, told)
    yield from phase_rows(ran, told)


def plan(count: int, seed: int) -> list[Kill]:
    """``count`` kills, of each kind alike often, against ranks and at times drawn by chance."""
    random = Random(seed)
    made: list[Kill] = []
    for number in range(count):
        kind = KINDS[(number + seed) % len(KINDS)]
        within = number % WITHIN == WITHIN - 1
        rank = random.randrange(RANKS)
        if within and rank // GROUP == made[-1].rank // GROUP:
            rank = (rank + GROUP) % RANKS  # the copies of a group that was just hit are not yet made again
        made.append(Kill(kind, rank, random.uniform(0.0, 0.4 if within else 0.8), within))
    return made


def run_job(folder: Path, kills: list[Kill]) -> JobRun:
    """A job that is struck with all ``kills`` and then comes to its end."""
    ran = JobRun(kills)
    options: dict[str, Any] = {"hosts": RANKS, "frozen_after": MOVES_NOT, "lease": MOVES_NOT}
    with harness.running("fsdp_trainer", [], folder, **options) as launched:
        try:
            done = 0
            for kill in kills:
                if not kill.within:
                    wait_settled(launched, done)
                time.sleep(kill.delay)
                inject(launched, kill)
                done = len(launched.events())
                ran.struck += 1
            wait_settled(launched, done)
            results = harness.end_soon(launched)
            ran.last = int((folder / harness.LAST).read_text())
            ran.hashes = {rank: result["hashes"][str(ran.last)] for rank, result in results.items()}
        except Failed as error:
            ran.failure = str(error)
        ran.events = launched.events()
    return ran


def wait_settled(launched: Launched, after: int) -> None:
    """Until `settled`.

    Raises:
        Failed: it does not come to that.
    """
    harness.until(launched, lambda events: settled(events, after), "commit after a kill", PATIENCE)


def settled(events: Sequence[Event], after: int) -> bool:
    """Whether a generation that was decided after the first ``after`` events (for 0: the first) has committed
    a step."""
    decided = [event["generation"] for event in events[after:] if event["kind"] == "decided"]
    if not decided or decided[-1] != max(e["generation"] for e in events if e["kind"] == "decided"):
        return False
    stepped = False
    for event in events[after:]:
        if event["generation"] == decided[-1]:
            stepped = stepped or event["kind"] == "step"
            if stepped and event["kind"] == "committed":
                return True
    return False


def inject(launched: Launched, kill: Kill) -> None:
    """Do it; a host that is only being replaced is waited for.

    Raises:
        Failed: whom it should strike does not come.
    """
    end = time.monotonic() + PATIENCE
    while True:
        with contextlib.suppress(KeyError, ProcessLookupError):
            if kill.kind == "host killed":
                launched.kill_host(kill.rank)
            elif kill.kind == "worker frozen":
                launched.stop_worker(kill.rank)
            else:
                launched.kill_worker(kill.rank)
            return
        if time.monotonic() > end or launched.outcome is not None:
            raise Failed(f"rank {kill.rank} did not come, to be struck")
        time.sleep(0.005)


def undisturbed(folder: Path, lasts: Sequence[int]) -> Truth:
    """The run that nothing disturbs, with every rank's state after each of the steps ``lasts``."""
    if not lasts:
        return Truth({}, {})
    harness.end_at(folder, max(lasts))
    arguments = ["--mode", "none", "--hashes", *lasts]
    with harness.running("fsdp_trainer", arguments, folder, hosts=RANKS) as launched:
        results = harness.ended(launched)
        losses = {event["step"]: event["loss"] for event in launched.events() if event["kind"] == "step"}
    return Truth(losses, {rank: result["hashes"] for rank, result in results.items()})


def result_rows(ran: Sequence[JobRun], truth: Truth, told: str) -> Iterator[Row]:
    """Whether all went on, and lost nothing."""
    asked, struck = sum(len(one.kills) for one in ran), sum(one.struck for one in ran)
    kinds = Counter(kill.kind for one in ran for kill in one.kills[: one.struck])
    within = sum(kill.within for one in ran for kill in one.kills[: one.struck])
    found = [recovery for one in ran for recovery in recoveries(one.events)]
    survived = struck if all(not one.failure for one in ran) else struck - 1
    yield row(
        "kills survived",
        "kills",
        measured=survived,
        target=f"all {asked}",
        met=survived == asked,
        note=f"{', '.join(f'{count} {kind}' for kind, count in kinds.items())}; {within} while the job still "
        f"recovered; {len(ran)} jobs of {RANKS} ranks on {RANKS} hosts, 2 copies of every step; {told}",
    )
    lost = [recovery.steps_lost for recovery in found if recovery.steps_lost is not None]
    counts = Counter(lost)
    yield row(
        "finished steps lost by a failure, most",
        "steps",
        measured=max(lost, default=None),
        published=1,
        source=SOURCE,
        target="at most 1",
        met=bool(lost) and max(lost) <= 1,
        note=f"of {len(lost)} recoveries: "
        + ", ".join(f"{counts[n]} lost {n}" for n in sorted(counts))
        + "; besides, the step under way",
    )
    steps = [event for one in ran for event in one.events if event["kind"] == "step"]
    all_steps = len(steps)
    same = sum(truth.losses.get(event["step"]) == event["loss"] for event in steps)
    yield row(
        "losses as in a run that nothing disturbed",
        "",
        measured=same / all_steps if all_steps else None,
        target="100 %",
        met=all_steps > 0 and same == all_steps,
        note=f"{all_steps} steps of rank 0's loss (sum over ranks), to the last bit, those done twice "
        f"counted twice; FSDP2, AdamW, learning-rate schedule, dropout, data cursor; the undisturbed run "
        f"keeps no checkpoints",
    )
    ends = [
        truth.hashes.get(rank, {}).get(str(one.last)) == found
        for one in ran
        for rank, found in one.hashes.items()
    ]
    yield row(
        "final states as in a run that nothing disturbed",
        "",
        measured=sum(ends) / (RANKS * len(ran)),
        target="100 %",
        met=sum(ends) == RANKS * len(ran),
        note="of all ranks of all jobs: parameters, moments, schedule, generators and cursor, to the last "
        "bit",
    )


def phase_rows(ran: Sequence[JobRun], told: str) -> Iterator[Row]:
    """From the kill to the first new step, by kind of kill."""
    by_kind = kinds_of(ran)
    for kind in (*KINDS, SEVERAL):
        found = by_kind.get(kind, [])
        totals = [one.seconds for one in found if one.seconds is not None and one.injected is not None]
        if not totals:
            yield left_out(SECTION, f"{kind}: recovery", "no such recovery in this run")
            continue
        tiers = Counter(tier for one in found for tier in one.tiers.values())
        notes = [
            f"p95 {units.seconds(quantile(totals, 0.95))} of {len(totals)}",
            f"shards read from {', '.join(f'{tier} {count}' for tier, count in sorted(tiers.items()))}",
        ]
        if kind == "worker frozen":
            notes.append(f"a worker counts as frozen after {MOVES_NOT:g} s without a sign")
        if kind == SEVERAL:
            notes.append("from the first kill to the first step after the last")
        notes.append("workers fork from a warm process, hosts are at hand: no boot, no import in it")
        yield row(
            f"{kind}: to the first new step",
            "s",
            measured=quantile(totals, 0.5),
            note="; ".join(notes),
        )
        if kind == SEVERAL:
            continue
        for phase in PHASES:
            values = [value for one in found if (value := one.phases[phase]) is not None]
            yield row(
                f"{kind}: {phase.replace('_', ' ')}",
                "s",
                measured=quantile(values, 0.5) if values else None,
                note=f"p95 {units.seconds(quantile(values, 0.95))}",
            )


def kinds_of(ran: Sequence[JobRun]) -> dict[str, list[Recovery]]:
    """Recoveries by the kind of their kill; `SEVERAL` where more than one fell into one."""
    out: dict[str, list[Recovery]] = {}
    for one in ran:
        injected = [event for event in one.events if event["kind"] == "injected"]
        found = [recovery for recovery in recoveries(one.events) if recovery.complete]
        since = 0.0
        for recovery in found:
            assert recovery.first_step is not None
            mine = [i for i, event in enumerate(injected) if since < event["t"] <= recovery.first_step]
            since = recovery.first_step
            if mine:
                kind = one.kills[mine[0]].kind if len(mine) == 1 else SEVERAL
                out.setdefault(kind, []).append(recovery)
    return out
