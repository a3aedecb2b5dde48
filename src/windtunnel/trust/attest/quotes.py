"""A TPM's quote, read and checked without a TPM: the verifier needs `cryptography` alone.

A quote is three fields: what the TPM attests (TPMS_ATTEST), its signature (TPMT_SIGNATURE: ECDSA, SHA-256)
and the public key (SubjectPublicKeyInfo, DER).

Source: TCG, Trusted Platform Module Library, part 2: TPMS_ATTEST, TPMS_QUOTE_INFO and TPMT_SIGNATURE.
"""

from __future__ import annotations

import hashlib
from io import BytesIO
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_der_public_key

from windtunnel.trust.attest.messages import Refused, unpack

QUOTE = b"\xff\x54\x43\x47\x80\x18"  # TPM_GENERATED, TPM_ST_ATTEST_QUOTE
SCHEME = b"\x00\x18\x00\x0b"  # TPM_ALG_ECDSA, TPM_ALG_SHA256


def read_quote(quote: bytes, binding: bytes) -> dict[str, Any]:
    """The fields ``quote``, ``quote_key`` and ``pcrs`` of `policy.Evidence`. ``binding``: the 32 bytes that
    it must have been made over. ``pcrs`` is of which registers were quoted, and of what was in them."""
    if not quote:
        return {}
    try:
        attested, signature, der = unpack("quote", quote, (None, None, None))
        key, signed, body = load_der_public_key(der), BytesIO(signature), BytesIO(attested)
        if not isinstance(key, EllipticCurvePublicKey) or (signed.read(4), body.read(6)) != (SCHEME, QUOTE):
            raise ValueError("no quote, or of another scheme")
        r, s = (int.from_bytes(_sized(signed), "big") for _ in range(2))
        key.verify(encode_dss_signature(r, s), attested, ECDSA(SHA256()))
    except (Refused, InvalidSignature, ValueError):
        return {"quote": "broken"}
    _sized(body)  # the name of the key
    holds = _sized(body) == binding
    body.read(17 + 8)  # clock and version of the firmware: all that follows is registers
    names = {"quote_key": hashlib.sha256(der).hexdigest(), "pcrs": hashlib.sha256(body.read()).hexdigest()}
    return {"quote": "holds" if holds else "broken", **names}


def _sized(stream: BytesIO) -> bytes:
    return stream.read(int.from_bytes(stream.read(2), "big"))
