"""Who shares an interface, and how: the file that users write, checked field by field.

    line: 10 Gb/s               # what the interface, or what is behind it, carries
    by: source                  # or destination, mark, cgroup
    hook: egress                # what it sends; ingress: what it receives
    entities:
      blue: {match: 10.0.1.0/24, weight: 3}
      red: {match: [10.0.2.0/24, "fd00:2::/64"], rate: 2 Gb/s, feedback: ecn}
    others: {weight: 1}         # all that is nobody's; without it that is not held back

An error becomes one sentence: file, field, value, what is accepted.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from windtunnel.base.errors import UserError
from windtunnel.base.fields import fitted
from windtunnel.base.strict_yaml import read_mapping
from windtunnel.cluster.schema import Bytes, Rate
from windtunnel.network.sharing.policy import Observation, SharingTenant, promised

SLOWEST, FASTEST = 125e3, 125e9
"""Bytes/s: below, a rate in whole bytes per 2^20 ns is off by more than a thousandth; above, a product
overflows."""
LEAST_LIMIT = 131_072
"""Bytes: two packets of 64 KiB, which the card cuts only later."""
LONGEST_LIMIT = 4.0
"""Seconds that a limit may take to drain."""
LIMIT, LIMIT_TIME, MARK_PART = 524_288.0, 2e-3, 0.25
"""By default: eight packets of 64 KiB (a sender whose whole window is one packet, which is dropped, waits for
its timeout), or so many seconds of the rate; and the part of that from which packets are marked."""
OTHERS = "others"
_MATCH = "a prefix such as 10.0.1.0/24, a mark (a whole number), a cgroup's folder, or a list of them"
ACCEPTED = {
    "line": "1 Mb/s to 1 Tb/s, such as 10 Gb/s",
    "by": "source, destination, mark or cgroup",
    "hook": "egress or ingress",
    "entities": "a mapping of names to what is theirs",
    "others": "a mapping of fields",
    "match": _MATCH,
    "weight": "a number greater than 0",
    "rate": "1 Mb/s to 1 Tb/s, such as 2 Gb/s",
    "limit": "bytes, from 128 KiB up",
    "feedback": "drop or ecn; virtual delays have no field in TCP/IP",
    "mark_at": "bytes, such as 60 kB",
}


class TrafficShare(BaseModel, extra="forbid"):
    """The share of a tenant, or of all other traffic."""

    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """share of what rates leave of 98.5 % of the line"""
    rate: Annotated[Rate, Field(ge=SLOWEST, le=FASTEST)] | None = None
    """a rate of its own, in place of a weight"""
    limit: Annotated[Bytes, Field(ge=LEAST_LIMIT, lt=2**32)] | None = None
    """bytes that a tenant may be ahead of its rate (default: 2 ms of it, at least 512 KiB)"""
    feedback: Literal["drop", "ecn"] = "drop"
    """`drop` or `ecn`"""
    mark_at: Annotated[Bytes, Field(lt=2**32 - 1)] | None = None
    """bytes ahead from which packets are marked, with `feedback: ecn`"""


class TenantShare(TrafficShare):
    match: str | int | Annotated[list[str | int], Field(min_length=1)]
    """a prefix, a mark or the folder of a cgroup, or a list of them"""


class SharingSpec(BaseModel, extra="forbid"):
    line: Annotated[Rate, Field(ge=SLOWEST, le=FASTEST)]
    """rate of the interface, or of what lies behind it"""
    by: Literal["source", "destination", "mark", "cgroup"]
    """the field that names the tenant of a packet"""
    hook: Literal["egress", "ingress"] = "egress"
    """`egress`: what the interface sends; `ingress`: what it receives"""
    entities: Annotated[dict[str, TenantShare], Field(min_length=1)]
    """tenants by name"""
    others: TrafficShare | None = None
    """all other traffic; without this field it is not held back, and must fit beside"""

    def parts(self) -> Iterator[tuple[str, TrafficShare | None]]:
        """Name and settings by place: first those of all others."""
        yield OTHERS, self.others
        yield from self.entities.items()

    def observation(self) -> Observation:
        """What the policy decides on, in the order of `parts`; others only where something holds them
        back."""
        limited = [(name, part) for name, part in self.parts() if part is not None]
        return Observation(
            self.line,
            tuple(
                SharingTenant(name, 1.0 if part.weight is None else part.weight, part.rate)
                for name, part in limited
            ),
        )

    def matches(self) -> Iterator[tuple[str, str]]:
        """Every name with everything that is matched to it."""
        for name, entity in self.entities.items():
            for match in entity.match if isinstance(entity.match, list) else [entity.match]:
                yield name, str(match)


def read_spec(path: Path) -> SharingSpec:
    """The file at ``path``. Raises `UserError` for the first thing in it that is wrong."""
    return check(read_mapping(path, "file of shares"), str(path))


def check(document: dict[str, Any], where: str) -> SharingSpec:
    """``document`` as a `SharingSpec`; ``where`` is the file that errors name.

    Raises:
        UserError: the first thing in it that is wrong.
    """
    spec = fitted(SharingSpec, document, where, ACCEPTED)
    try:
        rates = promised(spec.observation())
    except ValueError as error:
        raise UserError(f"{where}: line is {spec.line:g} bytes/s, {error} (98.5 % of it)") from None
    for (name, part), rate in zip(((n, o) for n, o in spec.parts() if o), rates, strict=True):
        field = f"{where}: {'' if name == OTHERS else 'entities.'}{name}"
        if part.weight is not None and part.rate is not None:
            raise UserError(f"{field} has a weight and a rate, accepted is one of them")
        if rate < SLOWEST:
            raise UserError(f"{field} gets {rate:.6g} bytes/s, accepted is at least 1 Mb/s")
        if limit_of(part, rate) > LONGEST_LIMIT * rate:
            raise UserError(f"{field}: limit is {part.limit!r}, accepted is at most 4 s of its rate")
        if part.mark_at is not None and part.feedback == "drop":
            raise UserError(f"{field}: mark_at is given, accepted is that with feedback: ecn")
    if OTHERS in spec.entities:
        raise UserError(f"{where}: an entity is called others, accepted is that as a field of its own")
    if spec.by == "cgroup" and spec.hook == "ingress":
        raise UserError(
            f"{where}: hook is 'ingress' by cgroup, accepted is egress: who receives is not known"
        )
    check_matches(spec.by, spec.matches(), where)
    return spec


def check_matches(by: str, matches: Iterable[tuple[str, str]], where: str) -> None:
    """Raises `UserError` for a name or a match that is none, or is there twice."""
    owners: dict[str, str] = {}
    for name, match in matches:
        if len(name.encode()) > 31:
            raise UserError(f"{where}: entities.{name}, accepted are names of at most 31 bytes")
        try:
            key = normal(by, match)
        except ValueError:
            kinds = {
                "mark": "a whole number from 1 up, below 2^32",
                "cgroup": "the path of a cgroup's folder",
            }
            accepted = kinds.get(by, "a prefix such as 10.0.1.0/24, without bits after it")
            raise UserError(f"{where}: entities.{name}.match is {match!r}, accepted is {accepted}") from None
        if key in owners:
            whose = f"of {owners[key]}, too" if owners[key] != name else "given twice"
            raise UserError(
                f"{where}: entities.{name}.match is {match!r}, which is {whose}; accepted is it once"
            )
        owners[key] = name


def normal(by: str, match: str) -> str:
    """The one way to write a match. Raises ValueError: it is none."""
    if by == "mark":
        number = int(match, 0)
        if not 0 < number < 2**32:
            raise ValueError
        return str(number)
    if by == "cgroup":
        if not match.startswith("/"):
            raise ValueError
        return str(Path(match))
    return str(ipaddress.ip_network(match))


def limit_of(part: TrafficShare, rate: float) -> float:
    """Bytes that an entity of ``rate`` may be ahead."""
    usual = min(max(LIMIT, LIMIT_TIME * rate), LONGEST_LIMIT * rate)
    return usual if part.limit is None else part.limit


def mark_of(part: TrafficShare, rate: float) -> float | None:
    """From where it is marked; None: never."""
    if part.feedback == "drop":
        return None
    return MARK_PART * limit_of(part, rate) if part.mark_at is None else part.mark_at
