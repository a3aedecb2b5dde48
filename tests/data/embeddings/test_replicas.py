"""Cuts of spread tables against a scan of all pairs of them, and what crosses against what is drawn."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations_with_replacement

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.base.errors import UserError
from windtunnel.cluster.load import load_cluster
from windtunnel.data.embeddings import synthetic, traffic
from windtunnel.data.embeddings.layout import RowLayout
from windtunnel.data.embeddings.model import EmbeddingTable, Replicas
from windtunnel.data.embeddings.policy import replicas
from windtunnel.data.embeddings.policy.replicas import Replication, ReplicationRequest, decide


def zipf(rows: int, skew: float, name: str = "t", **more: object) -> EmbeddingTable:
    shares = np.cumsum(np.arange(1, rows + 1) ** -skew)
    shares = np.concatenate(([0], shares / shares[-1]))
    shares[-1] = 1
    fields = {"dim": 4, "pooling": 5.0, "sequence": True, **more}
    return EmbeddingTable(
        name, rows, ranks=tuple(range(rows + 1)), shares=tuple(map(float, shares)), **fields
    )  # type: ignore[arg-type]


worlds = st.builds(
    ReplicationRequest,
    st.builds(
        lambda rows, skew, pooling, state: (zipf(rows, skew, pooling=pooling, state_bytes=state),),
        st.integers(1, 24), st.floats(0, 2), st.floats(0.5, 8), st.sampled_from((0, 16)),
    ),
    st.integers(1, 4), st.integers(1, 4), st.just(300e9), st.sampled_from((25e9, 300e9)),
    st.integers(1, 6).map(float), st.booleans(),
)  # fmt: skip


def totals(request: ReplicationRequest) -> dict[tuple[int, int], tuple[float, float]]:
    """Seconds and bytes of memory of every pair of cuts."""
    (table,) = request.tables
    rows, p = replicas.segments(table)
    time, held = replicas.seconds(request, table, p), replicas.memory(request, table, p)
    by_cuts = {}
    for hot, warm in combinations_with_replacement(range(table.rows + 1), 2):
        tiers = replicas.tiers_of(rows, Replicas(table.name, hot, warm))
        by_cuts[hot, warm] = float((time * tiers).sum()), float((held * tiers).sum())
    return by_cuts


@settings(max_examples=60, deadline=None)
@given(worlds, st.one_of(st.none(), st.floats(0, 1)))
def test_no_pair_of_cuts_is_faster(request: ReplicationRequest, room: float | None) -> None:
    """Within the room, all but the one row that it may leave half empty."""
    all_ = totals(request)
    least, most = min(cost[1] for cost in all_.values()), max(cost[1] for cost in all_.values())
    limit = 2 * most if room is None else least + room * (most - least) + 1e-6
    request = replace(request, memory=limit)
    try:
        (cuts,) = decide(request).tables
    except UserError:
        # rows that are faster and smaller further up have gone up, and it is still too much
        assert limit < all_[0, 0][1]
        return
    time, held = all_[cuts.hot, cuts.warm]
    assert held <= limit * (1 + 1e-9)
    assert held == pytest.approx(replicas.memory_of(request, Replication((cuts,))))
    (table,) = request.tables
    each = replicas.seconds(request, table, replicas.segments(table)[1])
    slack = 0.0 if room is None else float((each.max(0) - each.min(0)).max())
    best = min(cost[0] for cost in all_.values() if cost[1] <= limit)
    assert time <= best + slack + 1e-9 * best


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 3), st.integers(1, 40), st.data(), st.integers(1, 4), st.integers(1, 4))
def test_rows_lie_where_the_layout_says(
    number: int, rows: int, data: st.DataObject, hosts: int, devices: int
) -> None:
    hot = data.draw(st.integers(0, rows))
    layout = RowLayout(number, rows, hot, data.draw(st.integers(hot, rows)), hosts, devices)
    ranks = np.arange(rows)
    copies = np.zeros(rows, int)
    for device in range(layout.world):
        held = layout.ranks_on(device)
        assert (layout.place(held) == np.arange(len(held))).all()
        assert (np.flatnonzero(layout.holds(ranks, device)) == np.sort(held)).all()
        copies[held] += 1
        asked = layout.destination(ranks, device // devices)
        assert all(rank in layout.ranks_on(int(to)) for rank, to in zip(ranks, asked, strict=True))
        assert (asked[: layout.warm] // devices == device // devices).all()
    assert (copies == np.where(ranks < hot, layout.world, np.where(ranks < layout.warm, hosts, 1))).all()


@pytest.mark.parametrize(("distinct", "sums"), [(True, False), (False, False), (False, True)])
def test_what_is_expected_is_the_mean_of_what_is_counted(distinct: bool, sums: bool) -> None:
    tables = (zipf(30, 1.1, "a"), zipf(12, 0.1, "b", dim=8, pooling=3.0, sequence=False))
    request = ReplicationRequest(tables, 3, 2, 300e9, 25e9, 4.0, distinct, partial_sums=sums)
    decision = Replication((Replicas("a", 3, 9), Replicas("b", 0, 0 if sums else 4)))
    assert not sums or decide(request).tables[1] == decision.tables[1]
    bags = [{"b": np.arange(0, 12, 3)}] * request.world
    draws = np.random.default_rng(0)
    p = [np.diff(table.shares) for table in tables]
    drawn = []
    for _ in range(120):
        batches = [
            {
                table.name: draws.choice(table.rows, int(4 * table.pooling), p=q)
                for table, q in zip(tables, p, strict=True)
            }
            for _ in range(request.world)
        ]
        drawn.append({k: v.mean(0) for k, v in traffic.exact(request, decision, batches, bags).items()})
    for phase, mean in traffic.expected(request, decision).items():
        assert np.mean([sent[phase] for sent in drawn], 0) == pytest.approx(mean, rel=0.03, abs=1), phase


def test_replicas_need_no_memory_that_row_wise_sharding_would_not() -> None:
    """The shape of the paper's result: lookups of sequences, 16 hosts of 8, rows of 256 bytes."""
    ranks, shares = synthetic.zipf(200_000, 1.1)
    table = EmbeddingTable("t", 200_000, 128, "float16", 1000.0, 1.0, True, ranks, shares)
    saved = []
    for distinct in (False, True):
        request = traffic.exchange(load_cluster("a100-80:16x8"), (table,), 512.0, distinct=distinct)
        ours, rows = decide(request), replicas.rowwise(request)
        assert replicas.memory_of(request, ours) <= replicas.rowwise_memory(request)
        both = [traffic.expected(request, replication) for replication in (ours, rows)]
        moved = [sum(sent[phase].sum() for phase in traffic.ALL_TO_ALL) for sent in both]
        saved.append(
            (1 - moved[0] / moved[1], traffic.seconds(request, both[1]) / traffic.seconds(request, both[0]))
        )
        assert (ours.tables[0].hot > 0) == (not distinct)
    assert saved[0][0] > 0.5 and saved[0][1] > 2 and saved[1][1] > 1


def test_tables_that_do_not_fit_are_refused_with_the_sum() -> None:
    request = ReplicationRequest((zipf(1000, 1.0, dim=256),), 1, 2, 1e9, 1e9, 1.0, memory=1e5)
    with pytest.raises(UserError, match=r"memory is 97\.7 KiB a device, the tables with their buffers take"):
        decide(request)
    with pytest.raises(UserError, match="hosts is 0"):
        decide(replace(request, hosts=0))
