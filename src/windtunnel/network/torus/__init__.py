"""An all-to-all in an optical torus: a wavelength for every pair of nodes, planned and emulated.

There is no live world: an optical torus is nothing that a host has. `policy` plans, `policy.check` counts
whether a plan holds, `twin` takes traffic over it and over an electrical torus of the same links.
"""

import lazy_loader

# What has a heavy world (torch, a kernel's programs) is loaded when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
