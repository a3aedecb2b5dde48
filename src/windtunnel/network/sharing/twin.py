"""Entities on one link of the packet engine: with the policy's gap before it, and without.

A dumbbell: all flows of all entities cross one link, the bottleneck, and their acknowledgements come back
over another. What stands before it or waits at it is the arm: the gap (``aq``), nothing (``fifo``), a policer
with a bucket of ten packets (``policer``), a queue for each entity (``drr``), or core-stateless fair queueing
(``csfq``: one level of HCSFQ, NSDI 2021). Senders are the engine's sketches of their kind.

`cost` prices a decision by arithmetic alone, an entity's share as a cap on what it wants: no engine runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import carray
from numpy.typing import NDArray

from windtunnel.engines.packets import Flow, PacketLink, Queue, Simulation, gate
from windtunnel.network.sharing.policy import (
    HEADROOM,
    SHARE,
    Decision,
    Observation,
    SharingTenant,
    fixed,
    promised,
)  # fmt: skip
from windtunnel.network.sharing.policy import gap as gaps
from windtunnel.network.sharing.policy.meter import PERIOD, WINDOW, RateMeter
from windtunnel.network.sharing.policy.units import NEVER, rate_units

MOST = 64
METER = np.dtype(
    [(name, "i8") for name in (
        "last", "gap", "rate", "lent", "until", "limit", "mark", "delays", "passed", "dropped", "marked",
    )]
)  # fmt: skip
"""State of the gap's gate for each entity; ``delays``: whether its packets carry the virtual delay."""
FAIR = np.dtype(
    [(name, "f8") for name in (
        "rate", "last", "weight", "share", "arrived", "accepted", "began", "line", "most",
    )] + [("random", "u8")]
)  # fmt: skip
"""State of CSFQ's gate: ``rate`` and ``last`` of each entity, the rest in the first record."""
AVERAGE = 1e9
"""ps: 1 ms, over which CSFQ estimates rates."""


@dataclass(frozen=True)
class TenantTraffic:
    """An entity with its ``flows``: so many senders of ``kind`` (see `engines.packets`), or UDP of
    ``sends`` bytes/s in all. ``feedback``: drop, ecn, or delay."""

    name: str
    flows: int = 1
    kind: str = "reno"
    weight: float = 1.0
    rate: float | None = None
    sends: float | None = None
    feedback: str = "drop"
    stops: bool = False
    """It sends nothing at all: an idle neighbour."""


@dataclass(frozen=True)
class SharedLink:
    """A link of ``line`` bytes/s, round trips of ``rtt`` seconds, a FIFO of ``packets``; the gap's ``limit``
    and ``mark`` are packets."""

    line: float = 1.25e9
    rtt: float = 20e-6
    packets: int = 1000
    limit: int = 1000
    mark: int = 20
    packet: int = 1500


@dataclass(frozen=True)
class SharingResult:
    """Bytes/s that each tenant's receivers got, in the order of tenants; ``promised``: its own rate;
    ``wait``: seconds in the physical queue, mean; ``dropped``: of all packets offered."""

    goodput: tuple[float, ...]
    promised: tuple[float, ...]
    wait: float
    dropped: float


@gate
def aq_gate(now, packet, state):  # type: ignore[no-untyped-def]
    head, meters = carray(packet, 1)[0], carray(state, MOST, METER)
    meter, time = meters[head.tag], now // 1000
    rate = meter.lent if time < meter.until else meter.rate
    verdict, meter.last, meter.gap = gaps.step(
        time, head.size, meter.last, meter.gap, rate, meter.limit, meter.mark
    )
    if verdict == gaps.DROP:
        meter.dropped += head.size
        return verdict
    meter.passed += head.size
    if meter.delays:
        head.virtual_delay += gaps.virtual_delay(meter.gap, rate) * 1000
    if verdict == gaps.MARK:
        meter.marked += head.size
    return verdict


@gate
def fair_gate(now, packet, state):  # type: ignore[no-untyped-def]
    """CSFQ (SIGCOMM 1998, section 3), with exponential averages, as HCSFQ has it at one level."""
    head, all_ = carray(packet, 1)[0], carray(state, MOST, FAIR)
    meter, common = all_[head.tag], all_[0]
    passed = max(float(now) - meter.last, 1.0)
    meter.last = float(now)
    decay = np.exp(-passed / AVERAGE)
    meter.rate = (1.0 - decay) * head.size / passed + decay * meter.rate
    level = meter.rate / meter.weight
    common.arrived += head.size
    common.most = max(common.most, level)
    common.random = common.random * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
    draw = float(common.random >> np.uint64(11)) / 2.0**53
    keep = common.share <= 0.0 or draw < common.share / level
    if keep:
        common.accepted += head.size
    span = float(now) - common.began
    if span >= AVERAGE:
        if common.arrived >= common.line * span:
            if common.share <= 0.0:
                common.share = common.most
            common.share = min(common.share * common.line * span / max(common.accepted, 1.0), common.most)
        else:
            common.share = common.most
        common.began, common.arrived, common.accepted, common.most = float(now), 0.0, 0.0, 0.0
    return gaps.PASS if keep else gaps.DROP


