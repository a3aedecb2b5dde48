"""How M1 to M4 and records are written: a label that nothing else has, then fields, each after its length.

    M1 V→D  version, suites, nonce (32), e_V (32), SHA-256 of the allow-list (32)
    M2 D→V  version, suite, e_D (32), device key (32), its certificate (64), attestation key (32), kernel
            certificate (64), evidence (JSON), quote of a TPM over H(M1 | M2 before it), or nothing,
            signature (64) over H(M1 | M2 before it)
    M3 V→D  MAC(k_conf, "V" | h) (32), secrets under k_wrap, with h
    M4 D→V  MAC(k_conf, "D" | h | M3 | loaded) (32), loaded (32): H(evidence), once the secrets are there
    record  sequence (8) | length of the kind (1) | kind | AES-256-GCM(data)

h = H(M1 | M2) is the salt of all keys: a session belongs to one exchange. A record's sequence is its nonce,
and each direction has its own key, so no nonce comes twice.
"""

import hashlib
import hmac
from collections.abc import Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from windtunnel.base.errors import HostError

DOMAIN = b"windtunnel trust.attest v1 "
VERSION, SUITE = b"1", b"X25519+Ed25519+HKDF-SHA256+AES-256-GCM"
LENGTHS = {
    "M1": (0, 0, 32, 32, 32), "M2": (0, 0, 32, 32, 64, 32, 64, 0, 0, 64), "M3": (32, 0), "M4": (32, 32),
    "quote": (0, 0, 0),
}  # fmt: skip
"""Bytes of each field; 0: any."""
REKEY = 1 << 32  # records until a key becomes MAC(key, "rekey")


class AttestationRefused(HostError):
    """A message, a record or a device is not accepted. ``failing``: each claim that fails, by name."""

    def __init__(self, message: str = "", failing: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.failing = tuple(failing)


def pack(label: str, *fields: bytes) -> bytes:
    """The message of that label."""
    return b"".join(len(part).to_bytes(4, "big") + part for part in (DOMAIN + label.encode(), *fields))


def unpack(label: str, message: bytes) -> list[bytes]:
    """The fields of a message of that label. Raises Refused: it is another, or not as `pack` writes it."""
    fields, at = list[bytes](), 0
    while at < len(message):
        start = at + 4
        at = start + int.from_bytes(message[at:start], "big")
        fields.append(message[start:at])
    if at != len(message) or not fields or fields.pop(0) != DOMAIN + label.encode():
        raise AttestationRefused(f"{label}: this is another message, or truncated", [f"{label}.label"])
    sizes = [len(field) for field in fields]
    lengths = LENGTHS.get(label, (0,) * len(sizes))
    if len(sizes) != len(lengths) or any(b and a != b for a, b in zip(sizes, lengths, strict=True)):
        raise AttestationRefused(
            f"{label}: fields of {sizes} bytes, accepted are {lengths}", [f"{label}.length"]
        )
    return fields


def digest(label: str, *parts: bytes) -> bytes:
    """SHA-256 of parts that cannot run into each other."""
    return hashlib.sha256(pack(label, *parts)).digest()


def mac(key: bytes, label: str, *parts: bytes) -> bytes:
    """HMAC-SHA256 of the same; also a key that follows from another one."""
    return hmac.digest(key, pack(label, *parts), "sha256")


class _Way:
    def __init__(self, key: bytes) -> None:
        self.key, self.sequence, self.cipher = key, 0, AESGCM(key)

    def advance(self) -> None:
        self.sequence += 1
        if self.sequence % REKEY == 0:
            self.key = mac(self.key, "rekey")
            self.cipher = AESGCM(self.key)


class AttestedSession:
    """One side of an attested session, for one thread at a time. ``identity``: the same on both sides."""

    def __init__(self, identity: bytes, sends: bytes, receives: bytes) -> None:
        self.identity, self._sends, self._receives = identity, _Way(sends), _Way(receives)

    def seal(self, kind: str, data: bytes | memoryview) -> bytes:
        """A record of ``data`` for the other side. ``kind``: what it is, up to 255 bytes, for all to read."""
        way, word = self._sends, kind.encode()
        head = way.sequence.to_bytes(8, "big") + bytes([len(word)]) + word
        sealed = way.cipher.encrypt(way.sequence.to_bytes(12, "big"), data, self.identity + head)
        way.advance()
        return head + sealed

    def open(self, record: bytes, kind: str | None = None) -> bytes:
        """What the other side has sealed. ``kind``: what it must be, where that is to be checked. Raises
        Refused: it is not the next record of the other side, was changed, or is of another kind."""
        way, end = self._receives, 9 + sum(record[8:9])
        if int.from_bytes(record[:8], "big") != way.sequence:
            raise AttestationRefused(
                f"a record came that is not {way.sequence}, the next one", ["record.sequence"]
            )
        if kind is not None and record[9:end] != kind.encode():
            raise AttestationRefused(
                f"record {way.sequence} is a {record[9:end]!r}, not a {kind!r}", ["record.kind"]
            )
        try:
            nonce, about = way.sequence.to_bytes(12, "big"), self.identity + record[:end]
            data = way.cipher.decrypt(nonce, record[end:], about)
        except InvalidTag:
            raise AttestationRefused(
                f"record {way.sequence} is not what the other side sealed", ["record.tag"]
            ) from None
        way.advance()
        return data
