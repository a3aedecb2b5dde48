"""Both sides of the attestation, without a socket: whoever owns the transport is the attacker.

    verifier                         device
    m1 = hello()                 →   m2 = answer(m1)     evidence, signed over both messages
    m3 = check(m2)               →   m4 = accept(m3)     secrets, and what runs when they are there
    session = finish(m4)             device.session

    CDI_0 = HMAC(fuse, H(firmware))   CDI_i+1 = HMAC(CDI_i, H(layer))   attestation key = KDF(CDI)

So a layer that was changed has another attestation key. The device key, certified by the manufacturer, signs
what was booted with that key. Keys are new in each exchange, and each message is taken once. Where the
device has a TPM, all is measured into that too, and M2 has its quote over the exchange.

Source: Zhao et al., ShEF (ASPLOS 2022), secure boot and remote attestation; the chain is that of TCG's DICE.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from windtunnel.base.errors import UserError
from windtunnel.base.plain import canonical, from_plain, to_plain
from windtunnel.base.strict_yaml import read_mapping
from windtunnel.trust.attest import messages, quote
from windtunnel.trust.attest.messages import (
    SUITE,
    VERSION,
    AttestationRefused,
    AttestedSession,
    digest,
    mac,
    pack,
    unpack,
)
from windtunnel.trust.attest.policy import AllowList, Evidence, Loaded, Observation, Quoted, decide

if TYPE_CHECKING:
    from windtunnel.store.eventlog import EventLog
    from windtunnel.trust.attest.live.tpm import Tpm

Named = Mapping[str, bytes]
Keys = tuple[bytes, ...]  # to the device, to the verifier, of confirmations, of wrapped secrets


@dataclass(frozen=True)
class Fuse:
    """What is burnt into a device. ``secret``: 32 bytes; ``certificate``: the manufacturer's signature of its
    key; ``counter``: only ever raised, so that what is older is known as such."""

    secret: bytes = field(repr=False)
    certificate: bytes
    counter: int = 0


class Manufacturer:
    """Makes devices. ``root``: its public key, 64 hex digits, for allow-lists."""

    def __init__(self) -> None:
        self._key = Ed25519PrivateKey.generate()
        self.root = _public(self._key).hex()

    def fuse(self, counter: int = 0) -> Fuse:
        """Of a new device."""
        secret = os.urandom(32)
        return Fuse(secret, self._key.sign(digest("device", _public(_key(secret, "device")))), counter)


def measure(layer: bytes) -> str:
    """The measurement of what is run: SHA-256, 64 hex digits."""
    return hashlib.sha256(layer).hexdigest()


@dataclass(frozen=True)
class _Report:
    """``boot``: what the kernel certificate covers, in order; ``loads``: what it measured since, too."""

    boot: tuple[tuple[str, str], ...]
    loads: tuple[tuple[str, str], ...]
    claims: dict[str, int]


def read_allow_list(path: Path) -> AllowList:
    """The allow-list in a YAML file: its fields. Raises UserError: there is none, or one of them is wrong."""
    try:
        allow = from_plain(AllowList, read_mapping(path, "allow-list"))
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: {error}; accepted is an allow-list as docs/attest.md has it") from None
    for text in (*allow.roots, *allow.tpms, *sum(allow.measurements.values(), ())):
        if not re.fullmatch("[0-9a-f]{64}", text):
            raise UserError(f"{path}: {text!r} is no digest or key; accepted are 64 hex digits, 0 to f")
    return allow


class Verifier:
    """Gives ``secrets`` (by name) to a device that ``allow`` lets in; one exchange at a time. ``log`` gets
    each observation, decision and what followed."""

    def __init__(self, allow: AllowList, secrets: Named | None = None, log: EventLog | None = None) -> None:
        self._allow, self._secrets, self._log = allow, dict(secrets or {}), log
        self._hello: tuple[X25519PrivateKey, bytes] | None = None
        self._open: tuple[bytes, Keys, bytes, bytes] | None = None

    def hello(self) -> bytes:
        """M1 of a new exchange; an older one is forgotten."""
        key, allow = X25519PrivateKey.generate(), digest("allow", canonical(to_plain(self._allow)))
        m1 = pack("M1", VERSION, SUITE, os.urandom(32), _public(key), allow)
        self._hello, self._open = (key, m1), None
        return m1

    def check(self, m2: bytes) -> bytes:
        """M3, for a device that is accepted. Raises Refused: it is not; ``failing`` names every claim."""
        (key, m1), self._hello = self._hello or _unexpected("M2"), None
        version, suite, public, device, certificate, attest, kernel, text, quoted, signature = unpack(
            "M2", m2
        )
        if (version, suite) != (VERSION, SUITE):
            raise AttestationRefused(f"M2: version {version!r} with {suite!r} was not offered", ["version"])
        try:
            report = from_plain(_Report, json.loads(text))
        except (TypeError, ValueError, KeyError, RecursionError) as error:  # nobody has signed it yet
            raise AttestationRefused(f"M2: the evidence is not understood ({error})", ["evidence"]) from None
        measured = [*report.boot, *report.loads]
        if len(dict(measured)) < len(measured):
            raise AttestationRefused("M2: the evidence names a measurement twice", ["evidence"])
        about, signed = digest("device", device), digest("signature", m1, m2[: -4 - len(signature)])
        roots = [root for root in self._allow.roots if _holds(bytes.fromhex(root), certificate, about)]
        self._decide(Evidence(
            self._allow, "".join(roots[:1]), _holds(device, kernel, _certified(report.boot, attest)),
            _holds(attest, signature, signed), dict(measured), report.claims,
            _quoted(quoted, report, digest("quote", m1, m2[: -8 - len(signature) - len(quoted)])),
        ))  # fmt: skip
        h = digest("transcript", m1, m2)
        keys = _derive(key, public, h)
        secrets = [part for name, value in self._secrets.items() for part in (name.encode(), value)]
        wrapped = AESGCM(keys[3]).encrypt(bytes(12), pack("secrets", *secrets), h)
        m3 = pack("M3", mac(keys[2], "V", h), wrapped)
        self._open = h, keys, m3, digest("evidence", text)
        self._effect("M3")
        return m3

    def finish(self, m4: bytes) -> AttestedSession:
        """The session. Raises Refused: the device has not the keys, or does not run what it claimed."""
        (h, keys, m3, claimed), self._open = self._open or _unexpected("M4"), None
        confirmation, loaded = unpack("M4", m4)
        if not hmac.compare_digest(confirmation, mac(keys[2], "D", h, m3, loaded)):
            raise AttestationRefused(
                "M4: it is not the device's confirmation of this exchange", ["confirmation"]
            )
        self._decide(Loaded(claimed.hex(), loaded.hex()))
        self._effect("session")
        return AttestedSession(h[:16], keys[0], keys[1])

    def _decide(self, observation: Observation) -> None:
        decision = decide(observation)
        if self._log is not None:
            self._log.decision("trust.attest", "allow-list", observation, decision)
        if not decision.accept:
            self._effect("refused", decision.failing)
            raise AttestationRefused(f"the device is refused: {decision.reason}", decision.failing)

    def _effect(self, did: str, failing: tuple[str, ...] = ()) -> None:
        if self._log is not None:
            self._log.append("effect", did=did, failing=failing)


@dataclass
class AttestedDevice:
    """A device that has booted. ``session`` and ``secrets`` are there once `accept` has returned."""

    _fuse: Fuse
    _key: Ed25519PrivateKey
    _report: _Report
    _tpm: Tpm | None = None
    _open: tuple[bytes, Keys] | None = None
    session: AttestedSession | None = None
    secrets: dict[str, bytes] = field(default_factory=dict, repr=False)

    @classmethod
    def boot(
        cls,
        fuse: Fuse,
        layers: Named,
        loads: Named | None = None,
        debug: bool = False,
        tpm: Tpm | None = None,
    ) -> AttestedDevice:
        """``layers``: what is started, in order, up to the kernel; ``loads``: what the kernel then measures
        and runs, such as a program and its configuration. ``tpm``: new, or reset, for all that too."""
        secret, boot = fuse.secret, [(name, measure(layer)) for name, layer in layers.items()]
        for _, measured in boot:
            secret = hmac.digest(secret, bytes.fromhex(measured), "sha256")
            if tpm is not None:
                tpm.extend(quote.BOOT, measured)
        report = _Report(tuple(boot), (), {"debug": int(debug), "counter": fuse.counter})
        device = cls(fuse, _key(secret, "attestation"), report, tpm)
        for name, content in (loads or {}).items():
            device.load(name, content)
        return device

    def load(self, name: str, content: bytes) -> None:
        """The kernel measures ``content`` and runs it, beside or instead of what had that name."""
        loads = {**dict(self._report.loads), name: measure(content)}
        if self._tpm is not None:
            self._tpm.extend(quote.LOADS, loads[name])
        self._report = replace(self._report, loads=tuple(loads.items()))

    def answer(self, m1: bytes) -> bytes:
        """M2: who this is, what runs here, and a key of this exchange; an older one is forgotten. Raises
        Refused: it is no M1, or asks for what this device does not have."""
        self._open, self.session, self.secrets = None, None, {}
        version, suites, _, public, _ = unpack("M1", m1)
        if version != VERSION or SUITE not in suites.split(b","):
            raise AttestationRefused(
                f"M1: version {version!r} with {suites!r}; this is {VERSION!r}", ["version"]
            )
        key, device = X25519PrivateKey.generate(), _key(self._fuse.secret, "device")
        attest = _public(self._key)
        body = pack(
            "M2", VERSION, SUITE, _public(key), _public(device), self._fuse.certificate, attest,
            device.sign(_certified(self._report.boot, attest)), canonical(to_plain(self._report)),
        )  # fmt: skip
        body = _with(body, b"" if self._tpm is None else self._tpm.quote(digest("quote", m1, body)))
        m2 = _with(body, self._key.sign(digest("signature", m1, body)))
        h = digest("transcript", m1, m2)
        self._open = h, _derive(key, public, h)
        return m2

    def accept(self, m3: bytes) -> bytes:
        """M4, and the session. Raises Refused: this is not the verifier's answer to the last M2."""
        (h, keys), self._open = self._open or _unexpected("M3"), None
        confirmation, wrapped = unpack("M3", m3)
        if not hmac.compare_digest(confirmation, mac(keys[2], "V", h)):
            raise AttestationRefused(
                "M3: it is not the verifier's confirmation of this exchange", ["confirmation"]
            )
        try:
            fields = unpack("secrets", AESGCM(keys[3]).decrypt(bytes(12), wrapped, h))
        except InvalidTag:
            raise AttestationRefused("M3: the secrets were changed", ["secrets"]) from None
        self.secrets = {name.decode(): value for name, value in zip(fields[::2], fields[1::2], strict=True)}
        self.session = AttestedSession(h[:16], keys[1], keys[0])
        loaded = digest("evidence", canonical(to_plain(self._report)))
        return pack("M4", mac(keys[2], "D", h, m3, loaded), loaded)


