"""What a layer, a network or a training step costs on a chip that is only a drawing.

There is no live world: the chip is not there. `policy` maps loop nests, `twin` prices networks and captured
steps, brute force checks the counts.
"""

import lazy_loader

# What has a heavy world (Numba) is loaded when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
