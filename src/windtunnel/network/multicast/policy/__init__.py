"""Who relays which multicast over a p-shuffle, and which multicasts go at once (Shufflecast).

A multicast is a *tree*: the source sends, and of every relay group whose racks are needed one rack that has
the data relays it to the p racks that the group feeds. So each rack hears it once, N / p transmissions reach
all, and with the earliest relays a broadcast takes 2k - 1 hops. In its first k hops, though, each group has
only one rack with the data: where that one relays another tree of the round, or has failed, it takes one hop
more, and more where several have failed. Which member of a group relays is the lever:
the one that has the data first and, of those, has relayed least; one whose transmitter or fibre has failed is
left out, so that a rack is lost only when all p racks that feed it are. Where no one relay reaches all racks
that its group has to feed, several do, and each rack listens to one of them.

Trees go at once when no transmitter is in two of them. At most p can, and not every p sources can: trees are
put together only where `disjoint` holds for the very trees, else they share time, in rounds.

Source: Das et al., Shufflecast, ToN'22 (arXiv:2104.09680), read in its abstract; relay choice and packing are
ours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

from windtunnel.base.errors import UserError
from windtunnel.network.multicast.policy.repair import MissingPackets, RepairDecision, repair
from windtunnel.network.multicast.policy.shuffle import Shuffle


@dataclass(frozen=True)
class MulticastRequest:
    """``nbytes`` from the rack ``source`` to the racks ``members``."""

    source: int
    members: tuple[int, ...]
    nbytes: float = 0.0


@dataclass(frozen=True)
class SplitterFabric:
    """A fabric with splitters of ``p`` outputs and ``k`` columns, what is to be sent, and what has failed:
    transmitters (of a rack) and fibres (from one rack's splitter to another rack)."""

    p: int
    k: int
    requests: tuple[MulticastRequest, ...]
    failed_transmitters: tuple[int, ...] = ()
    failed_fibres: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class RelayTree:
    """``listeners``: (rack, the rack that it listens to, hop) of all racks that take the data, in order of
    the hops, those that only relay included. ``transmitters``: the racks that send, the source first."""

    request: MulticastRequest
    transmitters: tuple[int, ...]
    listeners: tuple[tuple[int, int, int], ...]

    @property
    def hops(self) -> int:
        return max((hop for _, _, hop in self.listeners), default=0)


@dataclass(frozen=True)
class RelayRule:
    """What a rack does with the data of a source: listen to ``feeder`` (-1: it is the source), deliver it to
    its own hosts, send it on."""

    source: int
    feeder: int
    deliver: bool
    relay: bool


@dataclass(frozen=True)
class Rounds:
    """Trees by rounds: those of a round go at once."""

    rounds: tuple[tuple[RelayTree, ...], ...]


Observation = SplitterFabric | MissingPackets
Decision = Rounds | RepairDecision


@overload
def decide(observation: SplitterFabric) -> Rounds: ...
@overload
def decide(observation: MissingPackets) -> RepairDecision: ...
def decide(observation: Observation) -> Decision:
    """Trees for all requests, in as few rounds as taking each request as early as it fits gives; of a rack
    that lacks packets, whom it asks for them.

    Raises:
        UserError: a rack that there is not, a source whose transmitter has failed, or a rack that is cut off.
    """
    if isinstance(observation, MissingPackets):
        return repair(observation)
    shuffle, waiting = Shuffle(observation.p, observation.k), list(observation.requests)
    for request in waiting:
        _check(request, shuffle, observation)
    rounds: list[tuple[RelayTree, ...]] = []
    load: Counter[int] = Counter()
    while waiting:
        first = waiting.pop(0)
        trees: tuple[RelayTree, ...] = (_tree(first, shuffle, observation, frozenset(), load),)
        for request in list(waiting):
            if len(trees) == observation.p:
                break
            packed = _together([*(tree.request for tree in trees), request], shuffle, observation, load)
            if packed is not None and disjoint(packed):
                trees = packed
                waiting.remove(request)
        for tree in trees:
            load.update(tree.transmitters)
        rounds.append(trees)
    return Rounds(tuple(rounds))


def one_at_a_time(observation: Observation) -> Decision:
    """The baseline: a round for each request."""
    if isinstance(observation, MissingPackets):
        return repair(observation)
    alone = (
        decide(
            SplitterFabric(
                observation.p,
                observation.k,
                (request,),
                observation.failed_transmitters,
                observation.failed_fibres,
            )
        )
        for request in observation.requests
    )
    return Rounds(tuple(rounds.rounds[0] for rounds in alone))


POLICIES: Mapping[str, Callable[[Observation], Decision]] = {"packed": decide, "serial": one_at_a_time}


def static_trees(p: int, k: int, failed_transmitters: tuple[int, ...] = ()) -> list[RelayTree]:
    """The tree of every source to all racks, with relays balanced over all of them: what racks are set up
    with once, whatever groups there will be. Sources whose transmitter has failed have none."""
    shuffle, load = Shuffle(p, k), Counter[int]()
    trees = []
    for source in sorted(set(range(shuffle.racks)) - set(failed_transmitters)):
        others = tuple(rack for rack in range(shuffle.racks) if rack != source)
        fabric = SplitterFabric(p, k, (), failed_transmitters)
        trees.append(_tree(MulticastRequest(source, others), shuffle, fabric, frozenset(), load))
        load.update(trees[-1].transmitters)
    return trees


def rules(trees: Iterable[RelayTree]) -> dict[int, list[RelayRule]]:
    """What each rack is told, a rule for each source: no more than there are racks, however many groups."""
    by_rack: dict[int, list[RelayRule]] = {}
    for tree in trees:
        source, members, sends = tree.request.source, set(tree.request.members), set(tree.transmitters)
        by_rack.setdefault(source, []).append(RelayRule(source, -1, False, True))
        for rack, feeder, _ in tree.listeners:
            by_rack.setdefault(rack, []).append(RelayRule(source, feeder, rack in members, rack in sends))
    return by_rack


def disjoint(trees: Sequence[RelayTree]) -> bool:
    """Whether no transmitter is in two trees; a rack has a receive port for each rack that feeds it, so that
    nothing else can meet."""
    return max(Counter(rack for tree in trees for rack in tree.transmitters).values(), default=0) <= 1


def _check(request: MulticastRequest, shuffle: Shuffle, fabric: SplitterFabric) -> None:
    for rack in (request.source, *request.members):
        if not 0 <= rack < shuffle.racks:
            raise UserError(f"requests: rack {rack} is not one of 0 to {shuffle.racks - 1}")
    if request.source in fabric.failed_transmitters:
        raise UserError(f"requests: rack {request.source} cannot send, its transmitter has failed")
    if request.source in request.members:
        raise UserError(f"requests: rack {request.source} is the source and among the members")


def _together(
    requests: list[MulticastRequest], shuffle: Shuffle, fabric: SplitterFabric, load: Counter[int]
) -> tuple[RelayTree, ...] | None:
    """Trees of all requests that leave each other's transmitters alone, one after the other; None where the
    last of them finds no way left."""
    transmitters = frozenset(request.source for request in requests)
    if len(transmitters) < len(requests):
        return None
    trees = []
    for request in requests:
        try:
            trees.append(_tree(request, shuffle, fabric, transmitters - {request.source}, load))
        except UserError:
            return None
        transmitters |= set(trees[-1].transmitters)
    return tuple(trees)


def _tree(
    request: MulticastRequest,
    shuffle: Shuffle,
    fabric: SplitterFabric,
    excluded: frozenset[int],
    load: Counter[int],
) -> RelayTree:
    """Hop by hop from the source, each group as soon as one of its racks has the data; then without what no
    member needs. Transmitters in ``excluded`` are not used."""
    broken, cut = excluded | set(fabric.failed_transmitters), set(fabric.failed_fibres)
    feeders: dict[int, tuple[int, int]] = {request.source: (-1, 0)}
    hop, fresh = 0, [request.source]
    while fresh:
        hop += 1
        ready = [rack for rack in feeders if rack not in broken]
        by_group: dict[int, list[int]] = {}
        for rack in ready:
            by_group.setdefault(shuffle.group(rack), []).append(rack)
        fresh = []
        for racks in by_group.values():
            open_ = {rack for rack in shuffle.fed_by(racks[0]) if rack not in feeders}
            # who reaches most of those that have not heard it; of them, who has relayed least
            while open_:
                reach = {rack: [to for to in open_ if (rack, to) not in cut] for rack in racks}
                best = min(racks, key=lambda rack: (-len(reach[rack]), load[rack], rack))
                if not reach[best]:
                    break
                for to in reach[best]:
                    feeders[to] = (best, hop)
                    fresh.append(to)
                open_ -= set(reach[best])
    lost = [rack for rack in request.members if rack not in feeders]
    if lost:
        raise UserError(f"requests: rack {lost[0]} is cut off from rack {request.source}")
    needed, queue = set(), list(request.members)
    while queue:
        rack = queue.pop()
        if rack != request.source and rack not in needed:
            needed.add(rack)
            queue.append(feeders[rack][0])
    listeners = sorted((feeders[rack][1], rack, feeders[rack][0]) for rack in needed)
    senders = dict.fromkeys([request.source, *(feeder for _, _, feeder in listeners)])
    return RelayTree(request, tuple(senders), tuple((rack, feeder, at) for at, rack, feeder in listeners))
