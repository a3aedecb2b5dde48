"""Effects outside a sandbox (a push, a payment), each made at most once: see ``journal``."""

from windtunnel.agents.sandbox.live.effects.journal import (
    Check,
    Effect,
    EffectError,
    EffectInDoubt,
    EffectUnderWay,
    Journal,
    NotDone,
)
from windtunnel.agents.sandbox.live.effects.wrap import at_most_once

__all__ = [
    "Check",
    "Effect",
    "EffectError",
    "EffectInDoubt",
    "EffectUnderWay",
    "Journal",
    "NotDone",
    "at_most_once",
]
