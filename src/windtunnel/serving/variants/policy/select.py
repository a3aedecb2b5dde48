"""Which variant answers a query, and on which host; and how many of those that wait go in one batch.

Order of ``infaas`` (INFaaS, section 4, and its code): what answered such queries lately, where it is loaded
and in no flagged state; then the loaded ones, the slowest that is in time first, since faster ones are for
those who need them; then what is soonest ready, where loading counts a second more than it takes, so that
small models do not look better than loaded ones. Unlike in INFaaS a replica that would be late for what
already waits is not in time. ``cheapest`` takes of the loaded ones the one that costs least an item; it loads
only where nothing that could answer is loaded, or loading is in time where what is loaded is not, and what is
then cheapest on the hardware that is soonest ready: what is loaded fast does little with an accelerator and
its memory.

All policies shed alike: who would be in time nowhere is refused when it comes, or when that turns out, before
it costs work. So who is answered under overload is answered in time. The others count as asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import inf

from windtunnel.serving.variants.model import CPU, HostReplicas, Query, ReplicaHost, Variant, VariantCandidate

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
QUEUE = 1000
"""Requests without a latency that may wait for a name's variants; more are refused."""


@dataclass(frozen=True, slots=True)
class VariantQuery:
    """``candidates``: all that have the query's name. ``recent``: names that answered such queries, latest
    first. ``pinned``: the variant that somebody without variants would have deployed; only the baselines look
    at it. ``grows``: hosts may come. ``waiting``: requests that wait for the candidates or for room;
    ``since``: seconds since this one came."""

    query: Query
    candidates: tuple[VariantCandidate, ...]
    hosts: tuple[ReplicaHost, ...]
    recent: tuple[str, ...] = ()
    pinned: str = ""
    grows: bool = True
    waiting: int = 0
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class Chosen:
    """``host``: where; "" while no host of that ``hardware`` has room (for ``owner``, where hosts are not
    shared). ``load``: a replica must be loaded there. ``need``: one more host would help. ``shed``: 0, or
    seconds after which it may ask again: it is refused, though what it asked for is loaded and counted."""

    variant: str
    host: str
    load: bool = False
    need: bool = False
    hardware: str = CPU
    owner: str = ""
    reason: str = field(default="", compare=False)
    shed: float = 0.0


@dataclass(frozen=True, slots=True)
class QueryRefused:
    """No variant does what is asked."""

    reason: str


@dataclass(frozen=True, slots=True)
class Waiting:
    """Requests for a replica (``busy``: none is free yet), oldest first: items of each, and seconds until it
    is late; ``slow``: as of `HostReplicas`. Of ``background`` jobs also which of the host's ``cores`` are
    used."""

    variant: Variant
    items: tuple[int, ...]
    slack: tuple[float, ...]
    background: bool = False
    used: int = 0
    cores: int = 1
    slow: float = 1.0
    busy: bool = False


@dataclass(frozen=True, slots=True)
class Batch:
    """``shed``: places of the requests that are refused; so many of the others, oldest first."""

    requests: int
    shed: tuple[int, ...] = ()


def feasible(query: Query, variant: Variant) -> bool:
    """Whether the profile fulfils what is asked."""
    return (
        query.items <= variant.batch and variant.accuracy >= query.accuracy
        and variant.latency(query.items) <= query.latency
        and (query.cost == inf or variant.cost <= query.cost)
    )  # fmt: skip


def select(request: VariantQuery, *, own: bool = False, cheapest: bool = False) -> Chosen | QueryRefused:
    """``own``: hosts are not shared between architectures. ``cheapest``: of the loaded ones the one that
    costs least an item, not the slowest."""
    query = request.query
    fit = [candidate for candidate in request.candidates if feasible(query, candidate.variant)]
    if not fit:
        return refusal(query, [candidate.variant for candidate in request.candidates])
    if query.background:
        return _whenever(query, fit, request, own)
    choice = _online(request, fit, own, cheapest)
    chosen = next(candidate for candidate in fit if candidate.variant.name == choice.variant)
    waits = [
        replicas.answers(chosen.variant, query.items)
        for replicas in chosen.replicas
        if replicas.host == choice.host
    ]
    seconds = min(waits, default=chosen.variant.load + chosen.variant.latency(query.items))
    left = query.latency - request.since
    if seconds <= left < inf or (left == inf and request.waiting < QUEUE):
        return choice
    why = f"{choice.variant} would take {seconds:.3g} s" if left < inf else f"{request.waiting} requests wait"
    after = max(1.0, seconds - left if left < inf else seconds)
    return replace(choice, shed=after, reason=f"{query.name}: shed, since {why}; ask again in {after:.0f} s")


