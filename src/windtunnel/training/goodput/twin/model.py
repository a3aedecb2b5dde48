"""What a run through failures needs to know, what comes out of it, and the hosts that come and go in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from windtunnel.training.elastic.policy.rules import (
    Change,
    Decision,
    Fail,
    Form,
    Keep,
    Observation,
    Rules,
    Wait,
    after_change,
)

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

    @property
    def wasted_per_failure(self) -> float:
        """Seconds of work, retrieval and checkpoints lost for each failure (GEMINI, section 3)."""
        lost = sum(seconds for name, seconds in self.phases.items() if name in ("redo", "load", "checkpoint"))
        return lost / max(1, self.failures)


class Members:
    """The hosts of an emulated job, with the ids that a supervisor would give them, and what its policy says.

    A trace numbers the hosts that a job began with, and a replacement keeps the number. Ids are never used
    again. In a job that keeps its size number n stands for whoever holds place n; in one that shrinks places
    close up, and number n is the host that came for it.

    ``record``: called with all that the policy is asked and answers.
    """

    def __init__(
        self,
        hosts: int,
        spares: int,
        rules: Rules,
        record: Callable[[Observation, Decision], None] | None = None,
    ) -> None:
        self.hosts, self.rules, self.record = hosts, rules, record
        self.numbers: list[int | None] = list(range(hosts))
        self.places: list[int | None] = list(range(hosts))
        self.spares = list(range(hosts, hosts + spares))
        self.missing = 0  # numbers without a host; kept, since it is asked for at every step of a run
        self._coming = 0
        self._next = hosts + spares

    def lose(self, numbers: Sequence[int]) -> bool:
        """These are gone. False: the job waits for hosts."""
        for number in numbers:
            host = self.numbers[number]
            if host is not None:
                self.numbers[number] = None
                self.missing += 1
                if host in self.spares:
                    self.spares.remove(host)
                else:
                    self.places[number if not self.rules.shrinks else self.places.index(host)] = None
        return self._ask(())

    def break_off(self, numbers: Sequence[int]) -> bool:
        """Processes of these ended, the hosts are there. False: the job waits for hosts."""
        hosts = {self.numbers[number] for number in numbers} - {None}
        return self._ask([place for place, host in enumerate(self.places) if host in hosts])

    def come(self, number: int) -> bool:
        """A host for ``number`` has come. False: the job waits for more."""
        host, self._next = self._next, self._next + 1
        self._coming = max(0, self._coming - 1)
        self.spares.append(host)
        if self.rules.shrinks and self.numbers[number] is None:
            self.numbers[number] = host
            self.missing -= 1
        return self._ask(())

    def _ask(self, broken: Sequence[int]) -> bool:
        now = Change(
            rules=self.rules,
            wanted=self.hosts,
            places=tuple(self.places),
            broken=tuple(broken),
            spares=tuple(self.spares),
            # a job that shrinks orders nothing, but what it has lost is being replaced
            coming=self.missing if self.rules.shrinks else self._coming,
        )
        decision = after_change(now)
        if self.record is not None:
            self.record(now, decision)
        match decision:
            case Form():
                taken = set(decision.places)
                self.spares = [host for host in self.spares if host not in taken]
                self.places = list(decision.places)
                if not self.rules.shrinks:
                    self.numbers, self.missing = list(decision.places), 0
            case Wait():
                self._coming += decision.order
            case Keep() | Fail():
                pass
        return isinstance(decision, Form | Keep)
