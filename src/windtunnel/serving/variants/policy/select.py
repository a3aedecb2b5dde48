"""Which variant answers a query, and on which host; and how many of those that wait go in one batch.

Order of ``infaas`` (INFaaS, section 4, and its code): what answered such queries lately, where it is loaded
and in no flagged state; then the loaded ones, the slowest that is in time first, since faster ones are for
those who need them; then what is soonest ready, where loading counts a second more than it takes, so that
small models do not look better than loaded ones. Unlike in INFaaS a replica that would be late for what
already waits is not in time. ``cheapest`` takes of the loaded ones the one that costs least an item; it loads
only where nothing that could answer is loaded, and what is then cheapest on the hardware that is soonest
ready: what is loaded fast does little with an accelerator and its memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

from windtunnel.serving.variants.model import CPU, Candidate, Held, Host, Query, Variant

NOT_LOADED = 1.0
"""Seconds that loading is charged beyond what it takes."""
LOOSE = 0.1
"""Seconds: who has more time than this is not answered by loading an accelerator that is faster."""
MARGIN = 0.8
"""Of the time that a profile leaves, what may be used up by waiting: more come meanwhile."""
BUSY = 0.8
"""Utilisation from which a host gets no new replica."""
SPARE = 1 << 30
"""Bytes that stay free on a host of `MUCH` memory."""
MUCH = 8 << 30


@dataclass(frozen=True, slots=True)
class Asked:
    """``candidates``: all that have the query's name. ``recent``: names that answered such queries, latest
    first. ``pinned``: the variant that somebody without variants would have deployed; only the baselines look
    at it. ``grows``: hosts may come."""

    query: Query
    candidates: tuple[Candidate, ...]
    hosts: tuple[Host, ...]
    recent: tuple[str, ...] = ()
    pinned: str = ""
    grows: bool = True


@dataclass(frozen=True, slots=True)
class Chosen:
    """``host``: where; "" while no host of that ``hardware`` has room (for ``owner``, where hosts are not
    shared). ``load``: a replica must be loaded there. ``need``: one more host would help."""

    variant: str
    host: str
    load: bool = False
    need: bool = False
    hardware: str = CPU
    owner: str = ""
    reason: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Refused:
    """No variant does what is asked."""

    reason: str


@dataclass(frozen=True, slots=True)
class Waiting:
    """Requests for a free replica, oldest first: items of each, and seconds until each is late. Of
    ``background`` jobs also which of the host's ``cores`` are used."""

    variant: Variant
    items: tuple[int, ...]
    slack: tuple[float, ...]
    background: bool = False
    used: int = 0
    cores: int = 1


@dataclass(frozen=True, slots=True)
class Batch:
    """So many of the requests, oldest first."""

    requests: int


def feasible(query: Query, variant: Variant) -> bool:
    """Whether the profile fulfils what is asked."""
    return (
        query.items <= variant.batch and variant.accuracy >= query.accuracy
        and variant.latency(query.items) <= query.latency
        and (query.cost == inf or variant.cost <= query.cost)
    )  # fmt: skip


def select(seen: Asked, *, own: bool = False, cheapest: bool = False) -> Chosen | Refused:
    """``own``: hosts are not shared between architectures. ``cheapest``: of the loaded ones the one that
    costs least an item, not the slowest."""
    query = seen.query
    fit = [one for one in seen.candidates if feasible(query, one.variant)]
    if not fit:
        return refusal(query, [one.variant for one in seen.candidates])
    if query.background:
        return _whenever(query, fit, seen, own)
    ready = {}
    for one in fit:
        least = one.variant.latency(query.items)
        bound = least + MARGIN * (query.latency - least)
        good = [
            held for held in one.held
            if held.state == "active" and held.answers(one.variant, query.items) <= bound
        ]  # fmt: skip
        if good:
            ready[one.variant.name] = (one.variant, good)
    if ready and cheapest:
        best = min(ready.values(), key=lambda one: (one[0].cost, one[0].latency(query.items)))
        return _at(best[0], _calmest(best[1]), "the cheapest loaded one that is in time")
    for name in seen.recent:
        if name in ready:
            return _at(ready[name][0], _calmest(ready[name][1]), "it answered such queries lately")
    if ready:
        latest = max(ready.values(), key=lambda one: (one[0].latency(query.items), -one[0].cost))
        return _at(latest[0], _calmest(latest[1]), "the slowest loaded one that is in time")
    return _soonest(seen, fit, own, cheapest)


