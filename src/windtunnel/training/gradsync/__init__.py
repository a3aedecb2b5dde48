"""Gradient synchronisation that chooses for itself (Espresso, Cupcake, DRAGONN, ZEN).

from windtunnel.training import gradsync

profile = gradsync.profile(ddp, step)    # all ranks at once, as all that follows
plan = gradsync.plan(profile)
handle = gradsync.apply(ddp, plan, profile=profile)
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from windtunnel.training.gradsync.live.hook import Handle, apply
    from windtunnel.training.gradsync.live.profile import profile
    from windtunnel.training.gradsync.run import plan

__all__ = ["Handle", "apply", "plan", "profile"]

# Late, since a plan needs no torch.
_PLACES = {"Handle": "live.hook", "apply": "live.hook", "plan": "run", "profile": "live.profile"}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
