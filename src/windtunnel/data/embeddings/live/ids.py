"""Ids of a table: which are accepted, what ranks they have, and what their rows begin with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from windtunnel.base.errors import UserError
from windtunnel.data.embeddings.model import EmbeddingTable

Init = Callable[[Tensor], Tensor]
"""From ids [n] to the weights [n, dim] that their rows begin with."""
BatchIds = Tensor | tuple[Tensor, Tensor]
"""Ids [n] of a sequence; ids and offsets [bags] of what is pooled."""


class Ids:
    """The ids 0 to ``rows`` - 1 of ``table``. ``order``: of each rank its id, [rows]; default: ids are ranks.
    4 bytes a row are kept of it, beside what was given.

    Raises:
        UserError: it is no order of that many ids.
    """

    def __init__(self, table: str, rows: int, order: ArrayLike | None) -> None:
        self.table, self.rows = table, rows
        self.order = None if order is None else np.asarray(order)
        self._ranks = None if self.order is None else self._inverse(self.order)

    def ranks(self, ids: Tensor) -> Tensor:
        return ids if self._ranks is None else self._ranks[ids].long()

    def of(self, ranks: Tensor) -> Tensor:
        """The ids that have these ranks."""
        return ranks if self.order is None else torch.from_numpy(self.order[ranks.numpy()].astype(np.int64))

    def wrong(self, what: str) -> UserError:
        return UserError(f"table {self.table!r}: {what}")

    def checked(
        self, ids: Tensor, offsets: Tensor | None = None, *, last: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """``ids`` flat and ``offsets`` [bags] as int64 on the CPU. ``last``: these end with the count of ids.

        Raises:
            UserError: there are no such ids, or the offsets are none of them.
        """
        for what, tensor in (("input", ids), ("offsets", offsets)):
            if tensor is not None and tensor.dtype not in (torch.int32, torch.int64):
                raise self.wrong(f"{what} is {tensor.dtype}; accepted are torch.int32, torch.int64")
        flat = ids.detach().reshape(-1).cpu().long()
        if len(flat) and not 0 <= int(flat.min()) <= int(flat.max()) < self.rows:
            at = int(((flat < 0) | (flat >= self.rows)).nonzero()[0, 0])
            raise self.wrong(f"input[{at}] = {int(flat[at])} is no id; accepted are 0 to {self.rows - 1}")
        if offsets is None:
            return flat, None
        offsets = offsets.cpu().long()
        ends = torch.cat([offsets.new_zeros(1), offsets, offsets.new_tensor([len(flat)])])
        falls = (ends.diff() < 0).nonzero()[:, 0]
        first, end = (int(offsets[0]), int(offsets[-1])) if len(offsets) else (0, len(flat))
        if len(falls):
            at = min(int(falls[0]), len(offsets) - 1)
            raise self.wrong(
                f"offsets[{at}] = {int(offsets[at])} falls or is past the end; accepted are rising ones of 0"
                f" to {len(flat)}"
            )
        if first != 0 or (last and end != len(flat)):
            raise self.wrong(
                f"offsets go from {first} to {end}; accepted are those from 0 to the end, {len(flat)}"
            )
        return flat, offsets

    def _inverse(self, order: NDArray[np.integer]) -> Tensor:
        kind = np.int32 if self.rows < 2**31 else np.int64
        inverse = np.full(self.rows, -1, kind)
        whole = order.shape == (self.rows,) and order.dtype.kind in "iu"
        for first in range(0, self.rows if whole else 0, 1 << 22):
            ids = np.asarray(order[first : first + (1 << 22)])
            if ids.min() < 0 or ids.max() >= self.rows:
                break
            inverse[ids] = np.arange(first, first + len(ids), dtype=kind)
        if not whole or inverse.min() < 0:
            raise self.wrong(
                f"order of shape {list(order.shape)}, {order.dtype}, does not name every id of 0 to"
                f" {self.rows - 1:,} once"
            )
        return torch.from_numpy(inverse)


def checked(
    batch: Mapping[str, BatchIds], tables: Sequence[EmbeddingTable], ids: Sequence[Ids]
) -> tuple[list[Tensor], dict[str, Tensor], UserError | None]:
    """Ids of every table, offsets of those that are pooled, and what is wrong with them."""
    none = [torch.empty(0, dtype=torch.long)] * len(tables)
    tensors, offsets = [*none], dict[str, Tensor]()
    try:
        if set(batch) - {table.name for table in tables}:
            names = ", ".join(table.name for table in tables)
            raise UserError(f"the batch has a table that there is not; accepted are {names}")
        for number, (table, table_ids) in enumerate(zip(tables, ids, strict=True)):
            if table.name in batch:
                feature = batch[table.name]
                parts = feature if isinstance(feature, tuple) else (feature,)
                if len(parts) != 2 - table.sequence or any(part.dim() != 1 for part in parts):
                    shape = "ids [n]" if table.sequence else "(ids [n], offsets [bags])"
                    raise table_ids.wrong(f"accepted are {shape}")
                tensors[number], ends = table_ids.checked(*parts)
                if ends is not None:
                    offsets[table.name] = ends
    except UserError as error:
        return none, {}, error
    return tensors, offsets, None


def uniform(ids: Tensor, dim: int, bound: float, seed: int = 0) -> Tensor:
    """Weights of +-``bound``, [n, dim], drawn from ``seed``, id and column alone (splitmix64, Steele
    2014)."""
    with np.errstate(over="ignore"):
        state: NDArray[np.uint64] = ids.numpy().astype(np.uint64)[:, None] * np.uint64(dim)
        state = state + np.arange(dim).astype(np.uint64) + np.uint64(seed) * np.uint64(0xD1342543DE82EF95)
        state *= np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            state = (state ^ np.right_shift(state, np.uint64(shift))) * np.uint64(factor)
        state = state ^ np.right_shift(state, np.uint64(31))
    unit = np.right_shift(state, np.uint64(40)).astype(np.float32) * np.float32(2**-23) - np.float32(1)
    return torch.from_numpy(unit * np.float32(bound))
