"""Do checkpoints that go to a peer over the training's own network make its steps longer (GEMINI, section 5)?

Two emulated hosts, a network of their own with a token bucket on each link. The training is gloo's: some
all-reduces a step, with a pause after each for the time that a device would compute (*slept*, so the host's
few cores are free for what is measured: in a cluster the device computes, not the host). Everything else is
the product's own path: `PeerCheckpointer`, agents, memory services, the control plane.

Images are given as the time that the link needs for them over the network's idle time in a step. What a step
contains: the call of the checkpointer, with the copy into the slot and its checksum. The first steps of each
phase (idle: its profile) do not count.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness.jobs import finished
from benchmarks.harness.measure import conditions, quantile, scratch
from benchmarks.harness.rows import Row, figure, need
from benchmarks.training.checkpoint import PROGRAMS
from windtunnel.linux import network

LAYERS, MESSAGE, COMPUTE = 4, 3_000_000, 0.08  # all-reduces a step, bytes, seconds of pause after each
RATE = 50e6  # bytes/s: 400 Mbit/s
IDLE = LAYERS * COMPUTE  # seconds of a step without traffic
ALLOWED = 3.0  # % of the median step
SETTLE = {"none": 2, "blocking": 2, "concurrent": 3, "idle": 8}  # steps that do not count
TIMEOUT = 400.0


@dataclass(frozen=True)
class Phase:
    """``ratio``: image over idle time."""

    mode: str
    ratio: float
    steps: int

    @property
    def nbytes(self) -> int:
        """Of one rank's state."""
        return max(4096, int(self.ratio * IDLE * RATE) // 4096 * 4096)

    def plain(self, number: int) -> dict[str, Any]:
        """For the program, as its phase ``number``."""
        settle = SETTLE[self.mode]
        options = None if self.mode == "none" else {"mode": self.mode}
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
        [none(30), Phase("idle", 0.25, 24), Phase("idle", 0.5, 60), none(30), Phase("idle", 0.6, 24)],
        [none(16), Phase("concurrent", 0.5, 60), none(16)],
        [none(8), Phase("blocking", 0.5, 10), none(8)],
    ]


def none(steps: int) -> Phase:
    """Training alone."""
    return Phase("none", 0.0, steps)


def idle_rows(quick: bool) -> Iterator[Row]:
    """The rows of this section."""
    need(network.missing())
    with scratch() as folder:
        for number, phases in enumerate(plan(quick)):
            alone, outcomes = measure(folder / str(number), phases)
            if number == 0:
                yield figure("no checkpoints: median step", "s", median(alone), note=_conditions(alone))
            for phase, outcome in outcomes.items():
                yield from rows(phase, outcome, alone)


def measure(folder: Path, phases: list[Phase]) -> tuple[list[float], IdleResults]:
    """Run one job: the seconds of steps without checkpoints (of all its phases of that kind), and the
    outcomes of its other phases.

    Raises:
        jobs.Failed: it did not end well.
    """
    todo = {
        "layers": LAYERS,
        "message": MESSAGE,
        "compute": COMPUTE,
        "phases": [phase.plain(number) for number, phase in enumerate(phases)],
    }
    # A host that is slow for a moment is no failure here.
    options: dict[str, Any] = {
        "hosts": 2,
        "network": "netns",
        "rate": RATE,
        "lease": 10.0,
        "frozen_after": 10.0,
    }
    ranks, _ = finished(PROGRAMS / "idle_trainer.py", [json.dumps(todo)], folder, TIMEOUT, **options)
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
    name = f"image {phase.ratio:g} of idle time: {mode}"
    middle = 100 * (median(outcome.seconds) / median(alone) - 1)
    checked = phase.mode == "idle"
    often = "each step" if outcome.every == 1 else f"each {outcome.every} steps"
    yield figure(
        f"{name}, median step over none", "%", middle, f"at most {ALLOWED:g} %" if checked else "",
        note=f"{len(outcome.seconds)} steps; {phase.nbytes / 1e6:.1f} MB a rank {often}",
    )  # fmt: skip
    high = 100 * (quantile(outcome.seconds, 0.95) / quantile(alone, 0.95) - 1)
    yield figure(f"{name}, p95 step over p95 of none", "%", high)
    if outcome.inside is not None:
        yield figure(f"{name}, bytes sent within predicted spans", "%", 100 * outcome.inside)


def _conditions(alone: list[float]) -> str:
    return (
        f"{len(alone)} steps, p95 {quantile(alone, 0.95):.3f} s; 2 hosts in network namespaces, "
        f"{RATE * 8 / 1e6:.0f} Mbit/s, {LAYERS} all-reduces of {MESSAGE / 1e6:g} MB a step over gloo, "
        f"{COMPUTE * 1e3:.0f} ms slept after each; {conditions()}"
    )
