"""A GPU that belongs to one enclave at a time, and what that costs (HIX).

from windtunnel.trust.gpu import claim, local_host, protection
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
