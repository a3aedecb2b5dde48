"""What the live sections measure, once in a process: sections that need the same runs share them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from statistics import median

from benchmarks.harness import jobs
from benchmarks.training.pipelines.runs import (
    CHECKPOINT_EVERY,
    HOSTS,
    Cold,
    JobRun,
    Loss,
    Scheme,
    restart_cold,
    run_job,
)  # fmt: skip
from windtunnel.training.elastic.events import Recovery

SCHEMES: tuple[Scheme, ...] = ("templates", "warm restart")
SEED = 5
FIRST, GAP = 6, 10  # no loss before this step, and at least about so many between two
TAIL = 8  # steps after the last loss
MULTIPLES = {2: 3, 5: 2, 10: 1, 30: 1}  # mean time between losses in warm restarts, and losses of such a run
LONGEST = 40.0  # seconds that a run's steps may take; of its losses, one stays
SPEEDED = 0.0  # seconds of a layer where only the numbers matter


@dataclass(frozen=True)
class Recoveries:
    """``ran``: runs by (scheme, hosts come back). ``undisturbed``: the same steps without a loss."""

    undisturbed: JobRun
    ran: dict[tuple[Scheme, bool], list[JobRun]]
    cold: list[Cold]

    @property
    def step_time(self) -> float:
        """Seconds of a step on all hosts, median."""
        return median(self.undisturbed.paces())

    def recoveries(self, scheme: Scheme, back: bool = False) -> list[tuple[JobRun, Recovery]]:
        """Those that a loss began, with their runs."""
        return [(ran, recovery) for ran in self.ran[scheme, back] for recovery in jobs.complete(ran.events)]

    def restart(self) -> float:
        """Seconds of a warm restart, from the loss to the first step, median."""
        found = [recovery.seconds for _, recovery in self.recoveries("warm restart")]
        return median([seconds for seconds in found if seconds is not None])


@dataclass(frozen=True)
class Cell:
    """One cell of the grid: a loss every ``every`` steps."""

    every: int
    back: bool
    ran: dict[Scheme, JobRun]


@dataclass(frozen=True)
class Grid:
    """All cells, and losses by step of a run without losses, on other hosts and without waiting."""

    cells: list[Cell]
    reference: JobRun


def random_losses(draw: random.Random, count: int, hosts: int = HOSTS) -> list[Loss]:
    """``count`` losses at random steps and places of a job that gets smaller with each."""
    return [
        (FIRST + index * GAP + draw.randrange(GAP - 2), draw.randrange(hosts - index))
        for index in range(count)
    ]


def regular_losses(draw: random.Random, count: int, every: int, back: bool) -> list[Loss]:
    """A loss in the middle of each stretch of ``every`` steps, at random places."""
    return [
        (index * every + every // 2, draw.randrange(HOSTS if back else HOSTS - index))
        for index in range(count)
    ]


@cache
def measure_recoveries(quick: bool) -> Recoveries:
    """Do the runs with random losses.

    Raises:
        jobs.Failed: one did not end well.
    """
    draw = random.Random(SEED)
    repeats, kills = (1, 1) if quick else (2, 3)
    steps = FIRST + kills * GAP + TAIL
    ran: dict[tuple[Scheme, bool], list[JobRun]] = {}
    for number in range(repeats):
        losses = random_losses(draw, kills)
        for scheme in SCHEMES:
            ran.setdefault((scheme, False), []).append(run_job(scheme, steps, losses))
            if number == 0:
                ran[scheme, True] = [run_job(scheme, steps, losses, back=True)]
    undisturbed = run_job("templates", steps)
    cold = []
    for _ in range(1 if quick else 2):
        step = CHECKPOINT_EVERY + draw.randrange(CHECKPOINT_EVERY)
        cold.append(restart_cold(step, draw.randrange(HOSTS), CHECKPOINT_EVERY // 2))
    return Recoveries(undisturbed, ran, cold)


@cache
def measure_grid(quick: bool) -> Grid:
    """Run every failure rate with every scheme, with hosts that come back and with such that do not.

    Raises:
        jobs.Failed: one did not end well.
    """
    found = measure_recoveries(quick)
    draw = random.Random(SEED + 1)
    cells = []
    longest = 0
    for multiple, most in ({2: 1} if quick else MULTIPLES).items():
        every = max(2, round(multiple * found.restart() / found.step_time))
        count = max(1, min(most, round(LONGEST / (every * found.step_time))))
        for back in (False, True):
            losses = regular_losses(draw, count, every, back)
            steps = count * every
            longest = max(longest, steps)
            ran = {scheme: run_job(scheme, steps, losses, back=back) for scheme in SCHEMES}
            cells.append(Cell(every, back, ran))
    return Grid(cells, run_job("templates", longest, hosts=2, forward=SPEEDED))
