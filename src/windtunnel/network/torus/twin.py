"""An all-to-all over the lightpaths of an optical torus, and over an electrical torus of the same links.

Each directed link carries ``link_rate`` bytes/s. In the *optical* torus it is split into the plan's
wavelengths (``count``), each pair has one of them from end to end, and no pair can use another's: what is
slowest is the pair with most bytes, at ``link_rate / count``. In the *electrical* torus every link is shared
by the flows on it, on the same routes. Its best possible end, with rates in proportion to bytes, is that of
the link with most bytes; what max-min fair flows reach is emulated by `windtunnel.engines.flows`. Neither has
queues, losses, guard times or the cost of tuning lasers.

With equal bytes for all pairs both end at the same time wherever the plan is at its lower bound. With unequal
ones the electrical torus lets busy pairs have what idle ones leave, and the optical one does not.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from windtunnel.base.errors import UserError
from windtunnel.cluster.model import Cluster
from windtunnel.engines.flows import World
from windtunnel.network.torus.policy import Decision, Observation, decide
from windtunnel.network.torus.policy.shape import check_sides
from windtunnel.training.emulate.graph import Alternative, Collective, Group

Floats = NDArray[np.float64]


def optical(plan: Decision, traffic: Floats, link_rate: float) -> float:
    """Seconds of ``traffic`` (bytes; shape (nodes, nodes), from row to column) over the plan's lightpaths.

    Raises:
        UserError: there are bytes between nodes of which one has failed.
    """
    sent = _by_pair(plan, traffic)
    return float(sent.max(initial=0.0)) * plan.count / link_rate


def electrical_best(plan: Decision, traffic: Floats, link_rate: float) -> float:
    """Seconds of ``traffic`` over the plan's routes when links are shared as well as can be."""
    routes = plan.routes
    load = np.bincount(routes.links, weights=_by_pair(plan, traffic)[routes.pair_of_hop()])
    return float(load.max(initial=0.0)) / link_rate


def electrical_fair(plan: Decision, traffic: Floats, link_rate: float) -> float:
    """Seconds of ``traffic`` over the plan's routes as max-min fair flows that all begin at once."""
    routes, sent = plan.routes, _by_pair(plan, traffic)
    world = World(np.full(int(routes.links.max()) + 1, link_rate))
    for pair in np.flatnonzero(sent).tolist():
        world.start(float(sent[pair]), routes.of(pair).tolist())
    world.run()
    return world.now


def _by_pair(plan: Decision, traffic: Floats) -> Floats:
    sent: Floats = traffic[plan.routes.sources, plan.routes.destinations]
    apart = traffic.sum() - np.trace(traffic)
    if not np.isclose(sent.sum(), apart, rtol=1e-9):
        raise UserError(
            "traffic is from or to a node that failed, accepted is traffic between those that stand"
        )
    return sent


def uniform_traffic(nodes: int, nbytes: float) -> Floats:
    """``nbytes`` from every node to every other."""
    return np.full((nodes, nodes), nbytes) - np.diag(np.full(nodes, nbytes))


def moe_traffic(
    nodes: int, tokens: int, token_bytes: float, skew: float, rng: np.random.Generator, *,
    own: bool = False, chosen: int = 2,
) -> Floats:  # fmt: skip
    """Bytes of the dispatch of a mixture of experts, one expert a node.

    Each node routes ``tokens`` to ``chosen`` experts, which are drawn by their popularity: that of the r-th
    is in proportion to r to the power of minus ``skew`` (Zipf), 0 for a balanced router. The order is random,
    the same for all nodes or, where each has data of its ``own``, for each another.
    """
    share = np.arange(1, nodes + 1) ** -skew / np.sum(np.arange(1, nodes + 1) ** -skew)
    shares = (
        rng.permuted(np.tile(share, (nodes, 1)), axis=1)
        if own
        else np.tile(rng.permutation(share), (nodes, 1))
    )
    traffic: Floats = rng.multinomial(tokens * chosen, shares).astype(np.float64) * token_bytes
    np.fill_diagonal(traffic, 0.0)  # these stay where they are
    return traffic


def cost(observation: Observation, decision: Decision) -> dict[str, float]:
    """What a decision takes: wavelengths, and links of all routes together."""
    return {"wavelengths": float(decision.count), "hops": float(len(decision.routes.links))}


def alternative(cluster: Cluster) -> Alternative:
    """All-to-alls between the hosts of an optical torus, over a lightpath for each pair of hosts.

    A host's NICs are split over its ports as in an electrical torus, and what a port carries over the plan's
    wavelengths. All groups of one shape communicate at once, as in any SPMD job, so those of a host pair
    share its lightpath. Inside a host NVLink carries the rest meanwhile.

    Raises:
        UserError: sides that cannot be planned.
    """
    host, sides = cluster.host, check_sides(cluster.topology.dims, f"{cluster.name}: topology.dims")
    plan = decide(Observation(sides))
    ports = 2 * len(sides) - sum(side == 2 for side in sides)
    line = host.nics * host.nic_bandwidth * host.nic.efficiency / ports / plan.count

    def seconds(call: Collective, group: Group) -> float | None:
        if call.kind != "all_to_all" or host.intra_hosts > 1:
            return None
        where = np.bincount([cluster.host_of(rank) for rank in group.ranks])
        members = int(where.max())
        if np.count_nonzero(where) < 2:
            return None
        each = max(call.in_bytes, call.out_bytes) / len(group.ranks)  # from one rank to another
        between = each * members * host.devices / line
        inside = 0.0
        if members > 1:
            placed = cluster.placement(group.ranks)
            inside = each * (members - 1) / (placed.intra_bandwidth * host.intra.efficiency)
        return host.nic.latency + max(between, inside)

    return Alternative("optical-torus", "all_to_all between hosts", seconds)
