"""A cluster as a graph of directed links, for many jobs at once: routes, and what collectives put on links.

`place` in `model` tells what one group of ranks crosses when all others do the same. Here every port and
every cable is a link of its own, so that jobs meet where they do meet:

* *Inside a host* (or the hosts that one NVLink switch joins) a device has a port into the switch and one out
  of it; in a mesh every ordered pair has its lanes.
* *NICs.* A device has its share of the host's NICs as one port, out and in; with fewer NICs than devices
  neighbours share one. In a rail-optimised network a message first goes to the device of its host that has
  the receiver's rail, by NVLink (NCCL's PXN), so rails do not cross the spine.
* *Leaves* have as many cables up as ports down, over the oversubscription, one to each spine of their pod;
  pods are joined by cores without further oversubscription. Of several ways a hash of sender, receiver, flow
  and seed takes one, as ECMP does: messages may meet on a cable while another one is idle.
* *Torus.* A host's NICs are split over its 2 x dimensions cables; routes go the shorter way round, dimension
  after dimension. In an optical one these are the ways of what no light path carries.

Rates are what large messages reach (line rate times efficiency). A route's latency is that of `Placement`.

Collectives are lowered as NCCL does: *ring* enters and leaves each host once, at other devices in each of as
many rings as a host has members; *tree* is two binary trees over hosts with half of the data each, and a
chain in each host; *direct* sends from each to each. ``nbytes`` is what nccl-tests calls the size: the whole
buffer of an all_reduce, broadcast or reduce, the gathered output, the input of a reduce_scatter, one rank's
buffer in an all_to_all, the root's whole buffer in a gather or scatter.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise, permutations

from windtunnel.base.errors import UserError
from windtunnel.cluster.model import TORI, Cluster, coordinates, place

ALGORITHMS = {
    "all_reduce": ("ring", "tree"), "all_gather": ("ring", "direct"), "reduce_scatter": ("ring", "direct"),
    "broadcast": ("ring",), "reduce": ("ring",), "all_to_all": ("direct",), "gather": ("direct",),
    "scatter": ("direct",),
}  # fmt: skip
"""How each collective can be done; the first is what `Fabric.collective` takes."""


Loads = defaultdict[tuple[int, int], float]  # bytes from rank to rank


class Fabric:
    """The links of ``cluster``, numbered from 0. ``seed`` chooses among equal ways."""

    def __init__(self, cluster: Cluster, seed: int = 0) -> None:
        self.cluster, self.seed = cluster, seed
        self._names: list[tuple[int, str]] = []  # what begins with each link
        self.rates: list[float] = []
        """Bytes/s of each link: what `engines.flows.World` begins with."""
        self.latencies: list[float] = []
        """Seconds of each link, and of what is before it."""
        host, topology = cluster.host, cluster.topology
        devices, hop = cluster.world_size, topology.hop_latency
        inside = host.intra.bandwidth * host.intra.efficiency
        if host.intra_switched or host.devices == 1:
            self._out = self._add("device out", devices, inside, host.intra.latency)
            self._in = self._add("device in", devices, inside, 0.0)
        else:
            lanes = inside / (host.devices - 1)
            self._mesh = self._add("lanes", devices * host.devices, lanes, host.intra.latency)
        nic = host.nic_bandwidth * host.nic.efficiency
        self._ports = min(host.nics, host.devices)
        """Of a host, into the network."""
        if topology.kind in TORI:
            ways = 2 * len(topology.dims)
            rate = host.nics * nic / ways
            self._torus = self._add("torus", cluster.hosts * ways, rate, host.nic.latency + hop)
            return
        ports, port = cluster.hosts * self._ports, nic * host.nics / self._ports
        self._nic_out = self._add("NIC out", ports, port, host.nic.latency)
        self._nic_in = self._add("NIC in", ports, port, hop)
        if cluster.leaves < 2:
            return
        rails = self._ports if topology.kind == "rail-optimised" else 1
        down = topology.hosts_per_leaf * self._ports // rails
        self._spines = max(1, round(down / topology.oversubscription))
        up, leaves = down * port / topology.oversubscription / self._spines, cluster.leaves * rails
        self._leaf_up = self._add("leaf to spine", leaves * self._spines, up, hop)
        self._leaf_down = self._add("spine to leaf", leaves * self._spines, up, hop)
        self._pod = cluster.leaves if topology.kind == "fat-tree-2" else topology.leaves_per_pod
        pods = -(-cluster.leaves // self._pod)
        if pods > 1:
            cores = pods * rails * self._spines * self._pod
            self._spine_up = self._add("spine to core", cores, up, hop)
            self._spine_down = self._add("core to spine", cores, up, hop)

    def _add(self, name: str, count: int, rate: float, latency: float) -> int:
        first = len(self.rates)
        self._names.append((first, name))
        self.rates += [rate] * count
        self.latencies += [latency] * count
        return first

    def name(self, link: int) -> str:
        """What a link is, and which of its kind."""
        first, name = next(name for name in reversed(self._names) if name[0] <= link)
        return f"{name} {link - first}"

    def latency(self, route: Iterable[int]) -> float:
        """Seconds until the first byte of a message has passed all of ``route``."""
        return sum(self.latencies[link] for link in route)

    def path(self, sender: int, receiver: int, flow: int = 0) -> list[int]:
        """The links that a message between two ranks passes, in their order. ``flow`` tells messages of one
        pair apart, as ports do. Between a rank and itself there are none.

        Raises:
            UserError: a rank that the cluster has not.
        """
        for rank in (sender, receiver):
            if not 0 <= rank < self.cluster.world_size:
                place(self.cluster, [rank])  # which says why not
        if sender == receiver:
            return []
        host, devices = self.cluster.host, self.cluster.host.devices
        a, b = sender // devices, receiver // devices
        if a // host.intra_hosts == b // host.intra_hosts:
            return self._inside(sender, receiver)
        if self.cluster.topology.kind in TORI:
            return self._round(a, b, self._hash(sender, receiver, flow))
        rail, way = self._rail(receiver % devices), self._hash(sender, receiver, flow)
        if self.cluster.topology.kind != "rail-optimised":
            return self._up_and_down(a, self._rail(sender % devices), b, rail, way)
        route: list[int] = []
        if self._rail(sender % devices) != rail:
            nearest = next(local for local in range(devices) if self._rail(local) == rail)
            route = self._inside(sender, a * devices + nearest)
        return route + self._up_and_down(a, rail, b, rail, way)

    def _inside(self, sender: int, receiver: int) -> list[int]:
        host = self.cluster.host
        if host.intra_switched or host.devices == 1:
            return [self._out + sender, self._in + receiver]
        return [self._mesh + sender * host.devices + receiver % host.devices]

    def _rail(self, local: int) -> int:
        return local * self._ports // self.cluster.host.devices

    def _up_and_down(self, a: int, port_a: int, b: int, port_b: int, way: int) -> list[int]:
        topology = self.cluster.topology
        first, last = self._nic_out + a * self._ports + port_a, self._nic_in + b * self._ports + port_b
        leaf_a, leaf_b = a // topology.hosts_per_leaf, b // topology.hosts_per_leaf
        if self.cluster.leaves < 2 or leaf_a == leaf_b:
            return [first, last]
        rails = self._ports if topology.kind == "rail-optimised" else 1
        rail, spine = (port_a if rails > 1 else 0), way % self._spines
        up = self._leaf_up + (leaf_a * rails + rail) * self._spines + spine
        down = self._leaf_down + (leaf_b * rails + rail) * self._spines + spine
        pod_a, pod_b = leaf_a // self._pod, leaf_b // self._pod
        if pod_a == pod_b:
            return [first, up, down, last]
        core = way // self._spines % self._pod
        to_core, from_core = (
            start + ((pod * rails + rail) * self._spines + spine) * self._pod + core
            for start, pod in ((self._spine_up, pod_a), (self._spine_down, pod_b))
        )
        return [first, up, to_core, from_core, down, last]

    def _round(self, a: int, b: int, way: int) -> list[int]:
        dims = self.cluster.topology.dims
        at, target = list(coordinates(a, dims)), coordinates(b, dims)
        route = []
        for axis, size in enumerate(dims):
            ahead = (target[axis] - at[axis]) % size
            forth = 2 * ahead < size or (2 * ahead == size and (way >> axis) % 2 == 0)
            for _ in range(ahead if forth else size - ahead):
                here = 0
                for where, length in zip(at, dims, strict=True):
                    here = here * length + where
                route.append(self._torus + (here * len(dims) + axis) * 2 + (not forth))
                at[axis] = (at[axis] + (1 if forth else -1)) % size
        return route

    def _hash(self, sender: int, receiver: int, flow: int) -> int:
        """Of four numbers, by SplitMix64's finaliser (Steele et al., OOPSLA 2014)."""
        word = 0
        for part in (self.seed, sender, receiver, flow):
            word = (word ^ part) + 0x9E3779B97F4A7C15 & 2**64 - 1
            word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & 2**64 - 1
            word = (word ^ word >> 27) * 0x94D049BB133111EB & 2**64 - 1
            word ^= word >> 31
        return word

    def collective(
        self, kind: str, ranks: Sequence[int], nbytes: float, *, algorithm: str = "", flow: int = 0
    ) -> dict[int, float]:
        """Bytes that one collective of ``kind`` over ``nbytes`` puts on each link that it uses. Of a group in
        its own order; the first rank is the root. As one flow it is ``nbytes`` in size, and loads each link
        ``bytes / nbytes`` times.

        Raises:
            UserError: a kind or an algorithm that there is not, or ranks that the cluster has not.
        """
        accepted = ALGORITHMS.get(kind, ())
        if not accepted:
            raise UserError(f"collective {kind!r} is unknown; accepted are {', '.join(ALGORITHMS)}")
        if algorithm and algorithm not in accepted:
            raise UserError(f"{kind} by {algorithm!r} is unknown; accepted are {', '.join(accepted)}")
        place(self.cluster, ranks)
        loads: Loads = defaultdict(float)
        match algorithm or accepted[0]:
            case "ring":
                self._ring(loads, kind, ranks, nbytes)
            case "tree":
                self._tree(loads, ranks, nbytes)
            case _:
                part, root = nbytes / len(ranks), ranks[0]
                for a, b in permutations(ranks, 2):
                    if kind not in ("gather", "scatter") or root == (b if kind == "gather" else a):
                        loads[a, b] += part
        summed: defaultdict[int, float] = defaultdict(float)
        for (a, b), size in loads.items():
            for link in self.path(a, b, flow):
                summed[link] += size
        return dict(summed)

    def _hosts(self, ranks: Sequence[int]) -> list[list[int]]:
        """The ranks by host (or what one NVLink switch joins), in the group's order."""
        domain = self.cluster.host.devices * self.cluster.host.intra_hosts
        hosts: dict[int, list[int]] = {}
        for rank in ranks:
            hosts.setdefault(rank // domain, []).append(rank)
        return list(hosts.values())

    def _steps(self, loads: Loads, steps: list[tuple[int, int]], hosts: list[list[int]], size: float) -> None:
        """``size`` bytes for each step from rank to rank; those inside a mesh take all lanes of members."""
        home = {rank: number for number, members in enumerate(hosts) for rank in members}
        inside: Counter[int] = Counter()
        for a, b in steps:
            if home[a] == home[b] and not self.cluster.host.intra_switched:
                inside[home[a]] += 1
            else:
                loads[a, b] += size
        for number, count in inside.items():
            pairs = list(permutations(hosts[number], 2))
            for pair in pairs:
                loads[pair] += size * count / len(pairs)

    def _ring(self, loads: Loads, kind: str, ranks: Sequence[int], nbytes: float) -> None:
        n, hosts, root = len(ranks), self._hosts(ranks), ranks[0]
        times = 2 if kind == "all_reduce" else 1
        size = nbytes if kind in ("broadcast", "reduce") else times * nbytes * (n - 1) / n
        rings = min(len(members) for members in hosts)
        for ring in range(rings):
            order = [rank for members in hosts for rank in members[ring:] + members[:ring]]
            steps = [(a, b) for a, b in pairwise([*order, order[0]]) if a != b]
            if kind in ("broadcast", "reduce"):  # the circle is open before or behind the root
                steps = [(a, b) for a, b in steps if root != (b if kind == "broadcast" else a)]
            self._steps(loads, steps, hosts, size / rings)

    def _tree(self, loads: Loads, ranks: Sequence[int], nbytes: float) -> None:
        hosts = self._hosts(ranks)
        rings = min(len(members) for members in hosts)
        for ring in range(rings):
            turned = [members[ring:] + members[:ring] for members in hosts]
            chains = [step for members in turned for step in pairwise(members)]
            self._steps(loads, [*chains, *((b, a) for a, b in chains)], hosts, nbytes / rings)
            for order in (
                turned,
                turned[::-1],
            ):  # who is inside one tree is a leaf of the other, or nearly so
                edges = [(order[child][0], order[(child - 1) // 2][0]) for child in range(1, len(order))]
                self._steps(loads, [*edges, *((b, a) for a, b in edges)], hosts, nbytes / rings / 2)


def placements(cluster: Cluster, jobs: Sequence[int], how: str = "packed") -> list[tuple[int, ...]]:
    """The ranks of the cluster that each of several jobs gets, so many each.

    ``packed``: hosts in their order, a job after the other, each beginning on a new host. ``spread``: a job's
    hosts lie as far apart as they can, jobs in turn. ``shared``: jobs share all hosts, devices dealt out in
    turn, so they share NICs where there are fewer than devices, and links above in any case.

    Raises:
        UserError: the jobs do not fit, or ``how`` is none of these.
    """
    if how not in ("packed", "spread", "shared"):
        raise UserError(f"placement {how!r} is unknown; accepted are packed, spread, shared")
    devices, hosts = cluster.host.devices, cluster.hosts
    needed = sum(jobs) if how == "shared" else sum(-(-size // devices) * devices for size in jobs)
    if not jobs or min(jobs) < 1 or needed > cluster.world_size:
        raise UserError(
            f"jobs of {', '.join(map(str, jobs))} ranks are placed {how} on {cluster.name}; accepted are jobs"
            f" from 1 rank that take its {cluster.world_size} together"
        )
    if how == "shared":
        dealt = iter([host * devices + local for local in range(devices) for host in range(hosts)])
        return [tuple(sorted(next(dealt) for _ in range(size))) for size in jobs]
    order = list(range(hosts))
    if how == "spread" and cluster.leaves > 1:
        order.sort(key=lambda host: (host % cluster.topology.hosts_per_leaf, host))
    free, groups = iter(order), []
    for size in jobs:
        mine = sorted(next(free) for _ in range(-(-size // devices)))
        groups.append(tuple(host * devices + local for host in mine for local in range(devices))[:size])
    return groups
