"""Federated learning that needs less of its server: schemes, a twin of thousands of devices, Flower (FedP2P).

from windtunnel.edge.federated import FedP2P, peer_mod
"""

import lazy_loader

# Flower is an extra, and heavy: it is loaded when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
