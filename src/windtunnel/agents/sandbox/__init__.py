"""Agent sandboxes that survive: checkpoint, restore, fork and roll back files, processes and shells.

    from windtunnel.agents.sandbox import Host, SandboxSpec

    with Host() as host:
        box = host.create(SandboxSpec("demo"))
        with box.turn():
            box.run("echo hello > /workspace/a")
        forks = host.fork("demo", 4)

``Host`` works in this process; ``Sandbox(name)`` and ``connect`` speak to a daemon, of this host or another.
Both are what `protocol` says, and raise the same errors. Source: Crab (arXiv 2604.28138); what differs
from it is said where it does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from windtunnel.agents.sandbox.client import Sandbox, connect, connect_async
    from windtunnel.agents.sandbox.errors import LessError, SandboxDied, SandboxError
    from windtunnel.agents.sandbox.live.box import Box
    from windtunnel.agents.sandbox.live.effects import Journal
    from windtunnel.agents.sandbox.live.host import Host
    from windtunnel.agents.sandbox.model import Lack, Limits, SandboxSpec, TurnClass, TurnResult
    from windtunnel.agents.sandbox.protocol import AnyHost, AnySandbox

_PLACES = {
    "AnyHost": "protocol",
    "AnySandbox": "protocol",
    "Box": "live.box",
    "Host": "live.host",
    "Journal": "live.effects",
    "Lack": "model",
    "LessError": "errors",
    "Limits": "model",
    "Sandbox": "client",
    "SandboxDied": "errors",
    "SandboxError": "errors",
    "SandboxSpec": "model",
    "TurnClass": "model",
    "TurnResult": "model",
    "connect": "client",
    "connect_async": "client",
}

__all__ = [
    "AnyHost",
    "AnySandbox",
    "Box",
    "Host",
    "Journal",
    "Lack",
    "LessError",
    "Limits",
    "Sandbox",
    "SandboxDied",
    "SandboxError",
    "SandboxSpec",
    "TurnClass",
    "TurnResult",
    "connect",
    "connect_async",
]


def __getattr__(name: str) -> Any:
    """Import what is asked for only then: the command line must not load a host to speak to a daemon."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
