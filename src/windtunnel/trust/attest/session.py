"""Records of an attested session: sealed in one direction, each once, in order, none missing.

    record = sequence (8) | length of the kind (1) | kind | AES-256-GCM(data)

The sequence is the nonce, and never comes twice under a key: each direction has a key of its own. After
`REKEY` records the key becomes HMAC(key, "rekey").
"""

from __future__ import annotations

import hmac

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from windtunnel.trust.attest.messages import Refused

REKEY = 1 << 32


class _Direction:
    def __init__(self, key: bytes) -> None:
        self._key, self.sequence = key, 0
        self.cipher = AESGCM(key)

    def advance(self) -> None:
        self.sequence += 1
        if self.sequence % REKEY == 0:
            self._key = hmac.digest(self._key, b"rekey", "sha256")
            self.cipher = AESGCM(self._key)


class Session:
    """One side, for one thread at a time. ``identity``: of this session, the same on both sides."""

    def __init__(self, identity: bytes, sends: bytes, receives: bytes) -> None:
        self.identity = identity
        self._sends, self._receives = _Direction(sends), _Direction(receives)

    def seal(self, kind: str, data: bytes | memoryview) -> bytes:
        """A record of ``data`` for the other side. ``kind``: what it is, at most 255 bytes, which all can
        read and nobody can change."""
        way, word = self._sends, kind.encode()
        head = way.sequence.to_bytes(8, "big") + bytes([len(word)]) + word
        sealed = way.cipher.encrypt(_nonce(way.sequence), data, self.identity + head)
        way.advance()
        return head + sealed

    def open(self, record: bytes, kind: str | None = None) -> bytes:
        """What the other side has sealed. ``kind``: what it must be, where that is to be checked.

        Raises:
            Refused: it is not the next record of the other side, it was changed, or is of another kind.
        """
        way = self._receives
        sequence, end = int.from_bytes(record[:8], "big"), 9 + (record[8] if len(record) > 8 else 0)
        if len(record) < end + 16:
            raise Refused(f"a record of {len(record)} bytes is truncated", ["record.length"])
        if sequence != way.sequence:
            raise Refused(f"record {sequence} came, {way.sequence} is the next one", ["record.sequence"])
        try:
            data = way.cipher.decrypt(_nonce(sequence), record[end:], self.identity + record[:end])
        except InvalidTag:
            raise Refused(f"record {sequence} is not what the other side sealed", ["record.tag"]) from None
        if kind is not None and record[9:end] != kind.encode():
            raise Refused(f"record {sequence} is a {record[9:end]!r}, not a {kind!r}", ["record.kind"])
        way.advance()
        return data


def _nonce(sequence: int) -> bytes:
    return sequence.to_bytes(12, "big")
