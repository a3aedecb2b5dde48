"""Routing and wavelength assignment (RWA) of an all-to-all in an optical torus, and repair after failures.

Every ordered pair of nodes gets a lightpath: a route, and one wavelength on all of its links, since nothing
converts wavelengths on the way; two lightpaths that share a directed link differ. `decide` routes in
dimension order and assigns by the method that fits the shape (`assign`). Where links or nodes have failed,
the paths that do not touch them stay as they were, and the others get the lowest wavelengths on which a way
around is free (`reroute`): those beyond the old ones are *backup wavelengths*.

Source: all-to-all in all-optical hypersquare torus networks, CF'16 (doi 10.1145/2903150.2903173).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from windtunnel.base.errors import UserError
from windtunnel.network.torus.policy import assign
from windtunnel.network.torus.policy.reroute import SLACK, Flags, around, shortest, slots_bound
from windtunnel.network.torus.policy.shape import (
    Ints,
    Links,
    PairRoutes,
    check_sides,
    dimension_order,
    failure_bound,
    heads,
    link_between,
    lower_bound,
    nodes_of,
)

METHODS = ("auto", "closed-form", "recursion", "gar", "first-fit")


@dataclass(frozen=True)
class Observation:
    """A torus of ``sides``; directed links (tail, head) and nodes that failed; one of `METHODS`."""

    sides: tuple[int, ...]
    failed_links: tuple[tuple[int, int], ...] = ()
    failed_nodes: tuple[int, ...] = ()
    method: str = "auto"


@dataclass(frozen=True, eq=False)
class Decision:
    """A lightpath for every ordered pair of nodes that stand.

    ``wavelengths``: of each pair of ``routes``, from 0. ``count``: wavelengths in all; ``bound``: the fewest
    that any plan of the whole torus needs. ``rerouted``: indices of pairs that took another way before the
    failure. ``backups``: wavelengths that the failure adds; ``backup_bound``: the fewest of any rerouting
    that leaves the others alone; ``paper_backup_bound``: the paper's, None where it says nothing.
    """

    routes: PairRoutes
    wavelengths: Links
    method: str
    count: int
    bound: int
    rerouted: Ints
    backups: int = 0
    backup_bound: int = 0
    paper_backup_bound: int | None = None


def decide(observation: Observation) -> Decision:
    """Routes and wavelengths of an all-to-all.

    Raises:
        UserError: sides that cannot be planned, a method that is not for this shape, a failed link or node
            that the torus has not, or a node that is cut off.
    """
    sides = check_sides(observation.sides)
    routes = dimension_order(sides)
    wavelengths, method = _assigned(sides, routes, observation.method)
    count = int(wavelengths.max()) + 1
    decision = Decision(routes, wavelengths, method, count, lower_bound(sides), np.empty(0, dtype=np.int64))
    return (
        _repaired(observation, decision) if observation.failed_links or observation.failed_nodes else decision
    )


def first_fit(observation: Observation) -> Decision:
    """The baseline: longest path first, lowest free wavelength."""
    return decide(replace(observation, method="first-fit"))


POLICIES: Mapping[str, Callable[[Observation], Decision]] = {"rwa": decide, "first-fit": first_fit}


def _assigned(sides: tuple[int, ...], routes: PairRoutes, method: str) -> tuple[Links, str]:
    alike = len(set(sides)) == 1
    fits = {
        "closed-form": alike and sides[0] <= 3, "recursion": alike and sides[0] == 3,
        "gar": len(sides) == 1, "first-fit": True,
    }  # fmt: skip
    if method not in METHODS or not fits.get(method, True):
        accepted = ", ".join(["auto", *(name for name, fit in fits.items() if fit)])
        shape = "x".join(map(str, sides))
        raise UserError(f"`method`: {method!r} is not for a torus of {shape}, accepted are {accepted}")
    if method == "closed-form" or (method == "auto" and fits["closed-form"]):
        return assign.closed_form(sides, routes), "closed-form"
    if method == "recursion":
        return assign.recursion(sides, routes), method
    orders = {"gar": assign.gar_order, "first-fit": lambda _, routes: assign.longest_first(routes)}
    # Neither order is always better on rings of an even side.
    names = [method] if method != "auto" else [name for name in orders if fits[name]]
    candidates = [
        (assign.first_fit(sides, routes, orders[name](nodes_of(sides), routes)), name) for name in names
    ]
    return min(candidates, key=lambda candidate: int(candidate[0].max()))


def _repaired(observation: Observation, decision: Decision) -> Decision:
    nodes, ends = nodes_of(observation.sides), heads(observation.sides)
    alive = standing(observation, ends)
    _no_node_cut_off(observation, ends, alive)
    routes, pair_of_hop = decision.routes, decision.routes.pair_of_hop()
    gone = np.isin(routes.sources, observation.failed_nodes) | np.isin(
        routes.destinations, observation.failed_nodes
    )
    hit = np.zeros(len(gone), dtype=np.bool_)
    hit[pair_of_hop[~alive[routes.links]]] = True
    hit &= ~gone
    keep = ~hit & ~gone
    which = np.flatnonzero(hit)
    sources, destinations = routes.sources[which], routes.destinations[which]
    load = np.bincount(routes.links[keep[pair_of_hop]], minlength=len(ends))
    limits = shortest(ends, alive, nodes, sources, destinations) + np.int32(SLACK)
    ways = np.empty((len(which), int(limits.max(initial=0))), dtype=np.int32)
    hops, colours = np.empty(len(which), dtype=np.int64), np.empty(len(which), dtype=np.int32)
    best: tuple[Links, Ints, Links] | None = None
    # Long ways first is better after the failure of a node, short ones after that of a link.
    for order in (np.argsort(-limits, kind="stable"), np.argsort(limits, kind="stable")):
        words = -(-2 * decision.count // 64)
        while True:
            occupied = assign.occupancy(len(ends), words, routes, decision.wavelengths, keep)
            arguments = (ends, alive, nodes, occupied, sources, destinations, order, limits)
            if around(*arguments, ways, hops, colours):
                break
            words *= 2
        if best is None or colours.max(initial=0) < best[2].max(initial=0):
            best = ways.copy(), hops.copy(), colours.copy()
        if best[2].max(initial=0) < decision.count:
            break
    assert best is not None
    wavelengths = decision.wavelengths.copy()
    wavelengths[which] = best[2]
    left = np.flatnonzero(~gone)
    count = max(decision.count, int(wavelengths[left].max()) + 1)
    return replace(
        decision, routes=_joined(routes, left, keep, which, best[0], best[1]), wavelengths=wavelengths[left],
        count=count, rerouted=np.searchsorted(left, which), backups=count - decision.count,
        backup_bound=slots_bound(ends, alive, nodes, load, decision.count, sources, destinations),
        paper_backup_bound=_paper_backup_bound(observation),
    )  # fmt: skip


def standing(observation: Observation, ends: Links) -> Flags:
    """Which directed links there are and have not failed.

    Raises:
        UserError: a failed link or node that the torus has not.
    """
    nodes, tails = nodes_of(observation.sides), np.arange(len(ends)) // (2 * len(observation.sides))
    for node in observation.failed_nodes:
        if not 0 <= node < nodes:
            raise UserError(f"`failed`: there is no node {node}, accepted are 0 to {nodes - 1}")
    alive = ends >= 0
    alive &= ~np.isin(tails, observation.failed_nodes) & ~np.isin(ends, observation.failed_nodes)
    for tail, head in observation.failed_links:
        link = link_between(observation.sides, tail, head) if 0 <= tail < nodes else None
        if link is None:
            raise UserError(
                f"`failed`: there is no link from {name(tail, observation.sides)}"
                f" to {name(head, observation.sides)}, "
                "accepted are links between neighbours"
            )
        alive[link] = False
    return alive


def name(node: int, sides: Sequence[int]) -> str:
    """Coordinates of a node, such as 0,2,1; its number where the torus does not have it."""
    if not 0 <= node < nodes_of(sides):
        return str(node)
    return ",".join(str(int(coordinate)) for coordinate in np.unravel_index(node, tuple(sides)))


def _no_node_cut_off(observation: Observation, ends: Links, alive: Flags) -> None:
    """Every node that stands reaches the first of them, and is reached by it."""
    nodes, tails = nodes_of(observation.sides), np.arange(len(ends)) // (2 * len(observation.sides))
    stand = np.setdiff1d(np.arange(nodes), observation.failed_nodes)
    if len(stand) < 2:
        raise UserError(f"`failed`: {len(stand)} nodes are left, accepted is a failure that leaves 2 or more")
    into, out = ends[alive].astype(np.int64), tails[alive]
    ways = np.bincount(into, minlength=nodes) * np.bincount(out, minlength=nodes)
    root = int(stand[np.argmax(ways[stand])])  # one that is not cut off itself, if any is not
    joined = _reached(out, into, root, nodes) & _reached(into, out, root, nodes)
    lost = stand[~joined[stand]].tolist()
    if lost:
        names = " and ".join(name(node, observation.sides) for node in lost[:4]) + (
            " and more" if lost[4:] else ""
        )
        what = "node" if len(lost) == 1 else "nodes"
        raise UserError(
            f"`failed`: {what} {names} would be cut off, accepted are failures that leave all nodes joined "
            "both ways, or the node itself"
        )


def _reached(begins: Ints, ends: Ints, root: int, nodes: int) -> Flags:
    """The nodes that links from ``begins`` to ``ends`` lead to from ``root``."""
    reached = np.arange(nodes) == root
    while not reached[more := ends[reached[begins]]].all():
        reached[more] = True
    return reached


def _joined(routes: PairRoutes, left: Ints, keep: Flags, which: Ints, ways: Links, hops: Ints) -> PairRoutes:
    """``routes`` of the pairs ``left``: the old one of those to ``keep``, ``ways`` of those in ``which``."""
    pair = routes.pair_of_hop()
    stays = keep[pair]
    owner = np.concatenate((pair[stays], np.repeat(which, hops)))
    links = np.concatenate((routes.links[stays], ways[np.arange(ways.shape[1]) < hops[:, None]]))
    lengths = np.bincount(owner, minlength=len(keep))[left]
    starts = np.concatenate(([0], np.cumsum(lengths)))
    return PairRoutes(
        routes.sources[left], routes.destinations[left], starts, links[np.argsort(owner, kind="stable")]
    )


def _paper_backup_bound(observation: Observation) -> int | None:
    """The paper's bound: of 3^n, where all that failed are links of one node to its neighbours."""
    if set(observation.sides) != {3} or observation.failed_nodes:
        return None
    cut, n = {frozenset(link) for link in observation.failed_links}, len(observation.sides)
    return failure_bound(n, len(cut)) if frozenset.intersection(*cut) and len(cut) < 2 * n else None