def _quoted(quoted: bytes, report: _Report, about: bytes) -> Quoted | None:
    """Raises Refused: it is no quote, nor nothing."""
    if not quoted:
        return None
    key, attest, signature = unpack("quote", quoted)
    nonce, digested = quote.parse(attest)
    expected = quote.pcrs(dict(report.boot).values(), dict(report.loads).values())
    return Quoted(
        hashlib.sha256(key).hexdigest(), quote.signed(key, attest, signature), nonce == about,
        digested.hex(), expected.hex(),
    )  # fmt: skip


def _with(body: bytes, field: bytes) -> bytes:
    """A message and one more field."""
    return body + len(field).to_bytes(4, "big") + field


def _key(secret: bytes, label: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(mac(secret, label))


def _public(key: Ed25519PrivateKey | X25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


def _certified(boot: Sequence[tuple[str, str]], attestation_key: bytes) -> bytes:
    return digest("kernel", *(part.encode() for pair in boot for part in pair), attestation_key)


def _holds(public: bytes, signature: bytes, message: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def _unexpected(message: str) -> NoReturn:
    raise AttestationRefused(f"{message}: none is expected, or it came before", [f"{message}.order"])


def _derive(own: X25519PrivateKey, public: bytes, h: bytes) -> Keys:
    """Raises Refused: the other side's key leads to a secret that everybody knows (RFC 7748, section 6.1)."""
    try:
        shared = own.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise AttestationRefused(
            "the shared secret would be all zeros: the key is no peer's", ["zero key"]
        ) from None
    material = HKDF(SHA256(), 128, salt=h, info=messages.DOMAIN + b"keys").derive(shared)
    return tuple(material[at : at + 32] for at in range(0, 128, 32))
