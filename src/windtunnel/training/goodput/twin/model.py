"""What a run through failures needs to know, and what comes out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# Where the time of a job goes. "useful": steps that were kept, at the speed of the whole, healthy job.
PHASES = ("useful", "slow", "checkpoint", "redo", "detect", "wait", "start", "regroup", "load", "join")


@dataclass(frozen=True)
class JobModel:
    """A training job.

    ``step_time``: seconds a step takes on all ``hosts`` without checkpoints. ``state_bytes``: all that
    must be kept of it (parameters and optimizer). ``stages``: hosts of one pipeline, or of one
    data-parallel replica. ``microbatches``: of all pipelines together in one step. ``layers``: of the model.
    ``overhead``: seconds of ``step_time`` that stay as they are on fewer hosts (reduction, optimizer).

    Raises:
        ValueError: the overhead is no part of the step.
    """

    hosts: int
    step_time: float
    state_bytes: float
    stages: int = 1
    microbatches: int = 0
    layers: int = 96
    overhead: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.overhead < self.step_time:
            raise ValueError(
                f"an overhead of {self.overhead:g} s is no part of a step of {self.step_time:g} s"
            )

    @property
    def work(self) -> float:
        """Seconds of a step that are divided over the hosts."""
        return self.step_time - self.overhead


@dataclass(frozen=True)
class PhaseCosts:
    """What each phase of a recovery takes. Seconds, bytes/s.

    ``detect``: from the loss until it is known. ``regroup``: to form the process group; ``regroup_growth``:
    more for every doubling of the ranks. ``start``: a new process, until it could form a group (0: warm).
    ``replace``: until a host comes for one that was lost. ``memory_bandwidth``: of one host to its own
    memory. ``peer_bandwidth``: between two hosts. ``storage_bandwidth``: of the storage, for all hosts;
    ``storage_share``: the part of it that saving may take. ``save_stall``: that a checkpoint to storage
    takes from training, None for the copy into memory alone. ``join``: a pause to take a host in.
    ``blocking_save``: a checkpoint to storage stops training until it is safe.
    """

    detect: float = 1.0
    regroup: float = 1.0
    regroup_growth: float = 0.5
    start: float = 30.0
    replace: float = 300.0
    memory_bandwidth: float = 10e9
    peer_bandwidth: float = 25e9
    storage_bandwidth: float = 10e9
    storage_share: float = 1.0
    save_stall: float | None = None
    join: float = 2.0
    blocking_save: bool = False


@dataclass(frozen=True)
class SimulationResult:
    """How a job fared under one scheme. All of it emulated.

    ``phases``: seconds by name (`PHASES`); they add up to ``horizon``. ``steps``: kept. ``redone``: steps
    that were done and lost. ``failures``: losses that stopped or slowed the job; ``from_storage``:
    recoveries for which memory did not suffice. ``series``: (time, steps kept so far), at every change of
    speed.
    """

    scheme: str
    horizon: float
    phases: Mapping[str, float]
    steps: float
    redone: float
    failures: int
    from_storage: int
    series: tuple[tuple[float, float], ...] = field(default=(), repr=False)

    @property
    def goodput(self) -> float:
        """Useful time over all time, 0 to 1 (effective training time ratio)."""
        return self.phases["useful"] / self.horizon
