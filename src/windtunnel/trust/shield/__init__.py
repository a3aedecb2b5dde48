"""Memory and storage that only hold ciphertext, and cannot bring back what they held before (ShEF's Shield).

from windtunnel.trust.shield import Region, Shield
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
