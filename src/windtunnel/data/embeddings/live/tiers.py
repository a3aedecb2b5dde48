"""Rows of one table (or of one rank's part of it) in a fast and a slow tier.

Rows are counted by place: places below ``fast_rows`` are in fast memory for good, the others in the slow
tier. The fast tensors have room behind the fast rows where a batch's slow rows are *staged*: lookups,
gradients and the optimizer's step then work on one tensor as if it were the whole table, in the same order
and so with the same bits, and fast rows are never copied. `flush` writes back the staged rows that have
changed.

What is staged and has changed is the truth until it is written: a full disk fails `flush`, loses nothing, and
`flush` may be called again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from windtunnel.data.embeddings.live.slow import FileRecords, MemoryRecords

Fresh = Callable[[Tensor], Tensor]
"""The weights, [n, dim], that rows at these places begin with; must depend on the places alone."""


class Tiers:
    """``weight``: [fast_rows + room, dim]; ``states``: of each name [fast_rows + room, its width].

    ``slow``: a path, or "memory". ``device``: of the fast tier; places and records are on the CPU.
    ``initial``: what each state begins with. No row is filled or written before it is first asked for.
    """

    def __init__(
        self, rows: int, dim: int, fast_rows: int, slow: str | Path, fresh: Fresh, *,
        widths: Mapping[str, int] | None = None, initial: Mapping[str, float] | None = None,
        device: str | torch.device = "cpu",
    ) -> None:  # fmt: skip
        self.rows, self.dim, self.fast_rows = rows, dim, min(fast_rows, rows)
        self.widths, self.initial = dict(widths or {}), dict(initial or {})
        self.width = dim + sum(self.widths.values())
        self.fresh, self.device = fresh, torch.device(device)
        self.slow: FileRecords | MemoryRecords | None = None
        if self.fast_rows < rows:
            self.slow = (
                MemoryRecords(rows, self.width) if slow == "memory" else FileRecords(slow, rows, self.width)
            )
        self.initialized = torch.zeros(rows, dtype=torch.bool)
        self._unknown_fast = self.fast_rows
        self.weight = torch.empty(0, dim, device=self.device)
        self.states: dict[str, Tensor] = {}
        self._room, self._dirty = 0, torch.zeros(0, dtype=torch.bool)
        self._allocate(min(rows - self.fast_rows, 1 << 16))
        self._staged = torch.empty(0, dtype=torch.long)  # rows at places fast_rows, fast_rows + 1, ...
        self._sorted = self._staged, self._staged  # the same ascending, and where each of them is

    def places(self, rows: Tensor) -> Tensor:
        """Where in `weight` these ``rows`` are, [n]; those of the slow tier are read first, each once."""
        if self._unknown_fast:
            self._begin(rows[rows < self.fast_rows])
        if self.slow is None:
            return rows.to(self.device)
        slow = rows >= self.fast_rows
        slow_rows = rows[slow]
        if not len(slow_rows):
            return rows.to(self.device)
        distinct, inverse = torch.unique(slow_rows, return_inverse=True)
        return rows.masked_scatter(slow, self._stage(distinct)[inverse]).to(self.device)

    def touched(self, places: Tensor) -> None:
        """Rows at these places of `weight` have changed."""
        self._dirty[places[places >= self.fast_rows].cpu() - self.fast_rows] = True

    def flush(self) -> None:
        """Writes back staged rows that have changed.

        Raises:
            windtunnel.HostError: the slow tier cannot be written; the rows are still staged.
        """
        changed = self._dirty[: len(self._staged)].nonzero()[:, 0]
        if not len(changed) or self.slow is None:
            return
        rows, order = self._staged[changed].sort()
        self.slow.write(rows.numpy(), self._records(self.fast_rows + changed[order]))
        self.initialized[rows] = True
        self._dirty[changed] = False

    def drop(self) -> None:
        """Gives up the staged rows, after `flush`."""
        self.flush()
        if len(self._staged):
            self._staged = self._staged[:0]
            self._sorted = self._staged, self._staged

    def read(self, rows: Tensor) -> Tensor:
        """Records of ``rows`` (distinct), [n, width], wherever they are. Nothing is staged."""
        buffer = torch.empty(len(rows), self.width)
        fast, staged, slow, at = self._parts(rows)
        self._begin(rows[fast])
        buffer[fast] = self._records(rows[fast])
        buffer[staged] = self._records(at)
        buffer[slow] = self._fetch(rows[slow])
        return buffer

    def write(self, rows: Tensor, records: Tensor) -> None:
        """Replaces records of ``rows`` (distinct)."""
        fast, staged, slow, at = self._parts(rows)
        below = staged | slow
        if self.slow is not None and below.any():
            ascending, order = rows[below].sort()
            self.slow.write(ascending.numpy(), records[below][order])
        self._put(at, records[staged])
        self._dirty[at - self.fast_rows] = False
        self._put(rows[fast], records[fast])
        self._unknown_fast -= int((~self.initialized[rows[fast]]).sum())
        self.initialized[rows] = True

    def move(self, device: torch.device) -> None:
        """Takes the fast tier to another device."""
        self.weight = self.weight.to(device)
        self.states = {name: state.to(device) for name, state in self.states.items()}
        self.device = device

    def close(self) -> None:
        """Gives the slow tier up; a file is removed."""
        if self.slow is not None:
            self.slow.close()

    def _allocate(self, room: int) -> None:
        """``room`` for staged rows, behind those that there are."""
        old = (self.weight, *self.states.values())
        # not filled: the system gives pages when they are first written
        new = [
            torch.empty(self.fast_rows + room, width, device=self.device)
            for width in (self.dim, *self.widths.values())
        ]
        for source, target in zip(old, new, strict=False):
            target[: len(source)] = source
        self.weight, self.states = new[0], dict(zip(self.widths, new[1:], strict=True))
        dirty = torch.zeros(room, dtype=torch.bool)
        dirty[: self._room] = self._dirty
        self._dirty, self._room = dirty, room

    def _begin(self, rows: Tensor) -> None:
        """Fills the fast ``rows`` that nobody has asked for."""
        if not self._unknown_fast:
            return
        new = rows[~self.initialized[rows]].unique()
        if len(new):
            self._put(new, self._first(new))
            self.initialized[new] = True
            self._unknown_fast -= len(new)

    def _first(self, rows: Tensor) -> Tensor:
        states = [
            torch.full((len(rows), width), self.initial.get(name, 0.0)) for name, width in self.widths.items()
        ]
        return torch.cat([self.fresh(rows), *states], 1)

    def _fetch(self, rows: Tensor) -> Tensor:
        """Records of rows of the slow tier, which are distinct."""
        if self.slow is None or not len(rows):
            return torch.empty(0, self.width)
        ascending, order = rows.sort()
        buffer = torch.empty(len(rows), self.width)
        initialized = self.initialized[ascending]
        buffer[order[initialized]] = self.slow.read(ascending[initialized].numpy())
        new = ascending[~initialized]
        if len(new):
            buffer[order[~initialized]] = self._first(new)
        return buffer

    def _stage(self, rows: Tensor) -> Tensor:
        """Places of ``rows`` of the slow tier (ascending, distinct), [n]."""
        staged_rows, places = self._sorted
        at = torch.searchsorted(staged_rows, rows)
        here = at < len(staged_rows)
        here[here.clone()] &= staged_rows[at[here]] == rows[here]
        new = rows[~here]
        first = self.fast_rows + len(self._staged)
        fresh = torch.arange(first, first + len(new))
        if len(new):
            self._grow(len(self._staged) + len(new))
            self._put(fresh, self._fetch(new))
            self._staged = torch.cat([self._staged, new])
            ascending, order = self._staged.sort()
            self._sorted = ascending, order + self.fast_rows
        buffer = torch.empty(len(rows), dtype=torch.long)
        buffer[here] = places[at[here]]
        buffer[~here] = fresh
        return buffer

    def _grow(self, staged: int) -> None:
        if staged > self._room:
            self._allocate(min(self.rows - self.fast_rows, max(staged, 2 * self._room)))

    def _parts(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Which of ``rows`` are fast, staged, in the slow tier only; and the places of the staged ones."""
        fast = rows < self.fast_rows
        staged_rows, places = self._sorted
        at = torch.searchsorted(staged_rows, rows).clamp_(max=max(0, len(staged_rows) - 1))
        staged = ~fast & (staged_rows[at] == rows) if len(staged_rows) else torch.zeros_like(fast)
        return fast, staged, ~fast & ~staged, places[at[staged]] if len(staged_rows) else places

    def _records(self, places: Tensor) -> Tensor:
        places = places.to(self.device)
        return torch.cat([tensor[places] for tensor in (self.weight, *self.states.values())], 1).cpu()

    def _put(self, places: Tensor, records: Tensor) -> None:
        places, records = places.to(self.device), records.to(self.device)
        first = 0
        for tensor in (self.weight, *self.states.values()):
            # .data: what a graph has kept of other rows is still as it was
            tensor.data[places] = records[:, first : first + tensor.shape[1]]
            first += tensor.shape[1]
