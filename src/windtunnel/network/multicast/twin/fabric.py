"""Broadcasts and all_gathers of a job between hosts, over splitters that stand beside its network.

Each scale-up domain (a host, or the hosts that one NVLink switch joins) is a rack of the shuffle, with a
transmit port a plane. An all_gather is a broadcast from every rack, in the rounds that the policy finds; a
rack takes no more than its NICs do. Groups that do the same at once, as in any SPMD job, share time.
"""

from __future__ import annotations

from functools import lru_cache

from windtunnel.base.errors import UserError
from windtunnel.cluster.model import Cluster
from windtunnel.network.multicast.policy import MulticastRequest, Rounds, SplitterFabric, decide
from windtunnel.network.multicast.policy.shuffle import shuffle_of
from windtunnel.network.multicast.twin import MulticastWorld, pipelined
from windtunnel.training.emulate.graph import Alternative, Collective, Group


def alternative(cluster: Cluster) -> Alternative:
    """Broadcasts and all_gathers between racks; inside a rack NVLink carries its part meanwhile.

    Raises:
        UserError: there is no shuffle of so many racks; the nearest are named.
    """
    host, plan = cluster.host, cluster.multicast
    assert plan is not None  # the fabric is in `Cluster.fabrics`
    racks = -(-cluster.hosts // host.intra_hosts)
    try:
        shuffle = shuffle_of(racks, plan.splitter)
    except UserError as error:
        raise UserError(f"{cluster.name}: multicast: {error}") from None
    nic, nics, devices = host.nic_bandwidth * host.nic.efficiency, host.nics, host.devices
    nics, devices = nics * host.intra_hosts, devices * host.intra_hosts
    line = nic * min(plan.planes, nics)
    world = MulticastWorld(rate=line, hop=cluster.topology.hop_latency)

    @lru_cache(maxsize=256)
    def trees(sources: tuple[int, ...], members: tuple[int, ...]) -> Rounds:
        requests = (
            MulticastRequest(source, tuple(rack for rack in members if rack != source)) for source in sources
        )
        return decide(SplitterFabric(shuffle.p, shuffle.k, tuple(requests)))

    def seconds(call: Collective, group: Group) -> float | None:
        if call.kind not in ("broadcast", "all_gather"):
            return None
        where = [cluster.host_of(rank) // host.intra_hosts for rank in group.ranks]
        members = tuple(sorted(set(where)))
        if len(members) < 2:
            return None
        placed = cluster.placement(group.ranks)
        local, size = placed.ranks_per_host, max(call.in_bytes, call.out_bytes)
        at_once = devices / local * (racks // len(members))  # groups of this shape
        if call.kind == "broadcast":
            root = call.peer if call.peer in group.ranks else group.ranks[0]
            rounds = trees((cluster.host_of(root) // host.intra_hosts,), members)
            between = size / line
        else:
            size = call.out_bytes or call.in_bytes * len(group.ranks)
            rounds, each = trees(members, members), size / len(members)
            between = max(len(rounds.rounds) * each / line, (size - each) / (nic * nics))
        hops = max(tree.hops for trees in rounds.rounds for tree in trees)
        first, inside = host.nic.latency + pipelined(hops, world), 0.0
        if placed.intra is not None:
            first += (local - 1) * placed.intra.latency
            inside = size / (placed.intra_bandwidth * placed.intra.efficiency)
        return first + max(between * at_once, inside)

    return Alternative("shufflecast", "broadcasts and all_gathers between hosts", seconds)
