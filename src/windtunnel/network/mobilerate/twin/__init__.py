"""A mobile link in the packet engine, and who sends over it: ours, TCP's congestion controls, and baselines.

The way is half the base delay, the link's queue, and the other half back, where nothing waits. Ours are asked
every interval, as live. Reno, CUBIC, Vegas and BBR are the engine's sketches; ``sprout`` forecasts (see
there); ``oracle`` knows the trace and sends what the link will take.
"""

from __future__ import annotations

import numpy as np

from windtunnel.engines.packets import At, Flow, PacketLink, Queue, Simulation
from windtunnel.engines.packets.layout import SECOND
from windtunnel.network.mobilerate.outcome import MobileResult, MobileWorld, outcome
from windtunnel.network.mobilerate.policy import (
    POLICIES,
    Ack,
    Decision,
    Observation,
    RateHistory,
    RateSettings,
)
from windtunnel.network.mobilerate.twin import link
from windtunnel.network.mobilerate.twin.sprout import SproutForecast
from windtunnel.traces.bandwidth import MTU, BandwidthTrace

SENDERS = ("reno", "cubic", "vegas", "bbr")
ARMS = (*POLICIES, *SENDERS, "sprout", "oracle")
FAST = 1.25e9
"""Bytes/s of the links beside the trace's."""
LEAST_RTO = 0.2
KNOWN, USUAL = RateSettings(), MobileWorld()


def emulate(
    trace: BandwidthTrace,
    arm: str,
    seconds: float,
    seed: int = 0,
    *,
    world: MobileWorld = USUAL,
    settings: RateSettings = KNOWN,
) -> MobileResult:
    """One sender for ``seconds``; ``seed``: of losses. Delays are those of the link's queue, of packets that
    have passed it.

    Raises:
        ValueError: an unknown arm.
    """
    if arm not in ARMS:
        raise ValueError(f"policy {arm!r}; accepted are {', '.join(ARMS)}")
    times, quick = trace.within(seconds), Queue(packets=10**6)
    words, half = link.link_words(times, world.packets), PacketLink(FAST, world.delay / 2, quick)
    links, nodes = [half, PacketLink(FAST, 0.0, quick, trace.loss), half], [(link.opportunities, words)]
    if arm in SENDERS:
        flow = Flow([0, At(0), 1], [2], arm, min_rto=LEAST_RTO)
        Simulation(links, [flow], nodes=nodes, seed=seed).run(seconds)
    else:
        own = link.sender_words(settings.delta, seconds, len(times) + 1)
        nodes.append((link.paced, own))
        simulation = Simulation(links, [Flow([0], sender="node")], nodes=nodes, seed=seed)
        own[link.ROUTE] = simulation.route([0, At(0), 1, At(1, link.RECEIVE), 2, At(1, link.ACKED)])
        simulation.wake(1, 0.0)
        _steer(simulation, own, trace, arm, seconds, world, settings)
    arrived, left = link.passed(words).T
    return outcome(left - arrived, len(left) * MTU, len(times), seconds, int(words[link.DROPPED]))


def _steer(
    simulation: Simulation, own: link.Words, trace: BandwidthTrace, arm: str, seconds: float,
    world: MobileWorld, settings: RateSettings,
) -> None:  # fmt: skip
    """Run it, and give the sender its pace, and how many packets may go in all, every interval."""
    delta, decide, before = settings.delta, POLICIES.get(arm), 0
    half = world.delay / 2 + 1e-5  # the last of several that go at once is there a little later
    memory, forecast = RateHistory(), SproutForecast(world.delay) if arm == "sprout" else None
    ahead = trace.within(seconds + world.delay)
    ahead = ahead[np.searchsorted(ahead, half) :]  # whatever goes is there half a round trip later
    for turn in range(round(seconds / delta)):
        entries, before = link.acknowledged(own, before), int(own[link.ACKS])
        acks = tuple(Ack(n, sent / SECOND, at / SECOND, received) for n, sent, at, received in entries)
        if decide is not None:
            decision = decide(Observation(settings, acks, int(own[link.LAST]), memory))
            memory = decision.memory
            own[link.GAP] = round(MTU / decision.rate * SECOND)
        elif forecast is not None:
            own[link.MAY] = forecast.update(turn * delta, acks)
        else:
            own[link.MAY] = np.searchsorted(ahead, (turn + 1) * delta + half)
        simulation.run((turn + 1) * delta)


def cost(observation: Observation, decision: Decision) -> dict[str, float]:
    """What a decision makes of its interval, if the link goes on as it did: seconds that its last packet
    waits, and bytes/s that nobody sends."""
    settings, memory = observation.settings, decision.memory
    passes = sum(memory.window) / (settings.intervals * settings.delta) or decision.rate
    waits = memory.trip - memory.least + (decision.rate / passes - 1) * settings.delta
    return {"seconds in the queue": max(waits, 0.0), "unused bytes/s": max(passes - decision.rate, 0.0)}
