"""A GPU that belongs to one user at a time, and what that costs (HIX).

from windtunnel.trust.gpu import Denied, Host, claim
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
