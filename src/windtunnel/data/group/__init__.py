"""Group operations: one region on several hosts, changed on all of them or none (HyperLoop).

from windtunnel.data.group import Group, Member, start_engine
"""

import lazy_loader

# What has a heavy world (engines of emulated time) is loaded when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
