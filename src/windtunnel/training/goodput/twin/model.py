"""What a run through failures needs to know, what comes out of it, and the hosts that come and go in it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

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


# Up to so many hosts the policy is asked of all of them, as the supervisor does; beyond, of those that a
# change concerns.
WHOLE = 64


class Members:
    """The hosts of an emulated job, with the ids that a supervisor would give them, and what its policy says.

    A trace numbers the hosts that a job began with, and a replacement keeps the number. Ids are never used
    again. In a job that keeps its size number n stands for whoever holds place n; in one that shrinks places
    close up, and number n is the host that came for it. The policy treats all hosts alike that go on as they
    are, so of a large job it is shown one of them, with sizes that are smaller by the others.

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
        self.spares = list(range(hosts, hosts + spares))
        self.missing = 0  # numbers without a host; kept, since it is asked for at every step of a run
        self._places = list(range(hosts))  # who had each place last; in a job that shrinks, in rising order
        self._gone: set[int] = set()  # places whose host is lost
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
                    self._gone.add(self._place(number, host))
        return self._ask(set())

    def break_off(self, numbers: Sequence[int]) -> bool:
        """Processes of these ended, the hosts are there. False: the job waits for hosts."""
        hosts = [(number, self.numbers[number]) for number in numbers]
        return self._ask({self._place(n, host) for n, host in hosts if host not in (None, *self.spares)})

    def come(self, number: int) -> bool:
        """A host for ``number`` has come. False: the job waits for more."""
        host, self._next = self._next, self._next + 1
        self._coming = max(0, self._coming - 1)
        self.spares.append(host)
        if self.rules.shrinks and self.numbers[number] is None:
            self.numbers[number] = host
            self.missing -= 1
        return self._ask(set())

    def _place(self, number: int, host: int | None) -> int:
        if not self.rules.shrinks or host is None:
            return number
        return bisect_left(self._places, host)

    def _ask(self, broken: set[int]) -> bool:
        shown = self._shown(broken)
        left_out = len(self._places) - len(shown)
        now = Change(
            rules=replace(self.rules, minimum=self.rules.minimum - left_out) if left_out else self.rules,
            wanted=self.hosts - left_out,
            places=tuple(None if place in self._gone else self._places[place] for place in shown),
            broken=tuple(at for at, place in enumerate(shown) if place in broken),
            spares=tuple(self.spares),
            # a job that shrinks orders nothing, but what it has lost is being replaced
            coming=self.missing if self.rules.shrinks else self._coming,
        )
        decision = after_change(now)
        if self.record is not None:
            self.record(now, decision)
        match decision:
            case Form():
                self._form(shown, decision.places)
            case Wait():
                self._coming += decision.order
            case Keep() | Fail():
                pass
        return isinstance(decision, Form | Keep)

    def _shown(self, broken: set[int]) -> Sequence[int]:
        """The places that the policy is shown."""
        if len(self._places) <= WHOLE:
            return range(len(self._places))
        struck = self._gone | broken
        well = next((place for place in range(len(self._places)) if place not in struck), None)
        return sorted(struck if well is None else {*struck, well})

    def _form(self, shown: Sequence[int], decided: Sequence[int]) -> None:
        taken = set(decided)
        if self.rules.shrinks:
            for place in sorted(self._gone, reverse=True):
                del self._places[place]
            self._places += [host for host in self.spares if host in taken]
        else:
            for place, host in zip(shown, decided, strict=True):
                self._places[place] = self.numbers[place] = host
            self.missing = 0
        self._gone.clear()
        self.spares = [host for host in self.spares if host not in taken]
