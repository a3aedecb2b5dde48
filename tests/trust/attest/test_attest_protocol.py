"""The exchange and its records, with an attacker between the two."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from support.trust import LAYERS, LOADS, MAKER, SECRETS, device, verifier
from windtunnel.trust.attest import (
    AttestationRefused,
    AttestedDevice,
    AttestedSession,
    Manufacturer,
    Verifier,
)
from windtunnel.trust.attest import messages as wire
from windtunnel.trust.attest.messages import pack, unpack

Change = Callable[[bytes], bytes]


def same(message: bytes) -> bytes:
    return message


def exchange(
    on: Verifier,
    by: AttestedDevice,
    m1: Change = same,
    m2: Change = same,
    m3: Change = same,
    m4: Change = same,
) -> AttestedSession:
    """With what an attacker makes of each message."""
    return on.finish(m4(by.accept(m3(on.check(m2(by.answer(m1(on.hello()))))))))


def test_both_sides_have_a_session_and_the_device_the_secrets() -> None:
    by = device()
    mine = exchange(verifier(), by)
    assert by.session is not None
    assert by.secrets == SECRETS
    assert by.session.identity == mine.identity
    assert by.session.open(mine.seal("rows", b"all of them"), "rows") == b"all of them"
    assert mine.open(by.session.seal("loss", b"0.5")) == b"0.5"
    assert "the key of the data" not in repr(by)


def messages() -> dict[str, bytes]:
    on, by = verifier(), device()
    m1 = on.hello()
    m2 = by.answer(m1)
    m3 = on.check(m2)
    return {"m1": m1, "m2": m2, "m3": m3, "m4": by.accept(m3)}


@pytest.mark.parametrize("which", ["m1", "m2", "m3", "m4"])
def test_a_byte_that_is_changed_anywhere_is_refused_with_a_name(which: str) -> None:
    by, on = device(), verifier()
    for at in range(len(messages()[which])):

        def flip(message: bytes, at: int = at) -> bytes:
            return message[:at] + bytes([message[at] ^ 1]) + message[at + 1 :]

        with pytest.raises(AttestationRefused) as caught:
            exchange(on, by, **{which: flip})
        assert caught.value.failing, at


@pytest.mark.parametrize("which", ["m1", "m2", "m3", "m4"])
def test_fields_of_another_length_are_refused(which: str) -> None:
    by, on = device(), verifier()
    label, lengths = which.upper(), wire.LENGTHS[which.upper()]
    for number in range(len(lengths)):
        for change in (lambda field: field[:-1], lambda field: field + b"\0", lambda field: b""):
            if label == "M2" and number == 8 and change(b"") == b"":
                continue  # there is no quote

            def other(message: bytes, number: int = number, change: Change = change) -> bytes:
                fields = unpack(label, message)
                return pack(label, *fields[:number], change(fields[number]), *fields[number + 1 :])

            with pytest.raises(AttestationRefused):
                exchange(on, by, **{which: other})
    for change in (lambda m: m[:-1], lambda m: m + b"\0", lambda m: m + b"\0\0\0\0", lambda m: m[:3], bytes):
        with pytest.raises(AttestationRefused):
            exchange(on, by, **{which: (lambda m: b"") if change is bytes else change})


def test_an_answer_of_another_exchange_is_refused() -> None:
    on, by = verifier(), device()
    old = by.answer(on.hello())
    with pytest.raises(AttestationRefused) as caught:
        exchange(on, by, m2=lambda _: old)
    assert caught.value.failing == ("signature",)


def test_each_message_is_taken_once_and_in_its_place() -> None:
    on, by = verifier(), device()
    m2 = by.answer(on.hello())
    m3 = on.check(m2)
    with pytest.raises(AttestationRefused, match="M2: none is expected"):
        on.check(m2)
    m4 = by.accept(m3)
    with pytest.raises(AttestationRefused, match="M3: none is expected"):
        by.accept(m3)
    on.finish(m4)
    with pytest.raises(AttestationRefused, match="M4: none is expected"):
        on.finish(m4)
    with pytest.raises(AttestationRefused, match="M3: none is expected"):
        device().accept(m3)


def test_what_is_sent_back_to_its_sender_is_refused() -> None:
    on, by = verifier(), device()
    m1 = on.hello()
    with pytest.raises(AttestationRefused, match="another message"):
        on.check(m1)
    m3 = on.check(by.answer(on.hello()))
    with pytest.raises(AttestationRefused, match="another message"):
        on.finish(m3)
    # as the right message, with the verifier's own confirmation in it
    m3 = on.check(by.answer(on.hello()))
    confirmation, _ = unpack("M3", m3)
    with pytest.raises(AttestationRefused) as caught:
        on.finish(pack("M4", confirmation, bytes(32)))
    assert caught.value.failing == ("confirmation",)


def test_a_downgrade_is_refused_by_the_device_or_found_out_by_the_verifier() -> None:
    def first(value: bytes) -> Change:
        return lambda m1: pack("M1", value, *unpack("M1", m1)[1:])

    def suites(value: bytes) -> Change:
        return lambda m1: pack("M1", *unpack("M1", m1)[:1], value, *unpack("M1", m1)[2:])

    for m1, failing in (
        (first(b"0"), "version"), (suites(b"none"), "version"), (suites(b"none," + wire.SUITE), "signature"),
    ):  # fmt: skip
        with pytest.raises(AttestationRefused) as caught:
            exchange(verifier(), device(), m1=m1)
        assert caught.value.failing == (failing,)
    with pytest.raises(AttestationRefused, match="was not offered"):
        exchange(verifier(), device(), m2=lambda m2: pack("M2", b"0", *unpack("M2", m2)[1:]))


def test_a_key_that_everybody_can_share_a_secret_with_is_refused() -> None:
    def with_key(label: str, at: int, key: bytes) -> Change:
        def other(message: bytes) -> bytes:
            fields = unpack(label, message)
            return pack(label, *fields[:at], key, *fields[at + 1 :])

        return other

    for key in (bytes(32), b"\1" + bytes(31)):  # RFC 7748: of small order
        with pytest.raises(AttestationRefused, match="all zeros"):
            exchange(verifier(), device(), m1=with_key("M1", 3, key))
    on, by = verifier(), device()
    with pytest.raises(AttestationRefused) as caught:
        exchange(on, by, m2=with_key("M2", 2, bytes(32)))
    assert caught.value.failing == ("signature",)


def test_certificates_of_others_are_refused() -> None:
    """Another maker's device; another device's certificates (unknown key share); another boot's."""
    with pytest.raises(AttestationRefused) as caught:
        exchange(verifier(), device(fuse=Manufacturer().fuse()))
    assert caught.value.failing == ("roots",)
    other = unpack("M2", device().answer(verifier().hello()))

    def swapped(*places: int) -> Change:
        def change(m2: bytes) -> bytes:
            fields = unpack("M2", m2)
            return pack("M2", *(other[at] if at in places else field for at, field in enumerate(fields)))

        return change

    for places, failing in (
        ((3, 4), {"certificate", "signature"}), ((4,), {"roots", "signature"}),
        ((3, 4, 5, 6), {"signature"}), ((6,), {"certificate", "signature"}),
    ):  # fmt: skip
        with pytest.raises(AttestationRefused) as caught:
            exchange(verifier(), device(), m2=swapped(*places))
        assert set(caught.value.failing) == failing, places


