"""Measured boot: each layer is measured before it runs, and what it may know follows from all before it.

    CDI_0 = HMAC(fuse, H(firmware))    CDI_i+1 = HMAC(CDI_i, H(layer))    attestation key = KDF(last CDI)

A changed layer has another attestation key, so it cannot speak for the one that it replaced. The device key,
which the manufacturer certified, signs what was booted together with that attestation key.

Source: Zhao et al., ShEF (ASPLOS 2022), secure boot; the chain as in TCG's DICE layering architecture.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from windtunnel.trust.attest.messages import digest


@dataclass(frozen=True)
class Fuse:
    """What is burnt into a device. ``secret``: 32 bytes; ``certificate``: its manufacturer's signature of its
    device key; ``counter``: only ever raised, so that what is older is known as such."""

    secret: bytes = field(repr=False)
    certificate: bytes
    counter: int = 0

    @property
    def device_key(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(hmac.digest(self.secret, b"device key", "sha256"))


class Manufacturer:
    """Makes devices. ``root``: its public key, 64 hex digits, for allow-lists."""

    def __init__(self) -> None:
        self._key = Ed25519PrivateKey.generate()
        self.root = self._key.public_key().public_bytes_raw().hex()

    def fuse(self, counter: int = 0) -> Fuse:
        """Of a new device."""
        fuse = Fuse(os.urandom(32), b"", counter)
        certified = digest("device key", fuse.device_key.public_key().public_bytes_raw())
        return Fuse(fuse.secret, self._key.sign(certified), counter)


def measure(layer: bytes) -> str:
    """The measurement of what is run: SHA-256, 64 hex digits."""
    return hashlib.sha256(layer).hexdigest()


def booted(fuse: Fuse, layers: Mapping[str, bytes]) -> tuple[Ed25519PrivateKey, bytes]:
    """The attestation key after ``layers`` were started in their order, and the kernel certificate: the
    device key's signature of what was booted and of that key."""
    secret = fuse.secret
    for layer in layers.values():
        secret = hmac.digest(secret, bytes.fromhex(measure(layer)), "sha256")
    key = Ed25519PrivateKey.from_private_bytes(hmac.digest(secret, b"attestation key", "sha256"))
    measured = [(name, measure(layer)) for name, layer in layers.items()]
    return key, fuse.device_key.sign(certified(measured, key.public_key().public_bytes_raw()))


def certified(measured: Sequence[tuple[str, str]], attestation_key: bytes) -> bytes:
    """What a kernel certificate signs."""
    return digest("kernel", *(part.encode() for pair in measured for part in pair), attestation_key)


def holds(public: bytes, signature: bytes, message: bytes) -> bool:
    """Whether ``signature`` is that of the Ed25519 key ``public`` (32 bytes)."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True
