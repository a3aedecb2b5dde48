"""Whether a device may have the secrets: its evidence held against an allow-list, claim by claim.

A refusal names every claim that fails, not the first: whoever runs the device must know what to change. All
rules are here; the verifier only says which signatures hold.

Source: Zhao, Gao and Kozyrakis, ShEF (ASPLOS 2022), remote attestation.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class AllowList:
    """``roots``: public keys of manufacturers, hex. ``measurements``: SHA-256 digests by the name of what is
    measured; what is not named is refused. ``claims``: accepted values. ``least``: least values, such as of
    ``counter``, or of ``tier``: 0 is a simulator, 1 has a TPM beside it. ``tpms``: SHA-256 of the attestation
    keys of these, hex."""

    roots: tuple[str, ...]
    measurements: dict[str, tuple[str, ...]]
    claims: dict[str, tuple[int, ...]] = field(default_factory=lambda: {"debug": (0,)})
    least: dict[str, int] = field(default_factory=dict)
    tpms: tuple[str, ...] = ()


@dataclass(frozen=True)
class Quoted:
    """A TPM's quote. ``key``: SHA-256 of who signed it; ``signed``: that holds; ``fresh``: it is over this
    exchange. ``pcrs``: its digest of these; ``expected``: the digest by the device's measurements."""

    key: str
    signed: bool
    fresh: bool
    pcrs: str
    expected: str


@dataclass(frozen=True)
class Evidence:
    """A device's answer (M2). ``root``: who signed its key, "" for nobody that is allowed. ``certified``:
    that key signed the boot and the attestation key. ``signed``: which signed both messages, so that neither
    was changed or is of another exchange. ``quote``: None makes it tier 0, whatever the device claims."""

    allow: AllowList
    root: str
    certified: bool
    signed: bool
    measurements: dict[str, str]
    claims: dict[str, int]
    quote: Quoted | None = None


@dataclass(frozen=True)
class Loaded:
    """Digests of the evidence that a device claimed, and of that once it has the secrets (M4)."""

    claimed: str
    loaded: str


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
        checks = {"loaded": (observation.claimed == observation.loaded, "not what was claimed")}
    else:
        allow, measured, quote = observation.allow, observation.measurements, observation.quote
        claims = observation.claims | {"tier": int(quote is not None)}
        checks = {
            "roots": (observation.root in allow.roots, "none of the allow-list"),
            "certificate": (observation.certified, "not by the device's key, or of another boot"),
            "signature": (observation.signed, "not of this exchange, or of another answer"),
        }
        if quote is not None:
            checks |= {
                "tpm.key": (quote.key in allow.tpms, "none of the allow-list"),
                "tpm.signature": (quote.signed, "not by that key, or of another quote"),
                "tpm.nonce": (quote.fresh, "not of this exchange"),
                "tpm.pcrs": (quote.pcrs == quote.expected, "not what the measurements lead to"),
            }
        for name in sorted(allow.measurements.keys() | measured.keys()):
            digest = measured.get(name, "missing")
            checks[f"measurements.{name}"] = digest in allow.measurements.get(name, ()), digest[:12]
        for name, accepted in allow.claims.items():
            checks[f"claims.{name}"] = claims.get(name) in accepted, f"{claims.get(name)}, not of {accepted}"
        for name, least in allow.least.items():
            checks[f"least.{name}"] = claims.get(name, -1) >= least, f"{claims.get(name)}, at least {least}"
    failing = {name: words for name, (holds, words) in checks.items() if not holds}
    return Decision(not failing, tuple(failing), "; ".join(" is ".join(both) for both in failing.items()))


POLICIES: Mapping[str, Callable[[Observation], Decision]] = {"allow-list": decide}
