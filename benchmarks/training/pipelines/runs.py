"""Real runs of the bench's job: six emulated hosts, hosts killed at chosen steps, what the log says.

Two ways to go on, on the same job, in the same harness:

- templates: those who are left go on in their processes (`Shrink`), layers come from other pipelines;
- warm restart: every process starts anew, forked from one that has torch imported, and reads the newest
  checkpoint, which the job writes every ten steps.

Losses strike at the end of a step that is given by its number, so both ways lose the same hosts at the same
steps. Hosts do not come back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.harness import jobs
from benchmarks.harness.measure import scratch
from windtunnel.training.elastic.events import Event, Recovery
from windtunnel.training.elastic.spec import PRELOAD

HOSTS = 6
FEWEST = 2  # hosts of the smallest template
CHECKPOINT_EVERY = 10
BOUND = 300.0  # seconds after which a run has failed
SCRIPT = Path(__file__).with_name("job.py")
# what the trainers import, so that a forked process is at once in the script
WARM = (*PRELOAD, "windtunnel.training.pipelines.live.trainer")

Scheme = Literal["templates", "warm restart"]
Loss = tuple[int, int]  # after this step, the host at this place


@dataclass(frozen=True)
class JobRun:
    """One run. ``losses``: by step; ``hashes``: of all layers at the end."""

    steps: int
    events: tuple[Event, ...] = field(repr=False)
    losses: dict[int, float] = field(repr=False)
    hashes: dict[str, str] = field(repr=False)

    def times(self) -> dict[int, float]:
        """When each step was first finished."""
        times: dict[int, float] = {}
        for event in self.events:
            if event["kind"] == "step":
                times.setdefault(event["step"], event["t"])
        return times

    @property
    def seconds(self) -> float:
        """From the end of the first step to the end of the last."""
        times = self.times()
        return times[self.steps - 1] - times[0]

    def regained(self, recovery: Recovery) -> float | None:
        """Seconds from the loss until the job was further than before it."""
        if recovery.injected is None or recovery.newest is None:
            return None
        times = self.times()
        return times[recovery.newest + 1] - recovery.injected if recovery.newest + 1 in times else None

    def paces(self) -> list[float]:
        """Seconds of its steps, but for the first of each generation."""
        return [seconds for _, seconds in jobs.paces(self.events)]


def run_job(scheme: Scheme, steps: int, losses: Sequence[Loss] = ()) -> JobRun:
    """Run the job for ``steps`` steps.

    Raises:
        jobs.Failed: it did not end well in time.
    """
    restart = scheme == "warm restart"
    rules: dict[str, Any] = {"on_loss": "shrink-restart" if restart else "shrink", "min_hosts": FEWEST}
    with scratch() as folder:
        arguments: list[object] = ["--steps", steps]
        if restart:
            arguments += ["--checkpoint", folder / "checkpoints", "--every", CHECKPOINT_EVERY]
        faults = [f"kill:host={place},step={step}" for step, place in losses]
        results, events = jobs.finished(
            SCRIPT, arguments, folder / "run", BOUND, hosts=HOSTS, **rules, faults=faults, preload=WARM
        )
    return _ran(scheme, steps, events, results)


def _ran(scheme: str, steps: int, events: Sequence[Event], results: dict[int, Any]) -> JobRun:
    losses: dict[int, float] = {}
    for event in events:
        if event["kind"] == "step" and losses.setdefault(event["step"], event["loss"]) != event["loss"]:
            raise jobs.Failed(f"{scheme}: step {event['step']} was done twice, with different losses")
    hashes: dict[str, str] = next(
        (result["hashes"] for result in results.values() if isinstance(result, dict)), {}
    )
    return JobRun(steps, tuple(events), losses, hashes)
