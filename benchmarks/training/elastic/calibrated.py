"""What the plan has to be told of the job in `storm`, measured beforehand: steps, saves, single strikes.

A failure costs, by the twin, its detection (or, where hosts went, the wait for others), the start of
processes, the group, and the load of the state, from memory or from storage. The strikes of each kind say how
long all of it took; what the kinds have in common is told as the common phases, the rest as the phase that
only this kind has. The model has one time for the detection of processes that ended, whatever ended them:
the mean over the kinds, by how often they come.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from benchmarks.harness import jobs
from benchmarks.training.elastic import storm
from benchmarks.training.elastic.storm import HOSTS, KINDS, Interruption, Kind
from windtunnel.training.elastic.events import Event
from windtunnel.training.launch import Launched

EVERY, PERSIST_EVERY = 8, 40
_NEAR = 3  # steps from a checkpoint on, which may take longer for it
_LEAST = 1e-4  # seconds of what was measured as none


@dataclass(frozen=True)
class Calibrated:
    """Seconds. ``step``: without checkpoints. ``copy``: what one to memory adds to the steps, ``stall``: one
    to storage besides. ``lag``: from a step until its checkpoint is committed; ``write``: until it is in
    storage. ``state``: bytes of all ranks. ``strikes``: what a single strike of each kind cost.
    """

    step: float
    copy: float
    stall: float
    lag: float
    write: float
    state: float
    strikes: Mapping[str, tuple[Interruption, ...]]

    def cost(self, kind: str) -> float:
        """Mean seconds of an interruption."""
        return mean(one.seconds for one in self.strikes[kind])

    def costs(self, often: Mapping[str, float]) -> dict[str, float]:
        """The fields of `PhaseCosts`, as ``--costs`` takes them. ``often``: of each kind, by its name."""
        share = self.state / HOSTS
        regroup = mean(one.regroup for several in self.strikes.values() for one in several)
        detect = self._mean("processes", often, lambda one: one.known)
        back = self._mean("processes", often, lambda one: one.back)
        copy, lag = max(_LEAST, self.copy), max(_LEAST, self.lag)
        start = max(0.0, back - regroup - copy)  # the state is loaded from this host's memory, as it is saved
        begun = start + regroup
        host = self._mean("host", often, lambda one: one.seconds)
        wait = max(0.0, host - begun - lag)  # .. and from a peer's, as it is sent there
        leaf = self._mean("leaf", often, lambda one: one.seconds)
        load = max(_LEAST, leaf - wait - begun)
        return {
            "detect": detect, "replace": wait, "start": start, "regroup": regroup, "regroup_growth": 0.0,
            "memory_bandwidth": share / copy, "peer_bandwidth": share / lag,
            "storage_bandwidth": self.state / load, "storage_share": min(1.0, load / max(_LEAST, self.write)),
            "save_stall": self.stall,
        }  # fmt: skip

    def _mean(self, reach: str, often: Mapping[str, float], what: Callable[[Interruption], float]) -> float:
        """Over the kinds of that reach; alike, where none of them ever comes."""
        kinds = [kind.name for kind in KINDS if kind.reach == reach]
        weights = [often.get(name, 0.0) for name in kinds]
        if not any(weights):
            weights = [1.0] * len(kinds)
        means = [mean(what(one) for one in self.strikes[name]) for name in kinds]
        return sum(w * m for w, m in zip(weights, means, strict=True)) / sum(weights)


def calibrate(folder: Path, times: int, steps: int) -> Calibrated:
    """``times``: strikes of each kind. ``steps``: that a pace is taken of.

    Raises:
        jobs.Failed: a job did not go on.
    """
    settings = {"every": EVERY, "persist": str(folder / "stored"), "persist_every": PERSIST_EVERY}
    with storm.job(folder / "calibration", settings) as job:
        done = _more(job, steps, 240.0)
        jobs.until(job, lambda events: jobs.count(events, "persisted") > 0, "checkpoint in storage")
        events = job.events()
        found: dict[str, tuple[Interruption, ...]] = {}
        for number in range(times):
            for kind in KINDS:
                found[kind.name] = (*found.get(kind.name, ()), _single(job, kind, number % HOSTS))
        results = jobs.end_soon(job)
    state = float(sum(result["nbytes"] for result in results.values()))
    lag, write = _after(events, "committed"), _after(events, "persisted")
    return Calibrated(*_steps(done), lag, write, state, found)


def _more(job: Launched, steps: int, timeout: float = 60.0) -> list[Event]:
    """The next so many steps."""
    first = jobs.count(job.events(), "step")
    jobs.until(job, lambda events: jobs.count(events, "step") > first + steps, "steps", timeout)
    return [event for event in job.events() if event["kind"] == "step"][first : first + steps + 1]


def _single(job: Launched, kind: Kind, rank: int) -> Interruption:
    """One strike, with nothing else on the way; the next one finds the job as it was."""
    _more(job, 3)
    one = storm.struck(job, kind, rank)
    if not one.found:
        raise jobs.Failed(f"{kind.name}: nobody was there to strike")

    def over(events: list[Event]) -> Interruption | None:
        found = storm.interruptions(events, [one])
        return found[-1] if found and one in found[-1].struck else None

    found = jobs.until(job, over, f"step after {kind.name}", 120.0)
    _more(job, PERSIST_EVERY)
    return found


def _steps(done: list[Event]) -> tuple[float, float, float]:
    """Seconds of a step without checkpoints, and what one to memory and one to storage add to those from it
    on: all from the same steps of one job, so that what else this computer does is in all three alike."""
    far: list[float] = []
    memory: list[float] = []
    storage: list[float] = []
    for event, seconds in jobs.paces(done):
        number = event["step"] + 1
        if number % EVERY >= _NEAR:
            far.append(seconds)
        else:
            (storage if number % PERSIST_EVERY < _NEAR else memory).append(seconds)
    step, near = mean(far), mean(memory)
    return step, max(0.0, near - step) * _NEAR, max(0.0, mean(storage) - near) * _NEAR


def _after(events: list[Event], kind: str) -> float:
    """Mean seconds from a step until what is said of it."""
    done = {event["step"]: float(event["t"]) for event in events if event["kind"] == "step"}
    return mean(float(e["t"]) - done[e["step"]] for e in events if e["kind"] == kind and e["step"] in done)
