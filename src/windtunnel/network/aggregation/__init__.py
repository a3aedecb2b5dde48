"""Gradients summed inside the network, by a switch that several jobs share (SwitchML, ATP, ESA).

``policy`` says whose fragments get the switch's few slots, what a server does with the rest, and how floats
become integers that a switch can add. ``twin`` has jobs, switches and servers in the packet engine, ``live``
the same as processes that speak UDP:

    from windtunnel.network import aggregation

    group = aggregation.connect("10.0.0.9:7000")      # on every rank, after init_process_group
    group.all_reduce(tensor)                          # in place
    ddp.register_comm_hook(group, aggregation.hook)   # means of gradients
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from windtunnel.network.aggregation.live.worker import AggregationLost, Aggregator, connect, hook

__all__ = ["AggregationLost", "Aggregator", "connect", "hook"]


def __getattr__(name: str) -> Any:  # late: the policy and the twin need no torch
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.live.worker"), name)
