"""Multicasts over splitters, and over an electrical network whose ports are as fast, in both engines.

Over splitters a tree is one flow: it loads the transmit port of its source and of each relay once, and of
each rack the receive port that the rack listens to; a rack has p of these. The electrical network has no
bottleneck but a transmit and a receive port a rack. There the same is done by

- ``unicast``: the source sends to one member after the other,
- ``binomial``: who has all of it sends to the next half of those that do not,
- ``chain``: everyone sends on to the next what has come, packet by packet,
- ``ip``: the network copies (IP multicast; ideal: no loss, no limit of groups).

A hop takes ``hop`` seconds, and the second and every further one of a pipeline a packet's time. Flows know no
queues and losses. `packets` takes one tree through the packet engine, with losses, and repairs as the policy
says; repairs begin when all has been sent, where live they begin at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log10

import numpy as np

from windtunnel.base.errors import UserError
from windtunnel.engines import flows
from windtunnel.engines.packets import Flow, Fork, PacketLink, Queue, Simulation, layout
from windtunnel.network.multicast.policy import MulticastRequest, RelayTree, Rounds, SplitterFabric, decide
from windtunnel.network.multicast.policy.repair import MissingPackets
from windtunnel.network.multicast.policy.shuffle import Shuffle

BASELINES = ("unicast", "binomial", "chain", "ip")
FASTEST = 1e12
"""Bytes/s of what takes no time in the packet engine: a fibre, beside the port that feeds it."""


@dataclass(frozen=True)
class MulticastWorld:
    """``rate``: bytes/s of every port; ``hop``: seconds to the next rack; ``packet``: bytes; ``loss``: of
    packets at each receive port, in `packets` only."""

    rate: float = 12.5e9
    hop: float = 1e-6
    packet: int = 9000
    loss: float = 0.0


@dataclass(frozen=True)
class MulticastResult:
    """``ends``: when all members of each request have it, in seconds; ``sent``: bytes that transmit ports
    sent together; ``repairs``: packets that were sent again, to one rack each."""

    ends: tuple[float, ...]
    sent: float
    repairs: int = 0

    @property
    def seconds(self) -> float:
        return max(self.ends, default=0.0)


def pipelined(hops: int, world: MulticastWorld) -> float:
    """Seconds by which the last of so many hops is behind the first's sending."""
    return hops * world.hop + max(hops - 1, 0) * world.packet / world.rate


def splitters(fabric: SplitterFabric, rounds: Rounds, world: MulticastWorld) -> MulticastResult:
    """All requests over splitters, round after round."""
    racks, engine = Shuffle(fabric.p, fabric.k).racks, flows.World()
    engine.add_links([world.rate] * racks * (1 + racks))
    ends: dict[MulticastRequest, float] = {}
    for trees in rounds.rounds:
        under_way = {}
        for tree in trees:
            ports = [*tree.transmitters, *(racks * (1 + rack) + feeder for rack, feeder, _ in tree.listeners)]
            under_way[engine.start(tree.request.nbytes, ports)] = tree
        while done := engine.advance():
            for flow in done:
                ends[under_way[flow].request] = engine.now + pipelined(under_way[flow].hops, world)
        # the next round's first packet may follow the last one of this
        engine.advance(until=engine.now + world.hop)
    return MulticastResult(
        tuple(ends[request] for request in fabric.requests), float(engine.carried()[:racks].sum())
    )


def electrical(
    requests: Sequence[MulticastRequest], racks: int, world: MulticastWorld, arm: str
) -> MulticastResult:
    """All requests at once over an electrical network, by one of `BASELINES`.

    Raises:
        ValueError: an unknown arm.
    """
    if arm not in BASELINES:
        raise ValueError(f"arm {arm!r}; accepted are {', '.join(BASELINES)}")
    engine = flows.World([world.rate] * 2 * racks)
    ends = [0.0] * len(requests)
    turns: list[dict[int, list[int]]] = []  # of each request, whom a rack sends to once it has all, in order
    under_way: dict[int, tuple[int, int, int]] = {}  # a flow's request, and who sends to whom

    def next_of(number: int, rack: int, after: float = 0.0) -> None:
        if turns[number].get(rack):
            to = turns[number][rack].pop(0)
            flow = engine.start(requests[number].nbytes, [rack, racks + to], after=after)
            under_way[flow] = (number, rack, to)

    for number, request in enumerate(requests):
        turns.append({})
        # each begins with its neighbour, or all sources would meet at the same member
        line = [request.source, *sorted(request.members, key=lambda rack: (rack - request.source) % racks)]
        if arm in ("chain", "ip"):
            senders = line[:-1] if arm == "chain" else line[:1]
            flow = engine.start(request.nbytes, [*senders, *(racks + rack for rack in request.members)])
            under_way[flow] = (number, -1, -1)
            ends[number] = pipelined(len(senders), world)
        elif arm == "unicast":
            turns[number][request.source] = line[1:]
        else:
            half = 1 << max(len(line) - 1, 0).bit_length()
            while half := half >> 1:  # the far half first: it has most left to do
                for place in range(0, len(line) - half, 2 * half):
                    turns[number].setdefault(line[place], []).append(line[place + half])
        next_of(number, request.source)
    while done := engine.advance():
        for flow in done:
            number, rack, to = under_way[flow]
            if rack < 0:
                ends[number] += engine.now
                continue
            ends[number] = engine.now + world.hop
            next_of(number, rack)
            next_of(number, to, world.hop)
    return MulticastResult(tuple(ends), float(engine.carried()[:racks].sum()))


