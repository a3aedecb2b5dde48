"""Real runs of the bench's job: six emulated hosts, hosts killed at chosen steps, what the log says.

Three ways to go on, on the same job, in the same harness:

- templates: those who are left go on in their processes (`Shrink`), layers come from other pipelines;
- warm restart: every process starts anew, forked from one that has torch imported, and reads the newest
  checkpoint, which the job writes every ten steps;
- cold restart: the job ends at the loss and is launched again: interpreter, torch and all.

Losses strike at the end of a step that is given by its number, so all ways lose the same hosts at the same
steps. Hosts do not come back, or each comes `COMES_AFTER` seconds after its loss.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.harness import jobs
from benchmarks.harness.measure import scratch
from benchmarks.training.pipelines.job import FORWARD
from windtunnel.training.elastic.events import Event, Recovery
from windtunnel.training.elastic.spec import PRELOAD
from windtunnel.training.launch import Launched

HOSTS = 6
FEWEST = 2  # hosts of the smallest template
CHECKPOINT_EVERY = 10
COMES_AFTER = 1.0  # seconds until a host comes for a lost one
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
        found: dict[int, float] = {}
        for event in self.events:
            if event["kind"] == "step":
                found.setdefault(event["step"], event["t"])
        return found

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


def run_job(
    scheme: Scheme, steps: int, losses: Sequence[Loss] = (), *, back: bool = False, hosts: int = HOSTS,
    forward: float = FORWARD,
) -> JobRun:  # fmt: skip
    """Run the job for ``steps`` steps. ``back``: lost hosts are replaced. ``forward``: seconds of a layer.

    Raises:
        jobs.Failed: it did not end well in time.
    """
    restart = scheme == "warm restart"
    rules: dict[str, Any] = {"on_loss": "shrink-restart" if restart else "shrink", "min_hosts": FEWEST}
    if restart and back:
        rules = {"on_loss": "restart"}  # better than to restart twice
    with scratch() as folder:
        arguments: list[object] = ["--steps", steps, "--forward", forward]
        if restart:
            arguments += ["--checkpoint", folder / "checkpoints", "--every", CHECKPOINT_EVERY]
        faults = [f"kill:host={place},step={step}" for step, place in losses]
        cloud = Cloud()
        with jobs.running(
            SCRIPT, arguments, folder / "run", hosts=hosts, **rules, faults=faults, preload=WARM,
            replace_after=COMES_AFTER, on_event=cloud.hear if back and not restart else None,
        ) as cloud.job:  # fmt: skip
            results = jobs.results(cloud.job, BOUND)
            events = cloud.job.events()
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


class Cloud:
    """For `Shrink`, which orders no host: one comes some time after each loss."""

    job: Launched

    def hear(self, event: Event) -> None:
        if event["kind"] == "lost" and event["what"] == "host":
            timer = threading.Timer(COMES_AFTER, lambda: self.job.add_host())
            timer.daemon = True
            timer.start()


@dataclass(frozen=True)
class Cold:
    """A full restart. Seconds, from the loss: until the first step, and until the job was further than
    before."""

    seconds: float
    regained: float
    losses: dict[int, float] = field(repr=False)


def restart_cold(step: int, place: int, more: int) -> Cold:
    """Lose the host at ``place`` after ``step``; the job ends, and is launched anew on those that are
    left, for ``more`` steps beyond.

    Raises:
        jobs.Failed: the first run did not end by the loss, or the second not well.
    """
    fault = f"kill:host={place},step={step}"
    with scratch() as folder:
        arguments: list[object] = ["--steps", step + 1 + more, "--checkpoint", folder / "checkpoints"]
        arguments += ["--every", CHECKPOINT_EVERY, "--forward", FORWARD]
        all_hosts = {"hosts": HOSTS, "on_loss": "shrink", "min_hosts": HOSTS, "preload": WARM}
        with jobs.running(SCRIPT, arguments, folder / "first", faults=[fault], **all_hosts) as first:
            outcome = first.wait(BOUND)
            if outcome is None or outcome.status == 0:
                raise jobs.Failed(f"cold restart: the loss after step {step} did not end the job")
            before = first.events()
        left = all_hosts | {"hosts": HOSTS - 1, "min_hosts": HOSTS - 1}
        _, after = jobs.finished(SCRIPT, arguments, folder / "second", BOUND, **left)
    injected = next(event["t"] for event in before if event["kind"] == "injected")
    done = [event for event in after if event["kind"] == "step"]
    beyond = next(event["t"] for event in done if event["step"] > step)
    return Cold(done[0]["t"] - injected, beyond - injected, jobs.losses([*before, *done]))
