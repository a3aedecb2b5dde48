"""Checkpoints in the memory of peers (GEMINI, Wang et al., SOSP 2023).

Every step each rank's state goes to a slot in its own host's memory, and from there, agent to agent, into
the memory of other hosts. A failed job goes on from the newest step of which every shard has a verified
copy.

    from windtunnel.training.checkpoint import PeerCheckpointer
"""

import lazy_loader

# What has a heavy world (torch, a kernel's programs) is loaded when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