def packets(fabric: SplitterFabric, tree: RelayTree, world: MulticastWorld, seed: int = 0) -> MulticastResult:
    """One tree, packet by packet.

    Raises:
        UserError: the policy gave up: too much is lost.
    """
    racks, size = Shuffle(fabric.p, fabric.k).racks, world.packet
    queue = Queue(packets=1 << 20)
    send = PacketLink(world.rate, 0.0, queue)
    fibre = PacketLink(min(64 * world.rate, FASTEST), world.hop, queue, world.loss)
    # transmit ports, each rack's fibre, and an electrical port in either direction, which repairs go by
    links = [send] * racks + [fibre] * racks + [send] * racks + [fibre] * racks
    fed: dict[int, list[int]] = {}
    hop_of = {rack: (feeder, hop) for rack, feeder, hop in tree.listeners}
    for rack, feeder, _ in tree.listeners:
        fed.setdefault(feeder, []).append(rack)

    def onward(rack: int) -> list[int | Fork]:
        if rack not in fed:
            return []
        return [rack, Fork([[racks + to, *onward(to)] for to in fed[rack]])]

    count = max(1, -int(-tree.request.nbytes // size))
    ways = {tree.request.source: (onward(tree.request.source), list(range(count)))}
    seconds, sent, repairs, turn = 0.0, 0, 0, 0
    vain: dict[int, int] = {}  # how often each rack has asked in vain
    while ways:
        whose, lacks = list(ways), dict[int, list[int]]()
        sending = [Flow(way, (), "udp", size=len(numbers) * size, rate=world.rate, packet=size)
                   for way, numbers in ways.values()]  # fmt: skip
        engine = Simulation(links, sending, seed=seed + turn, log=True)
        engine.run(2 * sum(len(numbers) for _, numbers in ways.values()) * size / world.rate
                   + 4 * (pipelined(tree.hops, world) + 1e-6))  # fmt: skip
        seconds += float(engine.log["time"].max()) / layout.SECOND
        sent += int(engine.links["passed_bytes"].reshape(4, racks)[[0, 2]].sum())
        for row in engine.log[engine.log["kind"] == layout.LOST]:
            numbers = ways[whose[int(row["flow"])]][1]
            lacks.setdefault(int(row["where"]) % racks, []).append(numbers[int(row["number"])])
        before, ways = ways, {}
        for rack, missing in ((rack, tuple(sorted(lacks[rack]))) for rack in sorted(lacks)):
            in_vain = turn > 0 and rack in before and tuple(before[rack][1]) == missing
            vain[rack] = vain.get(rack, 0) + 1 if in_vain else 0
            # all else is over: nothing is to be waited for
            lacking = MissingPackets(
                tree.request.source, *hop_of[rack], missing, True, np.inf, vain[rack], world.hop
            )
            to = decide(lacking).ask
            if to < 0:
                raise UserError(
                    f"loss: rack {rack} asked {vain[rack]} times in vain at {world.loss}, accepted is less"
                )
            ways[rack] = ([2 * racks + to, 3 * racks + rack, *onward(rack)], list(missing))
            repairs += len(missing)
        turn += 1
        seconds += world.hop * bool(ways)  # what it takes to ask
    return MulticastResult((seconds,), float(sent), repairs)


def split_loss(p: int, excess_db: float) -> float:
    """dB that a splitter of p outputs takes from each: what is divided, and what it swallows."""
    return 10 * log10(p) + excess_db


def cost(observation: SplitterFabric | MissingPackets, decision: object) -> dict[str, float]:
    """What a decision takes: rounds, transmissions of all trees, hops of the longest; packets asked for."""
    if isinstance(decision, Rounds):
        trees = [tree for trees in decision.rounds for tree in trees]
        return {
            "rounds": float(len(decision.rounds)),
            "transmissions": float(sum(len(tree.transmitters) for tree in trees)),
            "hops": float(max((tree.hops for tree in trees), default=0)),
        }
    return {"packets asked for": float(len(getattr(decision, "packets", ())))}
