"""Fluid flows that share links: who gets which rate, and when each is through.

A flow has a size in bytes and loads its links in fixed proportions: at rate r it puts ``times * r`` on a
link. With ``times`` 1 along a route it is a transfer, along a tree a multicast, and a whole collective is one
flow as well, with the bytes that each link carries for one byte of it. A network is any set of directed
links; a cap over several flows (an entity's share) is one more link that they all load. A flow without links
and with a cap is a timer, or a processor's work::

    world = World([10e9, 10e9, 25e9])
    one = world.start(1e9, [0, 2])
    two = world.start(1e9, [1, 2], weight=2.0, cap=8e9)
    while done := world.advance():
        print(world.now, done)

Rates are weighted max-min fair (Bertsekas and Gallager, Data Networks, 6.5.2): all flows of the first
priority rise together, each by its weight; where a link is full, or a flow at its cap, what is there stays at
that *level* (rate over weight), the others rise on. The next priority rises in what is left, and so on. What
holds a flow back is its *bottleneck*, a full link on which no flow has a higher level.

When flows come, go or change, the levels below the first change stay, and those of all flows that no change
reaches. So a solve goes through the levels from below as the filling would, but only at links that are
*touched*: one that was full at a level and is not so any more lets its flows rise from there (they touch
their links), one that is full sooner than before holds back the flows that were higher (so do they). It looks
at a link no sooner than anything may happen there. In the first solve every flow rises from nothing. After
each, all links of changed flows are added up; if one is overloaded, all is solved anew.

Fluid means: no packets, queues, losses or slow starts. Units are SI. The same calls give the same floats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from math import inf
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.base.compiled import jit, jit_inline
from windtunnel.engines.heap import KEY, Longs, Records, put, take

TIE = 1e-11  # levels this near to each other (relative) are one: sums of the same figures differ by less
SAME_TIME = 1e-14  # ends this near to each other (relative to the time) are one
CHECK = 1e-8  # a link may be loaded above its capacity by this part of it, by rounding
_OUT, _RISING, _SETTLED = 0, 1, 2  # mark of a flow in a solve: not reached, rising, at its new level
_FREE, _WAITING, _ACTIVE = 0, 1, 2  # state of a flow's slot
_OWN_CAP, _NOTHING, _LAST = -1, -2, 2**31 - 1  # bottlenecks that are no links; after all priorities

FLOW = np.dtype(
    [("level", "f8"), ("weight", "f8"), ("priority", "i8"), ("bottleneck", "i8"), ("mark", "i8"),
     ("state", "i8"), ("begin", "i8"), ("end", "i8"), ("cap", "f8"), ("rate", "f8"), ("sent", "f8"),
     ("since", "f8"), ("size", "f8"), ("number", "i8")]
)  # fmt: skip
LINK = np.dtype(
    [("capacity", "f8"), ("level", "f8"), ("priority", "i8"), ("first", "i8"), ("free", "f8"),
     ("used", "f8"), ("carried", "f8"), ("checked", "i8")]
)  # fmt: skip
"""``priority`` and ``level``: where it is full, with flows that it holds back; `_LAST` where there are none.
``used``: bytes/s of flows on it that are at a level for another reason; ``free``: weight of the others."""
LOAD = np.dtype([("flow", "i8"), ("link", "i8"), ("next", "i8"), ("previous", "i8"), ("times", "f8")])
"""One flow on one link. The loads of a flow lie side by side, those of a link are a list."""
Floats = NDArray[np.float64]


class _State(NamedTuple):
    """All that the kernels work on. Heaps of items with their keys: ``turns``, what the filling looks at next
    (twice a link, or twice a flow's slot and one: its cap), and ``ends``, flows by when they end or, if they
    wait, begin. ``reached``: slots of flows with a mark. ``counts``: lengths of the three, solves, flows that
    these have reached, flows rising now."""

    flows: Records
    links: Records
    loads: Records
    turns: Longs
    turn_keys: Records
    ends: Longs
    end_keys: Records
    reached: Longs
    counts: Longs


_TURNS, _ENDS, _REACHED, _SOLVES, _MOVED, _UP = range(6)


@jit_inline
def _turn(s: _State, item: int, priority: int, level: float) -> None:
    """The filling looks at ``item`` there, unless it does so before."""
    key = s.turn_keys[item]
    if key.place < 0 or priority < key.priority or (priority == key.priority and level < key.key):
        key.priority = priority
        s.counts[_TURNS] = put(s.turns, s.turn_keys, s.counts[_TURNS], item, level)


@jit_inline
def _full_at(s: _State, number: int) -> tuple[int, float]:
    """Priority and level at which a link is full when flows that other links hold back stay at their levels,
    and those rise that it held back itself; `_LAST` where it is never."""
    link = s.links[number]
    left = link.capacity
    past, priority, following = -_LAST, _LAST, _LAST  # what is done, what is added up now, and then
    while True:
        free, used, highest = 0.0, 0.0, 0.0
        at = link.first
        while at >= 0:
            load = s.loads[at]
            at = load.next
            flow = s.flows[load.flow]
            own = flow.priority
            if own <= past or own > priority:
                if priority < own < following:
                    following = own
                continue
            if own < priority:
                free, used, highest = 0.0, 0.0, 0.0
                following, priority = priority, own
            share = load.times * flow.weight
            if flow.mark == _RISING or flow.bottleneck == number:
                free += share
            else:
                used += share * flow.level
                highest = max(highest, flow.level)
        if priority == _LAST:
            return _LAST, 0.0
        if free > 0.0 or used > left * (1.0 + TIE):
            break
        left -= used
        if left <= TIE * link.capacity:
            left = 0.0
        past, priority, following = priority, following, _LAST
    if free > 0.0 and left - used >= free * highest:
        return priority, (left - used) / free
    # Some are held at higher levels than this: Newton from below on a sum of minima, exact in a few steps.
    level = -1.0
    while True:
        free, used = 0.0, 0.0
        at = link.first
        while at >= 0:
            load = s.loads[at]
            at = load.next
            flow = s.flows[load.flow]
            if flow.priority == priority:
                share = load.times * flow.weight
                if flow.mark == _RISING or flow.bottleneck == number or flow.level > level:
                    free += share
                else:
                    used += share * flow.level
        higher = max(0.0, left - used) / free if free > 0.0 else level
        if higher <= level:
            return priority, level
        level = higher


@jit_inline
def _move(s: _State, slot: int, mark: int, level: float, bottleneck: int) -> None:
    """Give a flow another mark, level and bottleneck, and keep the sums of its links right."""
    flow = s.flows[slot]
    if flow.mark == _OUT:
        s.reached[s.counts[_REACHED]] = slot
        s.counts[_REACHED] += 1
    for at in range(flow.begin, flow.end):
        load = s.loads[at]
        link = s.links[load.link]
        share = load.times * flow.weight
        if flow.mark == _RISING or flow.bottleneck == load.link:
            link.free -= share
        else:
            link.used -= share * flow.level
        if mark == _RISING or bottleneck == load.link:
            link.free += share
        else:
            link.used += share * level
    s.counts[_UP] += (mark == _RISING) - (flow.mark == _RISING)
    flow.mark, flow.level, flow.bottleneck = mark, level, bottleneck


@jit_inline
def _soonest(link: Any, now_priority: int) -> tuple[int, float]:
    """A bound, from sums: nothing happens at a link sooner. All that are held elsewhere might lie below."""
    priority, level = _LAST, 0.0
    if link.free > 0.0 or link.used > link.capacity * (1.0 + TIE):
        priority = max(now_priority, 0)
        level = max(0.0, link.capacity - link.used) / link.free if link.free > 0.0 else 0.0
    if link.priority < priority or (link.priority == priority and link.level < level):
        return link.priority, link.level
    return priority, level


@jit_inline
def _rise(s: _State, slot: int, priority: int) -> None:
    """Let a flow rise, when the filling has come to ``priority``, and look at its links in time."""
    _move(s, slot, _RISING, np.inf, _NOTHING)
    flow = s.flows[slot]
    if flow.cap < np.inf:
        _turn(s, 2 * slot + 1, flow.priority, flow.cap / flow.weight)
    for at in range(flow.begin, flow.end):
        number = s.loads[at].link
        at_priority, at_level = _soonest(s.links[number], priority)
        _turn(s, 2 * number, at_priority, at_level)


@jit_inline
def _settle(s: _State, slot: int, level: float, bottleneck: int) -> None:
    """Hold a flow at its new level. Links that it does less to than before may let others rise."""
    flow = s.flows[slot]
    if flow.mark != _RISING:  # the links of one that rises wait for their turn already
        for at in range(flow.begin, flow.end):
            number = s.loads[at].link
            link = s.links[number]
            if link.priority < _LAST and number != bottleneck:
                _turn(s, 2 * number, link.priority, link.level)
    _move(s, slot, _SETTLED, level, bottleneck)


@jit_inline
def _is_later(
    s: _State, number: int, priority: int, level: float, now_priority: int, now_level: float
) -> bool:
    """Whether this point is not come to yet; then the link is looked at there (at `_LAST`: not again)."""
    if priority < now_priority or (priority == now_priority and level <= now_level * (1.0 + TIE)):
        return False
    if priority < _LAST:
        _turn(s, 2 * number, priority, level)
    return True


@jit_inline
def _next_event(s: _State, number: int, now_priority: int, now_level: float) -> None:
    """What happens at a link, at a point of the filling; or when to look again."""
    link = s.links[number]
    priority, level = _soonest(link, now_priority)
    if _is_later(s, number, priority, level, now_priority, now_level):
        return
    priority, level = _full_at(s, number)
    loosens = link.priority < priority
    if link.priority == priority:
        if abs(level - link.level) <= TIE * max(level, link.level):
            level = link.level
        loosens = link.level < level
    if loosens:
        if _is_later(s, number, link.priority, link.level, now_priority, now_level):
            return
        link.priority = _LAST
        at = link.first
        while at >= 0:
            load = s.loads[at]
            at = load.next
            flow = s.flows[load.flow]
            if flow.bottleneck == number and flow.mark == _OUT:
                _rise(s, load.flow, now_priority)
        if priority < _LAST:
            _turn(s, 2 * number, priority, level)
        return
    if _is_later(s, number, priority, level, now_priority, now_level):
        return
    link.priority, link.level = priority, level
    at = link.first
    while at >= 0:
        load = s.loads[at]
        at = load.next
        flow = s.flows[load.flow]
        if flow.priority < priority or flow.mark == _SETTLED:
            continue
        most = level if flow.priority == priority else 0.0
        if flow.mark == _RISING or flow.level > most * (1.0 + TIE):
            _settle(s, load.flow, most, number)


@jit_inline
def _fill(s: _State) -> None:
    now_priority, now_level = -_LAST, 0.0
    while s.counts[_TURNS] > 0:
        item = s.turns[0]
        key = s.turn_keys[item]
        if key.priority > now_priority or (key.priority == now_priority and key.key > now_level):
            now_priority, now_level = key.priority, key.key
        s.counts[_TURNS] = take(s.turns, s.turn_keys, s.counts[_TURNS], item)
        if item % 2 == 0:
            _next_event(s, item // 2, now_priority, now_level)
        elif s.flows[item // 2].mark == _RISING:
            flow = s.flows[item // 2]
            _settle(s, item // 2, flow.cap / flow.weight, _OWN_CAP)


@jit_inline
def _within(s: _State) -> bool:
    """Whether the filling came to its end and no link of a flow that it reached is above its capacity."""
    s.counts[_SOLVES] += 1
    if s.counts[_UP] > 0:
        return False
    for i in range(s.counts[_REACHED]):
        slot = s.flows[s.reached[i]]
        for place in range(slot.begin, slot.end):
            link = s.links[s.loads[place].link]
            if link.checked == s.counts[_SOLVES]:
                continue
            link.checked = s.counts[_SOLVES]
            free, used, total, at = 0.0, 0.0, 0.0, link.first
            while at >= 0:
                load = s.loads[at]
                at = load.next
                flow = s.flows[load.flow]
                share = load.times * flow.weight
                total += share * flow.level
                if flow.bottleneck == load.link:
                    free += share
                else:
                    used += share * flow.level
            link.free, link.used = free, used  # without what rounding has left in them
            if total > link.capacity * (1.0 + CHECK):
                return False
    return True


@jit
def forget(s: _State) -> None:
    """Let all flows rise from nothing, and add up all sums anew."""
    for slot in range(len(s.flows)):
        if s.flows[slot].state == _ACTIVE:
            _move(s, slot, _SETTLED, 0.0, _NOTHING)
    for number in range(len(s.links)):
        s.links[number].priority, s.links[number].free, s.links[number].used = _LAST, 0.0, 0.0
    for slot in range(len(s.flows)):
        if s.flows[slot].state == _ACTIVE:
            _rise(s, slot, 0)


@jit
def solve(s: _State, now: float) -> bool:
    """Bring rates and ends up to date; whether the result holds."""
    holds, attempt = False, 0
    while not holds and attempt < 2:
        if attempt > 0:
            forget(s)
        _fill(s)
        holds, attempt = _within(s), attempt + 1
    for i in range(s.counts[_REACHED]):
        slot = s.reached[i]
        flow = s.flows[slot]
        flow.mark = _OUT
        rate = flow.weight * flow.level
        if rate != flow.rate and flow.state == _ACTIVE:
            flow.sent = min(flow.size, flow.sent + flow.rate * (now - flow.since))
            flow.since, flow.rate = now, rate
            end = now + (flow.size - flow.sent) / rate if rate > 0.0 else np.inf
            s.counts[_ENDS] = put(s.ends, s.end_keys, s.counts[_ENDS], slot, end)
    s.counts[_MOVED] += s.counts[_REACHED]
    s.counts[_REACHED] = 0
    return holds  # type: ignore[no-any-return]


@jit
def _enter(s: _State, slot: int, now: float) -> None:
    """A flow begins to ask for bandwidth."""
    flow = s.flows[slot]
    flow.state, flow.since, flow.bottleneck, flow.rate, flow.level = _ACTIVE, now, _NOTHING, 0.0, 0.0
    for at in range(flow.begin, flow.end):
        load = s.loads[at]
        first = s.links[load.link].first
        load.previous, load.next = -1, first
        if first >= 0:
            s.loads[first].previous = at
        s.links[load.link].first = at
    s.counts[_ENDS] = put(s.ends, s.end_keys, s.counts[_ENDS], slot, now if flow.size == 0.0 else np.inf)
    _rise(s, slot, 0)


@jit
def leave(s: _State, slot: int) -> None:
    """A flow is gone: what it has sent is booked to its links, which may let others rise."""
    flow = s.flows[slot]
    if flow.state == _ACTIVE:
        _move(s, slot, _SETTLED, 0.0, _NOTHING)
        for at in range(flow.begin, flow.end):
            load = s.loads[at]
            s.links[load.link].carried += load.times * flow.sent
            if load.previous >= 0:
                s.loads[load.previous].next = load.next
            else:
                s.links[load.link].first = load.next
            if load.next >= 0:
                s.loads[load.next].previous = load.previous
            _turn(s, 2 * load.link, -_LAST, 0.0)
    flow.state = _FREE
    s.counts[_TURNS] = take(s.turns, s.turn_keys, s.counts[_TURNS], 2 * slot + 1)
    s.counts[_ENDS] = take(s.ends, s.end_keys, s.counts[_ENDS], slot)


@jit
def begin(
    s: _State, slot: int, number: int, first: int, links: Longs, times: Floats, size: float, weight: float,
    cap: float, priority: int, now: float, after: float,
) -> None:  # fmt: skip
    """Fill a free slot with a flow, whose loads lie from ``first`` on, and begin it or let it wait."""
    flow = s.flows[slot]
    flow.begin, flow.end = first, first + len(links)
    for i in range(len(links)):
        load = s.loads[first + i]
        load.flow, load.link, load.times = slot, links[i], times[i]
    flow.number, flow.size, flow.sent = number, size, 0.0
    flow.weight, flow.cap, flow.priority = weight, cap, priority
    if after > 0.0:
        flow.state, flow.since, flow.rate = _WAITING, now, 0.0
        s.counts[_ENDS] = put(s.ends, s.end_keys, s.counts[_ENDS], slot, now + after)
    else:
        _enter(s, slot, now)


@jit
def change(s: _State, slot: int, weight: float, cap: float, priority: int) -> None:
    """Give a flow these, from now on."""
    flow = s.flows[slot]
    if flow.state == _ACTIVE:
        _move(s, slot, _SETTLED, 0.0, _NOTHING)
        s.counts[_TURNS] = take(s.turns, s.turn_keys, s.counts[_TURNS], 2 * slot + 1)
    flow.weight, flow.cap, flow.priority = weight, cap, priority
    if flow.state == _ACTIVE:
        _rise(s, slot, 0)


@jit
def step(s: _State, now: float, until: float, most: int, slots: Longs, times: Floats) -> tuple[float, int]:
    """Go on until ``most`` moments at which flows end have passed, or to ``until``. The time then (nan where
    a solve does not hold), and how many have ended: their slots and times are written."""
    ended, moments = 0, 0
    while True:
        if s.counts[_TURNS] > 0 and not solve(s, now):
            return np.nan, ended
        if moments == most:
            return now, ended
        end = s.end_keys[s.ends[0]].key if s.counts[_ENDS] > 0 else np.inf
        if end > until or end == np.inf:
            return until if until < np.inf else now, ended
        now = max(now, end)
        before = ended
        while s.counts[_ENDS] > 0 and s.end_keys[s.ends[0]].key <= now * (1.0 + SAME_TIME):
            slot = s.ends[0]
            if s.flows[slot].state == _WAITING:
                _enter(s, slot, now)
                continue
            s.flows[slot].sent = s.flows[slot].size
            leave(s, slot)
            slots[ended], times[ended] = slot, now
            ended += 1
        moments += ended > before


class World:
    """Links and the flows on them, both numbered from 0. Raises `ValueError` for what is out of range or not
    there, `ArithmeticError` for figures too far apart for floats. ``now`` is in seconds."""

    def __init__(self, capacities: Iterable[float] = ()) -> None:
        """``capacities``: bytes/s of the links that there are to begin with."""
        self.now = 0.0
        self._links = self._next = self._loads = 0
        self._slots: dict[int, int] = {}
        self._free: list[int] = []
        self._ended, self._times = np.zeros(0, np.int64), np.zeros(0, np.float64)
        self._state = _State(
            np.zeros(0, FLOW), np.zeros(0, LINK), np.zeros(0, LOAD), np.zeros(0, np.int64), np.zeros(0, KEY),
            np.zeros(0, np.int64), np.zeros(0, KEY), np.zeros(0, np.int64), np.zeros(6, np.int64),
        )  # fmt: skip
        self.add_links(capacities)

    def add_links(self, capacities: Iterable[float]) -> range:
        """More links, of so many bytes/s each; their numbers."""
        new = np.fromiter(capacities, np.float64)
        for capacity in new[~((new >= 0.0) & (new < inf))]:
            raise ValueError(f"capacity {capacity} of a link: accepted are finite bytes/s from 0")
        first, self._links = self._links, self._links + len(new)
        if self._links > len(self._state.links):
            links = _longer(self._state.links, self._links, "first")
            links["priority"][first:] = _LAST
            self._state = self._state._replace(links=links)
            self._room_for_turns()
        self._state.links["capacity"][first : self._links] = new
        return range(first, self._links)

    def set_capacity(self, link: int, capacity: float) -> None:
        """Let a link have so many bytes/s from now on; 0 is a link that is down."""
        self._check_link(link)
        if not 0.0 <= capacity < inf:
            raise ValueError(f"capacity {capacity} of link {link}: accepted are finite bytes/s from 0")
        s = self._state
        s.links["capacity"][link], s.turn_keys["priority"][2 * link] = capacity, -_LAST
        s.counts[_TURNS] = put(s.turns, s.turn_keys, s.counts[_TURNS], 2 * link, 0.0)

    def start(
        self, size: float, links: Iterable[int] | Mapping[int, float], *, weight: float = 1.0,
        cap: float = inf, priority: int = 0, after: float = 0.0,
    ) -> int:  # fmt: skip
        """Start a flow; its number.

        ``size``: bytes, ``inf`` for one that is to be stopped. ``links``: those of its route or tree, or of
        each link how many times the flow's rate it carries. ``weight``: it rises so many times as fast as one
        of weight 1. ``cap``: bytes/s at most. ``priority``: 0 takes first, 1 of what is left, and so on.
        ``after``: seconds until it asks for bandwidth (latency, a pause)."""
        times = links if isinstance(links, Mapping) else Counter(links)
        numbers = np.fromiter(times.keys(), np.int64, len(times))
        loads = np.fromiter(times.values(), np.float64, len(times))
        for link in times:
            self._check_link(link)
        if not (size >= 0.0 and 0.0 <= after < inf):
            raise ValueError(f"size {size}, after {after} of a flow: accepted are bytes and seconds from 0")
        if len(loads) and not (loads.min() > 0.0 and loads.max() < inf):
            raise ValueError("a flow loads each of its links some positive number of times")
        _check(weight, cap, priority)
        if cap == inf and not times:
            raise ValueError("a flow without links needs a cap")
        if not self._free:
            self._room_for_flows()
        if self._loads + len(numbers) > len(self._state.loads):
            self._room_for_loads(len(numbers))
        slot, number = self._free.pop(), self._next
        begin(
            self._state, slot, number, self._loads, numbers, loads, float(size), float(weight), float(cap),
            priority, self.now, float(after),
        )  # fmt: skip
        self._next, self._loads, self._slots[number] = number + 1, self._loads + len(numbers), slot
        return number

    def change(
        self, flow: int, *, weight: float | None = None, cap: float | None = None, priority: int | None = None
    ) -> None:
        """Give a flow another weight, cap or priority from now on."""
        slot = self._slot(flow)
        old = self._state.flows[slot]
        new_weight = float(old["weight"]) if weight is None else float(weight)
        new_cap = float(old["cap"]) if cap is None else float(cap)
        new_priority = int(old["priority"]) if priority is None else priority
        _check(new_weight, new_cap, new_priority)
        if new_cap == inf and old["begin"] == old["end"]:
            raise ValueError("a flow without links needs a cap")
        change(self._state, slot, new_weight, new_cap, new_priority)

    def stop(self, flow: int) -> float:
        """Take a flow out; the bytes that it had left."""
        slot, left = self._slot(flow), self.left(flow)
        self._state.flows[slot]["sent"] = self._sent(self._state.flows[slot])
        leave(self._state, slot)
        self._free.append(self._slots.pop(flow))
        return left

    def advance(self, until: float = inf) -> list[int]:
        """Go on to the next moment at which flows end, and return them; or to ``until`` if that is sooner,
        and return none. Without ``until`` the time stays where nothing ends any more."""
        return self._step(until, 1)[0]

    def run(self, until: float = inf) -> tuple[list[int], Floats]:
        """Let all end that does so up to ``until``: the flows in the order of their ends, and when each
        ended. It is `advance` until it returns none."""
        return self._step(until, -1)

    def rate(self, flow: int) -> float:
        """Bytes/s of a flow now; 0 while it waits."""
        self._solve()
        return float(self._state.flows["rate"][self._slot(flow)])

    def rates(self) -> dict[int, float]:
        """Bytes/s of all flows under way, in their order."""
        self._solve()
        rate = self._state.flows["rate"]
        return {flow: float(rate[slot]) for flow, slot in self._slots.items()}

    def bottleneck(self, flow: int) -> int | None:
        """The link that holds a flow back, None where it is the flow's own cap (or it waits)."""
        self._solve()
        record = self._state.flows[self._slot(flow)]
        return int(record["bottleneck"]) if record["bottleneck"] >= 0 and record["state"] == _ACTIVE else None

    def left(self, flow: int) -> float:
        """Bytes that a flow still has to send."""
        return float((record := self._state.flows[self._slot(flow)])["size"] - self._sent(record))

    def loads(self) -> Floats:
        """Bytes/s on each link now."""
        self._solve()
        slots, loads = self._under_way()
        rates = self._state.flows["rate"][slots]
        return np.bincount(loads["link"], loads["times"] * rates, self._links).astype(np.float64)

    def carried(self) -> Floats:
        """Bytes that each link has carried since the beginning."""
        slots, loads = self._under_way()
        sent = loads["times"] * self._sent(self._state.flows[slots])
        return self._state.links["carried"][: self._links] + np.bincount(loads["link"], sent, self._links)

    def solve(self) -> None:
        """Find all rates anew, from nothing: those that there were, but for rounding."""
        forget(self._state)
        self._solve()

    @property
    def solves(self) -> tuple[int, int]:
        """How often rates were brought up to date so far, and how many flows that has reached together."""
        return int(self._state.counts[_SOLVES]), int(self._state.counts[_MOVED])

    def _solve(self) -> None:
        if self._state.counts[_TURNS] and not solve(self._state, self.now):
            raise ArithmeticError("rates do not hold: capacities or weights too far apart")

    def _step(self, until: float, most: int) -> tuple[list[int], Floats]:
        if not until >= self.now:
            raise ValueError(f"until {until}: accepted are times from {self.now}, which it is")
        now, count = step(self._state, self.now, float(until), most, self._ended, self._times)
        if np.isnan(now):
            raise ArithmeticError("rates do not hold: capacities or weights too far apart")
        self.now = float(now)
        numbers, times = self._state.flows["number"][self._ended[:count]], self._times[:count]
        order = np.lexsort((numbers, times))
        ended: list[int] = numbers[order].tolist()
        self._free += [self._slots.pop(flow) for flow in ended]
        return ended, np.asarray(times[order], np.float64)

    def _sent(self, flows: Any) -> Any:
        return np.minimum(flows["size"], flows["sent"] + flows["rate"] * (self.now - flows["since"]))

    def _under_way(self) -> tuple[Longs, Records]:
        """Slots of the flows that load links now, and those loads."""
        flows = self._state.flows
        slots = np.flatnonzero(flows["state"] == _ACTIVE)
        places, lengths = _ranges(flows["begin"][slots], flows["end"][slots])
        return np.repeat(slots, lengths), self._state.loads[places]

    def _slot(self, flow: int) -> int:
        if flow not in self._slots:
            raise ValueError(f"flow {flow} is not under way")
        return self._slots[flow]

    def _check_link(self, link: int) -> None:
        if not 0 <= link < self._links:
            raise ValueError(f"link {link}: there are links 0 to {self._links - 1}")

    def _room_for_flows(self) -> None:
        old = len(self._state.flows)
        self._state = self._state._replace(flows=_longer(self._state.flows, old + 1))
        self._free += range(len(self._state.flows) - 1, old - 1, -1)
        self._room_for_turns()

    def _room_for_turns(self) -> None:
        s = self._state
        flows, items = len(s.flows), 2 * max(len(s.flows), len(s.links))
        self._state = s._replace(
            turns=_longer(s.turns, items), turn_keys=_longer(s.turn_keys, items, "place"),
            ends=_longer(s.ends, flows), end_keys=_longer(s.end_keys, flows, "place"),
            reached=_longer(s.reached, flows),
        )  # fmt: skip
        self._ended, self._times = np.zeros(flows, np.int64), np.zeros(flows, np.float64)

    def _room_for_loads(self, more: int) -> None:
        """Move the loads of flows under way together, into longer memory if they would fill half of it."""
        s = self._state
        slots = np.fromiter(self._slots.values(), np.int64, len(self._slots))
        places, lengths = _ranges(s.flows["begin"][slots], s.flows["end"][slots])
        s.flows["begin"], s.flows["end"] = 0, 0
        moved = np.full(len(s.loads) + 1, -1, np.int64)  # the last one is that of -1, the end of a list
        moved[places] = np.arange(len(places))
        loads = s.loads[places]
        loads["next"], loads["previous"] = moved[loads["next"]], moved[loads["previous"]]
        s.links["first"] = moved[s.links["first"]]
        ends = np.cumsum(lengths)
        s.flows["begin"][slots], s.flows["end"][slots] = ends - lengths, ends
        self._loads = len(places)
        self._state = s._replace(loads=_longer(loads, max(len(s.loads), 2 * (self._loads + more))))


def _check(weight: float, cap: float, priority: int) -> None:
    if not (0.0 < weight < inf and cap > 0.0 and 0 <= priority < _LAST):
        words = f"weight {weight}, cap {cap}, priority {priority} of a flow"
        raise ValueError(f"{words}: accepted are positive numbers, and a whole priority from 0")


def _ranges(begins: Longs, ends: Longs) -> tuple[Longs, Longs]:
    """All numbers from each begin to its end, and how many each has."""
    lengths = ends - begins
    starts = np.repeat(begins - np.cumsum(lengths) + lengths, lengths)
    return starts + np.arange(len(starts)), lengths


def _longer(array: NDArray[Any], least: int, minus: str = "") -> NDArray[Any]:
    """The array with room for at least so many; of new elements the field ``minus`` is -1."""
    if len(array) >= least:
        return array
    longer = np.zeros(max(least, 2 * len(array), 64), array.dtype)
    longer[: len(array)] = array
    if minus:
        longer[minus][len(array) :] = -1
    if minus == "place":
        longer["item"] = np.arange(len(longer))
    return longer
