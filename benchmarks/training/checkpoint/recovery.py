"""Does a continuation lose anything, and how long does it take? Real kills, at random, of a real job.

Jobs of 4 ranks on 4 emulated hosts keep a checkpoint of every step, in two copies, and are struck again
and again: a worker is killed, a whole host is (its agent, its workers, its memory), or a worker freezes.
Who and when is drawn by chance (seeded); every fifth fault strikes while the job still recovers from the one
before. Afterwards a run that nothing disturbed, and that kept no checkpoint, tells what the losses of all
steps (also of those that were done twice) and the states of all ranks at the end should have been.

The guarantee is that of two copies: both hosts of a group are never lost before the copies of the first
are made again, so groups are struck in turn.

Source: GEMINI (Wang et al., SOSP 2023): checkpoints of every iteration, so that at most the iteration under
way is lost.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from benchmarks.harness import jobs
from benchmarks.harness.measure import scratch
from benchmarks.harness.rows import Row, figure, left_out
from benchmarks.training.checkpoint import SOURCE, TRAINER
from windtunnel.training.elastic.events import Event, Recovery, recoveries

KINDS = {"worker killed": "kill:rank", "host killed": "kill:host", "worker frozen": "stop:rank"}
SEVERAL = "several at once"
RANKS, GROUP = 4, 2
WITHIN = 5  # every so many faults, one falls into a recovery
FIRST, GAP, TAIL = 6, 12, 12  # steps before the first fault, at least between two, and after the last
POINTS = ("step", "before_local_write", "during_local_write", "after_local_write")
"""Of a step and its checkpoint, where a fault strikes."""
MOVES_NOT = 1.0  # seconds without a sign of life until a worker is taken for frozen


@dataclass
class JobRun:
    """What one job gave. ``hashes``: by rank, of its state after step ``last``."""

    faults: list[str]
    last: int
    events: list[Event] = field(default_factory=list)
    hashes: dict[int, str] = field(default_factory=dict)
    failure: str = ""

    @property
    def struck(self) -> list[str]:
        """The faults that were injected."""
        return list(dict.fromkeys(one["fault"] for one in self.events if one["kind"] == "injected"))


@dataclass(frozen=True)
class Truth:
    """What the undisturbed run gave: the loss of each step, each rank's state by step."""

    losses: dict[int, str]
    hashes: dict[int, dict[str, str]]


def recovery_rows(quick: bool) -> Iterator[Row]:
    with scratch() as folder:
        count, faults = (1, 5) if quick else (3, 12)
        ran = [run_job(folder / f"job-{number}", *plan(faults, seed=number)) for number in range(count)]
        for number, one in enumerate(ran):
            if one.failure:
                yield left_out(f"job {number + 1} (failed)", one.failure)
        truth = undisturbed(folder / "undisturbed", sorted({one.last for one in ran if one.hashes}))
    yield from result_rows(ran, truth)
    yield from phase_rows(ran)


def plan(count: int, seed: int) -> tuple[list[str], int]:
    """``count`` faults, of each kind alike often, against ranks and at times drawn by chance; and the step to
    end with. Each that is recovered from makes another generation."""
    random, step, faults, kinds = Random(seed), FIRST, list[str](), list(KINDS.values())
    for number in range(count):
        when = f"during=recovery,generation={number + 1}"
        if number % WITHIN != WITHIN - 1:
            when, step = f"step={step},point={random.choice(POINTS)}", step + GAP + random.randrange(GAP)
        rank = GROUP * (number % (RANKS // GROUP)) + random.randrange(GROUP)
        faults.append(f"{kinds[(number + seed) % len(kinds)]}={rank},{when}")
    return faults, step + TAIL


def run_job(folder: Path, faults: list[str], last: int) -> JobRun:
    """A job that all ``faults`` strike, and that then comes to its end."""
    ran, options = JobRun(faults, last), {"frozen_after": MOVES_NOT, "lease": MOVES_NOT, "faults": faults}
    jobs.end_at(folder, last)
    with jobs.running(TRAINER, [], folder, hosts=RANKS, **options) as job:
        try:
            results = jobs.results(job, 300.0)
            ran.hashes = {rank: result["hashes"][str(last)] for rank, result in results.items()}
        except jobs.Failed as error:
            ran.failure = str(error)
        ran.events = job.events()
    return ran


def undisturbed(folder: Path, lasts: Sequence[int]) -> Truth:
    """The run that nothing disturbs, with every rank's state after each of the steps ``lasts``."""
    if not lasts:
        return Truth({}, {})
    jobs.end_at(folder, max(lasts))
    results, events = jobs.finished(TRAINER, ["--mode", "none", "--hashes", *lasts], folder, hosts=RANKS)
    return Truth(jobs.losses(events), {rank: result["hashes"] for rank, result in results.items()})


def result_rows(ran: Sequence[JobRun], truth: Truth) -> Iterator[Row]:
    """Whether all went on, and lost nothing."""
    wanted, struck = sum(len(one.faults) for one in ran), [fault for one in ran for fault in one.struck]
    survived = len(struck) - any(one.failure for one in ran)
    counts = Counter(fault.partition("=")[0] for fault in struck)
    kinds = ", ".join(f"{counts[text]} {kind}" for kind, text in KINDS.items())
    yield figure(
        "kills survived", "kills", survived, f"all {wanted}", met=survived == wanted,
        note=f"{kinds}; {sum('=recovery' in fault for fault in struck)} while the job still recovered;"
        f" {len(ran)} jobs of {RANKS} ranks on {RANKS} hosts, 2 copies of every step",
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
    by_kind: dict[str, list[Recovery]] = {}
    for recovery in (each for one in ran for each in jobs.complete(one.events) if each.fault is not None):
        kind = next(kind for kind, text in KINDS.items() if str(recovery.fault).startswith(text))
        by_kind.setdefault(kind if recovery.generations == 1 else SEVERAL, []).append(recovery)
    for kind in (*KINDS, SEVERAL):
        if not (found := by_kind.get(kind, [])):
            yield left_out(f"{kind}: recovery", "no such recovery in this run")
            continue
        tiers = Counter(tier for one in found for tier in one.tiers.values())
        note = f"shards read from {', '.join(f'{tier} {count}' for tier, count in sorted(tiers.items()))}"
        yield from jobs.recovery_rows(f"{kind}: to the first new step", f"{kind}: ", found, note)
