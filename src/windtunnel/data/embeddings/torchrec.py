"""Plans for TorchRec: shardings that its ``DistributedModelParallel`` takes, and statistics of caches.

A table of which some rows are fast lies in host memory, with a cache in the device's memory for as many rows
as the plan has fast (kernel ``fused_uvm_caching``): FBGEMM's cache finds the hot rows by itself, and
`cache_statistics` tells TorchRec's own planner what a cache of each size would miss.

TorchRec is imported only inside functions. A shard of TorchRec is a run of columns on a rank; all shards of a
table have one kernel and one share of cached rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from windtunnel.base import atomic
from windtunnel.base.errors import HostError, UserError
from windtunnel.base.plain import from_plain, to_plain
from windtunnel.data.embeddings.model import EmbeddingTable, TableShard
from windtunnel.data.embeddings.policy import TablePlacement

Accelerator = Literal["cuda", "cpu"]


@dataclass(frozen=True)
class Sharding:
    """One table as TorchRec shards it. ``widths``: columns on each of ``ranks``. ``load_factor``: of a cache;
    None where there is none."""

    rows: int
    dim: int
    sharding_type: str
    compute_kernel: str
    ranks: tuple[int, ...]
    widths: tuple[int, ...]
    load_factor: float | None = None


def shardings(
    tables: Sequence[EmbeddingTable], plan: TablePlacement, device: Accelerator = "cuda"
) -> dict[str, Sharding]:
    """By table. Columns of a table that the plan has on one device become one shard; its share of fast rows
    is that of all its shards. On ``cpu`` there is one memory, so all kernels are ``fused``."""
    mine: dict[str, list[TableShard]] = {table.name: [] for table in tables}
    for shard in plan.shards:
        mine[shard.table].append(shard)
    by_table = {}
    for table in tables:
        widths: dict[int, int] = {}
        for shard in mine[table.name]:
            widths[shard.device] = widths.get(shard.device, 0) + shard.last - shard.first
        fast = sum(shard.fast_rows * (shard.last - shard.first) for shard in mine[table.name])
        share = fast / (table.rows * table.dim)
        kernel = "fused" if share == 1 or device == "cpu" else "fused_uvm_caching" if share else "fused_uvm"
        by_table[table.name] = Sharding(
            table.rows, table.dim, "table_wise" if len(widths) == 1 else "column_wise", kernel,
            tuple(widths), tuple(widths.values()), share if kernel == "fused_uvm_caching" else None,
        )  # fmt: skip
    return by_table


def write_sharding(path: Path, tables: Sequence[EmbeddingTable], plan: TablePlacement) -> None:
    """What `shardings` says, as JSON by table; `read_sharding` reads it.

    Raises:
        HostError: it cannot be written.
    """
    plain = {name: to_plain(sharding) for name, sharding in shardings(tables, plan).items()}
    try:
        atomic.replace(path, json.dumps(plain, indent=1) + "\n")
    except OSError as fault:
        raise HostError(f"{path} cannot be written: {fault.strerror}") from fault


def read_sharding(path: Path) -> dict[str, Sharding]:
    """The inverse of `write_sharding`.

    Raises:
        UserError: the file cannot be read, or is no such thing.
    """
    try:
        return {name: from_plain(Sharding, load) for name, load in json.loads(path.read_bytes()).items()}
    except OSError as fault:
        raise UserError(f"{path}: cannot be read ({fault.strerror})") from None
    except (ValueError, TypeError, KeyError, AttributeError) as fault:
        raise UserError(
            f"{path}: {fault!s:.200}; accepted is what 'windtunnel embeddings plan --torchrec' wrote"
        ) from None


def sharding_plan(
    planned: Mapping[str, Sharding], device: Accelerator = "cuda", devices_per_host: int | None = None
) -> Any:
    """TorchRec's ``EmbeddingModuleShardingPlan`` for an ``EmbeddingBagCollection`` of these tables.
    ``devices_per_host``: of ``cuda``; one host unless given."""
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec
    from torchrec.distributed.types import CacheParams, EmbeddingModuleShardingPlan, ParameterSharding

    plan = EmbeddingModuleShardingPlan()
    for name, sharding in planned.items():
        begins = np.cumsum([0, *sharding.widths])
        shards = [
            ShardMetadata(
                shard_offsets=[0, int(begin)], shard_sizes=[sharding.rows, width],
                placement=f"rank:{rank}/{device}"
                + (f":{rank % devices_per_host if devices_per_host else rank}" if device == "cuda" else ""),
            )
            for begin, width, rank in zip(begins, sharding.widths, sharding.ranks, strict=False)
        ]  # fmt: skip
        plan[name] = ParameterSharding(
            sharding_type=sharding.sharding_type,
            compute_kernel=sharding.compute_kernel,
            ranks=[*sharding.ranks],
            sharding_spec=EnumerableShardingSpec(shards),
            cache_params=None
            if sharding.load_factor is None
            else CacheParams(load_factor=sharding.load_factor),
        )
    return plan


def cache_statistics(table: EmbeddingTable, batch: int) -> Any:
    """TorchRec's ``CacheStatistics`` of a table, for batches of ``batch`` samples of all devices. A cache is
    supposed to hold the rows asked for most, and asks for a row once a batch, as FBGEMM's does."""
    from torchrec.distributed.types import CacheStatistics

    ranks, shares = table.curve()
    rows = np.diff(ranks)
    counts = batch * table.lookups * np.diff(shares)
    expected = np.concatenate([[0.0], np.cumsum(rows * -np.expm1(-counts / rows))])

    class Curve(CacheStatistics):  # type: ignore[misc]
        @property
        def expected_lookups(self) -> float:
            return float(expected[-1])

        def expected_miss_rate(self, clf: float) -> float:
            if clf >= 1 or not expected[-1]:
                return 0.0 if clf > 0 else 1.0
            return float(1 - np.interp(clf * table.rows, ranks, expected) / expected[-1])

        @property
        def cacheability(self) -> float:
            grid = np.linspace(0, 1, 101)
            return float(np.trapezoid([self.expected_miss_rate(float(part)) for part in grid], grid))

    return Curve()
