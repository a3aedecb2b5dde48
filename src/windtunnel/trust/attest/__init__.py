"""Measured boot, remote attestation and the sealed session that follows (ShEF).

from windtunnel.trust.attest import Device, Manufacturer, Verifier, read_allow_list
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
