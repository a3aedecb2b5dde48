"""Live: the first step after the loss of a host, and the throughput at several rates of loss.

The runs with random losses are made once in a process: both sections need them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from statistics import median

from benchmarks.harness import jobs
from benchmarks.harness.measure import ratios
from benchmarks.harness.rows import Row, figure
from benchmarks.training.pipelines.job import FORWARD, LAYERS, MICROBATCH_SIZE, MICROBATCHES
from benchmarks.training.pipelines.runs import CHECKPOINT_EVERY, HOSTS, JobRun, Loss, Scheme, run_job
from windtunnel.training.elastic.events import Recovery, recoveries

SAMPLES = MICROBATCHES * MICROBATCH_SIZE  # of a step
SCHEMES: tuple[Scheme, ...] = ("templates", "warm restart")
SEED = 5
FIRST, GAP = 6, 10  # no loss before this step, and at least about so many between two
TAIL = 8  # steps after the last loss
MULTIPLES = {2: 3, 5: 2, 10: 1, 30: 1}  # mean time between losses in warm restarts, and losses of such a run
LONGEST = 40.0  # seconds that a run's steps may take; of its losses, one stays


@dataclass(frozen=True)
class Recoveries:
    """``ran``: runs by scheme. ``undisturbed``: the same steps without a loss."""

    undisturbed: JobRun
    ran: dict[Scheme, list[JobRun]]

    @property
    def step_time(self) -> float:
        """Seconds of a step on all hosts, median."""
        return median(self.undisturbed.paces())

    def recoveries(self, scheme: Scheme) -> list[tuple[JobRun, Recovery]]:
        """Those that a loss began, with their runs."""
        return [(ran, recovery) for ran in self.ran[scheme] for recovery in jobs.complete(ran.events)]

    def restart(self) -> float:
        """Seconds of a warm restart, from the loss to the first step, median."""
        times = [recovery.seconds for _, recovery in self.recoveries("warm restart")]
        return median([seconds for seconds in times if seconds is not None])


def random_losses(draw: random.Random, count: int) -> list[Loss]:
    """``count`` losses at random steps and places of a job that gets smaller with each."""
    return [
        (FIRST + index * GAP + draw.randrange(GAP - 2), draw.randrange(HOSTS - index))
        for index in range(count)
    ]


def regular_losses(draw: random.Random, count: int, every: int) -> list[Loss]:
    """A loss in the middle of each stretch of ``every`` steps, at random places."""
    return [(index * every + every // 2, draw.randrange(HOSTS - index)) for index in range(count)]


@cache
def measure_recoveries(quick: bool) -> Recoveries:
    """Do the runs with random losses.

    Raises:
        jobs.Failed: one did not end well.
    """
    draw = random.Random(SEED)
    repeats, kills = (1, 1) if quick else (2, 3)
    steps = FIRST + kills * GAP + TAIL
    ran: dict[Scheme, list[JobRun]] = {}
    for _ in range(repeats):
        losses = random_losses(draw, kills)
        for scheme in SCHEMES:
            ran.setdefault(scheme, []).append(run_job(scheme, steps, losses))
    undisturbed = run_job("templates", steps)
    return Recoveries(undisturbed, ran)


def conditions(step_time: float) -> str:
    """What the live figures were measured on."""
    return (
        f"{HOSTS} hosts of one rank on {os.cpu_count()} cores, gloo over loopback; {LAYERS} layers,"
        f" {MICROBATCHES} microbatches, step {step_time * 1e3:.0f} ms, of which a layer's device time"
        f" ({FORWARD * 1e3:g} ms forward, twice that backward, a microbatch) is slept"
    )


def recovery_rows(quick: bool) -> Iterator[Row]:
    """Rows of the section: kills of a host at random steps, no host comes back."""
    measured = measure_recoveries(quick)
    yield figure("step, undisturbed", "s", measured.step_time, note=conditions(measured.step_time))
    first, new = dict[Scheme, float | None](), dict[Scheme, float | None]()
    for scheme in SCHEMES:
        pairs, note = measured.recoveries(scheme), ""
        if scheme == "warm restart":
            note = (
                f"processes forked from one with torch imported, checkpoint every {CHECKPOINT_EVERY} steps"
                " on a local disk, which another host would not have"
            )
        recovered, total = [recovery for _, recovery in pairs], f"{scheme}: loss to first step"
        whole, *phases = jobs.recovery_rows(total, f"{scheme}, phase ", recovered, note)
        yield from (whole, *phases)
        regained = figure(f"{total} that is new", "s", (ran.regained(recovery) for ran, recovery in pairs))
        yield regained
        first[scheme], new[scheme] = whole.measured, regained.measured
        worst = max(
            (recovery.steps_lost for recovery in recovered if recovery.steps_lost is not None), default=None
        )
        yield figure(f"{scheme}: steps done again, most", "steps", worst, "0" * (scheme == "templates"))
    for title, theirs in (("step", first), ("new step", new)):
        over = ratios([theirs["warm restart"]], [first["templates"]])
        yield figure(f"warm restart / templates, first {title}", "times", over)
    yield from _same(measured)


def _same(measured: Recoveries) -> Iterator[Row]:
    truth = measured.undisturbed
    runs = [ran for several in measured.ran.values() for ran in several]
    equal = sum(ran.losses == truth.losses and ran.hashes == truth.hashes for ran in runs)
    kills = sum(len(measured.recoveries(scheme)) for scheme in measured.ran)
    note = f"{len(runs)} runs with {kills} kills: loss of every step, and hash of all layers with optimizers"
    share = equal / len(runs)
    yield figure("runs bit-identical to an undisturbed one", "", share, "all", passed=share == 1, note=note)


def rates_rows(quick: bool) -> Iterator[Row]:
    """Rows of the section: throughput, downtime included, for each rate of loss."""
    measured, draw = measure_recoveries(quick), random.Random(SEED + 1)
    step, restart = measured.step_time, measured.restart()
    note = f"{conditions(step)}; a warm restart takes {restart:.2f} s to its first step"
    yield figure("without losses", "samples/s", SAMPLES / step, note=note)
    for multiple, most in ({2: 1} if quick else MULTIPLES).items():
        every = max(2, round(multiple * restart / step))
        count = max(1, min(most, round(LONGEST / (every * step))))
        losses, steps = regular_losses(draw, count, every), count * every
        name, rate = f"loss every {every} steps", dict[Scheme, float]()
        for scheme in SCHEMES:
            ran = run_job(scheme, steps, losses)
            rate[scheme] = (steps - 1) * SAMPLES / ran.seconds
            down = sum(recovery.seconds or 0.0 for recovery in recoveries(ran.events))
            note = f"{ran.seconds:.1f} s, of which {down:.1f} s recoveries"
            yield figure(f"{name}: {scheme}", "samples/s", rate[scheme], note=note)
        yield figure(f"{name}: templates / warm restart", "times", rate["templates"] / rate["warm restart"])
