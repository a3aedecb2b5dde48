"""Whether the network is what holds a training job up, and what a better one would give (NetAI 2020).

from windtunnel.training.bottleneck import analyse
"""

import lazy_loader

# Emulations are heavy: they are loaded when they are first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
