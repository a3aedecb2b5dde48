"""Training that survives: what checkpoints in peer memory and pipeline templates stand on.

A supervisor without torch owns the membership of a job in numbered generations; an agent on every host
outlives the trainers; the trainers' process group can be cut while blocked and rebuilt in the same process.
A training program calls `run`, with a function that is called again, in the same process, after each failure.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from windtunnel.training.elastic.live.group import CuttableGroup, group_sockets
    from windtunnel.training.elastic.live.job import Job, Regroup
    from windtunnel.training.elastic.live.run import run

__all__ = ["CuttableGroup", "Job", "Regroup", "group_sockets", "run"]

# The trainer's side needs torch, which the supervisor and the agents must not load: so it is looked up late.
_PLACES = {
    "CuttableGroup": "group",
    "Job": "job",
    "Regroup": "job",
    "group_sockets": "group",
    "run": "run",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.live.{_PLACES[name]}"), name)
