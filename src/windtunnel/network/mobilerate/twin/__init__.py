"""A mobile link in the packet engine, and who sends over it: ours, TCP's congestion controls, and baselines.

The way is half the base delay, the link's queue, and the other half back; acknowledgements find no queue. Ours
are asked every interval, as live. Reno, CUBIC, Vegas and BBR are the engine's sketches. ``sprout`` forecasts
(see there). ``oracle`` knows the trace: it sends what the link will take.

Delays are those of the link's queue, of packets that have passed it. `cost` prices a decision by arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from windtunnel.engines.packets import At, Flow, Link, Queue, Simulation
from windtunnel.engines.packets.layout import NEVER, SECOND
from windtunnel.network.mobilerate.outcome import Outcome, World, outcome
from windtunnel.network.mobilerate.policy import (
    POLICIES,
    Ack,
    Decision,
    Memory,
    Observation,
    Settings,
)
from windtunnel.network.mobilerate.twin import link
from windtunnel.network.mobilerate.twin.sprout import Forecast
from windtunnel.traces.bandwidth import MTU, Trace

SENDERS = ("reno", "cubic", "vegas", "bbr")
BASELINES = ("sprout", "oracle")
ARMS = (*POLICIES, *SENDERS, *BASELINES)
FAST = 1.25e9
"""Bytes/s of the links beside the trace's."""


def emulate(
    trace: Trace, arm: str, seconds: float, seed: int = 0, *, world: World = World(),
    settings: Settings = Settings(), told: Callable[[Observation, Decision], object] = lambda *_: None,
) -> Outcome:  # fmt: skip
    """One sender for ``seconds``. ``told`` hears every decision of ours.

    Raises:
        ValueError: an unknown arm.
    """
    if arm not in ARMS:
        raise ValueError(f"policy {arm!r}; accepted are {', '.join(ARMS)}")
    times = trace.within(seconds)
    words = link.link_words(times, world.packets)
    quick = Queue(packets=10**6)
    links = [Link(FAST, world.delay / 2, quick), Link(FAST, 0.0, quick, trace.loss), Link(FAST, world.delay / 2, quick)]
    nodes = [(link.opportunities, words)]
    if arm in SENDERS:
        simulation = Simulation(links, [Flow([0, At(0), 1], [2], arm, min_rto=0.2)], nodes=nodes, seed=seed)
        simulation.run(seconds)
    else:
        own = link.sender_words(settings.delta, seconds, 0, len(times) + 1)
        simulation = Simulation(links, [Flow([0], sender="node")], nodes=[*nodes, (link.paced, own)], seed=seed)
        own[link.ROUTE] = simulation.route([0, At(0), 1, At(1, link.RECEIVE), 2, At(1, link.ACKED)])
        simulation.wake(1, 0.0)
        _steered(simulation, own, _driver(arm, trace.within(seconds + world.delay), settings, world, told), settings.delta, seconds)
    arrived, left = link.passed(words).T
    return outcome(left - arrived, len(left) * MTU, len(times), seconds, int(words[link.DROPPED]))


Driver = Callable[[float, tuple[Ack, ...], int], tuple[float, int]]
"""Of the time, the acknowledgements of an interval and the newest packet: bytes/s, and how many packets may go in
all."""


def _steered(simulation: Simulation, own: link.Words, driver: Driver, delta: float, seconds: float) -> None:
    """Run it, and give the sender its pace every interval."""
    before = 0
    for turn in range(round(seconds / delta)):
        count = int(own[link.ACKS])
        log = own[link._SLOT + before * link.ENTRY : link._SLOT + count * link.ENTRY].reshape(-1, link.ENTRY)
        acks = tuple(Ack(n, sent / SECOND, at / SECOND, got) for n, sent, at, got in log.tolist())
        before = count
        rate, may = driver(turn * delta, acks, int(own[link.LAST]))
        own[link.GAP] = 0 if rate == np.inf else round(MTU / rate * SECOND)
        own[link.MAY] = may
        simulation.run((turn + 1) * delta)


def _driver(
    arm: str, times: NDArray[np.float64], settings: Settings, world: World,
    told: Callable[[Observation, Decision], object],
) -> Driver:  # fmt: skip
    if arm == "oracle":
        first = np.searchsorted(times, world.delay / 2)

        def knowing(now: float, _: tuple[Ack, ...], __: int) -> tuple[float, int]:
            # what goes now is there half a round trip later
            return np.inf, int(np.searchsorted(times, now + world.delay / 2 + settings.delta) - first)

        return knowing
    if arm == "sprout":
        return Forecast(world.delay).look
    memory, decide = Memory(), POLICIES[arm]

    def ours(_: float, acks: tuple[Ack, ...], last: int) -> tuple[float, int]:
        nonlocal memory
        seen = Observation(settings, acks, last, memory)
        made = decide(seen)
        memory = made.memory
        told(seen, made)
        return made.rate, NEVER

    return ours


def cost(seen: Observation, made: Decision) -> dict[str, float]:
    """What a decision makes of its interval, if the link goes on as it did: seconds that the last packet of it
    waits, and bytes/s that nobody sends while the queue is empty."""
    known, memory = seen.settings, made.memory
    window = memory.window or (made.rate * known.delta,)
    passes = sum(window) / (len(window) * known.delta)
    waits = memory.trip - memory.least + (made.rate / passes - 1) * known.delta if passes else 0.0
    return {"seconds in the queue": max(waits, 0.0), "unused bytes/s": max(passes - made.rate, 0.0)}
