"""windtunnel: put a real training job, serving policy or agent sandbox into a cluster that you do not have.

    import windtunnel as wt

    run = wt.emulate("train.py", "--size", "8b", cluster="h100-sxm:16x8")
    print(run.iteration_time, run.peak_reserved, run.critical_path)

What is named here is loaded when it is first used: importing windtunnel costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from windtunnel.agents.sandbox import Sandbox
    from windtunnel.api import Run, SweepRun, emulate, load_run, runs, sweep
    from windtunnel.base.errors import (
        HangError,
        HostError,
        LessError,
        ScriptError,
        UserError,
        VerdictError,
        WindtunnelError,
    )
    from windtunnel.cluster.load import load_cluster
    from windtunnel.training import elastic
    from windtunnel.training.checkpoint import PeerCheckpointer
    from windtunnel.training.emulate.emulation import Options
    from windtunnel.training.emulate.twin.job import Slow
    from windtunnel.training.pipelines import PipelineTrainer

__version__ = "0.1.0"

__all__ = [
    "HangError",
    "HostError",
    "LessError",
    "Options",
    "PeerCheckpointer",
    "PipelineTrainer",
    "Run",
    "Sandbox",
    "ScriptError",
    "Slow",
    "SweepRun",
    "UserError",
    "VerdictError",
    "WindtunnelError",
    "elastic",
    "emulate",
    "load_cluster",
    "load_run",
    "runs",
    "sweep",
]

_PLACES = {
    "HangError": "base.errors",
    "HostError": "base.errors",
    "LessError": "base.errors",
    "Options": "training.emulate.emulation",
    "PeerCheckpointer": "training.checkpoint",
    "PipelineTrainer": "training.pipelines",
    "Run": "api",
    "Sandbox": "agents.sandbox",
    "ScriptError": "base.errors",
    "Slow": "training.emulate.twin.job",
    "SweepRun": "api",
    "UserError": "base.errors",
    "VerdictError": "base.errors",
    "WindtunnelError": "base.errors",
    "elastic": "training",
    "emulate": "api",
    "load_cluster": "cluster.load",
    "load_run": "api",
    "runs": "api",
    "sweep": "api",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "elastic":
        return import_module("windtunnel.training.elastic")
    found = getattr(import_module(f"windtunnel.{_PLACES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
