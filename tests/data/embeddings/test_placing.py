"""What every plan holds, and that the best one is found where all can be tried."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from windtunnel.base.errors import UserError
from windtunnel.data.embeddings import synthetic
from windtunnel.data.embeddings.model import EmbeddingTable, MemoryTier
from windtunnel.data.embeddings.policy import (
    CUTTING,
    PLACING,
    POLICIES,
    PlacementRequest,
    TablePlacement,
    decide,
    milp,
    pieces,
)

FAST, SLOW = MemoryTier(3e4, 1e12), MemoryTier(1e6, 1e10)


@st.composite
def tables(draw: st.DrawFn, most: int = 12) -> tuple[EmbeddingTable, ...]:
    embeddings = []
    for number in range(draw(st.integers(1, most))):
        rows = draw(st.integers(1, 500))
        ranks, shares = synthetic.zipf(rows, draw(st.floats(0, 2)), points=8)
        dim, dtype = draw(st.sampled_from([4, 10, 64])), draw(st.sampled_from(["float32", "bfloat16"]))
        embeddings.append(
            EmbeddingTable(
                f"t{number}", rows, dim, dtype, draw(st.floats(1, 50)), draw(st.floats(0, 1)), ranks=ranks,
                shares=shares, state_bytes=draw(st.sampled_from([0, 4, 4 * dim])),
            )
        )  # fmt: skip
    return tuple(embeddings)


def held(wanted: PlacementRequest, plan: TablePlacement) -> None:
    """Every column lies once, in memory that is there, and the plan says truly what it takes."""
    named = {table.name: table for table in wanted.tables}
    for name, table in named.items():
        mine = sorted((shard.first, shard.last) for shard in plan.shards if shard.table == name)
        assert [first for first, _ in mine] == [0, *(last for _, last in mine[:-1])]
        assert mine[-1][1] == table.dim
    fast, slow, seconds = (np.zeros(wanted.devices) for _ in range(3))
    for shard in plan.shards:
        table, columns = named[shard.table], shard.last - shard.first
        row = pieces.stored_bytes(table, columns)
        assert row >= columns * table.row_bytes / table.dim + table.state_bytes * columns / table.dim
        fast[shard.device] += shard.fast_rows * row
        slow[shard.device] += (table.rows - shard.fast_rows) * row
        share = float(table.share(shard.fast_rows))
        read = wanted.batch * table.lookups * columns * table.row_bytes / table.dim
        pace = share / wanted.fast.bandwidth + (1 - share) / wanted.slow.bandwidth
        seconds[shard.device] += read * pace
    assert (fast == plan.fast_bytes).all() and (slow == plan.slow_bytes).all()
    assert max(plan.fast_bytes) <= wanted.fast.capacity and max(plan.slow_bytes) <= wanted.slow.capacity
    np.testing.assert_allclose(plan.seconds, seconds, rtol=1e-9, atol=1e-18)
    for bound in (plan.pooled, plan.largest, plan.proven):
        assert plan.slowest >= bound * (1 - 1e-9)


@settings(max_examples=30, deadline=None)
@given(
    tables(), st.integers(1, 6), st.integers(0, 40), st.sampled_from([p for p in PLACING if p != "recshard"])
)
def test_every_plan_fits_and_says_what_it_takes(
    some: tuple[EmbeddingTable, ...], devices: int, percent: int, policy: str
) -> None:
    total = sum(table.total_bytes for table in some)
    wanted = PlacementRequest(
        some, devices, MemoryTier(percent * total / 100 / devices, 1e12), MemoryTier(total, 1e10), 64, policy
    )
    plan = decide(wanted)
    held(wanted, plan)
    assert plan == POLICIES[policy](replace(wanted, policy="recshard"))


@settings(max_examples=12, deadline=None)
@given(tables(most=6), st.integers(1, 60))
def test_the_best_of_all_plans_is_found(some: tuple[EmbeddingTable, ...], percent: int) -> None:
    total = sum(table.total_bytes for table in some)
    assume(any(table.lookups for table in some))
    wanted = PlacementRequest(
        some, 2, MemoryTier(percent * total / 200, 1e12), MemoryTier(total, 1e10), 64, columns=0
    )
    plan, searched = decide(wanted), decide(replace(wanted, policy="search"))
    held(wanted, plan)
    cut = pieces.cut(some, 2, wanted.fast, wanted.slow, 64, 0)
    best = min(
        pieces.least_seconds(cut, np.array(where), 2, wanted.fast.capacity).max()
        for where in product((0, 1), repeat=len(some))
    )
    # rows are whole in a plan and may be cut in the bound: at most a row of each table
    row = max(table.row_bytes for table in some) * 64 * max(table.lookups for table in some) / 1e10
    assert best * (1 - 1e-9) <= plan.slowest <= best * 1.0001 + row
    assert plan.slowest <= searched.slowest * (1 + 1e-9) <= best * 1.02 + row
    assert max(plan.pooled, plan.largest, plan.proven) <= best * (1 + 1e-6)


def test_the_solver_proves_what_the_search_finds() -> None:
    some = synthetic.tables("small")
    total = sum(table.total_bytes for table in some)
    wanted = PlacementRequest(some, 4, MemoryTier(0.2 * total / 4, 1e12), MemoryTier(total, 1e10), 4096)
    plan, searched = decide(wanted), decide(replace(wanted, policy="search"))
    held(wanted, plan)
    assert (plan.solver, searched.solver) == ("milp", "search") and plan.proven >= plan.pooled
    assert plan.gap < 1e-3 and searched.slowest <= 1.02 * plan.slowest
    for policy in ("size", "lookup", "size-lookup"):
        assert decide(replace(wanted, policy=policy)).slowest > plan.slowest


def test_a_solver_that_is_stopped_early_still_proves_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no plan is better than that of the search, too."""
    monkeypatch.setattr(milp, "NODES", 40)
    some = tuple(replace(table, state_bytes=4) for table in synthetic.tables("rm2")[:24])
    total = sum(table.total_bytes for table in some)
    plan = decide(
        PlacementRequest(some, 4, MemoryTier(0.1 * total / 4, 2e12), MemoryTier(float(total), 26e9), 16_384)
    )
    assert plan.proven > max(plan.pooled, plan.largest)


