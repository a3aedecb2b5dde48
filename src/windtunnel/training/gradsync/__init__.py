"""Gradient synchronisation that chooses for itself (Espresso, Cupcake, DRAGONN, ZEN).

from windtunnel.training import gradsync

profile = gradsync.profile(ddp, step)    # all ranks at once, as all that follows
plan = gradsync.plan(profile)
handle = gradsync.apply(ddp, plan)
"""

import lazy_loader

# What has a heavy world (torch, a kernel's programs) is loaded when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