def _online(request: VariantQuery, fit: list[VariantCandidate], own: bool, cheapest: bool) -> Chosen:
    query, ready = request.query, {}
    for candidate in fit:
        least = candidate.variant.latency(query.items)
        bound = least + MARGIN * (query.latency - least)
        good = [
            replicas for replicas in candidate.replicas
            if replicas.state == "active" and replicas.answers(candidate.variant, query.items) <= bound
        ]  # fmt: skip
        if good:
            ready[candidate.variant.name] = (candidate.variant, good)
    if ready and cheapest:
        best = min(ready.values(), key=lambda pair: (pair[0].cost, pair[0].latency(query.items)))
        return _at(best[0], _calmest(best[1]), "the cheapest loaded one that is in time")
    for name in request.recent:
        if name in ready:
            return _at(ready[name][0], _calmest(ready[name][1]), "it answered such queries lately")
    if ready:
        latest = max(ready.values(), key=lambda pair: (pair[0].latency(query.items), -pair[0].cost))
        return _at(latest[0], _calmest(latest[1]), "the slowest loaded one that is in time")
    return _soonest(request, fit, own, cheapest)


def _soonest(request: VariantQuery, fit: list[VariantCandidate], own: bool, cheapest: bool) -> Chosen:
    """Nothing is ready in time: the least seconds until the answer, loaded or not."""
    query = request.query
    waits = cheapest and any(possible.replicas for possible in fit)
    ways: list[tuple[float, Variant, str, HostReplicas | None]] = []
    for candidate in fit:
        variant = candidate.variant
        if candidate.replicas:
            replicas = min(candidate.replicas, key=lambda replicas: replicas.answers(variant, query.items))
            ways.append((replicas.answers(variant, query.items), variant, replicas.host, replicas))
            continue
        seconds = variant.load + variant.latency(query.items) + NOT_LOADED
        host = room(variant, request.hosts, variant.architecture if own else "")
        if host and (not waits or seconds <= query.latency < inf):
            ways.append((seconds, variant, host.name, None))
    if query.latency > LOOSE:
        ways = [
            way for way in ways if way[3] or way[1].hardware == CPU or way[1].latency() >= LOOSE
        ] or ways  # fmt: skip
    if not ways:
        return _nowhere(request, fit, own, True)
    seconds, variant, place, replica = min(ways, key=lambda way: way[0])
    if replica is not None:
        late = replica.state in ("overloaded", "interfered") or seconds > query.latency
        return _at(
            variant, replica, "loaded, if not in time" if late else "soonest ready", need=late, own=own
        )
    if cheapest:
        bound = query.latency if seconds <= query.latency else inf
        same = [way for way in ways if way[1].hardware == variant.hardware and way[0] <= bound]
        _, variant, place, _ = min(same, key=lambda way: way[1].cost)
    owner = variant.architecture if own else ""
    return Chosen(variant.name, place, True, False, variant.hardware, owner, "soonest ready, once loaded")


def _whenever(query: Query, fit: list[VariantCandidate], request: VariantQuery, own: bool) -> Chosen:
    """Of a background job: where it is soonest done by what is loaded; else it loads what costs least."""
    replicas = [
        (
            candidate.variant.latency(query.items)
            + replicas.wait
            + replicas.background / (replicas.replicas * candidate.variant.rate),
            candidate.variant,
            replicas,
        )
        for candidate in fit
        for replicas in candidate.replicas
    ]
    if replicas:
        _, variant, soonest = min(replicas, key=lambda entry: entry[0])
        return _at(variant, soonest, "soonest done")
    there = {host.hardware for host in request.hosts}
    return _nowhere(request, fit, own, not any(candidate.variant.hardware in there for candidate in fit))