def test_a_kernel_of_one_other_bit_has_another_key_and_is_refused() -> None:
    fuse = MAKER.fuse()
    keys, kernel = [], bytes([LAYERS["kernel"][0] ^ 1]) + LAYERS["kernel"][1:]
    for layers in (LAYERS, {**LAYERS, "kernel": kernel}, {**LAYERS, "firmware": b"other"}):
        keys.append(unpack("M2", device(fuse=fuse, layers=layers).answer(verifier().hello()))[5])
    assert len(set(keys)) == 3
    with pytest.raises(AttestationRefused) as caught:
        exchange(verifier(), device(layers={**LAYERS, "kernel": kernel}))
    assert caught.value.failing == ("measurements.kernel",)


def test_every_claim_that_fails_is_named() -> None:
    by = device(loads={"program": b"another", "extra": b"not asked for"}, debug=True, counter=2)
    with pytest.raises(AttestationRefused) as caught:
        exchange(verifier(least={"counter": 3, "tier": 1, "missing": 0}), by)
    assert set(caught.value.failing) == {
        "measurements.program", "measurements.extra", "measurements.shield", "claims.debug", "least.counter",
        "least.tier", "least.missing",
    }  # fmt: skip
    assert not by.secrets
    assert by.session is None


def test_evidence_that_names_a_measurement_twice_is_refused() -> None:
    by = device(loads={**LOADS, "kernel": LAYERS["kernel"]})
    with pytest.raises(AttestationRefused, match="twice"):
        exchange(verifier(), by)


@pytest.mark.parametrize("text", [b"", b"[" * 200_000, b"\xff", b"[]", b'{"boot":1}', b"9" * 9000])
def test_evidence_that_is_none_is_refused(text: bytes) -> None:
    def other(m2: bytes) -> bytes:
        fields = unpack("M2", m2)
        return pack("M2", *fields[:7], text, *fields[8:])

    with pytest.raises(AttestationRefused) as caught:
        exchange(verifier(), device(), m2=other)
    assert caught.value.failing == ("evidence",)


def test_a_program_that_is_changed_between_claim_and_secrets_is_refused() -> None:
    on, by = verifier(), device()
    m3 = on.check(by.answer(on.hello()))
    by.load("program", b"sends all away")
    with pytest.raises(AttestationRefused) as caught:
        on.finish(by.accept(m3))
    assert caught.value.failing == ("loaded",)


def sessions() -> tuple[AttestedSession, AttestedSession]:
    by = device()
    mine = exchange(verifier(), by)
    assert by.session is not None
    return mine, by.session


def test_records_come_once_in_order_and_unchanged() -> None:
    mine, other = sessions()
    first, second = mine.seal("a", b"1"), mine.seal("a", b"2")
    for wrong in (second, other.seal("a", b"1"), b"", first[:20], first[:9], sessions()[0].seal("a", b"1")):
        with pytest.raises(AttestationRefused):
            other.open(wrong)
    for at in range(len(first)):
        with pytest.raises(AttestationRefused) as caught:
            other.open(first[:at] + bytes([first[at] ^ 1]) + first[at + 1 :])
        assert caught.value.failing
    with pytest.raises(AttestationRefused, match="not a 'b'"):
        other.open(first, "b")
    assert other.open(first, "a") == b"1"
    with pytest.raises(AttestationRefused, match="is not 1, the next one"):
        other.open(first)
    assert other.open(second) == b"2"


def test_keys_change_after_so_many_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "REKEY", 3)
    mine, other = sessions()
    keys = set()
    for number in range(10):
        keys.add(mine._sends.key)
        assert other.open(mine.seal("n", b"%d" % number)) == b"%d" % number
    assert len(keys) == 4
    monkeypatch.setattr(wire, "REKEY", 1 << 32)
    record = mine.seal("n", b"")
    other._receives.key, other._receives.cipher = sessions()[0]._sends.key, sessions()[0]._sends.cipher
    with pytest.raises(AttestationRefused):
        other.open(record)
