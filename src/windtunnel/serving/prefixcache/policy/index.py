"""Those that may go, as columns: so that all of them are scored at once, and the policy is shown the
lowest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.serving.prefixcache.policy import Candidate, Eviction, scores
from windtunnel.serving.prefixcache.policy.density import Ages
from windtunnel.serving.prefixcache.policy.rules import CacheRules

SHOWN = 3


class Index:
    """Nodes with when they were used last, what they are worth and the group that they are of."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._columns = [np.zeros(64, kind) for kind in (np.int64, np.float64, np.float64, np.int64)]

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, node: int) -> bool:
        return node in self._slots

    def columns(self) -> list[NDArray[Any]]:
        """Of all of them: node, used, worth, group, each of shape (len(self),)."""
        return [column[: len(self._slots)] for column in self._columns]

    def put(self, node: int, *values: float) -> None:
        """Add the node, or say anew when it was ``used``, what it is ``worth`` and its ``group``."""
        slot = self._slots.setdefault(node, len(self._slots))
        if slot == len(self._columns[0]):
            self._columns = [np.concatenate([column, column]) for column in self._columns]
        for column, value in zip(self._columns, (node, *values), strict=True):
            column[slot] = value

    def drop(self, node: int) -> None:
        slot = self._slots.pop(node, None)
        last = len(self._slots)
        if slot is not None and slot != last:
            for column in self._columns:
                column[slot] = column[last]
            self._slots[int(self._columns[0][slot])] = slot

    def eviction(self, rules: CacheRules, alpha: float, now: float, ages: Ages | None) -> Eviction:
        """The candidates of the lowest scores, the oldest and the least worth, and the ranges of all."""
        node, used, worth, group = self.columns()
        density = ages.of(group, now - used) if ages is not None else np.zeros(len(node))
        spans = [(float(column.min()), float(column.max())) for column in (used, worth)]
        eviction = Eviction(rules, alpha, now, spans[0], spans[1])
        floats = scores(eviction, used, worth, density)
        lowest = floats.argpartition(SHOWN)[:SHOWN] if len(floats) > SHOWN else range(len(floats))
        ties = np.flatnonzero(floats == floats.min())
        best = ties[np.lexsort((node[ties], used[ties]))[:1]]
        slots = sorted({int(used.argmin()), int(worth.argmin()), *map(int, lowest), *map(int, best)})
        rows = zip(*(column[slots].tolist() for column in (node, used, worth, density)), strict=True)
        return replace(eviction, candidates=tuple(Candidate(*row) for row in rows))
