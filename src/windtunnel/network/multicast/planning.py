"""``windtunnel network multicast plan``: what a fabric of splitters does for multicasts, and what it takes.

Watts, prices and the excess loss of a splitter are the user's, in a YAML file; without it only what physics
and counting say is told::

    transmitter: {watts: 1.2, price: 300}
    receiver: {watts: 0.8, price: 150}
    splitter: {price: 40, excess_db: 0.7}
    port: {watts: 9, price: 700}      # one end of an electrical link, transceiver included
    budget_db: 9                      # what a receiver still understands
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field

from windtunnel.base.errors import UserError
from windtunnel.base.fields import fitted
from windtunnel.base.plain import to_plain
from windtunnel.base.strict_yaml import read_mapping
from windtunnel.cluster.schema import Watts
from windtunnel.network.multicast.policy import (
    MulticastRequest,
    Rounds,
    SplitterFabric,
    decide,
    rules,
    static_trees,
)
from windtunnel.network.multicast.policy.check import faults
from windtunnel.network.multicast.policy.shuffle import Shuffle, shuffle_of
from windtunnel.network.multicast.twin import (
    BASELINES,
    MulticastResult,
    MulticastWorld,
    electrical,
    packets,
    split_loss,
    splitters,
)

ACCEPTED = {
    "transmitter": "its watts and price",
    "receiver": "its watts and price",
    "splitter": "its price and excess_db",
    "port": "its watts and price",
    "watts": "watts from 0 up",
    "price": "a number from 0 up",
    "excess_db": "a number from 0 up",
    "budget_db": "a number from 0 up",
}
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class OpticalPart(BaseModel, extra="forbid"):
    watts: Watts = 0.0
    """power"""
    price: Amount = 0.0
    """in any currency"""


class Splitter(OpticalPart):
    excess_db: Amount
    """loss beyond 10 log10 p dB"""


class OpticalParts(BaseModel, extra="forbid"):
    transmitter: OpticalPart
    """of a rack"""
    receiver: OpticalPart
    """of a rack"""
    splitter: Splitter
    """passive, of p outputs"""
    port: OpticalPart
    """one end of an electrical link, transceiver included"""
    budget_db: Amount | None = None
    """a splitter that loses more is refused"""


def read_parts(file: Path) -> OpticalParts:
    """Raises UserError: the first thing in ``file`` that is wrong."""
    return fitted(OpticalParts, read_mapping(file, "table of parts"), str(file), ACCEPTED)


def fabric_of(
    shuffle: Shuffle, sources: Sequence[int], nbytes: float, failed: Sequence[str] = ()
) -> SplitterFabric:
    """``nbytes`` from each of ``sources`` to all other racks whose transmitters have not failed. ``failed``:
    transmitters (``3``) and fibres (``3-6``). Raises UserError: it is none."""
    dead: list[int] = []
    cut: list[tuple[int, int]] = []
    for text in failed:
        ends = text.split("-")
        rack_numbers = all(end.isdecimal() and int(end) < shuffle.racks for end in ends)
        if rack_numbers and len(ends) == 1:
            dead.append(int(text))
        elif rack_numbers and len(ends) == 2 and int(ends[1]) in shuffle.fed_by(int(ends[0])):
            cut.append((int(ends[0]), int(ends[1])))
        else:
            raise UserError(
                f"`failed`: {text!r} is not of this fabric, accepted are a rack's transmitter (0 to"
                f" {shuffle.racks - 1}) or a fibre, such as 0-{shuffle.fed_by(0)[0]}"
            )
    every = range(shuffle.racks)
    requests = tuple(
        MulticastRequest(source, tuple(to for to in every if to != source), nbytes) for source in sources
    )
    return SplitterFabric(shuffle.p, shuffle.k, requests, tuple(dead), tuple(cut))


def plan(
    racks: int, splitter: int, sources: Sequence[int], nbytes: float, world: MulticastWorld,
    failed: Sequence[str] = (), parts: OpticalParts | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Trees, rules of every rack, and emulated times beside an electrical network, as values of JSON.

    Raises:
        UserError: something given is wrong, or cannot be reached.
    """
    shuffle = shuffle_of(racks, splitter)
    if parts is not None and parts.budget_db is not None:
        most = [p for p in range(2, racks + 1) if split_loss(p, parts.splitter.excess_db) <= parts.budget_db]
        if splitter not in most:
            loss = split_loss(splitter, parts.splitter.excess_db)
            raise UserError(
                f"`splitter`: {splitter} outputs lose {loss:.1f} dB and budget_db is {parts.budget_db:g},"
                f" accepted are {f'2 to {max(most)}' if most else 'better parts'}"
            )
    request = fabric_of(shuffle, sources, nbytes, failed)
    rounds = decide(request)
    if wrong := faults(request, rounds):
        raise RuntimeError(f"a mistake of windtunnel's: {wrong[0]}")
    arms: dict[str, MulticastResult] = {"splitters": splitters(request, rounds, world)}
    if len(sources) > 1:
        alone = Rounds(tuple((tree,) for trees in rounds.rounds for tree in trees))
        arms["splitters, a round each"] = splitters(request, alone, world)
    if world.loss:
        fabric = replace(request, requests=request.requests[:1])
        arms["splitters, packet by packet"] = packets(fabric, decide(fabric).rounds[0][0], world)
    arms |= {name: electrical(request.requests, racks, world, name) for name in BASELINES}
    emulated = {
        name: {"seconds": arm.seconds, "bytes_sent": arm.sent, "repairs": arm.repairs}
        for name, arm in arms.items()
    }
    trees = [tree for trees in rounds.rounds for tree in trees]
    return {
        "racks": racks, "splitter": splitter, "columns": shuffle.k, "relay_groups": shuffle.groups,
        "hops": max(tree.hops for tree in trees), "transmissions": [len(tree.transmitters) for tree in trees],
        "rounds": [[tree.request.source for tree in round_] for round_ in rounds.rounds],
        "trees": to_plain(trees),
        "rules": {str(rack): to_plain(own) for rack, own in sorted(rules(static_trees(
            splitter, shuffle.k, request.failed_transmitters)).items())},
        "emulated": emulated, "parts": None if parts is None else totals(shuffle, parts),
    }  # fmt: skip


def totals(shuffle: Shuffle, parts: OpticalParts) -> dict[str, dict[str, float]]:
    """Watts and prices of a fabric of splitters, and of an electrical network without a bottleneck: a link
    from every rack to one switch."""
    count, p = shuffle.racks, shuffle.p
    networks = {
        "splitters": [(parts.transmitter, count), (parts.receiver, p * count), (parts.splitter, count)],
        "electrical": [(parts.port, 2 * count)],
    }
    result = {
        name: {key: sum(getattr(part, key) * many for part, many in used) for key in ("watts", "price")}
        for name, used in networks.items()
    }
    result["splitters"]["split_loss_db"] = split_loss(p, parts.splitter.excess_db)
    return result
