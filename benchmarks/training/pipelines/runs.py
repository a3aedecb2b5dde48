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
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from benchmarks.harness.measure import scratch
from windtunnel.linux.system import adopt_orphans
from windtunnel.training.elastic.events import Recovery, recoveries
from windtunnel.training.elastic.policy.rules import Rules
from windtunnel.training.job import PRELOAD
from windtunnel.training.launch import Launched, launch

HOSTS = 6
FEWEST = 2  # hosts of the smallest template
CHECKPOINT_EVERY = 10
COMES_AFTER = 1.0  # seconds until a host comes for a lost one
BOUND = 300.0  # seconds after which a run has failed
SCRIPT = Path(__file__).with_name("job.py")
PEER_SCRIPT = Path(__file__).with_name("peer_job.py")
# what the trainers import, so that a forked process is at once in the script
WARM = (
    *PRELOAD,
    "windtunnel.training.pipelines.live.trainer",
)

Scheme = Literal["templates", "warm restart"]
Loss = tuple[int, int]  # after this step, the host at this place


@dataclass(frozen=True)
class JobRun:
    """One run. ``losses``: by step; ``hashes``: of all layers at the end; ``state_bytes``: of all layers."""

    scheme: str
    steps: int
    events: tuple[dict[str, Any], ...] = field(repr=False)
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

    def recoveries(self) -> list[Recovery]:
        return recoveries(self.events)

    def joins(self) -> list[Recovery]:
        """Pauses in which a host was taken in (a rank that is cut off may suspect its peers first)."""
        return [recovery for recovery in self.recoveries() if recovery.kind != "loss" and recovery.complete]

    def regained(self, recovery: Recovery) -> float | None:
        """Seconds from the loss until the job was further than before it."""
        if recovery.injected is None or recovery.newest is None:
            return None
        times = self.times()
        return times[recovery.newest + 1] - recovery.injected if recovery.newest + 1 in times else None

    def step_times(self) -> dict[int, list[float]]:
        """Seconds of steps, by the number of hosts; without first steps of generations and without those
        that wait for a checkpoint."""
        hosts: dict[int, int] = {}
        found: dict[int, list[float]] = {}
        steps = []
        for event in self.events:
            if event["kind"] == "decided":
                hosts[event["generation"]] = len(event["membership"]["hosts"])
            elif event["kind"] == "step":
                steps.append(event)
        for one, two in pairwise(steps):
            if one["generation"] == two["generation"] and not self._saved_between(one["step"], two["step"]):
                found.setdefault(hosts[two["generation"]], []).append(two["t"] - one["t"])
        return found

    def saves(self) -> list[float]:
        """Seconds of the steps before which a checkpoint was written."""
        if self.scheme == "templates":
            return []
        steps = [event for event in self.events if event["kind"] == "step"]
        return [
            two["t"] - one["t"]
            for one, two in pairwise(steps)
            if one["generation"] == two["generation"] and self._saved_between(one["step"], two["step"])
        ]

    def _saved_between(self, one: int, two: int) -> bool:
        return self.scheme != "templates" and two == one + 1 and two % CHECKPOINT_EVERY == 0


class RunFailed(RuntimeError):
    """A run that should have ended well did not."""


def run_job(
    scheme: Scheme,
    steps: int,
    losses: Sequence[Loss] = (),
    *,
    back: bool = False,
    hosts: int = HOSTS,
    forward: float | None = None,
) -> JobRun:
    """Run the job for ``steps`` steps. ``back``: lost hosts are replaced. ``forward``: seconds that a
    layer takes, in place of the job's own.

    Raises:
        RunFailed: it did not end well in time.
    """
    restart = scheme == "warm restart"
    rules = Rules("shrink-restart" if restart else "shrink", minimum=FEWEST)
    if restart and back:
        rules = Rules("restart")  # better than to restart twice
    with _folder() as folder:
        arguments = ["--steps", str(steps)]
        if forward is not None:
            arguments += ["--forward", str(forward)]
        if restart:
            arguments += ["--checkpoint", str(folder / "checkpoints"), "--every", str(CHECKPOINT_EVERY)]
        with (
            _Return(back and not restart) as returning,
            launch(
                SCRIPT,
                arguments,
                folder=folder / "run",
                on_event=returning.hear,
                hosts=hosts,
                rules=rules,
                faults=[f"kill:host={place},step={step}" for step, place in losses],
                preload=WARM,
                replace_after=COMES_AFTER,
            ) as launched,
        ):
            returning.launched = launched
            outcome = launched.wait(BOUND)
            events = launched.events()
    if outcome is None or outcome.status != 0:
        reason = f"it ran for more than {BOUND:g} s" if outcome is None else outcome.reason
        raise RunFailed(f"{scheme}, {steps} steps, losses {list(losses)}: {reason}")
    return _ran(scheme, steps, events, outcome.results)


