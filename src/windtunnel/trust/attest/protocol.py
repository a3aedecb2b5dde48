"""Both sides of the attestation, without a socket: whoever owns the transport is the attacker.

    verifier                         device
    m1 = hello()                 →   m2 = answer(m1)     evidence, signed over both messages
    m3 = check(m2)               →   m4 = accept(m3)     secrets, and what runs when they are there
    session = finish(m4)             device.session

`Verifier.check` decides by `policy.decide`; without an acceptance no secret leaves it. Each exchange has new
keys on both sides (nothing recorded is opened by keys that leak later), and each message is taken once.

Source: Zhao et al., ShEF (ASPLOS 2022), remote attestation. Other than its public artefact: one key signs and
another agrees, the shared secret is never signed, and the whole certificate is checked.
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from windtunnel.base.errors import UserError
from windtunnel.base.plain import canonical, from_plain, to_plain
from windtunnel.trust.attest import messages
from windtunnel.trust.attest.boot import Fuse, booted, certified, holds, measure
from windtunnel.trust.attest.messages import SUITE, VERSION, Refused, digest, pack, unpack
from windtunnel.trust.attest.policy import POLICIES, AllowList, Evidence, Loaded, Observation
from windtunnel.trust.attest.quotes import read_quote
from windtunnel.trust.attest.session import Session

if TYPE_CHECKING:
    from windtunnel.store.eventlog import EventLog

T = TypeVar("T")


@dataclass(frozen=True)
class _Report:
    """The evidence of M2. ``boot``: what the kernel certificate covers, in order; ``loads``: what the kernel
    has measured since."""

    boot: tuple[tuple[str, str], ...]
    loads: dict[str, str]
    claims: dict[str, int]


class _Keys(NamedTuple):
    to_device: bytes
    to_verifier: bytes
    confirm: bytes
    wrap: bytes


class Verifier:
    """Gives ``secrets`` (by name) to a device that ``allow`` lets in; one exchange at a time. ``policy``: a
    name of `POLICIES`. ``log`` gets each observation, decision and what followed."""

    def __init__(
        self, allow: AllowList, secrets: Mapping[str, bytes] | None = None, *, policy: str = "allow-list",
        log: EventLog | None = None,
    ) -> None:  # fmt: skip
        if policy not in POLICIES:
            raise UserError(f"`policy`: {policy!r} is unknown; accepted are {', '.join(POLICIES)}")
        self._allow, self._secrets, self._policy, self._log = allow, dict(secrets or {}), policy, log
        self._hello: tuple[X25519PrivateKey, bytes] | None = None
        self._open: tuple[bytes, _Keys, bytes, _Report] | None = None

    def hello(self) -> bytes:
        """M1 of a new exchange; an older one is forgotten."""
        key = X25519PrivateKey.generate()
        allow = digest("allow", canonical(to_plain(self._allow)))
        m1 = pack("M1", VERSION, SUITE, os.urandom(32), key.public_key().public_bytes_raw(), allow)
        self._hello, self._open = (key, m1), None
        return m1

    def check(self, m2: bytes) -> bytes:
        """M3, if the device that answered is accepted.

        Raises:
            Refused: it is not; ``failing`` names every claim.
        """
        (key, m1), self._hello = _expected(self._hello, "M2"), None
        version, suite, public, device, certificate, attest, kernel, text, quote, signature = unpack(
            "M2", m2, messages.M2
        )
        if (version, suite) != (VERSION, SUITE):
            raise Refused(f"M2: version {version!r} with {suite!r} was not offered", ["version"])
        report: _Report = _read(_Report, text)
        measured = [*report.boot, *report.loads.items()]
        if len(dict(measured)) < len(measured):
            raise Refused("M2: the evidence names a measurement twice", ["evidence"])
        about = digest("device key", device)
        roots = [root for root in self._allow.roots if holds(bytes.fromhex(root), certificate, about)]
        evidence = Evidence(
            self._allow, "".join(roots[:1]), holds(device, kernel, certified(report.boot, attest)),
            holds(attest, signature, digest("signature", m1, m2[: -4 - len(signature)])), dict(measured),
            report.claims, **read_quote(quote, digest("quote", m1, public, attest)),
        )  # fmt: skip
        self._decide(evidence, "M2")
        h = digest("transcript", m1, m2)
        keys = _derive(key, public, h)
        secrets = [part for name, value in self._secrets.items() for part in (name.encode(), value)]
        wrapped = AESGCM(keys.wrap).encrypt(bytes(12), pack("secrets", *secrets), h)
        m3 = pack("M3", hmac.digest(keys.confirm, b"V" + h, "sha256"), wrapped)
        self._open = h, keys, m3, report
        return m3

    def finish(self, m4: bytes) -> Session:
        """The session, if the device has the keys and runs what it claimed.

        Raises:
            Refused: it does not.
        """
        (h, keys, m3, report), self._open = _expected(self._open, "M4"), None
        confirmation, text = unpack("M4", m4, messages.M4)
        if not hmac.compare_digest(confirmation, _confirmed(keys, h, m3, text)):
            raise Refused("M4: it is not the device's confirmation of this exchange", ["confirmation"])
        self._decide(Loaded(report.loads, _read(dict[str, str], text)), "M4")
        return Session(h[:16], keys.to_device, keys.to_verifier)

    def _decide(self, observation: Observation, message: str) -> None:
        decision = POLICIES[self._policy](observation)
        if self._log is not None:
            self._log.decision("trust.attest", self._policy, observation, decision)
            self._log.append("effect", message=message, goes_on=decision.accept, failing=decision.failing)
        if not decision.accept:
            raise Refused(f"the device is refused: {decision.reason}", decision.failing)


@dataclass
class Device:
    """A device that has booted. ``session`` and ``secrets`` are there once `accept` has returned."""

    _fuse: Fuse
    _key: Ed25519PrivateKey
    _kernel_certificate: bytes
    _report: _Report
    _quote: Callable[[bytes], bytes] | None
    _open: tuple[bytes, _Keys] | None = None
    session: Session | None = None
    secrets: dict[str, bytes] = field(default_factory=dict, repr=False)

    @classmethod
    def boot(
        cls, fuse: Fuse, layers: Mapping[str, bytes], loads: Mapping[str, bytes] | None = None, *,
        debug: bool = False, quote: Callable[[bytes], bytes] | None = None,
    ) -> Device:  # fmt: skip
        """``layers``: what is started, in order, up to the kernel; ``loads``: what the kernel then measures
        and runs, such as a program and its configuration. ``quote``: of a TPM, over 32 bytes."""
        key, certificate = booted(fuse, layers)
        boot = tuple((name, measure(layer)) for name, layer in layers.items())
        report = _Report(boot, {}, {"debug": int(debug), "counter": fuse.counter})
        device = cls(fuse, key, certificate, report, quote)
        for name, content in (loads or {}).items():
            device.load(name, content)
        return device

    def load(self, name: str, content: bytes) -> None:
        """The kernel measures ``content`` and runs it, beside or instead of what had that name."""
        self._report = replace(self._report, loads={**self._report.loads, name: measure(content)})

    def answer(self, m1: bytes) -> bytes:
        """M2: who this is, what runs here, and a key of this exchange. An older exchange is forgotten.

        Raises:
            Refused: it is no M1, or asks for what this device does not have.
        """
        self._open, self.session, self.secrets = None, None, {}
        version, suites, _, public, _ = unpack("M1", m1, messages.M1)
        if version != VERSION or SUITE not in suites.split(b","):
            raise Refused(f"M1: version {version!r} with {suites!r}; this is {VERSION!r}", ["version"])
        key = X25519PrivateKey.generate()
        own, device, attest = (
            each.public_key().public_bytes_raw() for each in (key, self._fuse.device_key, self._key)
        )
        quote = self._quote(digest("quote", m1, own, attest)) if self._quote else b""
        body = pack(
            "M2", VERSION, SUITE, own, device, self._fuse.certificate, attest, self._kernel_certificate,
            canonical(to_plain(self._report)), quote,
        )  # fmt: skip
        signature = self._key.sign(digest("signature", m1, body))
        m2 = body + len(signature).to_bytes(4, "big") + signature
        h = digest("transcript", m1, m2)
        self._open = h, _derive(key, public, h)
        return m2

    def accept(self, m3: bytes) -> bytes:
        """M4, and the session.

        Raises:
            Refused: it is not the verifier's answer to the last M2.
        """
        (h, keys), self._open = _expected(self._open, "M3"), None
        confirmation, wrapped = unpack("M3", m3, messages.M3)
        if not hmac.compare_digest(confirmation, hmac.digest(keys.confirm, b"V" + h, "sha256")):
            raise Refused("M3: it is not the verifier's confirmation of this exchange", ["confirmation"])
        try:
            fields = unpack("secrets", AESGCM(keys.wrap).decrypt(bytes(12), wrapped, h))
        except InvalidTag:
            raise Refused("M3: the secrets were changed", ["secrets"]) from None
        self.secrets = {name.decode(): value for name, value in zip(fields[::2], fields[1::2], strict=True)}
        self.session = Session(h[:16], keys.to_verifier, keys.to_device)
        text = canonical(self._report.loads)
        return pack("M4", _confirmed(keys, h, m3, text), text)


def _read(kind: Any, text: bytes) -> Any:
    try:
        return from_plain(kind, json.loads(text))
    except (TypeError, ValueError, KeyError) as error:
        raise Refused(f"the evidence is not understood ({error})", ["evidence"]) from None


def _expected(state: T | None, message: str) -> T:
    if state is None:
        raise Refused(f"{message}: none is expected, or it came before", [f"{message}.order"])
    return state


def _confirmed(keys: _Keys, h: bytes, m3: bytes, loaded: bytes) -> bytes:
    return hmac.digest(keys.confirm, pack("D", h, m3, loaded), "sha256")


def _derive(own: X25519PrivateKey, public: bytes, h: bytes) -> _Keys:
    """Raises Refused: the other side's key leads to a secret that everybody knows (RFC 7748, section 6.1)."""
    try:
        shared = own.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise Refused("the shared secret would be all zeros: the key is no peer's", ["zero key"]) from None
    material = HKDF(SHA256(), 128, salt=h, info=messages.DOMAIN + b"keys").derive(shared)
    return _Keys(*(material[at : at + 32] for at in range(0, 128, 32)))
