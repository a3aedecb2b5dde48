"""A TPM's quote in the evidence: what it is refused for, by name. The TPM is paper; conformance has swtpm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.rsa import generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from support.trust import SECRETS, PaperTpm, device, verifier
from windtunnel.trust.attest import AttestationRefused, AttestedDevice, Verifier, measure
from windtunnel.trust.attest.messages import pack, unpack
from windtunnel.trust.attest.quote import LAYOUT, pcrs

Change = Callable[[bytes], bytes]


@dataclass
class Bus(PaperTpm):
    """A TPM of whose quotes something is made on their way to the device."""

    change: Change = field(default=lambda quote: quote)

    def quote(self, nonce: bytes) -> bytes:
        return self.change(super().quote(nonce))


def attested(tpm: Any, on: Verifier | None = None, by: AttestedDevice | None = None) -> tuple[str, ...]:
    """What the device with that TPM is refused for."""
    on, by = on or verifier(least={"tier": 1}, tpms=(tpm.key,)), by or device(tpm=tpm)
    try:
        on.finish(by.accept(on.check(by.answer(on.hello()))))
    except AttestationRefused as error:
        assert not by.secrets
        return error.failing
    assert by.secrets == SECRETS
    return ()


def test_a_device_with_a_tpm_that_is_allowed_is_of_tier_1() -> None:
    assert attested(PaperTpm()) == ()
    assert attested(PaperTpm(), verifier(least={"tier": 1})) == ("tpm.key",)
    assert attested(PaperTpm(), verifier(least={"tier": 1}), device()) == ("least.tier",)


def test_one_of_the_two_has_no_say_for_the_other() -> None:
    tpm = PaperTpm()
    on = verifier(least={"tier": 1, "counter": 1}, tpms=(tpm.key,), roots=())
    assert attested(tpm, on) == ("roots", "least.counter")
    assert attested(PaperTpm(), verifier(tpms=())) == ("tpm.key",)  # even where tier 0 would do


def test_a_quote_of_another_nonce_or_exchange_is_refused() -> None:
    tpm = PaperTpm()
    by, old = device(tpm=tpm), tpm.quote(bytes(32))
    assert attested(tpm, by=by) == ()
    for quote in (old, unpack("M2", by.answer(verifier().hello()))[8]):
        bus = Bus(tpm.private, tpm.pcrs)
        bus.change = lambda _, quote=quote: quote
        assert attested(tpm, by=AttestedDevice(by._fuse, by._key, by._report, bus)) == ("tpm.nonce",)


@pytest.mark.parametrize("pcr", [8, 9])
def test_what_was_measured_besides_is_refused_even_when_nobody_says_so(pcr: int) -> None:
    tpm = PaperTpm()
    by = device(tpm=tpm)
    tpm.extend(pcr, measure(b"a rootkit"))
    assert attested(tpm, by=by) == ("tpm.pcrs",)


def test_a_program_that_was_put_back_has_left_its_trace() -> None:
    tpm = PaperTpm()
    by = device(tpm=tpm)
    assert attested(tpm, by=by) == ()
    by.load("program", b"leaks")
    assert attested(tpm, by=by) == ("tpm.pcrs", "measurements.program")
    by.load("program", b"train")
    assert attested(tpm, by=by) == ("tpm.pcrs",)
    plain = device()
    plain.load("program", b"leaks")
    plain.load("program", b"train")
    assert attested(tpm, verifier(), plain) == ()  # what tier 0 does not know


def test_the_pcrs_are_of_an_order() -> None:
    assert pcrs([measure(b"a"), measure(b"b")], []) != pcrs([measure(b"b"), measure(b"a")], [])
    assert pcrs([measure(b"a")], [measure(b"b")]) != pcrs([measure(b"a"), measure(b"b")], [])
    assert pcrs([], []) == sha256(bytes(64)).digest()


def test_a_byte_that_is_changed_anywhere_in_a_quote_is_refused_with_a_name() -> None:
    bus = Bus()
    by, named = device(tpm=bus), set[str]()
    on = verifier(least={"tier": 1}, tpms=(bus.key,))
    for at in range(len(bus.quote(bytes(32))) - 3):  # signatures differ in length
        bus.change = lambda quote, at=at: quote[:at] + bytes([quote[at] ^ 1]) + quote[at + 1 :]
        failing = attested(bus, on, by)
        assert failing, at
        named |= {*failing}
    assert named == {
        "tpm.key", "tpm.signature", "tpm.nonce", "tpm.pcrs", "tpm.format", "quote.label"
    }  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {"head": b"\xffTCG\x80\x14"},  # of another type: the time
        {"head": b"\xfeTCG\x80\x18"},  # not by a TPM
        {"selection": bytes.fromhex("00000001000b03000c00")},  # PCRs 10 and 11, into which anybody may extend
        {"selection": bytes.fromhex("00000001000403000300")},  # of the bank of SHA-1
    ],
)
def test_what_is_signed_and_no_quote_of_these_pcrs_is_refused(change: dict[str, bytes]) -> None:
    assert attested(PaperTpm(**change)) == ("tpm.format",)


def test_lengths_and_keys_of_another_kind_are_refused() -> None:
    bus, rsa = Bus(), generate_private_key(65537, 2048).public_key()
    by, on = device(tpm=bus), verifier(least={"tier": 1}, tpms=(bus.key,))

    def fields(quote: bytes) -> list[bytes]:
        return unpack("quote", quote)

    def other(number: int, change: Change) -> tuple[str, ...]:
        bus.change = lambda quote: pack(
            "quote", *(change(part) if at == number else part for at, part in enumerate(fields(quote)))
        )
        return attested(bus, on, by)

    for change in (lambda part: part[:-1], lambda part: part + b"\0", lambda part: b""):
        assert other(1, change) == ("tpm.format",)
        assert other(2, change) == ("tpm.signature",)
        assert other(0, change) == ("tpm.key", "tpm.signature")
    der = rsa.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    assert other(0, lambda _: der) == ("tpm.key", "tpm.signature")
    assert LAYOUT.size == 145