@pytest.mark.parametrize("columns", [3, 4, 6, 7, 12])
def test_no_shard_has_fewer_columns_than_said(columns: int) -> None:
    tables = (EmbeddingTable("hot", 10**6, 64, pooling=100.0), EmbeddingTable("cold", 10, 64))
    tiers = MemoryTier(24e9, 2e12), MemoryTier(128e9, 25e9)
    plan = decide(PlacementRequest(tables, 64, *tiers, 16_384, "search", columns=columns))
    widths = [shard.last - shard.first for shard in plan.shards if shard.table == "hot"]
    assert len(widths) > 1 and min(widths) >= columns and sum(widths) == 64


def test_a_table_that_holds_all_up_is_cut_into_columns() -> None:
    small = tuple(EmbeddingTable(f"t{number}", 100, 64) for number in range(3))
    wanted = PlacementRequest(
        (EmbeddingTable("giant", 10_000, 64, pooling=100.0), *small),
        4,
        MemoryTier(1e5, 1e12),
        MemoryTier(1e7, 1e10),
        64,
    )
    plan, whole = decide(wanted), decide(replace(wanted, columns=0))
    assert len({shard.device for shard in plan.shards if shard.table == "giant"}) == 4
    assert len([shard for shard in whole.shards if shard.table == "giant"]) == 1
    assert whole.slowest > 2 * plan.slowest
    assert all(shard.first % 4 == 0 for shard in plan.shards)
    larger = replace(wanted, slow=MemoryTier(1.2e6, 1e10))
    held(larger, decide(larger))
    with pytest.raises(UserError, match=r"table giant takes 2\.44 MiB, a device has .* this policy cuts no"):
        decide(replace(larger, policy="size"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"slow": MemoryTier(10.0, 1e10)},
            r"the tables take 97\.7 KiB, 2 devices have .* 10 B of slow memory each",
        ),
        (
            {"policy": "best"},
            "policy 'best' is unknown; accepted are recshard, search, size, lookup, size-lookup",
        ),
        ({"devices": 0}, "devices is 0, a positive number is accepted"),
        ({"fast": MemoryTier(1e4, 1e9)}, r"slow\.bandwidth is 1e\+10, accepted is what fast\.bandwidth has"),
        ({"tables": ()}, "there are no tables"),
        ({"tables": (EmbeddingTable("a", 0, 4),)}, "table a: rows is 0"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_a_sentence(change: dict[str, object], words: str) -> None:
    wanted = PlacementRequest((EmbeddingTable("a", 500, 25), EmbeddingTable("b", 500, 25)), 2, FAST, SLOW, 64)
    with pytest.raises(UserError, match=words):
        decide(replace(wanted, **change))  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", CUTTING)
def test_tables_that_do_not_fit_beside_each_other_name_memory(policy: str) -> None:
    three = tuple(EmbeddingTable(name, 100, 25) for name in "abc")  # 10,000 bytes each, 15,000 a device
    wanted = PlacementRequest(three, 2, MemoryTier(5e3, 1e12), MemoryTier(1e4, 1e10), 64, policy, columns=0)
    with pytest.raises(UserError, match=r"memory binds: 3 shards of 29\.3 KiB fit no 2 devices of"):
        decide(wanted)
