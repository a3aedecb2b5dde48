"""Pipeline templates (Oobleck, Jang et al., SOSP 2023): a pipeline-parallel job that goes on without spares.

A few plans of how to cut the model over so and so many hosts are made before the job starts. Any number of
hosts that is left is a sum of such plans; lost layers are copied from a pipeline that has them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from windtunnel.training.pipelines.live.entry import LayersLost
    from windtunnel.training.pipelines.live.layers import LayerSpec, even_templates
    from windtunnel.training.pipelines.live.profiler import measure_layers
    from windtunnel.training.pipelines.live.trainer import PipelineTrainer

__all__ = ["LayerSpec", "LayersLost", "PipelineTrainer", "even_templates", "measure_layers"]

_WHERE = {
    "LayerSpec": "layers",
    "LayersLost": "entry",
    "PipelineTrainer": "trainer",
    "even_templates": "layers",
    "measure_layers": "profiler",
}


def __getattr__(name: str) -> Any:
    """The live part needs torch, the policies do not: it is imported when it is first used."""
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"{__name__}.live.{_WHERE[name]}"), name)