def _soonest(seen: Asked, fit: list[Candidate], own: bool, cheapest: bool) -> Chosen:
    """Nothing is ready in time: the least seconds until the answer, loaded or not."""
    query = seen.query
    waits = cheapest and any(one.held for one in fit)
    ways: list[tuple[float, Variant, str, Held | None]] = []
    for one in fit:
        variant = one.variant
        if one.held:
            held = min(one.held, key=lambda held: held.answers(variant, query.items))
            ways.append((held.answers(variant, query.items), variant, held.host, held))
        elif not waits and (host := room(variant, seen.hosts, variant.architecture if own else "")):
            ways.append((variant.load + variant.latency(query.items) + NOT_LOADED, variant, host.name, None))
    if query.latency > LOOSE:
        ways = [
            way for way in ways if way[3] or way[1].hardware == CPU or way[1].latency() >= LOOSE
        ] or ways  # fmt: skip
    if not ways:
        return _nowhere(seen, fit, own, True)
    seconds, variant, place, found = min(ways, key=lambda way: way[0])
    if found is not None:
        late = found.state in ("overloaded", "interfered") or seconds > query.latency
        return _at(variant, found, "loaded, if not in time" if late else "soonest ready", need=late, own=own)
    if cheapest:
        same = [way for way in ways if way[1].hardware == variant.hardware]
        _, variant, place, _ = min(same, key=lambda way: way[1].cost)
    owner = variant.architecture if own else ""
    return Chosen(variant.name, place, True, False, variant.hardware, owner, "soonest ready, once loaded")


def _whenever(query: Query, fit: list[Candidate], seen: Asked, own: bool) -> Chosen:
    """Of a background job: where it is soonest done by what is loaded; else it loads what costs least."""
    held = [
        (one.variant.latency(query.items) + held.wait + held.background / (held.replicas * one.variant.rate),
         one.variant, held)
        for one in fit for held in one.held
    ]  # fmt: skip
    if held:
        _, variant, soonest = min(held, key=lambda one: one[0])
        return _at(variant, soonest, "soonest done")
    there = {one.hardware for one in seen.hosts}
    return _nowhere(seen, fit, own, not any(one.variant.hardware in there for one in fit))


def _nowhere(seen: Asked, fit: list[Candidate], own: bool, need: bool) -> Chosen:
    """The cheapest, where a host has room for it; else it waits for one, or for the load to go down."""
    ordered = sorted((one.variant for one in fit), key=lambda one: (one.price, one.latency()))
    most = 1.0 if need and not seen.grows else BUSY
    for one in ordered:
        owner = one.architecture if own else ""
        if host := room(one, seen.hosts, owner, most):
            return Chosen(one.name, host.name, True, False, one.hardware, owner, "the cheapest is loaded")
    owner = ordered[0].architecture if own else ""
    words = f"no {ordered[0].hardware} host has room"
    return Chosen(ordered[0].name, "", True, need, ordered[0].hardware, owner, words)


def room(variant: Variant, hosts: Sequence[Host], owner: str = "", busy: float = BUSY) -> Host | None:
    """The least busy host that can load one more replica, of those that are not busier."""
    fitting = [
        one for one in hosts
        if one.hardware == variant.hardware and one.owner == owner and one.utilisation <= busy
        and variant.threads <= one.cores
        and variant.memory + (SPARE if one.free > MUCH else 0) <= one.free
    ]  # fmt: skip
    return min(fitting, key=lambda one: (one.utilisation, one.name), default=None)


def refusal(query: Query, variants: Sequence[Variant]) -> Refused:
    """In one sentence what is the nearest to what is asked."""
    what = query.name
    wide = [one for one in variants if query.items <= one.batch]
    if not wide:
        most = max((one.batch for one in variants), default=0)
        return Refused(f"{what}: {query.items} items at once, {most} are the most")
    told = [f"{what}: no variant does accuracy {query.accuracy:g} within {query.latency:g} s"]
    if query.cost < inf:
        told[0] += f" for {query.cost:g} an item"
    if accurate := [one.latency(query.items) for one in wide if one.accuracy >= query.accuracy]:
        told.append(f"as accurate ones take {min(accurate):.4g} s")
    else:
        told.append(f"the most accurate has {max(one.accuracy for one in wide):.4g}")
    if quick := [one.accuracy for one in wide if one.latency(query.items) <= query.latency]:
        told.append(f"as fast ones have accuracy {max(quick):.4g}")
    return Refused("; ".join(told))


def gather(seen: Waiting) -> Batch:
    """As many as make nobody late who would not be late alone, one at least; of a background job none where
    they would take cores from others."""
    if seen.background and seen.used and seen.used + seen.variant.threads > seen.cores:
        return Batch(0)
    total, tightest, most = 0, inf, 1
    for count, (items, slack) in enumerate(zip(seen.items, seen.slack, strict=True), 1):
        total += items
        if total > seen.variant.batch and count > 1:
            break
        if slack >= seen.variant.latency(items):  # who is late in any case holds nobody back
            tightest = min(tightest, slack)
        if seen.variant.latency(total) <= tightest:
            most = count
    return Batch(most)


def wait_of(variant: Variant, queued: int, ready: int, idle: int, loading: float) -> float:
    """Seconds until a request that comes now begins: behind ``queued`` items for ``ready`` replicas, of which
    ``idle`` do nothing; ``loading``: seconds until the first is ready where none is."""
    if not ready:
        return loading + queued / variant.rate
    return queued / (ready * variant.rate) + (0.0 if idle else variant.latency(variant.batch) / 2)


def _at(variant: Variant, held: Held, words: str, *, need: bool = False, own: bool = False) -> Chosen:
    owner = variant.architecture if own else ""
    return Chosen(variant.name, held.host, False, need, variant.hardware, owner, words)


def _calmest(held: list[Held]) -> Held:
    return min(held, key=lambda one: (one.wait, one.rate / one.replicas, one.host))
