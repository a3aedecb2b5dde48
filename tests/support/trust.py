"""A device, its maker and an allow-list that lets it in."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from windtunnel.trust.attest import AllowList, Device, Manufacturer, Verifier, measure

LAYERS = {"firmware": b"firmware 7", "kernel": b"kernel 7"}
LOADS = {"program": b"train", "shield": b"tree"}
SECRETS = {"data key": b"the key of the data, 32 bytes long"[:32]}
MAKER = Manufacturer()


def allowed(**changes: Any) -> AllowList:
    measurements = {name: (measure(part),) for name, part in {**LAYERS, **LOADS}.items()}
    return replace(AllowList((MAKER.root,), measurements), **changes)


def device(**changes: Any) -> Device:
    """``changes``: of the arguments of `Device.boot`, and ``counter`` of the fuse."""
    fuse = changes.pop("fuse", None) or MAKER.fuse(changes.pop("counter", 0))
    return Device.boot(fuse, **{"layers": LAYERS, "loads": LOADS, **changes})


def verifier(**changes: Any) -> Verifier:
    return Verifier(allowed(**changes), SECRETS)


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

    for module in (filesystem, memory):
        patch.setattr(module, "AESGCM", Recorded)
    return used
