"""A host's queue in the packet engine: bulk flows of some entities, and requests beside them.

All leave through one link, the host's; acknowledgements come back over another. Senders are the engine's
sketches of their kind. The policy is asked every `meter.PERIOD` and caps flows by windows and rates, as the
kernel's program does; receivers of the engine do not delay acknowledgements: what that costs is seen live.

Requests are packets of 1,000 bytes at even times; a request's latency is what one of them takes and half a
round trip. `cost` prices a decision by arithmetic alone: no engine runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from windtunnel.engines.packets import Flow, PacketLink, Queue, Simulation
from windtunnel.network.hostrate.policy import POLICIES, Decision, Observation, WindowSettings
from windtunnel.network.hostrate.policy.meter import PERIOD, WindowMeter

QUEUES = {
    "cut": lambda window_settings, _: Queue(packets=window_settings.upper),
    "dctcp": lambda window_settings, packets: Queue(packets=packets, mark_at=window_settings.upper),
    "codel": lambda _, packets: Queue("codel", packets=packets),
    "fq_codel": lambda _, packets: Queue("fq_codel", packets=packets, bands=1024),
}
"""Arms that are another queue, of CUBIC or (dctcp) with its own senders."""
SENDERS = ("cubic", "reno", "bbr")
ARMS = (*SENDERS, *QUEUES, *POLICIES)
REQUEST = 1000
KNOWN = WindowSettings(25e6, 200e-6)


@dataclass(frozen=True)
class BulkTenant:
    """An entity with so many bulk ``flows``."""

    name: str
    flows: int
    weight: float = 1.0


@dataclass(frozen=True)
class WindowResult:
    """``goodput``: bytes/s of each tenant; ``latency``: seconds of a request, mean; ``wait``: packets in the
    queue, mean over turns; ``window``: the last decision's."""

    goodput: tuple[float, ...]
    latency: float
    wait: float
    window: int


def emulate(
    tenants: Sequence[BulkTenant], arm: str, seconds: float, seed: int, *,
    settings: WindowSettings = KNOWN, trip: float = KNOWN.trip, packets: int = 1000, requests: float = 400.0,
    warm: float = 0.3,
) -> WindowResult:  # fmt: skip
    """All tenants for ``seconds``, of which the first part ``warm`` is not counted. ``trip``: what a round
    trip really takes; ``packets``: of the queue; ``requests``: a second.

    Raises:
        ValueError: an unknown arm.
    """
    if arm not in ARMS:
        raise ValueError(f"arm {arm!r}; accepted are {', '.join(ARMS)}")
    queue = QUEUES[arm](settings, packets) if arm in QUEUES else Queue(packets=packets)
    links = [
        PacketLink(settings.line, trip / 2, queue),
        PacketLink(settings.line * 10, trip / 2, Queue(packets=10**6)),
    ]
    rng = np.random.default_rng(seed)
    kind = arm if arm in SENDERS or arm == "dctcp" else "cubic"
    flows, owner = [Flow([0], sender="udp", rate=requests * REQUEST, packet=REQUEST)], [-1]
    for place, tenant in enumerate(tenants):
        for _ in range(tenant.flows):
            start = float(rng.uniform(0, 0.02))
            flows.append(Flow([0], [1], kind, start=start, ecn=kind == "dctcp", packet=settings.packet))
            owner.append(place)
    simulation, whose = Simulation(links, flows, seed=seed), np.array(owner, np.int64)
    meter = WindowMeter(settings, [(entity.name, entity.weight) for entity in tenants])
    policy, first, decision = POLICIES.get(arm), None, None
    waits: list[float] = []
    marked, flow_counts = np.zeros(len(flows), np.int64), np.zeros(len(tenants), np.int64)
    before = simulation.flows["acks"].copy()
    for turn in range(1, round(seconds / PERIOD) + 1):
        now = turn * PERIOD
        simulation.run(now)
        backlog = float(simulation.links["waiting_bytes"][0]) / settings.packet
        if not queue.kind.endswith("codel"):  # who has left is looked up only when the next one comes
            ahead = float(simulation.links["free_at"][0]) / 1e12 - now
            backlog = max(0.0, ahead) * settings.line / settings.packet
        if first is None and now >= warm * seconds:
            first = (simulation.now, simulation.flows[["received", "delay", "delivered"]].copy())
        elif first is not None:
            waits.append(backlog)
        acks = simulation.flows["acks"].copy()
        new = (acks > before) & (marked < meter.round) & (whose >= 0)
        marked[new], before = meter.round, acks
        flow_counts = flow_counts + np.bincount(whose[new], minlength=len(tenants))
        if policy is None:
            continue
        acked = np.array([acks[whose == place].sum() for place in range(len(tenants))])
        decision = policy(meter.look(now, backlog, acked, flow_counts))
        meter.took(decision)
        _cap(simulation, whose, decision)
    assert first is not None
    got, span = simulation.flows, simulation.now - first[0]
    rates = (got["received"] - first[1]["received"]) * settings.packet / span
    delay = (got["delay"][0] - first[1]["delay"][0]) / (got["delivered"][0] - first[1]["delivered"][0])
    return WindowResult(
        tuple(float(rates[whose == place].sum()) for place in range(len(tenants))),
        float(delay) / 1e12 + trip / 2, float(np.mean(waits)), decision.total if decision is not None else 0,
    )  # fmt: skip


def _cap(simulation: Simulation, whose: NDArray[np.int64], decision: Decision) -> None:
    """Give every flow its part."""
    for place, share in enumerate(decision.shares):
        for number, flow in enumerate(np.flatnonzero(whose == place)):
            if share.free:
                simulation.set_cap(int(flow))
            else:
                simulation.set_cap(int(flow), window=max(1, share.of_flow(number)), rate=share.pace)


def cost(observation: Observation, decision: Decision) -> dict[str, float]:
    """What a decision makes of the next round trips: seconds that a packet waits, if entities use their
    windows (or go on as they are, where none is given), and bytes/s of the line that windows leave unused."""
    window_settings = observation.settings
    holds = window_settings.trip * window_settings.line / window_settings.packet
    waits = max(0.0, decision.total - holds) if decision.total else observation.backlog
    unused = max(0.0, 1.0 - decision.total / holds) if decision.total and holds else 0.0
    return {
        "seconds in the queue": waits * window_settings.packet / window_settings.line,
        "unused bytes/s": unused * window_settings.line,
    }
