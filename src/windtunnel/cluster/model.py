"""What there is: devices, links, hosts, topologies and the cluster that they make, as plain frozen data.

A cluster is ``hosts`` equal hosts. Ranks are laid out as torchrun lays them out: rank r is device
``r % devices_per_host`` of host ``r // devices_per_host``. What a group of ranks crosses (NVLink inside a
host, NICs, leaf switches, spines) is a `GroupPlacement`.

Units are SI: bytes, bytes/s, seconds, FLOP/s, watts. Rates are peaks or line rates; what large operators and
messages reach of them is told by ``Device.sustained`` and ``Link.efficiency``.

The rules of a placement, for a group given in its own order:

* Inside a host traffic takes the intra link. A mesh host gives a rank only the lanes to those peers that
  are in the group.
* Between hosts a rank drives the NICs nearest to it, as NCCL does: with at least one NIC a device, its own;
  with fewer, one shared with its neighbours. In a rail-optimised network the peers are reached on the rail of
  the NIC, data moving to the right device by NVLink first (NCCL's PXN), so rails do not cross the spine.
* Oversubscription bites only what leaves a leaf. ``inter_bandwidth`` supposes that all traffic does.
  ``ring_bandwidth`` counts the hops between consecutive hosts that do, and supposes that the rest of the leaf
  is filled with groups of the same shape, as in any SPMD job.
* In a torus a host's NICs are split evenly over its 2 x dimensions ports; a group along k dimensions drives
  2k of them, and a message that passes h hosts takes the ports of h hosts: in a ring h is the mean of its
  steps, in ``inter_bandwidth`` that of all pairs.

Source for the rail and leaf counts: NVIDIA DGX SuperPOD H100 reference architecture, RA-11333-001. The torus
and mesh shares are inference from the wiring.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from windtunnel.base.errors import UserError

TopologyKind = Literal[
    "single-switch", "rail-optimised", "fat-tree-2", "fat-tree-3", "torus", "optical-torus"
]
TOPOLOGY_KINDS: tuple[TopologyKind, ...] = (
    "single-switch", "rail-optimised", "fat-tree-2", "fat-tree-3", "torus", "optical-torus",
)  # fmt: skip
TORI = ("torus", "optical-torus")
"""Hosts joined to their neighbours. In an optical one light may also pass hosts, a wavelength a pair."""


_FLOAT8 = ("float8_e4m3fn", "bfloat16", "float16", "float32")
UNITS = {
    "float64": ("float64",), "float32": ("float32",), "tf32": ("tf32", "float32"),
    "bfloat16": ("bfloat16", "float32"), "float16": ("float16", "float32"),
    "float4_e2m1fn_x2": ("float4_e2m1fn_x2", *_FLOAT8),
    **dict.fromkeys(
        ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), _FLOAT8
    ),
    "int8": ("int8", "float32"), "uint8": ("int8", "float32"),
    **dict.fromkeys(("int16", "int32", "int64", "uint16", "uint32", "uint64", "bool"), ("float32",)),
    "complex32": ("float16", "float32"), "complex64": ("float32",), "complex128": ("float64", "float32"),
}  # fmt: skip
"""The arithmetic units that each dtype of PyTorch can run on, the narrowest first: a device without the first
computes in the next wider one that it has. All formats of 8 bits have the same units; ``float8_e8m0fnu`` is
that of the scales beside them."""


@dataclass(frozen=True)
class Device:
    """One accelerator, or one core of a CPU.

    ``torch_name`` and ``memory_bytes`` are what the driver tells PyTorch. ``peak_flops`` is dense (no
    sparsity), by dtype name; ``"tf32"`` is float32 with TF32 allowed. ``sustained`` is the fraction of the
    peak tensor throughput that the device holds under its power limit. ``sources`` names the origin of each
    field.
    """

    name: str
    vendor: str
    kind: Literal["gpu", "cpu"]
    torch_name: str
    capability: tuple[int, int]
    sm_count: int
    memory_bytes: float
    memory_bandwidth: float
    l2_bytes: int
    power_watts: float
    sustained: float
    # Dictionaries are left out of the hash, so that devices can be keys of caches.
    peak_flops: dict[str, float] = field(hash=False)
    sources: dict[str, str] = field(default_factory=dict, hash=False)

    def units(self, dtype: str) -> str:
        """The dtype of ``peak_flops`` at whose rate ``dtype`` runs: see `UNITS`.

        Raises `UserError` for a dtype that is not known, or of whose units the device has none.
        """
        for name in UNITS.get(dtype, ()):
            if name in self.peak_flops:
                return name
        raise UserError(
            f"device {self.name}: no peak is known for dtype {dtype!r}; known are"
            f" {', '.join(self.peak_flops)}, and a cluster file can add one (host.device.peak_flops)"
        )

    def peak(self, dtype: str) -> float:
        """Peak FLOP/s of ``dtype``, at the rate of `units`, which says what it raises."""
        return self.peak_flops[self.units(dtype)]


@dataclass(frozen=True)
class Link:
    """A kind of link.

    ``bandwidth``: line rate in one direction, bytes/s, of all lanes of one device (inside a host) or of one
    NIC. ``latency``: seconds, one way, without switches. ``efficiency``: the fraction of the line rate that
    large messages reach.
    """

    name: str
    bandwidth: float
    latency: float
    efficiency: float
    source: str = ""


@dataclass(frozen=True)
class Host:
    """A host and how its devices are joined.

    ``intra_switched``: any two devices reach each other at the full ``intra`` rate (NVSwitch, a PCIe switch,
    shared memory); otherwise each device splits its lanes evenly between its peers (a mesh). ``nvls``: the
    switch reduces in the network (NVLink SHARP). ``intra_hosts``: how many consecutive hosts one NVLink
    switch joins (18 trays of an NVL72 rack), 1 where NVLink ends at the host.
    """

    device: Device
    devices: int
    intra: Link
    intra_switched: bool
    nvls: bool
    nic: Link
    nics: int
    pcie: Link
    cpu_cores: int
    intra_hosts: int = 1
    source: str = ""

    @property
    def nic_bandwidth(self) -> float:
        """Line rate of one NIC, bytes/s, no more than its PCIe slot carries."""
        return min(self.nic.bandwidth, self.pcie.bandwidth)


@dataclass(frozen=True)
class Topology:
    """The network between hosts.

    ``hosts_per_leaf``: hosts under one leaf switch (rail-optimised: under one set of rail switches).
    ``leaves_per_pod``: leaves (sets of rails) that one layer of spines joins; beyond them is the core.
    ``oversubscription``: capacity into a leaf over capacity out of it, 1 is full bisection. ``dims``: of a
    torus of hosts, the last one varies fastest. ``hop_latency``: seconds for each switch (torus: host).
    """

    kind: TopologyKind
    oversubscription: float = 1.0
    hosts_per_leaf: int = 32
    leaves_per_pod: int = 8
    dims: tuple[int, ...] = ()
    hop_latency: float = 0.3e-6
    source: str = ""


@dataclass(frozen=True)
class Multicast:
    """Passive splitters beside the network: a shuffle of the scale-up domains with ``splitter`` outputs each,
    in ``planes`` copies, whose ports are as fast as a NIC's."""

    splitter: int
    planes: int = 1


