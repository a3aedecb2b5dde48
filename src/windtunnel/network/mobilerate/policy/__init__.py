"""How fast to send over a mobile link, decided every 2 ms from the acknowledgements (SIRA and SIRA-H).

**SIRA** paces at the mean rate of what was acknowledged over the last half second; before the first
acknowledgement, and in the places of that window that are not filled yet, at a rate above the link's. What
that overshoots stays in the queue, so that the link never runs dry, and packets wait.

**SIRA-H** drains that queue. While the smoothed round trip is above the least one by more than a target it
sends less, and notes what it held back. When the acknowledgement of such an interval shows that the link had
little to send (fewer than ``busy`` packets were ahead, by the times between acknowledgements), what was held
back counts as acknowledged (H1), or else the rate would fall with each time. When queues stay empty all the
same, what is not made up for yet is spread over a window (H2).

`literal` is that, with the paper's defaults, as we read it; the paper's formula of packets ahead is our
reading. It collapses where rates move fast: sending less lowers the rate of acknowledgements, that lowers the
rate, and at a low rate one packet alone takes longer than the target. `decide` is `guarded`, of which every
difference is named there.

A log of acknowledgements may lack some, have some twice or in another order: each says how many packets the
receiver has got so far, and only more of them counts.

Source: SIRA and SIRA-H, IWQoS 2016, doi 10.1109/IWQoS.2016.7590420.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

SMOOTH = 0.875
"""Of the round trip before, at each acknowledgement."""
PACKETS = 3
"""Packet times that packets may wait at the least."""
EMPTY = 2 / 3
"""Of the intervals of a round trip, from which queues are taken for empty."""
ALIVE = 1.0
"""Seconds after which a packet goes in any case: no acknowledgement would ever come else."""


@dataclass(frozen=True, slots=True)
class RateSettings:
    """``delta``: seconds of an interval; ``intervals``: of the window (the paper's M). ``start``: bytes/s,
    above the link's (X). ``target``: seconds that packets may wait (T). ``busy``: packets ahead (L_q).
    ``packet``: bytes."""

    delta: float = 2e-3
    intervals: int = 250
    start: float = 1.5e6
    target: float = 10e-3
    busy: int = 6
    packet: int = 1500


@dataclass(frozen=True, slots=True)
class Ack:
    """Of packet ``number``, sent and acknowledged at these seconds of the sender's clock; ``received``:
    packets that the receiver has got by then."""

    number: int
    sent: float
    at: float
    received: int


@dataclass(frozen=True, slots=True)
class RateHistory:
    """What is kept of the log. ``window``: bytes acknowledged in each interval, () before the first.
    ``trip``, ``least``: round trip, smoothed and least, seconds. ``arrivals``: times of the last few
    acknowledgements, ``highest``: the newest packet of all. ``owed``: of intervals that were held back the
    last packet and the bytes; ``withheld``: bytes of the last interval. ``unsent``: bytes held back and not
    made up for; ``extra``: those that are made up for now, at ``bonus`` bytes/s. ``empty``: whether the queue
    was, in the last intervals with acknowledgements."""

    window: tuple[float, ...] = ()
    received: int = 0
    trip: float = 0.0
    least: float = 0.0
    arrivals: tuple[float, ...] = ()
    owed: tuple[tuple[int, float], ...] = ()
    withheld: float = 0.0
    unsent: float = 0.0
    extra: float = 0.0
    bonus: float = 0.0
    empty: tuple[bool, ...] = ()
    highest: int = -1


@dataclass(frozen=True, slots=True)
class Observation:
    """One interval: the acknowledgements that came in it, and ``last``, the newest packet that was sent."""

    settings: RateSettings
    acks: tuple[Ack, ...]
    last: int
    memory: RateHistory = RateHistory()


@dataclass(frozen=True, slots=True)
class Decision:
    """``rate``: bytes/s until the next interval. ``memory``: for its observation."""

    rate: float
    memory: RateHistory
    reason: str = field(default="", compare=False)


def hear(observation: Observation) -> tuple[RateHistory, float, list[tuple[int, bool]]]:
    """Take in the acknowledgements of an interval: what is kept, the bytes that are new, and of each its
    packet and whether few were ahead of it."""
    settings, before = observation.settings, observation.memory
    trip, least, arrivals, got = before.trip, before.least, before.arrivals, before.received
    short = list[tuple[int, bool]]()
    for ack in observation.acks:
        took = ack.at - ack.sent
        trip = SMOOTH * trip + (1 - SMOOTH) * took if trip else took
        least = min(least, took) if least else took
        # the times that packets took to be sent, added up backwards, reach over what this one waited
        full = len(arrivals) == settings.busy - 1
        short.append((ack.number, full and ack.at - arrivals[0] >= took - least))
        arrivals = (*arrivals, ack.at)[1 - settings.busy :]
        got = max(got, ack.received)
    empty = before.empty
    if observation.acks:
        last, fits = observation.acks[-1], max(int(trip / settings.delta), 1)
        empty = (*empty, last.at - last.sent - least < settings.packet / settings.start)[-fits:]
    newest = max((before.highest, *(ack.number for ack in observation.acks)))
    memory = replace(before, trip=trip, least=least, arrivals=arrivals, received=got, empty=empty)
    memory = replace(memory, highest=newest)
    return memory, float((got - before.received) * settings.packet), short


def mean(observation: Observation, window: tuple[float, ...]) -> float:
    """Bytes/s over the window, ``start`` before there is one; a packet in `ALIVE` at the least."""
    settings = observation.settings
    if not window:
        return settings.start
    return max(sum(window) / (settings.intervals * settings.delta), settings.packet / ALIVE)


def shifted(observation: Observation, acked: float) -> tuple[float, ...]:
    """The window and this interval. Before the first acknowledgement there is none; then all is as at
    ``start``."""
    settings, window = observation.settings, observation.memory.window
    if not window and not acked:
        return ()
    return (*(window or (settings.start * settings.delta,) * settings.intervals)[1:], acked)


def noted(observation: Observation) -> tuple[tuple[int, float], ...]:
    """What is owed, with the last interval; in an outage many intervals end with one packet."""
    owed, withheld, last = observation.memory.owed, observation.memory.withheld, observation.last
    if owed and owed[-1][0] == last:
        return (*owed[:-1], (last, owed[-1][1] + withheld))
    return (*owed, (last, withheld)) if withheld else owed


def sira(observation: Observation) -> Decision:
    """The mean of the window, and nothing drains the queue."""
    now, acked, _ = hear(observation)
    window = shifted(observation, acked)
    return Decision(mean(observation, window), replace(now, window=window))


def literal(observation: Observation) -> Decision:
    """SIRA-H with the paper's defaults."""
    settings, memory = observation.settings, observation.memory
    now, acked, short = hear(observation)
    most = settings.target + now.least
    delayed = now.trip > most
    owed, unsent, extra, bonus = (
        noted(observation),
        memory.unsent + memory.withheld,
        memory.extra,
        memory.bonus,
    )
    for number, few in short:
        while owed and owed[0][0] <= number:
            if few and not delayed:  # H1
                acked, unsent = acked + owed[0][1], unsent - owed[0][1]
            owed = owed[1:]
    extra = max(extra - bonus * settings.delta, 0.0)
    if not delayed and not owed and unsent > 0 and sum(now.empty) > EMPTY * len(now.empty):  # H2
        extra, unsent = unsent, 0.0
        bonus = extra / (settings.intervals * settings.delta)
    window = shifted(observation, acked)
    rate = mean(observation, window) + (bonus if extra else 0.0)
    sends = max(rate * most / now.trip, settings.packet / ALIVE) if delayed else rate
    memory = replace(now, window=window, owed=owed, unsent=unsent, extra=extra, bonus=bonus)
    memory = replace(memory, withheld=(rate - sends) * settings.delta)
    return Decision(sends, memory, "packets wait" if delayed else "")


def guarded(observation: Observation) -> Decision:
    """SIRA-H for links whose rates move. What differs from `literal`, because a trial showed the need:

    - An interval that found the queue empty counts as if ``start`` had been acknowledged in it, so that the
      rate rises by one part of the window (X/M) each time, for as long as the window lasts; in H2's place.
    - H1 in any state: an empty queue is an empty queue.
    - Packets may wait `PACKETS` packet times at the least: at a low rate one takes longer than the target.
    - The last round trip counts, not the smoothed one.
    - No more is on its way than the rate fills a round trip and the target with. A link that stops stops the
      sender after that.
    """
    settings, owed = observation.settings, noted(observation)
    now, acked, short = hear(observation)
    for number, few in short:
        while owed and owed[0][0] <= number:
            acked += owed[0][1] if few else 0.0
            owed = owed[1:]
    if observation.acks and now.empty[-1]:
        acked += settings.start * settings.delta
    window = shifted(observation, acked)
    if not window:
        return Decision(settings.start, now, "nothing is acknowledged yet")
    rate = min(mean(observation, window), settings.start)
    most = now.least + max(settings.target, PACKETS * settings.packet / rate)
    trip = observation.acks[-1].at - observation.acks[-1].sent if observation.acks else now.trip
    room = rate * most - (observation.last - now.highest) * settings.packet
    sends = max(min(rate * min(most / trip, 1.0), room / settings.delta), settings.packet / ALIVE)
    reason = "as much is on its way as may be" if room <= 0 else "packets wait" if trip > most else ""
    memory = replace(now, window=window, owed=owed, withheld=(rate - sends) * settings.delta)
    return Decision(sends, memory, reason)


decide = guarded
POLICIES: Mapping[str, Callable[[Observation], Decision]] = {
    "sira-h": guarded,
    "sira-h-literal": literal,
    "sira": sira,
}
