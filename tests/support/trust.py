"""A device, its maker, a TPM and an allow-list that lets them in."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import (
    ECDSA,
    SECP256R1,
    EllipticCurvePrivateKey,
    generate_private_key,
)
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from windtunnel.trust.attest import AllowList, AttestedDevice, Manufacturer, Verifier, measure
from windtunnel.trust.attest.messages import pack
from windtunnel.trust.attest.quote import HEAD, LAYOUT, SELECTION

LAYERS = {"firmware": b"firmware 7", "kernel": b"kernel 7"}
LOADS = {"program": b"train", "shield": b"tree"}
SECRETS = {"data key": b"the key of the data, 32 bytes long"[:32]}
MAKER = Manufacturer()


def allowed(**changes: Any) -> AllowList:
    measurements = {name: (measure(part),) for name, part in {**LAYERS, **LOADS}.items()}
    return replace(AllowList((MAKER.root,), measurements), **changes)


def device(**changes: Any) -> AttestedDevice:
    """``changes``: of the arguments of `AttestedDevice.boot`, and ``counter`` of the fuse."""
    fuse = changes.pop("fuse", None) or MAKER.fuse(changes.pop("counter", 0))
    return AttestedDevice.boot(fuse, **{"layers": LAYERS, "loads": LOADS, **changes})


def verifier(**changes: Any) -> Verifier:
    return Verifier(allowed(**changes), SECRETS)


@dataclass
class PaperTpm:
    """As much of a TPM as a quote shows, without a process. ``head``, ``selection``: of its quotes."""

    private: EllipticCurvePrivateKey = field(default_factory=lambda: generate_private_key(SECP256R1()))
    pcrs: dict[int, bytes] = field(default_factory=lambda: {8: bytes(32), 9: bytes(32)})
    head: bytes = HEAD
    selection: bytes = SELECTION

    @property
    def public(self) -> bytes:
        return self.private.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)

    @property
    def key(self) -> str:
        return hashlib.sha256(self.public).hexdigest()

    def extend(self, pcr: int, measured: str) -> None:
        self.pcrs[pcr] = hashlib.sha256(self.pcrs[pcr] + bytes.fromhex(measured)).digest()

    def quote(self, nonce: bytes) -> bytes:
        digest, signer = hashlib.sha256(self.pcrs[8] + self.pcrs[9]).digest(), b"\0\x0b" + bytes(32)
        about = 34, signer, 32, nonce, 1, 2, 3, True, 4
        attest = LAYOUT.pack(self.head, *about, self.selection, 32, digest)
        return pack("quote", self.public, attest, self.private.sign(attest, ECDSA(SHA256())))


def nonces(patch: pytest.MonkeyPatch) -> list[tuple[bytes, bytes]]:
    """Key and nonce of all that shields encrypt from now on."""
    from windtunnel.trust.shield.live import filesystem, memory

    used: list[tuple[bytes, bytes]] = []

    class Recorded:
        def __init__(self, key: bytes) -> None:
            self.key, self.cipher = key, AESGCM(key)
            self.decrypt = self.cipher.decrypt

        def encrypt(self, nonce: bytes, data: Any, checked: bytes | None) -> bytes:
            used.append((self.key, nonce))
            return self.cipher.encrypt(nonce, data, checked)

        def encrypt_into(self, nonce: bytes, data: Any, checked: bytes | None, sealed: bytearray) -> int:
            used.append((self.key, nonce))
            return self.cipher.encrypt_into(nonce, data, checked, sealed)

    for module in (filesystem, memory):
        patch.setattr(module, "AESGCM", Recorded)
    return used