@dataclass(frozen=True)
class GroupPlacement:
    """What a group of ranks crosses.

    ``hosts``: scale-up domains that the group lies in (a host, or the hosts that one NVLink switch joins).
    ``ranks_per_host``: the most ranks of the group in one of them. ``tier``: 0 inside one domain, 1 through
    one leaf or rail switch (torus: neighbours), 2 across leaves, 3 across pods.

    Bandwidths are line rates, bytes/s, for each rank in one direction: ``intra_bandwidth`` inside the host,
    ``inter_bandwidth`` when every host of a leaf sends over the leaf's uplinks at once (all-to-all, the worst
    case), ``ring_bandwidth`` for traffic between consecutive ranks, of which only some crosses the uplinks,
    with the rest of the cluster doing the same. ``latency``: seconds for one message between two hosts, or
    between two devices at tier 0.
    """

    ranks: int
    hosts: int
    ranks_per_host: int
    tier: int
    intra: Link | None
    inter: Link | None
    nics_per_rank: float
    intra_bandwidth: float
    inter_bandwidth: float
    ring_bandwidth: float
    latency: float


@dataclass(frozen=True)
class Cluster:
    """``hosts`` equal hosts and the network between them. The price is in any one currency."""

    name: str
    host: Host
    hosts: int
    topology: Topology
    price_per_device_hour: float | None = None
    multicast: Multicast | None = None

    @property
    def devices_per_host(self) -> int:
        return self.host.devices

    @property
    def world_size(self) -> int:
        return self.hosts * self.host.devices

    @property
    def leaves(self) -> int:
        """Leaf switches (rail-optimised: sets of rail switches); 1 for a single switch, 0 for a torus."""
        if self.topology.kind in TORI:
            return 0
        if self.topology.kind == "single-switch":
            return 1
        return math.ceil(self.hosts / self.topology.hosts_per_leaf)

    @property
    def fabrics(self) -> tuple[str, ...]:
        """What the network has for some collectives besides what NCCL does; no placement knows of it."""
        torus = ("optical-torus",) if self.topology.kind == "optical-torus" else ()
        return torus + (("shufflecast",) if self.multicast is not None else ())

    def host_of(self, rank: int) -> int:
        return rank // self.host.devices

    def local_rank(self, rank: int) -> int:
        return rank % self.host.devices

    def placement(self, ranks: Sequence[int]) -> GroupPlacement:
        """What ``ranks`` (in group order) cross. Raises `UserError` for ranks that the cluster has not."""
        return place(self, ranks)


