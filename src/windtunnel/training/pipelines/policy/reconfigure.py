"""What follows when hosts are lost or join: new pipelines of the same templates, and what to copy.

The published rules (Oobleck, Jang et al., SOSP 2023, section 5), for the pipelines that lost hosts:

1. *simple*: a pipeline that is left with ``n0`` hosts or more takes the template of its new size;
2. *borrow*: one that is shorter takes hosts from the largest pipeline, as long as that one has more than
   ``n0``;
3. *merge*: where nobody can yield, short pipelines are joined, and the last of them with a full one.

Hosts that join (ours): first they replace what a pipeline has just lost, then make new pipelines of
``n0``, then lengthen the shortest pipelines. Beside these local rules, all hosts are composed anew
(`compose`), with as many pipelines left as they are as can be; of both, the layout with the shorter step is
taken, and at equal steps the one that moves fewer bytes. A layout by the local rules does not count if it has
fewer pipelines than ``f + 1`` where there are hosts for so many.

In each pipeline that changes, hosts are put where they have most of the layers already (an assignment
problem, solved exactly). Everything is deterministic: any process that knows the same finds the same.

A host that newly has a layer gets it from one that had it before and is alive. Layers are given out largest
first, each to the holder that has least to send so far. Oobleck's artifact lets the first holder send
everything, and parameters only; what is sent here is a layer's whole state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache

import numpy as np
from scipy.optimize import linear_sum_assignment

from windtunnel.base.errors import UserError
from windtunnel.training.pipelines.model import Layout, Reconfiguration, Template, TemplateSet, Transfer
from windtunnel.training.pipelines.policy.compose import choose_sizes, share, step_seconds, usable
from windtunnel.training.pipelines.policy.templates import largest_size


def reconfigure(
    set: TemplateSet,
    layout: Layout,
    lost: Collection[int],
    joined: Sequence[int] = (),
    *,
    microbatches: int,
    layer_bytes: Sequence[float],
    search: bool = True,
) -> Reconfiguration:
    """The layout after hosts (ids) were ``lost`` and others ``joined``, and the copies that lead there.

    ``joined`` may name hosts that were idle before. ``layer_bytes``: state of each layer. ``search``: compose
    anew too, not by the local rules alone. With fewer hosts than the model needs, the layout is empty. Hosts
    are idle only if no sum of sizes uses them (`compose.usable`).

    Raises:
        UserError: a host that joins is in the layout, or there is no microbatch.
    """
    dead = frozenset(lost)
    members = frozenset(host for pipeline in layout.pipelines for host in pipeline)
    new = sorted(frozenset(joined) - dead)
    if twice := sorted(members & frozenset(new)):
        raise UserError(f"host {twice[0]} joins, but runs already; new ids are needed")
    if microbatches < 1:
        raise UserError(f"microbatches is {microbatches}; at least 1 is needed")
    alive = (members - dead) | frozenset(new)
    if len(alive) < set.n0:
        empty = Layout((), ())
        return Reconfiguration(empty, "none", (), transfers(set, layout, empty, alive, layer_bytes)[1])
    if not members & dead and not new and len(layout.pipelines) <= microbatches:
        sizes = [len(pipeline) for pipeline in layout.pipelines]
        return Reconfiguration(Layout(layout.pipelines, share(set, sizes, microbatches)), "none")
    plans: list[tuple[list[list[int]], str]] = []
    local = _local(set, layout, dead, new)
    # f + 1 pipelines where there can be so many: joining may only lengthen the pipelines that losses left
    fewest = min(set.failures + 1, len(alive) // set.n0, microbatches)
    if local is not None and fewest <= len(local[0]) <= microbatches:
        plans.append(local)
    if search or not plans:
        plans.append((_anew(set, layout, dead, new, microbatches), "search"))
    options = []
    for number, (pipelines, how) in enumerate(plans):
        placed = _placed(set, layout, pipelines, layer_bytes)
        shares = share(set, [len(pipeline) for pipeline in placed], microbatches)
        after = Layout(placed, shares)
        copies, gone = transfers(set, layout, after, alive, layer_bytes)
        moved = sum(copy.nbytes for copy in copies)
        options.append(((step_seconds(set, after), moved, number), Reconfiguration(after, how, copies, gone)))
    return min(options, key=lambda each: each[0])[1]


def _local(
    set: TemplateSet, layout: Layout, dead: frozenset[int], new: Sequence[int]
) -> tuple[list[list[int]], str] | None:
    """Pipelines by the local rules, and the last rule that was needed; None where they do not lead to
    templates."""
    n0, largest = set.n0, largest_size(set)
    pipelines = [[host for host in pipeline if host not in dead] for pipeline in layout.pipelines]
    spare = list(new)
    missing = [len(old) - len(now) for old, now in zip(layout.pipelines, pipelines, strict=True)]
    for i in sorted(range(len(pipelines)), key=lambda i: (-missing[i], i)):
        if pipelines[i]:
            pipelines[i] += spare[: missing[i]]
            del spare[: missing[i]]
    while len(spare) >= n0:
        pipelines.append(spare[:n0])
        del spare[:n0]
    pipelines = [pipeline for pipeline in pipelines if pipeline]
    for host in spare:
        shortest = min(pipelines, key=lambda pipeline: (len(pipeline), min(pipeline)), default=None)
        if shortest is None or len(shortest) >= largest:
            return None
        shortest.append(host)
    how = "join" if new else "simple"
    while short := [pipeline for pipeline in pipelines if len(pipeline) < n0]:
        needy = max(short, key=lambda pipeline: (len(pipeline), -min(pipeline)))
        giver = max(pipelines, key=lambda pipeline: (len(pipeline), min(pipeline)))
        if len(giver) > n0:
            needy.append(giver.pop())
            how = "merge" if how == "merge" else "borrow"
            continue
        others = [pipeline for pipeline in pipelines if pipeline is not needy]
        # Short ones come first here, the shortest of all: fewer hosts change their layers.
        partner = min(others, key=lambda pipeline: (len(pipeline), min(pipeline)))
        pipelines = [pipeline for pipeline in others if pipeline is not partner] + [needy + partner]
        how = "merge"
    if any(len(pipeline) > largest for pipeline in pipelines):
        return None
    return pipelines, how


def _anew(
    set: TemplateSet, layout: Layout, dead: frozenset[int], new: Sequence[int], microbatches: int
) -> list[list[int]]:
    """All hosts composed anew, with as many pipelines left as they are as can be."""
    left = [[host for host in pipeline if host not in dead] for pipeline in layout.pipelines]
    total = sum(map(len, left)) + len(new)
    sizes = choose_sizes(set, usable(set, total, microbatches), microbatches)
    open_sizes = Counter(sizes)
    whole = [now for now, old in zip(left, layout.pipelines, strict=True) if len(now) == len(old)]
    damaged = [now for now, old in zip(left, layout.pipelines, strict=True) if 0 < len(now) < len(old)]
    fitting: list[list[int]] = []
    cut: list[list[int]] = []
    for pipeline in whole + damaged:
        if open_sizes[len(pipeline)]:
            open_sizes[len(pipeline)] -= 1
            fitting.append(pipeline)
        else:
            cut.append(pipeline)
    cut.sort(key=lambda pipeline: (-len(pipeline), min(pipeline)))
    targets = sorted(open_sizes.elements(), reverse=True)
    changed = [pipeline[:size] for pipeline, size in zip(cut, targets, strict=False)]
    changed += [[] for _ in targets[len(changed) :]]
    pool = [host for pipeline, size in zip(cut, targets, strict=False) for host in pipeline[size:]]
    pool += [host for pipeline in cut[len(targets) :] for host in pipeline] + list(new)
    for pipeline, size in zip(changed, targets, strict=True):
        more = size - len(pipeline)
        pipeline += pool[:more]
        del pool[:more]
    return fitting + changed


def _placed(
    set: TemplateSet, layout: Layout, pipelines: Sequence[Sequence[int]], layer_bytes: Sequence[float]
) -> tuple[tuple[int, ...], ...]:
    """The hosts of each pipeline in the order of its template, by (size, lowest id)."""
    unchanged = frozenset(layout.pipelines)
    old = Holders(set, layout)
    placed = []
    for pipeline in pipelines:
        if tuple(pipeline) in unchanged:
            placed.append(tuple(pipeline))
            continue
        hosts = sorted(pipeline)
        positions = old.layers_at(len(hosts))
        home = {layer: position for position, layers in enumerate(positions) for layer in layers}
        savings = np.zeros((len(hosts), len(hosts)))  # [host, position]: bytes that it need not fetch
        for row, host in enumerate(hosts):
            for layer in sorted(old.layers_of(host)):
                savings[row, home[layer]] += layer_bytes[layer]
        _, order = linear_sum_assignment(savings, maximize=True)
        at = {position: host for host, position in zip(hosts, order.tolist(), strict=True)}
        placed.append(tuple(at[position] for position in range(len(hosts))))
    return tuple(sorted(placed, key=lambda pipeline: (len(pipeline), min(pipeline))))


def layers_by_host(template: Template) -> tuple[frozenset[int], ...]:
    """The layers that each host of a template has."""
    return tuple(frozenset(range(stage.first, stage.last)) for stage in template.stages)


class Holders:
    """Who has which layer in a layout."""

    def __init__(self, set: TemplateSet, layout: Layout) -> None:
        self.set, self.layout = set, layout
        self._layers: dict[int, tuple[frozenset[int], ...]] = {}
        self._position: dict[int, dict[int, int]] = {}
        self._place = {
            host: (len(pipeline), position)
            for pipeline in layout.pipelines
            for position, host in enumerate(pipeline)
        }

    def layers_at(self, size: int) -> tuple[frozenset[int], ...]:
        """Layers of each host of a pipeline of ``size`` hosts."""
        if size not in self._layers:
            self._layers[size] = layers_by_host(self.set.of(size))
            self._position[size] = {
                layer: i for i, layers in enumerate(self._layers[size]) for layer in layers
            }
        return self._layers[size]

    def layers_of(self, host: int) -> frozenset[int]:
        """The layers that a host (an id) has; none where it is in no pipeline."""
        if host not in self._place:
            return frozenset()
        size, position = self._place[host]
        return self.layers_at(size)[position]

    def of(self, layer: int, alive: Collection[int]) -> list[int]:
        """The hosts that are ``alive`` and have ``layer``, by pipeline."""
        hosts = []
        for pipeline in self.layout.pipelines:
            self.layers_at(len(pipeline))
            host = pipeline[self._position[len(pipeline)][layer]]
            if host in alive:
                hosts.append(host)
        return hosts


def transfers(
    set: TemplateSet, before: Layout, after: Layout, alive: Collection[int], layer_bytes: Sequence[float]
) -> tuple[tuple[Transfer, ...], tuple[int, ...]]:
    """The copies that lead from one layout to the other, by target and layer; and the layers that are lost.

    ``alive``: the hosts (ids) that are left, those of ``after`` among them. ``layer_bytes``: state of
    each layer. A lost layer, of which no host that is alive had a copy, is in no transfer.
    """
    living = frozenset(alive)
    old, new = Holders(set, before), Holders(set, after)
    lost = frozenset(layer for layer in range(len(layer_bytes)) if not old.of(layer, living))
    unchanged = frozenset(before.pipelines)
    missing = [
        (layer, host)
        for pipeline in after.pipelines
        if pipeline not in unchanged
        for host in pipeline
        for layer in new.layers_of(host) - old.layers_of(host) - lost
    ]
    holders = cache(lambda layer: old.of(layer, living))
    moves = spread(missing, holders, layer_bytes.__getitem__)
    return tuple(sorted(moves, key=lambda each: (each.target, each.layer))), tuple(sorted(lost))


def spread(
    missing: Iterable[tuple[int, int]],
    holders: Callable[[int], Sequence[int]],
    nbytes: Callable[[int], float],
) -> list[Transfer]:
    """A source for each (layer, target), largest layers first. ``holders``, ``nbytes``: of a layer."""
    load: dict[int, float] = {}
    moves = []
    for layer, target in sorted(missing, key=lambda each: (-nbytes(each[0]), each)):
        source = min(holders(layer), key=lambda host: (load.get(host, 0.0), host))
        load[source] = load.get(source, 0.0) + nbytes(layer)
        moves.append(Transfer(layer, source, target, nbytes(layer)))
    return moves