def _ran(scheme: str, steps: int, events: Sequence[dict[str, Any]], results: dict[int, Any]) -> JobRun:
    losses: dict[int, float] = {}
    for event in events:
        if event["kind"] == "step" and losses.setdefault(event["step"], event["loss"]) != event["loss"]:
            raise RunFailed(f"{scheme}: step {event['step']} was done twice, with different losses")
    told = [result for result in results.values() if isinstance(result, dict)]
    hashes: dict[str, str] = told[0]["hashes"] if told else {}
    return JobRun(scheme, steps, tuple(events), losses, hashes)


class _Return:
    """The cloud for `Shrink`, which orders no host: one comes some time after each loss."""

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted
        self.launched: Launched | None = None
        self.timers: list[threading.Timer] = []

    def hear(self, event: dict[str, Any]) -> None:
        if self.wanted and event["kind"] == "lost" and event["what"] == "host":
            timer = threading.Timer(COMES_AFTER, self._come)
            timer.daemon = True
            timer.start()
            self.timers.append(timer)

    def _come(self) -> None:
        if self.launched is not None:
            self.launched.add_host()

    def __enter__(self) -> _Return:
        return self

    def __exit__(self, *_: object) -> None:
        for timer in self.timers:
            timer.cancel()


@dataclass(frozen=True)
class Cold:
    """A full restart. Seconds, from the loss: until it was noticed, until all processes had ended, until the
    new ones had their group, until they had their state, until their first step, and until they were further
    than before."""

    detect: float
    end: float
    start: float
    load: float
    first_step: float
    regained: float
    losses: dict[int, float] = field(repr=False)

    @property
    def seconds(self) -> float:
        return self.detect + self.end + self.start + self.load + self.first_step


def restart_cold(step: int, place: int, more: int) -> Cold:
    """Lose the host at ``place`` after ``step``; the job ends, and is launched anew on those that are
    left, for ``more`` steps beyond.

    Raises:
        RunFailed: the first run did not end by the loss, or the second not well.
    """
    with _folder() as folder:
        steps = str(step + 1 + more)
        arguments = ["--steps", steps, "--checkpoint", str(folder / "checkpoints")]
        arguments += ["--every", str(CHECKPOINT_EVERY)]
        with launch(
            SCRIPT,
            arguments,
            folder=folder / "first",
            hosts=HOSTS,
            rules=Rules("shrink", minimum=HOSTS),
            faults=[f"kill:host={place},step={step}"],
            preload=WARM,
        ) as launched:
            outcome = launched.wait(BOUND)
            first = launched.events()
        ended = time.time()
        if outcome is None or outcome.status == 0:
            raise RunFailed(f"cold restart: the loss after step {step} did not end the job")
        with launch(
            SCRIPT,
            arguments,
            folder=folder / "second",
            hosts=HOSTS - 1,
            rules=Rules("shrink", minimum=HOSTS - 1),
            preload=WARM,
        ) as launched:
            outcome = launched.wait(BOUND)
            second = launched.events()
        if outcome is None or outcome.status != 0:
            raise RunFailed(f"cold restart: {outcome.reason if outcome else 'too slow'}")
    injected = next(event["t"] for event in first if event["kind"] == "injected")
    lost = next(event["t"] for event in first if event["kind"] == "lost")
    grouped = max(event["t"] for event in second if event["kind"] == "grouped")
    restored = max(event["t"] for event in second if event["kind"] == "restored")
    done = [event for event in second if event["kind"] == "step"]
    beyond = next(event["t"] for event in done if event["step"] > step)
    told = {event["step"]: event["loss"] for event in (*first, *done) if event["kind"] == "step"}
    return Cold(
        lost - injected,
        ended - lost,
        grouped - ended,
        restored - grouped,
        done[0]["t"] - restored,
        beyond - injected,
        told,
    )


def run_with_peer_memory(steps: int, losses: Sequence[Loss]) -> list[Recovery]:
    """The recoveries of a job of the same size with checkpoints in peer memory; lost hosts are replaced at
    once.

    Raises:
        RunFailed: it did not end well in time.
    """
    pipelines = HOSTS // FEWEST
    with (
        _folder() as folder,
        launch(
            PEER_SCRIPT,
            ["--steps", str(steps), "--pipelines", str(pipelines)],
            folder=folder / "run",
            hosts=HOSTS,
            rules=Rules(),
            faults=[f"kill:host={place},step={step}" for step, place in losses],
            preload=WARM,
            settings={"copies": 2, "placement": "group"},
        ) as launched,
    ):
        outcome = launched.wait(BOUND)
        events = launched.events()
    if outcome is None or outcome.status != 0:
        raise RunFailed(f"peer memory: {outcome.reason if outcome else 'too slow'}")
    return recoveries(events)


@contextmanager
def _folder() -> Iterator[Path]:
    """A folder for one run, removed when all its processes have ended."""
    adopt_orphans()
    with scratch() as path:
        yield path
