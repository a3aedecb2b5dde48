"""Embedding tables larger than fast memory: which rows lie where, on which device (RecShard, FlexShard).

from windtunnel.data.embeddings import ShardedEmbedding, TieredEmbeddingBag
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from windtunnel.data.embeddings.files import Statistics, read_plan, read_statistics
    from windtunnel.data.embeddings.live.bag import TieredEmbeddingBag, TieredOptimizer
    from windtunnel.data.embeddings.live.build import build
    from windtunnel.data.embeddings.live.optim import RowWiseAdagrad, RowWiseAdam
    from windtunnel.data.embeddings.live.sharded import ShardedEmbedding, exchange
    from windtunnel.data.embeddings.model import Table
    from windtunnel.data.embeddings.run import Planned, plan_run

_PLACES = {
    "Planned": "run",
    "RowWiseAdagrad": "live.optim",
    "RowWiseAdam": "live.optim",
    "ShardedEmbedding": "live.sharded",
    "Statistics": "files",
    "Table": "model",
    "TieredEmbeddingBag": "live.bag",
    "TieredOptimizer": "live.bag",
    "build": "live.build",
    "exchange": "live.sharded",
    "plan_run": "run",
    "read_plan": "files",
    "read_statistics": "files",
}

__all__ = [
    "Planned",
    "RowWiseAdagrad",
    "RowWiseAdam",
    "ShardedEmbedding",
    "Statistics",
    "Table",
    "TieredEmbeddingBag",
    "TieredOptimizer",
    "build",
    "exchange",
    "plan_run",
    "read_plan",
    "read_statistics",
]


def __getattr__(name: str) -> Any:
    """Late: plans and profiles need no torch."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
