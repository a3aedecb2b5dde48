"""Whether a device may have the secrets: what its evidence says, held against an allow-list, claim by claim.

A refusal names every claim that fails, not the first: whoever runs the device must know what to change. All
checks are here; the verifier only says which signatures hold.

Source: Zhao, Gao and Kozyrakis, ShEF (ASPLOS 2022), remote attestation: the allow-list of security kernels,
the certificate chain to the manufacturer, the report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

TIERS = ("simulator", "tpm")
"""By what proof there is, weakest first: signatures of a program, or also a quote of a TPM."""


@dataclass(frozen=True)
class AllowList:
    """``roots``: public keys of manufacturers, hex. ``measurements``: SHA-256 digests that are accepted, by
    the name of what is measured; what is not named here is refused. ``claims``: values that are accepted.
    ``least``: values of counters at least. ``tier``: the weakest proof. ``quote_keys``: SHA-256 of the public
    keys of TPMs; ``pcrs``: digests of the registers that they may quote."""

    roots: tuple[str, ...]
    measurements: dict[str, tuple[str, ...]]
    claims: dict[str, tuple[int, ...]] = field(default_factory=lambda: {"debug": (0,)})
    least: dict[str, int] = field(default_factory=dict)
    tier: str = TIERS[0]
    quote_keys: tuple[str, ...] = ()
    pcrs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Evidence:
    """What a device has answered (M2). ``root``: who signed its key, "" where no signature holds.
    ``certified``: its key signed the boot and the attestation key. ``signed``: that key signed both messages,
    so that neither was changed or is of another exchange. ``quote``: none, broken or holds."""

    allow: AllowList
    root: str
    certified: bool
    signed: bool
    measurements: dict[str, str]
    claims: dict[str, int]
    quote: str = "none"
    quote_key: str = ""
    pcrs: str = ""


@dataclass(frozen=True)
class Loaded:
    """What a device says that it runs when it has the secrets (M4), and what it claimed before."""

    claimed: dict[str, str]
    loaded: dict[str, str]


Observation = Evidence | Loaded


@dataclass(frozen=True)
class Decision:
    """``failing``: every claim that does not hold, as a path into the allow-list."""

    accept: bool
    failing: tuple[str, ...] = ()
    reason: str = field(default="", compare=False)


def decide(observation: Observation) -> Decision:
    """Everything must hold."""
    if isinstance(observation, Loaded):
        return _loaded(observation)
    allow, failing = observation.allow, dict(_signatures(observation))
    measured = observation.measurements
    for name in sorted(allow.measurements.keys() | measured.keys()):
        if measured.get(name) not in allow.measurements.get(name, ()):
            failing[f"measurements.{name}"] = f"{name} is {_short(measured.get(name))}"
    for name, accepted in allow.claims.items():
        if observation.claims.get(name) not in accepted:
            failing[f"claims.{name}"] = f"{name} is {observation.claims.get(name)}, accepted {accepted}"
    for name, least in allow.least.items():
        if observation.claims.get(name, -1) < least:
            failing[f"least.{name}"] = f"{name} is {observation.claims.get(name)}, at least {least}"
    proof = TIERS[0]
    if observation.quote == "broken":
        failing["quote"] = "the quote is not of this exchange, or its signature does not hold"
    elif observation.quote == "holds":
        proof = TIERS[1]
        if observation.quote_key not in allow.quote_keys:
            failing["quote_keys"] = f"the TPM's key {_short(observation.quote_key)} is not known"
        if observation.pcrs not in allow.pcrs:
            failing["pcrs"] = f"the registers are {_short(observation.pcrs)}"
    if TIERS.index(proof) < TIERS.index(allow.tier):
        failing["tier"] = f"the proof is that of a {proof}, at least {allow.tier}"
    return _decision(failing)


def signature_only(observation: Observation) -> Decision:
    """What ShEF's public artefact does: signatures are checked, and the allow-list is left for later."""
    return _loaded(observation) if isinstance(observation, Loaded) else _decision(_signatures(observation))


POLICIES: Mapping[str, Callable[[Observation], Decision]] = {
    "allow-list": decide, "signature": signature_only,
}  # fmt: skip


def _signatures(evidence: Evidence) -> dict[str, str]:
    failing = {}
    if evidence.root not in evidence.allow.roots:
        failing["roots"] = "the device's key is signed by no manufacturer of the allow-list"
    if not evidence.certified:
        failing["certificate"] = "the device's key did not sign this boot and attestation key"
    if not evidence.signed:
        failing["signature"] = "the answer is not signed for this exchange, or was changed"
    return failing


def _loaded(observation: Loaded) -> Decision:
    names = sorted(observation.claimed.keys() | observation.loaded.keys())
    return _decision({
        f"loaded.{name}": f"{name} was changed after it was claimed"
        for name in names if observation.claimed.get(name) != observation.loaded.get(name)
    })  # fmt: skip


def _decision(failing: Mapping[str, str]) -> Decision:
    return Decision(not failing, tuple(failing), "; ".join(failing.values()) or "all holds")


def _short(digest: str | None) -> str:
    return f"{digest[:12]}…, which is not accepted" if digest else "missing"
