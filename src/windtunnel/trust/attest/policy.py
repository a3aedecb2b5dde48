"""Whether a device may have the secrets: its evidence held against an allow-list, claim by claim.

A refusal names every claim that fails, not the first: whoever runs the device must know what to change. All
rules are here; the verifier only says which signatures hold.

Source: Zhao, Gao and Kozyrakis, ShEF (ASPLOS 2022), remote attestation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class AllowList:
    """``roots``: public keys of manufacturers, hex. ``measurements``: SHA-256 digests by the name of what is
    measured; what is not named is refused. ``claims``: accepted values. ``least``: least values, such as of
    ``counter``, or of ``tier``: 0 is a simulator, as all devices here are."""

    roots: tuple[str, ...]
    measurements: dict[str, tuple[str, ...]]
    claims: dict[str, tuple[int, ...]] = field(default_factory=lambda: {"debug": (0,)})
    least: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Evidence:
    """A device's answer (M2). ``root``: who signed its key, "" for nobody that is allowed. ``certified``:
    that key signed the boot and the attestation key. ``signed``: which signed both messages, so that neither
    was changed or is of another exchange."""

    allow: AllowList
    root: str
    certified: bool
    signed: bool
    measurements: dict[str, str]
    claims: dict[str, int]


@dataclass(frozen=True)
class Loaded:
    """What a device runs once it has the secrets (M4), and what it had claimed."""

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
        return _decision(_loaded(observation))
    allow, measured, claims = observation.allow, observation.measurements, observation.claims
    checks = _signatures(observation)
    for name in sorted(allow.measurements.keys() | measured.keys()):
        digest = measured.get(name, "missing")
        checks[f"measurements.{name}"] = digest in allow.measurements.get(name, ()), digest[:12]
    for name, accepted in allow.claims.items():
        checks[f"claims.{name}"] = claims.get(name) in accepted, f"{claims.get(name)}, not of {accepted}"
    for name, least in allow.least.items():
        checks[f"least.{name}"] = claims.get(name, -1) >= least, f"{claims.get(name)}, at least {least}"
    return _decision(checks)


def signature_only(observation: Observation) -> Decision:
    """What ShEF's public artefact does: signatures are checked, and the allow-list is left for later."""
    if isinstance(observation, Loaded):
        return _decision(_loaded(observation))
    return _decision(_signatures(observation))


POLICIES: Mapping[str, Callable[[Observation], Decision]] = {
    "allow-list": decide,
    "signature": signature_only,
}
Checks = dict[str, tuple[bool, str]]  # whether it holds, and what it is


def _signatures(evidence: Evidence) -> Checks:
    return {
        "roots": (evidence.root in evidence.allow.roots, "none of the allow-list"),
        "certificate": (evidence.certified, "not by the device's key, or of another boot"),
        "signature": (evidence.signed, "not of this exchange, or of another answer"),
    }


def _loaded(observation: Loaded) -> Checks:
    claimed, loaded = observation.claimed, observation.loaded
    names = sorted(claimed.keys() | loaded.keys())
    return {
        f"loaded.{name}": (claimed.get(name) == loaded.get(name), "not what was claimed") for name in names
    }


def _decision(checks: Checks) -> Decision:
    failing = {name: words for name, (holds, words) in checks.items() if not holds}
    return Decision(
        not failing, tuple(failing), "; ".join(f"{name} is {is_}" for name, is_ in failing.items())
    )
