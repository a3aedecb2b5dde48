"""What there is: devices, links, hosts, topologies and the cluster that they make, as plain frozen data.

A cluster is ``hosts`` equal hosts. Ranks are laid out as torchrun lays them out: rank r is device
``r % devices_per_host`` of host ``r // devices_per_host``. What a group of ranks crosses (NVLink inside a
host, NICs, leaf switches, spines) is a `Placement`, worked out in `windtunnel.cluster.place`.

Units are SI: bytes, bytes/s, seconds, FLOP/s, watts. Rates are peaks or line rates; what large operators and
messages reach of them is told by ``Device.sustained`` and ``Link.efficiency``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

TopologyKind = Literal["single-switch", "rail-optimised", "fat-tree-2", "fat-tree-3", "torus"]
TOPOLOGY_KINDS: tuple[TopologyKind, ...] = (
    "single-switch", "rail-optimised", "fat-tree-2", "fat-tree-3", "torus",
)  # fmt: skip


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

    def peak(self, dtype: str) -> float:
        """Peak FLOP/s of ``dtype``; a dtype without own units runs at the float32 rate."""
        return self.peak_flops.get(dtype, self.peak_flops["float32"])


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
class Placement:
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

    @property
    def devices_per_host(self) -> int:
        return self.host.devices

    @property
    def world_size(self) -> int:
        return self.hosts * self.host.devices

    @property
    def leaves(self) -> int:
        """Leaf switches (rail-optimised: sets of rail switches); 1 for a single switch, 0 for a torus."""
        if self.topology.kind == "torus":
            return 0
        return (
            1
            if self.topology.kind == "single-switch"
            else math.ceil(self.hosts / self.topology.hosts_per_leaf)
        )

    def host_of(self, rank: int) -> int:
        return rank // self.host.devices

    def local_rank(self, rank: int) -> int:
        return rank % self.host.devices

    def placement(self, ranks: Sequence[int]) -> Placement:
        """What ``ranks`` (in group order) cross. Raises `UserError` for ranks that the cluster has not."""
        from windtunnel.cluster.place import place

        return place(self, ranks)