SWITCHES = {1: 1, 2: 3, 3: 5}  # that a message passes at each tier: leaf; + spine, leaf; + core, spine


def place(cluster: Cluster, ranks: Sequence[int]) -> GroupPlacement:
    """The `GroupPlacement` of ``ranks`` (distinct, in group order) in ``cluster``.

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
        rates = (intra_bandwidth, intra_bandwidth, intra_bandwidth)
        return GroupPlacement(len(ranks), 1, most, 0, intra, None, 0.0, *rates, latency)

    nics_per_rank = min(_nics_used(host, members) / len(members) for members in by_host.values())
    line_rate = nics_per_rank * host.nic_bandwidth
    order = list(by_host)
    if cluster.topology.kind in TORI:
        tier, hops, share, share_of_all = _torus(cluster.topology, order)
        ring, worst = line_rate * share, line_rate * share_of_all
    else:
        tier = _tier(cluster.topology, order)
        hops = SWITCHES[tier]
        worst = ring = line_rate
        if tier > 1:
            worst /= cluster.topology.oversubscription
            crossing = _ring_crossing(cluster.topology, order)
            ring /= max(1.0, cluster.topology.oversubscription * crossing)
    return GroupPlacement(
        ranks=len(ranks), hosts=len(by_domain), ranks_per_host=most, tier=tier, intra=intra, inter=host.nic,
        nics_per_rank=nics_per_rank, intra_bandwidth=intra_bandwidth, inter_bandwidth=worst,
        ring_bandwidth=ring, latency=host.nic.latency + hops * cluster.topology.hop_latency,
    )  # fmt: skip


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


def _torus(topology: Topology, hosts: Sequence[int]) -> tuple[int, int, float, float]:
    """Tier, hosts passed by the ring's longest step, and the share of a host's NICs that the group gets when
    it is a ring, and when all send to all."""
    where = [coordinates(host, topology.dims) for host in hosts]
    steps = [torus_distance(a, b, topology.dims) for a, b in pairwise([*where, where[0]])]
    spread = sum(len({point[axis] for point in where}) > 1 for axis in range(len(topology.dims)))
    longest = max(steps)
    share = spread / len(topology.dims)
    apart = 0
    for axis, size in enumerate(topology.dims):
        count = Counter(point[axis] for point in where).items()
        apart += sum(n * m * min((a - b) % size, (b - a) % size) for a, n in count for b, m in count)
    mean = apart / (len(hosts) * (len(hosts) - 1))
    return (1 if longest == 1 else 2), longest, share / (sum(steps) / len(steps)), share / mean


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
