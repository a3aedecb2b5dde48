"""Ingestion: workers read, transform and batch samples beside trainers (DPP, Zhao et al., ISCA 2022).

from windtunnel.data.ingest import IngestDataset
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from windtunnel.data.ingest.live.dataset import IngestDataset, Ragged
    from windtunnel.data.ingest.model import Session, Transform

_PLACES = {
    "IngestDataset": "live.dataset",
    "Ragged": "live.dataset",
    "Session": "model",
    "Transform": "model",
}

__all__ = ["IngestDataset", "Ragged", "Session", "Transform"]


def __getattr__(name: str) -> Any:
    """Late: workers import this package, and must not wait for torch."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
