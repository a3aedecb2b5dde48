"""What becomes of a run: every rule by which the supervisor decides, and the twin with it.

Six questions are put, each with all that its answer depends on, the settings too; the state between them is
the asker's (`core.Core`, live and in the twin):

- `Change`: hosts or processes are gone, or hosts have come: who goes on?
- `Doubt`: all are there, but ranks suspect their peers: is a new generation needed?
- `Reached`: the hosts said whom they do not reach: has one to go?
- `Late`: ranks have not joined their group: are they to be given up?
- `Overdue`: hosts have not come: is it waited on?
- `Ended`: a process ended: was it the program's own doing?

The answer to a change is complete, never a patch of the one before; so a failure in the middle of a recovery
needs no case of its own.

Who goes on: ``replace`` is GEMINI's rule (Wang et al., SOSP 2023, section 6): the job keeps its size, a spare
or a new host takes the place of a lost one. ``shrink`` goes on with those that are left, as Oobleck (Jang et
al., SOSP 2023, section 5) does with its pipelines. ``restart`` and ``shrink-restart`` do the same with every
process anew, as launchers such as torchrun do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from windtunnel.training.elastic.policy.evidence import blames_peers, in_short, to_fence

MOST_IN_VAIN = 3
"""Generations in succession, without a step between them, that are formed because of suspicion alone, or that
did not group in time. One more fails the run."""
MOST_FRUITLESS = 30
"""The same of those that ended by any loss."""
OnLoss = Literal["replace", "shrink", "restart", "shrink-restart"]
# What argparse and `elastic.run` end with where the input is wrong: another try would end alike.
WRONG_USE = 2
_IN_VAIN = (
    "all processes are there, but waited for each other in vain {} times without a new step in between; does "
    "every rank enter the same collectives?"
)


@dataclass(frozen=True)
class Rules:
    """What the user chose.

    ``on_loss``: see the module. ``minimum``: fewest places with which a job that shrinks still runs (for
    pipeline templates: n0, the smallest template). ``max_own_failures``: after so many ends of the program's
    own making the job fails, since a bug would come again for ever.
    """

    on_loss: OnLoss = "replace"
    minimum: int = 1
    max_own_failures: int = 3

    @property
    def shrinks(self) -> bool:
        return self.on_loss.startswith("shrink")

    @property
    def restart_all(self) -> bool:
        return self.on_loss.endswith("restart")


@dataclass(frozen=True)
class Change:
    """Something was lost or came, and nothing more for a moment.

    ``target``: how many places the job is started with. ``places``: the host at each place, None where it is
    gone; () before the first generation. ``broken``: places whose host lives but whose processes ended or
    were fenced. ``spares``: live hosts without a place, oldest first. ``coming``: hosts that were ordered and
    have not come. ``forced``: a new generation is needed though all are there.

    ``own``: the program ended by itself in this generation. ``hit``: something outside it broke this
    generation. ``own_failures``: how often it ended by itself so far.

    ``fruitless``: generations in succession that were hurt before a new step. ``progress``: this one did a
    new step. ``lived``: its age in seconds; beyond ``form`` it may work without a word of it.
    ``cause``: in words, for reasons alone.
    """

    rules: Rules
    target: int
    places: tuple[int | None, ...]
    broken: tuple[int, ...] = ()
    spares: tuple[int, ...] = ()
    coming: int = 0
    forced: bool = False
    own: bool = False
    hit: bool = False
    own_failures: int = 0
    fruitless: int = 0
    progress: bool = True
    lived: float = 0.0
    form: float = 60.0
    cause: str = ""

    @property
    def hurt(self) -> bool:
        """Whether the generation cannot go on as it is."""
        return self.forced or bool(self.broken) or None in self.places


@dataclass(frozen=True)
class Doubt:
    """``ranks`` suspect their peers since ``waited`` seconds, of ``allowed`` for evidence, and nothing else
    changed. ``times``: how often in succession without a new step, this time included. ``probed``: the hosts
    were asked whom they reach. ``unstarted``, ``lived``, ``start``: as in `Late`."""

    ranks: tuple[int, ...]
    waited: float
    allowed: float
    times: int
    probed: bool = True
    unstarted: tuple[int, ...] = ()
    lived: float = 0.0
    start: float = 120.0


@dataclass(frozen=True)
class Reached:
    """The hosts at ``places`` (None: gone) were asked whom they reach. ``answered``: who did. ``silent``:
    pairs of hosts of whom the first gets no answer from the second."""

    places: tuple[int | None, ...]
    answered: tuple[int, ...]
    silent: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Late:
    """``ranks`` have not joined their group ``waited`` seconds after it was formed, or its last process was
    started. ``speaks``: the workers say when they have; plain scripts never do. ``times``: as in `Doubt`.
    ``unstarted``: ranks that have no process yet, since ``lived`` seconds, of ``start`` that it may take;
    nobody can join without these."""

    ranks: tuple[int, ...]
    speaks: bool
    waited: float
    allowed: float
    times: int
    unstarted: tuple[int, ...] = ()
    lived: float = 0.0
    start: float = 120.0


@dataclass(frozen=True)
class Overdue:
    """Hosts are waited for: the first ones (``there`` of ``target``), or ``coming`` ones, ordered."""

    first: bool
    there: int
    target: int
    coming: int
    waited: float
    allowed: float


@dataclass(frozen=True)
class Ended:
    """A rank's process ended: with ``status``, or None where a signal ended it or nobody could tell.

    ``hit``: this generation is broken already. ``doubtful``: a host is away this instant, perhaps lost.
    ``less``: it said that what was asked for cannot be reached. ``error``: the exception that ended it, where
    there is evidence of one. ``times``: how often in succession without a new step a process ended over its
    peers though nothing was lost, this time included.
    """

    rank: int
    status: int | None
    hit: bool
    doubtful: bool
    less: bool = False
    error: str = ""
    times: int = 1


Observation = Change | Doubt | Reached | Late | Overdue | Ended


@dataclass(frozen=True)
class Form:
    """A generation of ``places`` (hosts) is formed. ``restart_all``: every process starts anew, also those
    that could go on. ``own_failures``, ``fruitless``: the counts from now on."""

    places: tuple[int, ...]
    restart_all: bool = False
    own_failures: int = 0
    fruitless: int = 0
    reason: str = ""


@dataclass(frozen=True)
class Wait:
    """For hosts; ``order``: how many to ask for now."""

    order: int = 0
    own_failures: int = 0
    reason: str = ""


@dataclass(frozen=True)
class Fail:
    """The run ends with status 1."""

    reason: str


@dataclass(frozen=True)
class Keep:
    """All stays as it is."""

    own_failures: int = 0


@dataclass(frozen=True)
class Regroup:
    """A new generation is needed, whoever is there."""


@dataclass(frozen=True)
class Look:
    """The hosts are asked whom they reach."""


@dataclass(frozen=True)
class Fence:
    """These ranks are killed, and count as lost; these hosts are given up with all that runs on them."""

    ranks: tuple[int, ...] = ()
    hosts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Blame:
    """``own``: it was the program's own doing. ``hopeless``: another try would end alike; the run fails, for
    ``reason``. ``peers``: it ended over its peers, of which one may hang."""

    own: bool
    hopeless: bool = False
    peers: bool = False
    reason: str = ""


Decision = Form | Wait | Fail | Keep | Regroup | Look | Fence | Blame


def decide(observation: Observation) -> Decision:
    """The answer to any of the questions."""
    match observation:
        case Change():
            return after_change(observation)
        case Doubt():
            return _doubt(observation)
        case Reached():
            return _reached(observation)
        case Late():
            return _late(observation)
        case Overdue():
            return _overdue(observation)
        case Ended():
            return _blame(observation)


def _blame(now: Ended) -> Blame:
    own = now.status is not None and now.status != 0
    counts = own and not now.hit and not now.doubtful
    if own and (now.less or now.status == WRONG_USE):
        return Blame(counts, hopeless=True)
    if counts and blames_peers(now.error):
        often = now.times > MOST_IN_VAIN
        reason = f"{_IN_VAIN.format(now.times)} ({in_short(now.error)})" if often else ""
        return Blame(False, hopeless=bool(reason), peers=True, reason=reason)
    return Blame(counts)


def after_change(now: Change) -> Form | Wait | Fail | Keep:
    """Who goes on after a change; see `decide`."""
    if not now.places:
        if len(now.spares) < now.target:
            return Wait(reason=f"{len(now.spares)} of {now.target} hosts are there")
        return Form(now.spares[: now.target], fruitless=now.fruitless)
    # a host that is gone is why the program ended
    own = now.own and not now.hit and None not in now.places
    failures = now.own_failures + own
    if failures > now.rules.max_own_failures:
        times = "once" if failures == 1 else f"{failures} times"
        allowed = now.rules.max_own_failures
        return Fail(f"the program ended by itself {times}; restarts allowed: {allowed} ({now.cause})")
    answer = _shrink(now) if now.rules.shrinks else _replace(now)
    match answer:
        case Fail():
            return Fail(f"{answer.reason} ({now.cause})")
        case Wait():
            return replace(answer, own_failures=failures)
    if not now.hurt and answer.places == now.places:
        return Keep(failures)
    fruitless = now.fruitless
    if now.hurt:
        fruitless = 0 if now.progress or now.lived > now.form else now.fruitless + 1
        if fruitless > MOST_FRUITLESS:
            return Fail(f"{fruitless} generations ended without a step, the last by {now.cause}")
    restart = now.rules.restart_all
    return replace(answer, restart_all=restart, own_failures=failures, fruitless=fruitless)


def _replace(now: Change) -> Form | Wait:
    """The job keeps its size."""
    vacant = now.places.count(None)
    missing = vacant - len(now.spares)
    if missing <= 0:
        spares = iter(now.spares)
        filled = tuple(next(spares) if host is None else host for host in now.places)
        return Form(filled, reason=f"{vacant} of the places by spares" if vacant else "the same hosts")
    order = max(0, missing - now.coming)
    return Wait(order=order, reason=f"{missing} of {len(now.places)} hosts missing")


def _shrink(now: Change) -> Form | Wait | Fail:
    """Those that are left go on at once; hosts that come are taken in, up to the first size."""
    left = [host for host in now.places if host is not None]
    left += now.spares[: max(0, now.target - len(left))]
    least = now.rules.minimum
    if len(left) >= least:
        return Form(tuple(left), reason=f"{len(left)} go on")
    if now.coming:
        return Wait(reason=f"{len(left)} hosts of at least {least}")
    return Fail(f"{len(left)} hosts are left, at least {least} are needed")


def _doubt(now: Doubt) -> Keep | Look | Regroup | Fail:
    if now.waited < now.allowed:
        return Keep()
    if now.unstarted and now.lived < now.start:
        return Keep()  # they are who was waited for: those that wait come together with them
    if not now.probed:
        return Look()
    if now.times > MOST_IN_VAIN:
        return Fail(_IN_VAIN.format(now.times))
    return Regroup()


def _reached(now: Reached) -> Keep | Fence:
    gone = to_fence(now.places, now.silent, now.answered)
    return Fence(hosts=gone) if gone else Keep()


def _late(now: Late) -> Keep | Fence | Fail:
    if not now.speaks or not now.ranks or now.waited < now.allowed:
        return Keep()
    if now.unstarted and now.lived < now.start:
        return Keep()
    if now.times > MOST_IN_VAIN:
        names = ", ".join(map(str, now.ranks))
        return Fail(f"ranks {names} joined no group in {now.times} generations")
    return Fence(now.ranks)


def _overdue(now: Overdue) -> Keep | Fail:
    if now.waited <= now.allowed:
        return Keep()
    if not now.first:
        return Fail(f"{now.coming} hosts were ordered and did not come within {now.allowed:g} s")
    if now.there >= now.target:
        return Keep()
    return Fail(f"{now.there} of {now.target} hosts came within {now.allowed:g} s")


def _instead(on_loss: OnLoss) -> Callable[[Observation], Decision]:
    def decided(observation: Observation) -> Decision:
        if isinstance(observation, Change):
            observation = replace(observation, rules=replace(observation.rules, on_loss=on_loss))
        return decide(observation)

    return decided


POLICIES: Mapping[str, Callable[[Observation], Decision]] = {
    name: _instead(name) for name in ("replace", "shrink", "restart", "shrink-restart")
}
