"""Those that may go, in two orders at once: so that the next victim is found among a few, not all."""

from __future__ import annotations

from bisect import bisect_left, insort
from math import inf

from windtunnel.serving.prefixcache.policy import Candidate


class Index:
    """Nodes with when they were used last and what they are worth; both lists are sorted, lowest first."""

    def __init__(self) -> None:
        self._known: dict[int, Candidate] = {}
        self._used: list[tuple[float, int]] = []
        self._worth: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._known)

    def put(self, node: int, used: float, worth: float) -> None:
        """Add the node, or say anew what it is worth."""
        known = self._known.get(node)
        if known is not None:
            if known.used == used and known.worth == worth:
                return
            self.drop(node)
        self._known[node] = Candidate(node, used, worth)
        insort(self._used, (used, node))
        insort(self._worth, (worth, node))

    def drop(self, node: int) -> None:
        known = self._known.pop(node, None)
        if known is not None:
            del self._used[bisect_left(self._used, (known.used, node))]
            del self._worth[bisect_left(self._worth, (known.worth, node))]

    def shortlist(self, count: int) -> tuple[tuple[Candidate, ...], tuple[float, float]]:
        """The ``count`` that are oldest and the ``count`` that are least worth, and what all others have at
        least: (used, worth); infinite where there are no others."""
        shown = dict.fromkeys(node for _, node in self._used[:count])
        shown |= dict.fromkeys(node for _, node in self._worth[:count])
        rest = len(shown) < len(self._known)
        others = (self._used[count][0], self._worth[count][0]) if rest else (inf, inf)
        return tuple(self._known[node] for node in shown), others

    @property
    def ranges(self) -> tuple[tuple[float, float], tuple[float, float]]:
        """Lowest and highest: when they were used, what they are worth."""
        return (self._used[0][0], self._used[-1][0]), (self._worth[0][0], self._worth[-1][0])
