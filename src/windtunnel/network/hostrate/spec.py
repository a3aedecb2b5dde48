"""Whose flows a host holds back, and how far: the file that users write, checked field by field.

    line: 1 Gb/s                # what the interface, or what is behind it, carries
    by: source                  # or cgroup: the senders of this host, by their addresses or their groups
    entities:
      blue: {match: 10.0.1.0/24, weight: 3}
      red: {match: [10.0.2.0/24, "fd00:2::/64"]}
    trip: 200 us                # a round trip when nothing waits
    upper: 8                    # packets in the queue from which windows are given, and
    lower: 3                    # that a window leaves in it

An error becomes one sentence: file, field, value, what is accepted.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from windtunnel.base.errors import UserError
from windtunnel.base.fields import fitted
from windtunnel.base.strict_yaml import read_mapping
from windtunnel.cluster.schema import Rate, Seconds
from windtunnel.network.hostrate.policy import WindowSettings
from windtunnel.network.hostrate.policy.meter import PERIOD
from windtunnel.network.sharing.spec import FASTEST, SLOWEST, check_matches

ACCEPTED = {
    "line": "1 Mb/s to 1 Tb/s, such as 10 Gb/s",
    "by": "source or cgroup",
    "entities": "a mapping of names to what is theirs",
    "match": "a prefix such as 10.0.1.0/24, a cgroup's folder, or a list of them",
    "weight": "a number greater than 0",
    "trip": "0 to 10 s, such as 200 us",
    "upper": "a whole number of packets, above lower",
    "lower": "a whole number of packets from 1 up",
    "packet": "576 to 9000 bytes",
    "period": "0.5 ms to 1 s, such as 2 ms",
}


class TenantWeight(BaseModel, extra="forbid"):
    match: str | list[str]
    """a prefix, or the folder of a cgroup, or a list of them"""
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """share among the senders that want more"""


class HostrateSpec(BaseModel, extra="forbid"):
    line: Annotated[Rate, Field(ge=SLOWEST, le=FASTEST)]
    """rate of the interface, or of what lies behind it"""
    by: Literal["source", "cgroup"]
    """the field that names the tenant of a flow"""
    entities: Annotated[dict[str, TenantWeight], Field(min_length=1)]
    """tenants by name"""
    trip: Annotated[Seconds, Field(le=10)] = 200e-6
    """seconds of a round trip when the queue is empty"""
    upper: Annotated[int, Field(gt=1, lt=2**20)] = WindowSettings.upper
    """packets of the queue above which windows are cut"""
    lower: Annotated[int, Field(ge=1)] = WindowSettings.lower
    """packets of the queue that windows leave"""
    packet: Annotated[int, Field(ge=576, le=9000)] = WindowSettings.packet
    """bytes of a packet"""
    period: Annotated[Seconds, Field(ge=5e-4, le=1)] = PERIOD
    """seconds between two looks at the queue"""

    @property
    def settings(self) -> WindowSettings:
        """What the policy goes by."""
        return WindowSettings(self.line, self.trip, self.packet, self.upper, self.lower)

    @property
    def weights(self) -> list[tuple[str, float]]:
        return [(name, entity.weight) for name, entity in self.entities.items()]

    def matches(self) -> Iterator[tuple[str, str]]:
        """Every name with everything that is matched to it."""
        for name, entity in self.entities.items():
            for match in entity.match if isinstance(entity.match, list) else [entity.match]:
                yield name, match


def read_spec(path: Path) -> HostrateSpec:
    """The file at ``path``. Raises `UserError` for the first thing in it that is wrong."""
    return check(read_mapping(path, "file of senders"), str(path))


def check(document: dict[str, Any], where: str) -> HostrateSpec:
    """``document`` as a `HostrateSpec`; ``where`` is the file that errors name.

    Raises:
        UserError: the first thing in it that is wrong.
    """
    spec = fitted(HostrateSpec, document, where, ACCEPTED)
    if spec.lower >= spec.upper:
        raise UserError(f"{where}: lower is {spec.lower}, accepted is less than upper, which is {spec.upper}")
    check_matches(spec.by, spec.matches(), where)
    return spec
