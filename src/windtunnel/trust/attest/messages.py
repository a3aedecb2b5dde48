"""How M1 to M4 are written: a label that no other message has, then fields, each after its length.

    M1 V→D  version, suites, nonce (32), e_V (32), SHA-256 of the allow-list (32)
    M2 D→V  version, suite, e_D (32), device key (32), its certificate (64), attestation key (32), kernel
            certificate (64), evidence (JSON), quote (may be empty), signature (64) over H(M1 | M2 before it)
    M3 V→D  HMAC(k_conf, "V" | h) (32), secrets under k_wrap, with h
    M4 D→V  HMAC(k_conf, "D" | h | M3 | loaded) (32), loaded (JSON): what runs once the secrets are there

h = H(M1 | M2) is the salt of all keys, so a session belongs to one exchange. Nothing is read that has another
count of fields or a field of another length: there is one way to write a message.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from windtunnel.base.errors import HostError

DOMAIN = b"windtunnel trust.attest v1 "
VERSION, SUITE = b"1", b"X25519+Ed25519+HKDF-SHA256+AES-256-GCM"
M1 = (None, None, 32, 32, 32)
M2 = (None, None, 32, 32, 64, 32, 64, None, None, 64)
M3 = M4 = (32, None)
"""Bytes of each field; None: any."""


class Refused(HostError):
    """A message, a record or a device is not accepted. ``failing``: each claim that fails, by name."""

    def __init__(self, message: str = "", failing: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.failing = tuple(failing)


def pack(label: str, *fields: bytes) -> bytes:
    """The message of that label."""
    parts = (DOMAIN + label.encode(), *fields)
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def unpack(label: str, message: bytes, lengths: Sequence[int | None] | None = None) -> list[bytes]:
    """The fields of a message of that label, of these ``lengths`` (None: any count of any length).

    Raises:
        Refused: it is another message, or not written as `pack` does.
    """
    fields, at = list[bytes](), 0
    while at < len(message):
        end = at + 4 + int.from_bytes(message[at : at + 4], "big")
        if max(at + 4, end) > len(message):
            raise Refused(f"{label}: its last field is truncated", [f"{label}.length"])
        fields.append(message[at + 4 : end])
        at = end
    if not fields or fields.pop(0) != DOMAIN + label.encode():
        raise Refused(f"{label}: this is another message", [f"{label}.label"])
    found = [len(field) for field in fields]
    if lengths is not None and (
        len(found) != len(lengths)
        or any(need not in (None, has) for need, has in zip(lengths, found, strict=True))
    ):
        raise Refused(f"{label}: fields of {found} bytes, accepted are {lengths}", [f"{label}.length"])
    return fields


def digest(label: str, *parts: bytes) -> bytes:
    """SHA-256 of parts that cannot run into each other."""
    return hashlib.sha256(pack(label, *parts)).digest()
