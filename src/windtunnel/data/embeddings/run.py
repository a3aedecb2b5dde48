"""A plan for tables on a cluster, kept as a run: what was given, what was decided, what it is to do."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from windtunnel.base import units
from windtunnel.base.errors import UserError
from windtunnel.base.plain import to_plain
from windtunnel.cluster.load import load_cluster
from windtunnel.data.embeddings import files, synthetic
from windtunnel.data.embeddings.model import EmbeddingTable
from windtunnel.data.embeddings.policy import PlacementRequest, TablePlacement, decide
from windtunnel.data.embeddings.twin import Iteration, iteration, tiers
from windtunnel.store.eventlog import NAME, EventLog
from windtunnel.store.runs import Store

CAPABILITY = "data.embeddings"
BATCH = 16_384
"""Samples of an iteration, of all devices together: the paper's (section 6)."""
SHOWN = 16


@dataclass(frozen=True)
class PlacementRun:
    """A plan that was made, what for, and what an average iteration is emulated to take with it."""

    run: str
    directory: Path
    cluster: str
    request: PlacementRequest
    plan: TablePlacement
    emulated: Iteration
    synthetic: bool

    def forecast(self) -> dict[str, Any]:
        """What accesses and seconds are forecast from. ``samples``: those held out of the counting;
        ``unseen_rows``: of all tables, rows that only these asked for."""
        held_out_counts = [table.held_out for table in self.request.tables if table.held_out is not None]
        if not held_out_counts:
            return {"from": "distribution" if self.synthetic else "counted samples", "samples": 0,
                    "unseen_rows": 0}  # fmt: skip
        unseen = sum(held_out.unseen for held_out in held_out_counts)
        return {"from": "held-out samples", "samples": held_out_counts[0].samples, "unseen_rows": unseen}

    def plain(self) -> dict[str, Any]:
        """As values of JSON. Seconds and accesses are emulated."""
        return {
            "run": self.run, "directory": str(self.directory), "cluster": self.cluster,
            "policy": self.request.policy, "tables": len(self.request.tables),
            "bytes": sum(table.total_bytes for table in self.request.tables), "summary": self.summary(),
            "forecast": self.forecast(), "emulated": to_plain(self.emulated), "plan": to_plain(self.plan),
        }  # fmt: skip

    def summary(self) -> dict[str, Any]:
        """The figures that runs are compared by."""
        emulated = self.emulated
        worst, mean = emulated.balance
        return {
            "iteration_time_s": emulated.seconds, "samples_per_s": emulated.throughput, "gap": self.plan.gap,
            "slow_accesses": emulated.raw[1], "slow_rows": emulated.distinct[1],
            "slowest_over_fastest": worst, "slowest_over_mean": mean, "solver": self.plan.solver,
        }  # fmt: skip


def tables_of(name: str | None, statistics: Path | None, seed: int) -> tuple[EmbeddingTable, ...]:
    """The synthetic tables of a name, or those of a folder of statistics.

    Raises:
        UserError: neither or both are given, or one of them is wrong.
    """
    if name is not None and statistics is None:
        return synthetic.tables(name, seed)
    if statistics is not None and name is None:
        return files.read_statistics(statistics).tables
    raise UserError("embeddings plan: `synthetic` NAME or `statistics` FOLDER is needed, and not both")


