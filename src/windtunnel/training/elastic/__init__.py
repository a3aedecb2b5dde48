"""Training that survives: what checkpoints in peer memory and pipeline templates stand on.

A supervisor without torch owns the membership of a job in numbered generations; an agent on every host
outlives the trainers; the trainers' process group can be cut while blocked and rebuilt in the same process.
A training program calls `run`, with a function that is called again, in the same process, after each failure.
"""

import lazy_loader

# What has a heavy world (torch, a kernel's programs) is loaded when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