def _nowhere(request: VariantQuery, fit: list[VariantCandidate], own: bool, need: bool) -> Chosen:
    """The cheapest, where a host has room for it; else it waits for one, or for the load to go down."""
    ordered = sorted(
        (candidate.variant for candidate in fit), key=lambda entry: (entry.price, entry.latency())
    )
    most = 1.0 if need and not request.grows else BUSY
    for variant in ordered:
        owner = variant.architecture if own else ""
        if host := room(variant, request.hosts, owner, most):
            return Chosen(
                variant.name, host.name, True, False, variant.hardware, owner, "the cheapest is loaded"
            )
    owner = ordered[0].architecture if own else ""
    words = f"no {ordered[0].hardware} host has room"
    return Chosen(ordered[0].name, "", True, need, ordered[0].hardware, owner, words)


def room(
    variant: Variant, hosts: Sequence[ReplicaHost], owner: str = "", busy: float = BUSY
) -> ReplicaHost | None:
    """The least busy host that can load one more replica, of those that are not busier."""
    fitting = [
        host for host in hosts
        if host.hardware == variant.hardware and host.owner == owner and host.utilisation <= busy
        and variant.threads <= host.cores
        and variant.memory + (SPARE if host.free > MUCH else 0) <= host.free
    ]  # fmt: skip
    return min(fitting, key=lambda host: (host.utilisation, host.name), default=None)


def refusal(query: Query, variants: Sequence[Variant]) -> QueryRefused:
    """In one sentence what is the nearest to what is asked."""
    name = query.name
    wide = [variant for variant in variants if query.items <= variant.batch]
    if not wide:
        most = max((variant.batch for variant in variants), default=0)
        return QueryRefused(f"{name}: {query.items} items at once, {most} are the most")
    reasons = [f"{name}: no variant does accuracy {query.accuracy:g} within {query.latency:g} s"]
    if query.cost < inf:
        reasons[0] += f" for {query.cost:g} an item"
    if accurate := [variant.latency(query.items) for variant in wide if variant.accuracy >= query.accuracy]:
        reasons.append(f"as accurate ones take {min(accurate):.4g} s")
    else:
        reasons.append(f"the most accurate has {max(variant.accuracy for variant in wide):.4g}")
    if quick := [variant.accuracy for variant in wide if variant.latency(query.items) <= query.latency]:
        reasons.append(f"as fast ones have accuracy {max(quick):.4g}")
    return QueryRefused("; ".join(reasons))


def gather(waiting: Waiting) -> Batch:
    """Who would be late even alone is shed; as many of the others as make none of them late, oldest first.
    Where that would make those late who could have come along, since all have little time left, those who
    have least are shed, too, and more are answered. Of a background job none where they would take cores from
    others."""
    variant, slack = waiting.variant, waiting.slack
    if waiting.background and waiting.used and waiting.used + variant.threads > waiting.cores:
        return Batch(0)

    def takes(some: Sequence[int]) -> float:
        return variant.latency(sum(waiting.items[at] for at in some)) * waiting.slow

    def most(some: Sequence[int]) -> Sequence[int]:
        parts = (some[:count] for count in range(len(some), 0, -1))
        return next((part for part in parts if min(slack[at] for at in part) >= takes(part)), ())

    lost = tuple(at for at in range(len(slack)) if slack[at] < takes([at]))
    if waiting.busy:
        return Batch(0, lost)
    left = [at for at in range(len(slack)) if at not in lost]
    sums = accumulate(waiting.items[at] for at in left)
    fit = left[: max(1, sum(total <= variant.batch for total in sums))]
    first, by_slack = most(fit), most(sorted(fit, key=lambda at: -slack[at]))
    later = fit[len(first) :]
    if len(by_slack) <= len(first) or all(slack[at] >= takes(first) + takes(later) for at in later):
        return Batch(len(first), lost)
    return Batch(len(by_slack), (*lost, *(at for at in fit if at not in by_slack)))


def wait_of(variant: Variant, queued: int, free: Sequence[float], slow: float) -> float:
    """Seconds until a request that comes now begins, behind ``queued`` items in full batches; ``free``:
    seconds until each replica is, the first first."""
    rounds, place = divmod(queued // variant.batch, len(free))
    return free[place] + rounds * variant.latency(variant.batch) * slow


def _at(
    variant: Variant, replicas: HostReplicas, words: str, *, need: bool = False, own: bool = False
) -> Chosen:
    owner = variant.architecture if own else ""
    return Chosen(variant.name, replicas.host, False, need, variant.hardware, owner, words)


def _calmest(replicas: list[HostReplicas]) -> HostReplicas:
    return min(
        replicas, key=lambda replicas: (replicas.wait, replicas.rate / replicas.replicas, replicas.host)
    )