def plan_run(
    cluster: str, *, synthetic: str | None = None, statistics: Path | None = None, policy: str = "recshard",
    batch: int = BATCH, memory: float | None = None, host_memory: float | None = None,
    state_bytes: int | None = None, columns: int = 16, seed: int = 0,
) -> PlacementRun:  # fmt: skip
    """Plan on ``cluster`` (its file, or its name in the catalogue). ``memory`` and ``host_memory``: bytes of
    a device's fast and slow tier for rows, as `twin.tiers` has them unless given; ``state_bytes``: what the
    optimiser keeps for a row, instead of what the statistics say.

    Raises:
        UserError: something given is wrong, or there is no plan.
    """
    where = load_cluster(cluster)
    tables = tables_of(synthetic, statistics, seed)
    if not any(table.lookups for table in tables):
        raise UserError(f"{statistics}: no table is looked up, accepted are statistics of logs with lookups")
    if state_bytes is not None:
        tables = tuple(replace(table, state_bytes=state_bytes) for table in tables)
    fast, slow = tiers(where, memory, host_memory)
    request = PlacementRequest(tables, where.world_size, fast, slow, batch, policy, columns, seed)
    inputs = {
        "cluster": cluster, "synthetic": synthetic, "statistics": str(statistics) if statistics else None,
        "policy": policy, "batch": batch, "memory": fast.capacity, "host_memory": slow.capacity,
        "state_bytes": state_bytes, "columns": columns,
    }  # fmt: skip
    run = Store.open().begin(CAPABILITY, inputs, seed)
    log = EventLog(run.directory / NAME)
    with run.failing(), closing(log):
        plan = decide(request)
        log.decision(CAPABILITY, policy, request, plan)
        files.write_plan(run.directory / files.PLAN, tables, plan)
        emulated = iteration(where, request, plan)
        planned = PlacementRun(
            run.id, run.directory, where.name, request, plan, emulated, synthetic is not None
        )
    run.finish(planned.summary())
    return planned


def show(planned: PlacementRun) -> None:
    """On the terminal: the verdict, the bounds, and what each device holds."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table as Shown

    console, plan, emulated = Console(highlight=False), planned.plan, planned.emulated
    total = float(sum(table.total_bytes for table in planned.request.tables))
    split = len(plan.shards) - len(planned.request.tables)
    cut = f" ({split} more shards than tables: some are cut into columns)" if split else ""
    console.print(
        f"[bold]{len(planned.request.tables)} tables, {units.size(total)}, on {plan.devices} devices of"
        f" {escape(planned.cluster)}: {units.seconds(emulated.seconds)} an iteration (emulated),"
        f" {units.decimal(emulated.throughput)}samples/s[/]{cut}"
    )
    console.print(
        f"lookups {units.seconds(emulated.lookups)}, updates {units.seconds(emulated.updates)}, exchange"
        f" {units.seconds(emulated.exchange)} ({units.amount(sum(emulated.sent))} sent); slow accesses"
        f" {units.count(emulated.raw[1])} of {units.count(sum(emulated.raw))}, distinct rows"
        f" {units.count(emulated.distinct[1])} of {units.count(sum(emulated.distinct))}"
    )
    basis = planned.forecast()
    more = {
        "distribution": " of the synthetic tables",
        "counted samples": ", which is too low: profile the log again to hold some samples out",
        "held-out samples": f", {basis['samples']:,} in all; {basis['unseen_rows']:,} rows that no"
        " counted sample reads lie in slow memory",
    }
    console.print(f"slow accesses are forecast from the {basis['from']}{more[basis['from']]}", style="dim")
    bounds = [("all work spread evenly", plan.pooled), ("largest shard alone", plan.largest)]
    bounds += [("proven by the solver", plan.proven)] if plan.proven else []
    words = ", ".join(f"{name} {units.seconds(value)}" for name, value in bounds)
    console.print(
        f"{planned.request.policy} ({plan.solver}): slowest device reads for {units.seconds(plan.slowest)},"
        f" {plan.reason}"
    )
    console.print(f"bounds: {words}", style="dim")
    table = Shown("device", "shards", "fast", "slow", "reading (emulated)", title_justify="left")
    shard_counts = Counter(shard.device for shard in plan.shards)
    order = sorted(range(plan.devices), key=lambda number: (-plan.seconds[number], number))
    for device in sorted(order[:SHOWN]):
        table.add_row(
            str(device), str(shard_counts[device]), units.size(float(plan.fast_bytes[device])),
            units.size(float(plan.slow_bytes[device])), units.seconds(plan.seconds[device]),
        )  # fmt: skip
    console.print(table)
    if plan.devices > SHOWN:
        console.print(f"the {SHOWN} slowest of {plan.devices} devices", style="dim")
    console.print(f"Run {planned.run}   Plan: {escape(str(planned.directory / files.PLAN))}", soft_wrap=True)
