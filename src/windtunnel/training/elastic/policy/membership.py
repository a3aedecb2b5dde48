"""Who goes on after a loss: the decisions that the supervisor and the twin share.

A policy is asked at every change (a process or a machine is gone, a machine has come) with a `Snapshot` of
all there is, and answers with a complete `Decision`, never with a patch of the one before; so a failure in
the middle of a recovery needs no case of its own.

`Replace` is GEMINI's rule (Wang et al., SOSP 2023, section 6): the job keeps its size, a spare or a new
machine takes the place of a lost one. `Shrink` goes on with those that are left, as Oobleck (Jang et al.,
SOSP 2023, section 5) does with its pipelines. With ``restart_all`` either is what launchers such as torchrun
do.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

Action = Literal["form", "wait", "fail"]


@dataclass(frozen=True)
class Snapshot:
    """All that a policy knows.

    ``wanted``: how many places the job was started with. ``places``: the node at each place, None where its
    machine is gone. ``broken``: places whose machine lives but whose processes ended or were fenced.
    ``spares``: live machines without a place, oldest first. ``coming``: machines that were ordered and have
    not come. ``own_failures``: how often the program ended by itself (an exception, an exit status) so far.
    """

    wanted: int
    places: tuple[int | None, ...]
    broken: tuple[int, ...] = ()
    spares: tuple[int, ...] = ()
    coming: int = 0
    own_failures: int = 0


@dataclass(frozen=True)
class Decision:
    """What is done: ``form`` a generation of ``places``, ``wait`` for machines, or ``fail`` the job.

    ``order``: how many machines to ask for now. ``restart_all``: every process starts anew, also those that
    could go on. ``reason``: in words, for the log and the user.
    """

    action: Action
    places: tuple[int, ...] = ()
    order: int = 0
    restart_all: bool = False
    reason: str = ""


class Policy(Protocol):
    """Decides who goes on; pure, so that the twin and the supervisor ask the same object."""

    def decide(self, now: Snapshot) -> Decision: ...


@dataclass(frozen=True)
class Replace:
    """The job keeps its size: spares take the places of lost machines, new ones are ordered for what is
    missing.

    ``order``: whether machines can be had; where not, a job with too few machines fails.
    ``max_own_failures``: after so many ends of the program's own making the job fails, since a bug would
    come again for ever.
    """

    order: bool = True
    restart_all: bool = False
    max_own_failures: int = 3

    def decide(self, now: Snapshot) -> Decision:
        if now.own_failures > self.max_own_failures:
            return _given_up(now, self.max_own_failures)
        taken = now.places.count(None)
        missing = taken - len(now.spares)
        if missing <= 0:
            spares = iter(now.spares)
            filled = (
                tuple(next(spares) if node is None else node for node in now.places) if taken else now.places
            )
            reason = f"{taken} of the places by spares" if taken else "the same machines"
            return Decision("form", tuple(filled), restart_all=self.restart_all, reason=reason)  # type: ignore[arg-type]
        if missing > now.coming and not self.order:
            return Decision("fail", reason=f"{missing} machines too few, and none can be ordered")
        reason = f"{missing} of {len(now.places)} machines missing"
        return Decision("wait", order=max(0, missing - now.coming), reason=reason)


@dataclass(frozen=True)
class Shrink:
    """Those that are left go on at once; machines that come are taken in, up to the first size.

    ``minimum``: fewest places with which the job still runs (for pipeline templates: n0, the smallest
    template).
    """

    minimum: int = 1
    restart_all: bool = False
    max_own_failures: int = 3

    def decide(self, now: Snapshot) -> Decision:
        if now.own_failures > self.max_own_failures:
            return _given_up(now, self.max_own_failures)
        left = [node for node in now.places if node is not None]
        left += now.spares[: max(0, now.wanted - len(left))]
        if len(left) >= self.minimum:
            return Decision("form", tuple(left), restart_all=self.restart_all, reason=f"{len(left)} go on")
        if now.coming:
            return Decision("wait", reason=f"{len(left)} machines of at least {self.minimum}")
        return Decision("fail", reason=f"{len(left)} machines are left, at least {self.minimum} are needed")


def _given_up(now: Snapshot, allowed: int) -> Decision:
    times = "once" if now.own_failures == 1 else f"{now.own_failures} times"
    return Decision("fail", reason=f"the program ended by itself {times}; restarts allowed: {allowed}")
