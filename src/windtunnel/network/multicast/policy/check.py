"""Whether trees do what they are to: sent through the fabric, transmission by transmission."""

from __future__ import annotations

from collections import Counter

from windtunnel.network.multicast.policy import RelayTree, Rounds, SplitterFabric, disjoint
from windtunnel.network.multicast.policy.shuffle import Shuffle


def faults(fabric: SplitterFabric, rounds: Rounds) -> list[str]:
    """What is wrong, a sentence each: every request has one tree, in which each member takes the data once
    from a rack that has it and feeds it; no transmitter is used twice at once."""
    shuffle, wrongs = Shuffle(fabric.p, fabric.k), []
    planned = [tree for trees in rounds.rounds for tree in trees]
    if Counter(tree.request for tree in planned) != Counter(fabric.requests):
        wrongs.append("the trees are not those of the requests")
    for number, trees in enumerate(rounds.rounds):
        if not disjoint(trees):
            wrongs.append(f"round {number}: a transmitter is in two trees")
    for tree in planned:
        wrongs += [f"from rack {tree.request.source}: {wrong}" for wrong in _sent(tree, shuffle, fabric)]
    return wrongs


def _sent(tree: RelayTree, shuffle: Shuffle, fabric: SplitterFabric) -> list[str]:
    has, wrongs = {tree.request.source: 0}, []
    for rack, feeder, hop in tree.listeners:
        if rack in has:
            wrongs.append(f"rack {rack} takes it twice")
        if has.get(feeder) is None or has[feeder] >= hop:
            wrongs.append(f"rack {rack} listens to rack {feeder}, which has nothing at hop {hop}")
        if rack not in shuffle.fed_by(feeder) or (feeder, rack) in fabric.failed_fibres:
            wrongs.append(f"no fibre leads from rack {feeder} to rack {rack}")
        if feeder not in tree.transmitters or feeder in fabric.failed_transmitters:
            wrongs.append(f"rack {feeder} does not send")
        has[rack] = hop
    missing = set(tree.request.members) - set(has)
    return wrongs + [f"rack {rack} does not get it" for rack in sorted(missing)]