def emulate(
    tenants: Sequence[TenantTraffic], arm: str, seconds: float, seed: int,
    world: SharedLink = SharedLink(), *, policy: Callable[[Observation], Decision] = fixed, warm: float = 0.2,
) -> SharingResult:  # fmt: skip
    """All tenants for ``seconds``, of which the first part ``warm`` is not counted. ``arm``: aq, fifo,
    policer, drr or csfq; of aq rates are given anew by ``policy`` every 5 ms.

    Raises:
        ValueError: an unknown arm, or more than is promised than the line has.
    """
    if arm not in ("aq", "fifo", "policer", "drr", "csfq") or len(tenants) > MOST:
        raise ValueError(
            f"arm {arm!r} with {len(tenants)} tenants; at most {MOST} on aq, fifo, policer, drr, csfq"
        )
    entities = [SharingTenant(tenant.name, tenant.weight, tenant.rate) for tenant in tenants]
    own = promised(Observation(world.line, tuple(entities)))
    queue = Queue(packets=world.packets, mark_at=world.mark if arm == "fifo" else 0)
    if arm == "drr":
        least = min(own)
        quanta = [max(world.packet, round(world.packet * rate / least)) for rate in own]
        queue = Queue("drr", packets=world.limit, mark_at=world.mark, bands=len(own), quantum=quanta)
    links = [
        PacketLink(world.line, world.rtt / 2, queue),
        PacketLink(world.line, world.rtt / 2, Queue(packets=10**6)),
    ]
    rng = np.random.default_rng(seed)
    flows, owner = _flows(tenants, world, rng)
    simulation = Simulation(links, flows, seed=seed)
    meters = np.zeros(MOST, METER)
    if arm in ("aq", "policer"):
        simulation.set_gate(0, aq_gate, meters)
        _fill(meters, tenants, own, world, policer=arm == "policer")
    elif arm == "csfq":
        fair = np.ones(MOST, FAIR)
        fair["rate"] = fair["last"] = fair["arrived"] = fair["accepted"] = fair["began"] = fair["share"] = 0.0
        fair["weight"][: len(own)] = np.array(own) / max(own)
        fair["line"], fair["random"] = SHARE * world.line / 1e12, seed + 1
        simulation.set_gate(0, fair_gate, fair)
    meter, start = RateMeter(), None
    for turn in range(1, round(seconds / PERIOD) + 1):
        now = turn * PERIOD
        simulation.run(now)
        if start is None and now >= warm * seconds:
            start = (now, simulation.flows["received"].copy(), *_queue(simulation))
        if arm == "aq":
            count = meters[: len(own)]
            offered, trouble = count["passed"] + count["dropped"], count["dropped"] + count["marked"]
            observation = meter.look(now, world.line, entities, offered, trouble)
            meters["lent"][: len(own)] = [rate_units(rate) for rate in policy(observation).lent]
            meters["until"] = int((now + WINDOW * PERIOD) * 1e9)
    assert start is not None
    got = (simulation.flows["received"] - start[1]) * world.packet / (simulation.now - start[0])
    wait, passed, offered, lost = (
        after - before for after, before in zip(_queue(simulation), start[2:], strict=True)
    )
    return SharingResult(
        tuple(float(got[owner == place].sum()) for place in range(len(tenants))), own,
        wait / 1e12 / max(passed, 1.0), lost / max(offered, 1.0),
    )  # fmt: skip


def _queue(simulation: Simulation) -> tuple[float, float, float, float]:
    link = simulation.links[0]
    lost = float(link["gated"] + link["dropped"])
    return float(link["wait"]), float(link["passed"]), float(link["offered"]), lost


def _flows(
    tenants: Sequence[TenantTraffic], world: SharedLink, rng: np.random.Generator
) -> tuple[list[Flow], NDArray[np.int64]]:
    """Every tenant's flows, begun within the first 5 ms, and whose each is."""
    flows, owner = [], []
    for place, tenant in enumerate(tenants):
        for _ in range(0 if tenant.stops else tenant.flows):
            common: dict[str, Any] = {"start": float(rng.uniform(0, 5e-3)), "tag": place, "band": place}
            if tenant.kind == "udp":
                assert tenant.sends is not None
                flows.append(
                    Flow([0], sender="udp", rate=tenant.sends / tenant.flows, packet=world.packet, **common)
                )
            else:
                ecn = tenant.feedback == "ecn"
                flows.append(Flow([0], [1], tenant.kind, ecn=ecn, packet=world.packet, **common))
            owner.append(place)
    return flows, np.array(owner, np.int64)


def _fill(
    meters: NDArray[Any],
    tenants: Sequence[TenantTraffic],
    own: Sequence[float],
    world: SharedLink,
    *,
    policer: bool,
) -> None:
    for place, (tenant, rate) in enumerate(zip(tenants, own, strict=True)):
        row = meters[place]
        row["rate"] = row["lent"] = rate_units(rate)
        row["limit"] = (10 if policer else world.limit) * world.packet
        row["mark"] = world.mark * world.packet if tenant.feedback == "ecn" and not policer else NEVER
        row["delays"] = tenant.feedback == "delay" and not policer


def cost(observation: Observation, decision: Decision) -> dict[str, float]:
    """What a decision makes of one second like the one that was seen: bytes that entities wanted and did not
    get, and of the line those that nobody used. Whoever was held back wants the line."""
    wants = [
        observation.line if entity.since_trouble is not None else HEADROOM * entity.offered
        for entity in observation.entities
    ]
    got = [min(want, rate) for want, rate in zip(wants, decision.lent, strict=True)]
    scale = min(1.0, observation.line / max(sum(got), 1e-9))
    missed = sum(min(want, observation.line) - rate * scale for want, rate in zip(wants, got, strict=True))
    return {"missed bytes": missed, "unused bytes": observation.line - scale * sum(got)}
