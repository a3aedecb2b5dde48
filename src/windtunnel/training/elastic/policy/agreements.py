"""All-gathers over the control plane, fenced by generation.

Every rank of a generation posts a value under a key; when all have, the key is decided and everybody gets all
values. A post of another generation than the present one is refused: whatever is not decided when a
generation ends is never decided under it. Keys that begin with ``commit/`` are durable: their values outlive
the generation, so that a rank that was cut while it waited can ask later what became of them. This is the
commit record for the step in doubt (Oobleck leaves it open; see also two-phase commit, Gray and Lamport,
"Consensus on transaction commit", section 3).
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

Values = dict[int, Any]
DURABLE = "commit/"
KEPT_DECIDED = 4096
"""Decided keys of the present generation that are kept for those who post again after a broken connection."""
KEPT_DURABLE = 65536
"""Durable keys that are kept in memory; all are in the log."""


class Agreements:
    """The agreements of the present generation, and the durable ones of all."""

    def __init__(self, durable: dict[str, Values] | None = None) -> None:
        self.generation = 0
        self.world = 0
        self._open: dict[str, Values] = {}
        self._decided: OrderedDict[str, Values] = OrderedDict()
        self._durable: OrderedDict[str, Values] = OrderedDict(durable or {})

    def begin(self, generation: int, world: int) -> None:
        """A new generation of ``world`` ranks: what was open is forgotten."""
        self.generation, self.world = generation, world
        self._open.clear()
        self._decided.clear()

    def post(self, generation: int, key: str, rank: int, value: Any) -> bool:
        """Whether this post completes the agreement: then `seal` it.

        A rank's first post counts; the same one again (after a reconnection) changes nothing.
        """
        if generation != self.generation or not 0 <= rank < self.world or key in self._decided:
            return False
        values = self._open.setdefault(key, {})
        values.setdefault(rank, value)
        return len(values) == self.world

    def complete(self, key: str) -> Values:
        """What all ranks posted under ``key``, in the order of ranks."""
        return dict(sorted(self._open[key].items()))

    def seal(self, key: str) -> None:
        """``key`` is decided (and in the log, if it is durable)."""
        values = self.complete(key)
        del self._open[key]
        self._keep(self._decided, key, values, KEPT_DECIDED)
        if key.startswith(DURABLE):
            self._keep(self._durable, key, values, KEPT_DURABLE)

    def decided(self, generation: int, key: str) -> Values | None:
        """The values of a key that is decided in the present generation, None if it is not."""
        return self._decided.get(key) if generation == self.generation else None

    def ask(self, key: str) -> Values | None:
        """The values of a decided key of this generation, or of a durable one of any."""
        return self._decided.get(key, self._durable.get(key))

    @staticmethod
    def _keep(where: OrderedDict[str, Values], key: str, values: Values, most: int) -> None:
        where[key] = values
        where.move_to_end(key)
        while len(where) > most:
            where.popitem(last=False)
