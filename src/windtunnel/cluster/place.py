"""Where a group of ranks lies, and what its traffic therefore crosses.

The rules, for a group given in its own order:

* Inside a host traffic takes the intra link. A mesh host gives a rank only the lanes to those peers that
  are in the group.
* Between hosts a rank drives the NICs nearest to it, as NCCL does: with at least one NIC a device, its own;
  with fewer, one shared with its neighbours. In a rail-optimised network the peers are reached on the rail of
  the NIC, data moving to the right device by NVLink first (NCCL's PXN), so rails do not cross the spine.
* Oversubscription bites only what leaves a leaf. ``inter_bandwidth`` supposes that all traffic does.
  ``ring_bandwidth`` counts the hops between consecutive hosts that do, and supposes that the rest of the leaf
  is filled with groups of the same shape, as in any SPMD job.
* In a torus a host's NICs are split evenly over its 2 x dimensions ports; a group along k dimensions drives
  2k of them, and a message that passes h hosts takes the ports of h hosts.

Source for the rail and leaf counts: NVIDIA DGX SuperPOD H100 reference architecture, RA-11333-001.
The torus and mesh shares are inference from the wiring.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from windtunnel.base.errors import UserError
from windtunnel.cluster.model import Cluster, Host, Placement, Topology

SWITCHES = {
    1: 1,
    2: 3,
    3: 5,
}  # switches that a message passes at each tier: leaf; + spine, leaf; + core, spine


def place(cluster: Cluster, ranks: Sequence[int]) -> Placement:
    """The `Placement` of ``ranks`` (distinct, in group order) in ``cluster``.

    Raises `UserError` when the group is empty, names a rank twice, or one that the cluster does not have.
    """
    if not ranks:
        raise UserError("a group of ranks is empty, accepted is at least one rank")
    if len(set(ranks)) != len(ranks):
        twice = next(rank for rank, count in Counter(ranks).items() if count > 1)
        raise UserError(f"a group names rank {twice} more than once, accepted is every rank once")
    outside = next((rank for rank in ranks if not 0 <= rank < cluster.world_size), None)
    if outside is not None:
        raise UserError(
            f"a group names rank {outside}, cluster {cluster.name} has ranks 0 to {cluster.world_size - 1}"
        )

    host = cluster.host
    by_host: dict[int, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(rank // host.devices, []).append(rank % host.devices)
    by_domain: Counter[int] = Counter()
    for index, members in by_host.items():
        by_domain[index // host.intra_hosts] += len(members)
    most = max(by_domain.values())
    intra = host.intra if most > 1 else None
    intra_bandwidth = _intra_bandwidth(host, most) if intra else 0.0

    if len(by_domain) == 1:
        latency = host.intra.latency if intra else 0.0
        return Placement(
            len(ranks),
            1,
            most,
            0,
            intra,
            None,
            0.0,
            intra_bandwidth,
            intra_bandwidth,
            intra_bandwidth,
            latency,
        )

    nics_per_rank = min(_nics_used(host, members) / len(members) for members in by_host.values())
    line_rate = nics_per_rank * host.nic_bandwidth
    order = list(by_host)
    if cluster.topology.kind == "torus":
        tier, hops, share = _torus(cluster.topology, order)
        worst = ring = line_rate * share
    else:
        tier = _tier(cluster.topology, order)
        hops = SWITCHES[tier]
        worst = ring = line_rate
        if tier > 1:
            worst /= cluster.topology.oversubscription
            crossing = _ring_crossing(cluster.topology, order)
            ring /= max(1.0, cluster.topology.oversubscription * crossing)
    return Placement(
        ranks=len(ranks),
        hosts=len(by_domain),
        ranks_per_host=most,
        tier=tier,
        intra=intra,
        inter=host.nic,
        nics_per_rank=nics_per_rank,
        intra_bandwidth=intra_bandwidth,
        inter_bandwidth=worst,
        ring_bandwidth=ring,
        latency=host.nic.latency + hops * cluster.topology.hop_latency,
    )


def _intra_bandwidth(host: Host, members: int) -> float:
    """Bytes/s of each of ``members`` ranks inside one host; a mesh gives only the lanes to these peers."""
    if host.intra_switched or host.devices == 1:
        return host.intra.bandwidth
    return host.intra.bandwidth * (members - 1) / (host.devices - 1)


def _nics_used(host: Host, local_ranks: Sequence[int]) -> float:
    """How many NICs of a host the group's ranks there drive: the ones nearest to them."""
    if host.nics >= host.devices:
        return len(local_ranks) * (host.nics / host.devices)
    return len({local * host.nics // host.devices for local in local_ranks})


def _tier(topology: Topology, hosts: Sequence[int]) -> int:
    """1 under one leaf, 2 across leaves, 3 across pods."""
    if topology.kind == "single-switch":
        return 1
    leaves = {host // topology.hosts_per_leaf for host in hosts}
    if len(leaves) == 1:
        return 1
    # Two tiers are built to join all leaves by one layer of spines; the others grow a core above their pods.
    if topology.kind == "fat-tree-2" or len({leaf // topology.leaves_per_pod for leaf in leaves}) == 1:
        return 2
    return 3


def _ring_crossing(topology: Topology, hosts: Sequence[int]) -> float:
    """The fraction of the group's hosts under a leaf whose next host is under another, at the worst leaf."""
    leaves = [host // topology.hosts_per_leaf for host in hosts]
    members = Counter(leaves)
    out = Counter(leaf for leaf, following in pairwise([*leaves, leaves[0]]) if leaf != following)
    return max(count / members[leaf] for leaf, count in out.items())


def _torus(topology: Topology, hosts: Sequence[int]) -> tuple[int, int, float]:
    """Tier, hosts passed by the ring's longest step, and the share of a host's NICs that the group gets."""
    where = [coordinates(host, topology.dims) for host in hosts]
    steps = [torus_distance(a, b, topology.dims) for a, b in pairwise([*where, where[0]])]
    spread = sum(len({point[axis] for point in where}) > 1 for axis in range(len(topology.dims)))
    longest = max(steps)
    share = spread / len(topology.dims) / (sum(steps) / len(steps))
    return (1 if longest == 1 else 2), longest, share


def coordinates(host: int, dims: Sequence[int]) -> tuple[int, ...]:
    """Where host number ``host`` stands in a torus; the last dimension varies fastest."""
    point = []
    for size in reversed(dims):
        host, here = divmod(host, size)
        point.append(here)
    return tuple(reversed(point))


def torus_distance(a: Sequence[int], b: Sequence[int], dims: Sequence[int]) -> int:
    """Steps between two points of a torus, going the shorter way round in each dimension."""
    return sum(min((x - y) % size, (y - x) % size) for x, y, size in zip(a, b, dims, strict=True))
