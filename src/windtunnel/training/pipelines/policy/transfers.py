"""Which host sends which layer to whom, when the layout changes.

A host that newly has a layer gets it from one that had it before and is alive. Layers are given out
largest first, each to the holder that has least to send so far. Oobleck's artifact lets the first holder
send everything, and parameters only; what is sent here is a layer's whole state.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache

from windtunnel.training.pipelines.model import Layout, Template, TemplateSet, Transfer


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

    def any(self, layer: int, alive: Collection[int]) -> bool:
        """Whether a host that is ``alive`` has ``layer``."""
        for pipeline in self.layout.pipelines:
            self.layers_at(len(pipeline))
            if pipeline[self._position[len(pipeline)][layer]] in alive:
                return True
        return False


def transfers(
    set: TemplateSet, before: Layout, after: Layout, alive: Collection[int], layer_bytes: Sequence[float]
) -> tuple[tuple[Transfer, ...], tuple[int, ...]]:
    """The copies that lead from one layout to the other, by target and layer; and the layers that are lost.

    ``alive``: the hosts (ids) that are left, those of ``after`` among them. ``layer_bytes``: state of
    each layer. A lost layer, of which no host that is alive had a copy, is in no transfer.
    """
    living = frozenset(alive)
    old, new = Holders(set, before), Holders(set, after)
    lost = frozenset(layer for layer in range(len(layer_bytes)) if not old.any(layer, living))
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
