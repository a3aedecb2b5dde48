"""The tables of one device of a plan, as modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from torch import Tensor

from windtunnel.base.errors import UserError
from windtunnel.data.embeddings.files import Statistics
from windtunnel.data.embeddings.live.bag import TieredEmbeddingBag
from windtunnel.data.embeddings.live.ids import Init, uniform
from windtunnel.data.embeddings.live.optim import OptimizerFactory
from windtunnel.data.embeddings.model import EmbeddingTable, TableShard
from windtunnel.data.embeddings.policy import TablePlacement


def build(
    plan: TablePlacement, statistics: Statistics, device: int, *, slow: str | Path = "memory",
    optimizer: OptimizerFactory | None = None, memory: str | torch.device = "cpu", **options: Any,
) -> dict[str, TieredEmbeddingBag]:  # fmt: skip
    """Of every shard on ``device`` a module, by its name: the table's, with its columns where it has only
    some.

    ``statistics``: those that the plan was made from, with the tables' orders. ``slow``: a folder for the
    files of the slow tier, or "memory". ``memory``: where torch has the fast tier. ``options``: of all
    modules, as of `TieredEmbeddingBag`. Columns of a table begin with what these columns of the whole table
    would.

    Raises:
        UserError: the plan has no such device or is of other tables, or a table is not of float32.
    """
    tables = {table.name: table for table in statistics.tables}
    if not 0 <= device < plan.devices:
        raise UserError(f"plan: there is no device {device}; accepted are 0 to {plan.devices - 1}")
    bags = {}
    for shard in plan.shards:
        if shard.device != device:
            continue
        table = tables.get(shard.table)
        if table is None or shard.last > table.dim or shard.fast_rows > table.rows:
            raise UserError(f"plan: {shard} is of no table of {statistics.folder}")
        if table.dtype != "float32":
            raise UserError(f"table {table.name}: its rows are {table.dtype}; accepted is float32")
        whole = (shard.first, shard.last) == (0, table.dim)
        name = table.name if whole else f"{table.name}[{shard.first}:{shard.last}]"
        bags[name] = TieredEmbeddingBag(
            table.rows, shard.last - shard.first, shard.fast_rows, name=name,
            order=statistics.order(table.name), mode="none" if table.sequence else "sum",
            slow=slow if slow == "memory" else Path(slow) / quote(f"{name}.rows", safe="[:]"),
            optimizer=optimizer, init=_columns(table, shard), device=memory, **options,
        )  # fmt: skip
    return bags


def _columns(table: EmbeddingTable, shard: TableShard) -> Init:
    def init(ids: Tensor) -> Tensor:
        return uniform(ids, table.dim, table.rows**-0.5)[:, shard.first : shard.last]

    return init
