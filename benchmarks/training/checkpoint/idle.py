"""Do checkpoints that go to a peer over the training's own network make its steps longer (GEMINI, section 5)?

Two emulated hosts, a network of their own with a token bucket on each link. The training is gloo's: some
all-reduces a step, with a pause after each for the time that a device would compute (*slept*, so the host's
few cores are free for what is measured: in a cluster the device computes, not the host). Everything else is
the product's own path: `PeerCheckpointer`, agents, memory services, the control plane.

Images are given as the time that the link needs for them over the network's idle time in a step. What a step
contains: the call of the checkpointer; the copy into the slot and its checksum run beside the next step
(``overlap``), as they would beside a device's work. In mode idle checkpoints that do not fit one step's idle
time are made every few steps, as the chunk plan says; modes blocking and concurrent save every step, and
"concurrent" once more as often as idle does. The first steps of each phase (idle: its profile) do not count.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.harness.measure import conditions, quantile, scratch
from benchmarks.harness.rows import Row, left_out
from benchmarks.training.checkpoint import harness
from benchmarks.training.checkpoint.harness import SOURCE
from windtunnel.linux import network

row = partial(Row, "idle")
LAYERS, MESSAGE, COMPUTE = 4, 3_000_000, 0.08  # all-reduces a step, bytes, seconds of pause after each
RATE = 50e6  # bytes/s: 400 Mbit/s
IDLE = LAYERS * COMPUTE  # seconds of a step without traffic
FITS = 0.6  # of the idle time: images up to this are to cost nothing
ALLOWED = 3.0  # % of the median step
NOISE = 1.0  # % by which two medians of the same thing differ
SETTLE = {"none": 2, "blocking": 2, "concurrent": 3, "idle": 8}  # steps that do not count
TIMEOUT = 400.0


@dataclass(frozen=True)
class Phase:
    """``ratio``: image over idle time; ``every``: steps between checkpoints that are asked for."""

    mode: str
    ratio: float
    steps: int
    every: int = 1

    @property
    def nbytes(self) -> int:
        """Of one rank's state."""
        return max(4096, int(self.ratio * IDLE * RATE) // 4096 * 4096)

    def plain(self, number: int) -> dict[str, Any]:
        """For the program, as its phase ``number``."""
        settle = SETTLE[self.mode]
        options = None
        if self.mode != "none":
            options = {"mode": self.mode, "overlap": self.mode != "blocking", "every": self.every}
        # Each phase has slots of its own: by their size.
        nbytes = self.nbytes + 4096 * number
        return {"options": options, "nbytes": nbytes, "steps": settle + self.steps, "settle": settle}


@dataclass(frozen=True)
class IdleResult:
    """``seconds`` of the steps that count; ``inside``: the share of the bytes that went within windows."""

    seconds: list[float]
    every: int
    inside: float | None


IdleResults = dict[Phase, IdleResult]


def plan(quick: bool) -> list[list[Phase]]:
    """The phases of each job, the ones without checkpoints between them.

    Images grow from phase to phase: a smaller one would go to the slots of a larger one of before, which hold
    steps that nobody went back to.
    """
    if quick:
        return [
            [none(10), Phase("idle", 0.5, 24), none(10)],
            [none(6), Phase("concurrent", 0.5, 10), Phase("blocking", 0.5, 6)],
        ]
    return [
        [
            none(30),
            Phase("idle", 0.25, 24),
            Phase("idle", 0.5, 60),
            none(30),
            Phase("idle", FITS, 24),
            Phase("idle", 1, 24),
            Phase("idle", 2, 24),
        ],
        [
            none(16),
            Phase("concurrent", 0.25, 16),
            Phase("concurrent", 0.5, 60),
            none(16),
            Phase("concurrent", 1, 16),
            Phase("concurrent", 1, 16, every=2),
            Phase("concurrent", 2, 16),
            Phase("concurrent", 2, 18, every=3),
        ],
        [none(8), *(Phase("blocking", ratio, 10) for ratio in (0.25, 0.5)), none(8)]
        + [Phase("blocking", ratio, 10) for ratio in (1, 2)],
    ]


def none(steps: int) -> Phase:
    """Training alone."""
    return Phase("none", 0.0, steps)


def idle_rows(quick: bool) -> Iterator[Row]:
    """The rows of this section."""
    why = network.missing()
    if why is not None:
        yield left_out("idle", "checkpoints beside training on one network", why)
        return
    over: dict[tuple[str, float, int], float] = {}
    with scratch() as folder:
        for number, phases in enumerate(plan(quick)):
            alone, outcomes = measure(folder / str(number), phases)
            if number == 0:
                yield row("no checkpoints: median step", "s", median(alone), note=_conditions(alone))
            for phase, outcome in outcomes.items():
                over[phase.mode, phase.ratio, phase.every] = _mean_over(outcome.seconds, alone)
                yield from rows(phase, outcome, alone)
    for (mode, ratio, _), found in over.items():
        if mode == "idle" and ratio > FITS and ("concurrent", ratio, 1) in over:
            beside = over["concurrent", ratio, 1]
            yield row(
                f"image {ratio:g} of idle time: idle spans less concurrent, mean step",
                "%",
                found - beside,
                target="no worse than concurrent",
                met=found <= beside + NOISE,
                note="both over the mean without checkpoints; idle spans save as rarely as their plan says",
            )


def measure(folder: Path, phases: list[Phase]) -> tuple[list[float], IdleResults]:
    """Run one job: the seconds of steps without checkpoints (of all its phases of that kind), and the
    outcomes of its other phases.

    Raises:
        Failed: it did not end well.
    """
    todo = {
        "layers": LAYERS,
        "message": MESSAGE,
        "compute": COMPUTE,
        "phases": [phase.plain(number) for number, phase in enumerate(phases)],
    }
    options: dict[str, Any] = {"hosts": 2, "network": "netns", "rate": RATE}
    # A host that is slow for a moment is no failure here.
    options |= {"lease": 10.0, "frozen_after": 10.0}
    with harness.running("idle_trainer", [json.dumps(todo)], folder, **options) as launched:
        ranks = harness.ended(launched, TIMEOUT)
    alone: list[float] = []
    outcomes: IdleResults = {}
    for number, phase in enumerate(phases):
        # All ranks wait for the slowest in every all-reduce.
        seconds = [
            max(each) for each in zip(*(found[number]["seconds"] for found in ranks.values()), strict=True)
        ]
        if phase.mode == "none":
            alone += seconds
            continue
        sent = sum(found[number]["sent"] for found in ranks.values())
        inside = sum(found[number]["inside"] for found in ranks.values())
        share = inside / sent if phase.mode == "idle" and sent else None
        outcomes[phase] = IdleResult(seconds, ranks[0][number]["every"], share)
    return alone, outcomes


def rows(phase: Phase, outcome: IdleResult, alone: list[float]) -> Iterator[Row]:
    """One phase's figures."""
    mode = {"idle": "idle spans"}.get(phase.mode, phase.mode)
    often = f", every {phase.every} steps" if phase.every > 1 else ""
    name = f"image {phase.ratio:g} of idle time: {mode}{often}"
    middle, high = _over(outcome.seconds, alone)
    checked = phase.mode == "idle" and phase.ratio <= FITS
    yield row(
        f"{name}, median step over none",
        "%",
        middle,
        source=f"{SOURCE}, section 5 (no loss of throughput)" if checked else "",
        target=f"at most {ALLOWED:g} %" if checked else "",
        met=middle <= ALLOWED if checked else None,
        note=f"{len(outcome.seconds)} steps; {phase.nbytes / 1e6:.1f} MB a rank {_often(outcome.every)}; "
        f"mean {_mean_over(outcome.seconds, alone):+.1f} %",
    )
    yield row(f"{name}, p95 step over p95 of none", "%", high)
    if outcome.inside is not None:
        yield row(f"{name}, bytes sent within predicted spans", "%", 100 * outcome.inside)


def _often(every: int) -> str:
    return "each step" if every == 1 else f"each {every} steps"


def _over(seconds: list[float], alone: list[float]) -> tuple[float, float]:
    """Median and 95th percentile, each in % over that of ``alone``."""
    return (
        100 * (median(seconds) / median(alone) - 1),
        100 * (quantile(seconds, 0.95) / quantile(alone, 0.95) - 1),
    )


def _mean_over(seconds: list[float], alone: list[float]) -> float:
    """The mean in % over that of ``alone``: where only some steps have a checkpoint a median may not show
    it."""
    return 100 * (mean(seconds) / mean(alone) - 1)


def _conditions(alone: list[float]) -> str:
    return (
        f"{len(alone)} steps, p95 {quantile(alone, 0.95):.3f} s; 2 hosts in network namespaces, "
        f"{RATE * 8 / 1e6:.0f} Mbit/s, {LAYERS} all-reduces of {MESSAGE / 1e6:g} MB a step over gloo, "
        f"{COMPUTE * 1e3:.0f} ms slept after each; {conditions()}"
    )
