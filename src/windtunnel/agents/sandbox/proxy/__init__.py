"""The model proxy: turn boundaries, the gate, and replay, for agents that know nothing of it.

``ModelProxy`` is what a host uses. ``classify`` says which requests end a turn, ``gate`` holds replies,
``conversation`` records them.
"""

from windtunnel.agents.sandbox.proxy.classify import AGENTS, AgentRules
from windtunnel.agents.sandbox.proxy.conversation import Conversation
from windtunnel.agents.sandbox.proxy.events import (
    Bounds,
    Classified,
    Failed,
    ProxyEvent,
    Replayed,
    TurnServed,
    Upstream,
)
from windtunnel.agents.sandbox.proxy.server import ModelProxy, conversation_file

__all__ = [
    "AGENTS",
    "AgentRules",
    "Bounds",
    "Classified",
    "Conversation",
    "Failed",
    "ModelProxy",
    "ProxyEvent",
    "Replayed",
    "TurnServed",
    "Upstream",
    "conversation_file",
]
