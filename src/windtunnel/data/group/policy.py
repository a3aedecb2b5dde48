"""Which replicas form a group's chain, in which order, and who copies from whom before it opens.

A chain acknowledges an operation when its tail has it, so every member of the last chain has all that was
ever acknowledged: any one of them may be the source of the others after a loss, and the one that is furthest
loses least of what was under way. A coordinator fences its members first (they take no operation of an older
epoch from then on), so what it sees of them does not change any more.

Source: Kim et al., HyperLoop (SIGCOMM 2018), section 3 for the chain and its pre-posted window; who goes on
after a loss is not said there: van Renesse and Schneider, Chain Replication (OSDI 2004), section 3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

SLOT = 1 << 18
"""Bytes of a payload at most: one operation's place in a ring."""


@dataclass(frozen=True)
class Member:
    """A replica. ``address``: of its engine, ``unix:PATH`` or ``HOST:PORT``. ``domain``: what fails at once
    with it, such as its rack."""

    name: str
    address: str
    domain: str = ""


@dataclass(frozen=True)
class MemberState:
    """A member once it is fenced. ``fenced``: the highest epoch before this one; ``epoch`` and ``sequence``:
    of the last operation that it has; ``steady``: its engine has run since that epoch began, and failed at
    nothing; ``torn``: it was being copied to; ``size``: bytes of its region; ``room``: of its ring at most,
    0 where it needs none. One that does not answer has no figures."""

    name: str
    domain: str
    answers: bool = True
    fenced: int = 0
    epoch: int = 0
    sequence: int = 0
    steady: bool = False
    torn: bool = False
    size: int = 0
    room: int = 0


@dataclass(frozen=True)
class Observation:
    """A chain is to be formed for ``epoch`` by a coordinator in the domain ``coordinator``. ``least``:
    members that it must have; ``window``: operations that are wanted in flight."""

    epoch: int
    members: tuple[MemberState, ...]
    coordinator: str = ""
    least: int = 1
    window: int = 64


@dataclass(frozen=True)
class Decision:
    """``chain``: names from head to tail, empty where there can be none. ``source``: whose region counts;
    ``compare``: members whose regions are held against it, and what differs copied; ``sequence``: of the last
    operation that the chain begins with; ``dropped``: who does not answer."""

    epoch: int
    chain: tuple[str, ...]
    source: str = ""
    compare: tuple[str, ...] = ()
    sequence: int = 0
    window: int = 0
    dropped: tuple[str, ...] = ()
    reason: str = field(default="", compare=False)


def decide(observation: Observation) -> Decision:
    """Neighbours of other domains: an operation that has passed a member is in two domains."""
    return _formed(observation, by_domain)


def as_given(observation: Observation) -> Decision:
    """The order in which members were named, whatever they share."""
    return _formed(observation, lambda members, _: tuple(member.name for member in members))


POLICIES: Mapping[str, Callable[[Observation], Decision]] = {"domains": decide, "given": as_given}


def _formed(
    observation: Observation, order: Callable[[Sequence[MemberState], str], tuple[str, ...]]
) -> Decision:
    here = [member for member in observation.members if member.answers]
    dropped = tuple(member.name for member in observation.members if not member.answers)

    def none(why: str) -> Decision:
        return Decision(observation.epoch, (), dropped=dropped, reason=why)

    if len(here) < max(1, observation.least):
        return none(
            f"{len(here)} of {len(observation.members)} members answer,"
            f" {max(1, observation.least)} are needed"
        )
    if len({standing.size for standing in here}) > 1:
        return none(
            "regions differ in size: "
            + ", ".join(f"{standing.name} has {standing.size}" for standing in here)
        )
    whole = [standing for standing in here if not standing.torn]
    if not whole:
        return none("every member that answers was being copied to: none has a whole region")
    source = max(whole, key=lambda standing: (standing.epoch, standing.sequence, standing.steady))
    rooms = [standing.room // SLOT for standing in here if standing.room]
    return Decision(
        observation.epoch, order(here, observation.coordinator), source.name,
        tuple(standing.name for standing in here if standing is not source and not _same(standing, source)),
        source.sequence, max(1, min([observation.window, *rooms])), dropped,
        f"{source.name} has {source.sequence} operations, as many as anybody",
    )  # fmt: skip


def _same(standing: MemberState, source: MemberState) -> bool:
    """Whether both regions are known to be equal: both are new, or did the same without a break. The source
    is whole; one that was being copied to is not."""
    new = not any((standing.fenced, source.fenced, standing.epoch, source.epoch))
    position = (standing.epoch, standing.sequence) == (source.epoch, source.sequence)
    return position and not standing.torn and (new or (standing.steady and source.steady))


def by_domain(members: Sequence[MemberState], coordinator: str) -> tuple[str, ...]:
    """Always one of the domain that has most members left, but the last one's; the coordinator's own first:
    its member is reached without a wire, so that a payload leaves the coordinator's host once."""
    left = Counter(member.domain for member in members)
    rank = {domain: place for place, domain in enumerate(left)}
    chain: list[MemberState] = []
    while len(chain) < len(members):
        last = chain[-1].domain if chain else None
        if not chain and left[coordinator]:
            domain = coordinator
        else:
            domain = max(+left, key=lambda candidate: (candidate != last, left[candidate], -rank[candidate]))
        chain.append(next(member for member in members if member.domain == domain and member not in chain))
        left[domain] -= 1
    return tuple(standing.name for standing in chain)
