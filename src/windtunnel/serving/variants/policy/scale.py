"""In which state a variant is on a host, how many replicas of which variants there are, and how many hosts.

INFaaS's heuristics and constants (section 4.3 and its published code, stanford-mast/INFaaS, MIT): a replica
more where the load is beyond what the replicas do, or another variant that does it all, whichever is sooner
loaded; one replica less, or a cheaper variant, only after the load has asked for that some seconds long. The
code folds *overloaded* (asked for more than it can do: load more) and *interfered* (slow though it is not:
something else is on the host) into one flag; here they are two, since what helps differs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from windtunnel.serving.variants.model import CPU, ReplicaHost, State, Variant
from windtunnel.serving.variants.policy.select import BUSY, MUCH, SPARE, room

FULL = 0.95
"""Of what CPU replicas do by their profile, that they are trusted to do."""
VOTES = {CPU: 10}
VOTES_ELSE = 20
"""Seconds in a row that must ask for less before there is less."""
IDLE = 300
"""The same, for a replica that is the last of its variant, unless fewer than `TIGHT` bytes are free."""
TIGHT = 2 << 30
QUIET = 0.05
"""Items a second that count as none: an average does not become 0."""
BEYOND = 1000.0
"""What a replica that there is no room for weighs against one that there is room for."""
WORTH = 1.5
PAUSE = 15
"""Rounds of hosts (of two seconds) after one, and of low load before a host goes."""
LOW = {CPU: 0.30}
LOW_ELSE = 0.08


LEGAL: dict[State, tuple[State, ...]] = {
    "inactive": ("active",),
    "active": ("overloaded", "interfered", "inactive"),
    "overloaded": ("active", "inactive"),
    "interfered": ("active", "overloaded", "inactive"),
}


@dataclass(frozen=True, slots=True)
class FlagBounds:
    """Flagged beyond: ``latency`` times the profile's while more is asked than ``rate`` times what one batch
    after another now makes, ``queue`` seconds of work; no more flagged below ``leave`` times the profile's.
    INFaaS compares the rate with what the profile makes: what something else slows down to a tenth is then
    never asked for enough."""

    latency: float
    rate: float
    queue: float
    leave: float


def bounds(variant: Variant, replicas: int) -> FlagBounds:
    """Those of the hardware; a replica that is alone on a CPU is given more time."""
    if variant.hardware == CPU:
        return FlagBounds(4.0, 1.0, 1.1, 1.5) if replicas == 1 else FlagBounds(2.5, 0.5, 0.8, 1.5)
    short = variant.latency() < 0.010
    return FlagBounds(min(5.0, 0.015 / variant.latency()) if short else 1.5, 0.3, 0.8, 1.25)


@dataclass(frozen=True, slots=True)
class Measured:
    """A second of a variant on a host. ``latency``: mean seconds of its batches, of ``items`` each;
    ``rate``: items a second that came; ``outstanding``: items that wait or run; ``stuck``: batches
    under way for longer than the bound."""

    variant: Variant
    state: State
    replicas: int
    rate: float = 0.0
    latency: float = 0.0
    items: float = 1.0
    outstanding: int = 0
    stuck: int = 0


@dataclass(frozen=True, slots=True)
class Now:
    """The state from now on."""

    state: State
    reason: str = field(default="", compare=False)


def state_of(measured: Measured) -> Now:
    """By the bounds; one who leaves a flag is active for a second before it may get another."""
    variant, was = measured.variant, measured.state
    if measured.replicas == 0:
        return Now("inactive", "no replica is loaded")
    if was == "inactive":
        return Now("active", "a replica is loaded")
    bound, single = bounds(variant, measured.replicas), 1.0 / variant.latency()
    queue = measured.outstanding / (bound.queue * measured.replicas * single)
    slow = measured.latency / (variant.slope * measured.items + variant.intercept)
    if queue > 1.0:
        return Now("overloaded", f"{measured.outstanding} items wait for {measured.replicas} replicas")
    if was == "overloaded":
        return Now("active", "the queue is short again")
    if was == "interfered":
        over = slow < bound.leave
        return Now("active" if over else "interfered", f"batches take {slow:.2g} of their profile")
    offered = measured.rate * measured.latency / measured.items
    if measured.stuck >= measured.replicas or (slow > bound.latency and offered > bound.rate):
        return Now("interfered", f"batches take {slow:.2g} of their profile, and few wait")
    return Now("active", "within its profile")


@dataclass(frozen=True, slots=True)
class Running:
    """A variant on the host: replicas (those that load, too), items a second that came; ``late``: those among
    them that were sent here since nothing was ready in time, or all that wait behind replicas that hang;
    ``latency`` and ``accuracy``: the hardest that its queries asked for; ``votes``: seconds in a row that
    asked for less."""

    variant: Variant
    replicas: int
    rate: float
    late: int = 0
    state: State = "active"
    latency: float = math.inf
    accuracy: float = 0.0
    votes: int = 0


@dataclass(frozen=True, slots=True)
class Load:
    """One architecture on one host. ``others``: its variants for that hardware that are not loaded there;
    ``elsewhere``: the other hosts that replicas may be loaded on."""

    host: ReplicaHost
    running: tuple[Running, ...]
    others: tuple[Variant, ...] = ()
    elsewhere: tuple[ReplicaHost, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplicaChange:
    """So many replicas more or fewer, on the host that was looked at or on another."""

    variant: str
    replicas: int
    host: str = ""


@dataclass(frozen=True, slots=True)
class Scaling:
    """``votes``: of the running ones, in their order. ``need``: another host would help."""

    changes: tuple[ReplicaChange, ...]
    votes: tuple[int, ...]
    need: bool = False
    reason: str = field(default="", compare=False)


def scale(load: Load, *, upgrade: bool = True) -> Scaling:
    """``upgrade``: another variant may take over."""
    none = tuple(0 for _ in load.running)
    # who comes late though the mean rate is not too high came in a burst: that is lacking, too
    lack = [max(0.0, group.rate - _does(group.variant, group.replicas), group.late) for group in load.running]
    if any(lack):
        more = [
            math.ceil(missing / group.variant.rate) for group, missing in zip(load.running, lack, strict=True)
        ]
        replicate, changes = _replicating(load, more)
        other = _upgrade(load, lack) if upgrade else None
        if other is not None and replicate > WORTH * other.load:
            return Scaling((ReplicaChange(other.name, 1),), none, False, f"{other.name} takes over")
        there = _elsewhere(load, more, changes) if replicate >= BEYOND else ()
        short = replicate >= BEYOND and not there
        return Scaling(changes + there, none, short, "as many replicas as the load asks for")
    votes, changed = [], []
    for running in load.running:
        fewer = (
            running.rate <= max(QUIET, _does(running.variant, running.replicas - 1))
            and running.state == "active"
        )
        smaller = (
            _downgrade(running, load) if upgrade and running.replicas == 1 and running.rate > 0 else None
        )
        count = running.votes + 1 if fewer or smaller is not None else 0
        enough = VOTES.get(running.variant.hardware, VOTES_ELSE)
        if fewer and count >= (enough if running.replicas > 1 or load.host.free < TIGHT else IDLE):
            changed.append(ReplicaChange(running.variant.name, -1))
            count = 0
        elif smaller is not None and not fewer and count >= enough:
            loaded = any(other.variant.name == smaller.name for other in load.running)
            changed += [] if loaded else [ReplicaChange(smaller.name, 1)]
            changed.append(ReplicaChange(running.variant.name, -1))
            count = 0
        votes.append(count)
    return Scaling(tuple(changed), tuple(votes), False, "less is enough" if changed else "as it is")


def _does(variant: Variant, replicas: int) -> float:
    return replicas * variant.rate * (FULL if variant.hardware == CPU else 1.0)


def _replicating(load: Load, more: list[int]) -> tuple[float, tuple[ReplicaChange, ...]]:
    """Seconds of loading so many replicas (those beyond the host's room weigh more), and those that fit."""
    free = load.host.free - (SPARE if load.host.free > MUCH else 0) if load.host.utilisation <= BUSY else 0
    cost, changes = 0.0, []
    for running, count in zip(load.running, more, strict=True):
        cap = max(1, load.host.cores // running.variant.threads) if running.variant.hardware == CPU else 1
        fitting = max(0, min(count, cap - running.replicas, free // max(1, running.variant.memory)))
        free -= fitting * running.variant.memory
        cost += running.variant.load * (fitting + BEYOND * (count - fitting))
        changes += [ReplicaChange(running.variant.name, fitting)] if fitting else []
    return cost, tuple(changes)


def _elsewhere(load: Load, more: list[int], here: tuple[ReplicaChange, ...]) -> tuple[ReplicaChange, ...]:
    """One replica on the least busy other host, of each variant that needs more than fit here."""
    fitting = {change.variant: change.replicas for change in here}
    changes = []
    for running, count in zip(load.running, more, strict=True):
        other = room(running.variant, load.elsewhere, load.host.owner)
        if other is not None and count > fitting.get(running.variant.name, 0):
            changes.append(ReplicaChange(running.variant.name, 1, other.name))
    return tuple(changes)


def _upgrade(load: Load, lack: list[float]) -> Variant | None:
    """What is not loaded, fulfils all that is asked, fits, and does what the others lack: the cheapest."""
    behind = [running for running, missing in zip(load.running, lack, strict=True) if missing]
    hardest, needed = min(running.latency for running in behind), sum(lack)
    accuracy = max(running.accuracy for running in behind)
    fit = [
        variant for variant in load.others
        if variant.latency() <= hardest and variant.accuracy >= accuracy and _does(variant, 1) >= needed
        and variant.memory <= load.host.free and variant.rate > max(other.variant.rate for other in behind)
    ]  # fmt: skip
    return min(fit, key=lambda variant: (variant.price, variant.load, variant.name), default=None)


def _downgrade(current: Running, load: Load) -> Variant | None:
    """A cheaper variant for the same hardware that would do what this one does."""
    fit = [
        other for other in (*load.others, *(running.variant for running in load.running))
        if other.price < current.variant.price and other.latency() <= current.latency
        and other.accuracy >= current.accuracy and current.rate <= 0.8 * _does(other, 1)
        and other.memory <= load.host.free
    ]  # fmt: skip
    return min(fit, key=lambda other: (other.price, other.name), default=None)


@dataclass(frozen=True, slots=True)
class Fleet:
    """Hosts of one ``hardware`` (and ``owner``), of which ``first`` were there at first. ``need``: whether
    one more was asked for since the last round; ``since``: rounds since the last change; ``low``: rounds in a
    row of low load; ``starting``: hosts that are on their way."""

    hardware: str
    hosts: tuple[ReplicaHost, ...]
    first: int
    need: bool
    since: int
    low: int
    starting: int = 0
    owner: str = ""


@dataclass(frozen=True, slots=True)
class Resize:
    """``add``: hosts; ``remove``: one by name, or ""."""

    add: int = 0
    remove: str = ""
    low: int = 0
    reason: str = field(default="", compare=False)


def resize(fleet: Fleet, *, last: int = PAUSE) -> Resize:
    """A host more where one is needed or even the least busy is too busy; one less after long low load, the
    last of its hardware after so many rounds of it."""
    least = min((host.utilisation for host in fleet.hosts), default=1.0)
    mean = sum(host.utilisation for host in fleet.hosts) / len(fleet.hosts) if fleet.hosts else 1.0
    low = fleet.low + 1 if not fleet.need and mean <= LOW.get(fleet.hardware, LOW_ELSE) else 0
    if fleet.since < PAUSE and fleet.hosts:
        return Resize(low=low, reason="hosts changed a short time ago")
    if not fleet.starting and (least > BUSY or fleet.need):
        return Resize(1, reason="one is needed" if fleet.need else "even the least busy is too busy")
    if low >= (PAUSE if len(fleet.hosts) > 1 else last) and len(fleet.hosts) > fleet.first:
        idle = min(fleet.hosts, key=lambda host: (host.utilisation, host.name))
        return Resize(remove=idle.name, reason=f"{mean:.0%} of {len(fleet.hosts)} hosts is used")
    return Resize(low=low, reason="as it is")
