"""The published table is whole, and its headline is where it is said to be."""

from __future__ import annotations

from windtunnel.training.pipelines.published import INTERVALS, MODELS, SPOT, THROUGHPUT


def test_the_table_is_whole() -> None:
    assert frozenset(THROUGHPUT) == frozenset(INTERVALS) | frozenset(SPOT)
    for row in THROUGHPUT.values():
        assert list(row) == [model.name for model in MODELS]
        for model in MODELS:
            assert (row[model.name].over_bamboo is not None) == model.bamboo_fits


def test_the_headline() -> None:
    cells = {
        (trace, model): ratio.over_varuna or 0.0
        for trace, row in THROUGHPUT.items()
        for model, ratio in row.items()
    }
    assert max(cells, key=lambda cell: cells[cell]) == ("10m", "GPT-3 6.7B")
    assert max(cells.values()) == 13.9
