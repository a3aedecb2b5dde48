"""A TPM 2.0's quote as a verifier reads it: what was extended into its PCRs, signed over this exchange.

The boot's measurements go into one PCR and what the kernel loads into the next, in order. A PCR only ever
becomes H(PCR | measurement), so one value stands for all that was measured since power on: evidence that
leaves something out, or a program that was swapped and put back, has another one.

Source: TCG, Trusted Platform Module Library, part 1 (PCR) and part 2 (TPMS_ATTEST, TPML_PCR_SELECTION).
"""

import hashlib
import struct
from collections.abc import Iterable

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, EllipticCurvePublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import load_der_public_key

from windtunnel.trust.attest.messages import AttestationRefused

BOOT, LOADS = 8, 9  # the first PCRs that are the operating system's
SELECTION = bytes.fromhex("00000001 000b 03 000300")  # one bank, SHA-256, three bytes of bits: PCRs 8 and 9
HEAD = b"\xffTCG\x80\x18"  # the magic of what only a TPM makes, and the type of a quote
LAYOUT = struct.Struct(">6s H34s H32s QII? Q 10s H32s")  # names and digests are of SHA-256


def parse(attest: bytes) -> tuple[bytes, bytes]:
    """What the verifier gave, and the digest of the PCRs. Raises Refused: it is no quote of two PCRs over 32
    bytes. Signer, clock, resets, restarts and firmware have no rule: the key alone is allowed or not."""
    if len(attest) == LAYOUT.size:
        head, name, _signer, nonce_size, extra, *_clock, _firmware, selection, size, digest = LAYOUT.unpack(
            attest
        )
        if (head, name, nonce_size, selection, size) == (HEAD, 34, 32, SELECTION, 32):
            return extra, digest
    raise AttestationRefused("M2: what the TPM signed is no quote of these PCRs", ["tpm.format"])


def pcrs(boot: Iterable[str], loads: Iterable[str]) -> bytes:
    """What the digest of a quote is after these measurements (hex), in order, since power on."""
    both = hashlib.sha256()
    for measurements in (boot, loads):
        value = bytes(32)
        for measured in measurements:
            value = hashlib.sha256(value + bytes.fromhex(measured)).digest()
        both.update(value)
    return both.digest()


def signed(key: bytes, attest: bytes, signature: bytes) -> bool:
    """Whether the key (DER) is one for ECDSA, and signed that."""
    try:
        public = load_der_public_key(key)
        if isinstance(public, EllipticCurvePublicKey):
            public.verify(signature, attest, ECDSA(SHA256()))
            return True
    except (InvalidSignature, UnsupportedAlgorithm, ValueError):
        pass
    return False
