"""The model proxy: turn boundaries, the gate, and replay, for agents that know nothing of it.

``Coordinator`` is what a host uses. ``classify`` says which requests end a turn, ``gate`` holds replies,
``conversation`` records them, ``effect_gate`` keeps effects outside from happening twice.
"""

from windtunnel.agents.sandbox.live.coordinator.classify import AGENTS, AgentRules
from windtunnel.agents.sandbox.live.coordinator.conversation import Conversation
from windtunnel.agents.sandbox.live.coordinator.effect_gate import EffectService
from windtunnel.agents.sandbox.live.coordinator.events import (
    Bounds,
    Classified,
    CoordinatorEvent,
    Failed,
    Replayed,
    TurnServed,
    Upstream,
)
from windtunnel.agents.sandbox.live.coordinator.server import Coordinator, conversation_file

__all__ = [
    "AGENTS",
    "AgentRules",
    "Bounds",
    "Classified",
    "Conversation",
    "Coordinator",
    "CoordinatorEvent",
    "EffectService",
    "Failed",
    "Replayed",
    "TurnServed",
    "Upstream",
    "conversation_file",
]
