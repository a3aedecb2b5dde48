"""Options as tasks: what a way to synchronise a group of gradients takes of which resource, step by step.

The design space is Espresso's (EuroSys '23, section 4.2: compress or not, device, scheme, where encoding and
decoding sit), without its paths that others equal or better: a code is decoded where it is added up, and
nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from windtunnel.base.errors import UserError
from windtunnel.training.gradsync.model import (
    NONE,
    CodecCost,
    Inside,
    Kind,
    Option,
    Profile,
    Scheme,
    Scope,
)

COMPUTE, HOST, INSIDE, BETWEEN = range(4)
"""Resources: the device that runs backward, the host's processor, the links inside a host, the network."""
RESOURCES = ("compute", "host", "inside", "network")
ELEMENT = 4
"""Bytes of an element that is synchronised as it is (float32, as DDP's gradients mostly are)."""


class Task(NamedTuple):
    """One step of a group: ``what`` is *encode*, *decode* or the collective's kind. ``sent``: bytes that a
    rank sends in it to other ranks."""

    what: str
    resource: int
    seconds: float
    sent: float = 0.0


def sent_by_each(kind: Kind, members: int, size: float) -> float:
    """Bytes that each of ``members`` sends in a collective of ``size``, by algorithms that send fewest."""
    return size * (members - 1) / members * (2 if kind == "allreduce" else 1)


def tasks(option: Option, numel: int, profile: Profile) -> list[Task]:
    """The steps, in their order, that synchronise ``numel`` elements in this way.

    Raises:
        UserError: the profile has no cost of the codec on that processor.
    """
    steps = _Steps(profile, option)
    mine = numel
    if option.inside != "flat":
        parts = profile.network.ranks_per_host
        mine = -(-numel // parts)
        if option.inside == "plain":
            steps.call("inside", "reduce_scatter", ELEMENT * numel)
        else:
            steps.coded("inside", "alltoall", numel, mine, parts)
    scope: Scope = "flat" if option.inside == "flat" else "between"
    members = profile.network.members(scope)
    match option.scheme:
        case "allreduce":
            steps.encode(mine)
            for _ in range(steps.sums):
                steps.call(scope, "allreduce", steps.nbytes(mine) / steps.sums)
            steps.decode(mine, 1)
        case "allgather":
            steps.encode(mine)
            steps.call(scope, "allgather", members * steps.nbytes(mine))
            steps.decode(mine, members)
        case "alltoall":
            part = -(-mine // members)
            steps.coded(scope, "alltoall", mine, part, members)
            steps.encode(part)
            steps.call(scope, "allgather", members * steps.nbytes(part))
            steps.decode(mine, 1)
        case "sparse":
            raise UserError("a sparse sum is priced by its own policy")
    if option.inside == "plain":
        steps.call("inside", "allgather", ELEMENT * numel)
    elif option.inside == "coded":
        steps.encode(mine)
        steps.call("inside", "allgather", parts * steps.nbytes(mine))
        steps.decode(numel, 1)
    return steps.found


class _Steps:
    """Tasks of one group as they are laid out."""

    def __init__(self, profile: Profile, option: Option) -> None:
        self.found: list[Task] = []
        self._network = profile.network
        self._processor = COMPUTE if option.device == "device" else HOST
        self._cost: CodecCost | None = None
        if option.codec != NONE:
            self._cost = profile.cost(option.codec, option.device)
            if self._cost is None:
                raise UserError(f"profile: codec {option.codec!r} has no cost on the {option.device}")

    def nbytes(self, numel: int) -> int:
        return ELEMENT * numel if self._cost is None else self._cost.at(numel).nbytes

    @property
    def sums(self) -> int:
        return 1 if self._cost is None else self._cost.sums

    def call(self, scope: Scope, kind: Kind, size: float) -> None:
        members = self._network.members(scope)
        if members > 1:
            resource = INSIDE if scope == "inside" or self._network.hosts == 1 else BETWEEN
            seconds = self._network.seconds(scope, kind, size)
            self.found.append(Task(kind, resource, seconds, sent_by_each(kind, members, size)))

    def encode(self, numel: int) -> None:
        if self._cost is not None:
            self.found.append(Task("encode", self._processor, self._cost.at(numel).encode))

    def decode(self, numel: int, codes: int) -> None:
        """The sum of that many codes of ``numel`` elements."""
        if self._cost is not None:
            point = self._cost.at(numel)
            self.found.append(Task("decode", self._processor, point.decode + (codes - 1) * point.add))

    def coded(self, scope: Scope, kind: Kind, numel: int, part: int, parts: int) -> None:
        """Encode all, give each rank its part of it, and add up the codes of one's own."""
        self.encode(numel)
        self.call(scope, kind, parts * self.nbytes(part))
        self.decode(part, parts)


def options(profile: Profile) -> Iterator[Option]:
    """Every option that the codecs of the profile and the shape of its network allow, plain first."""
    network = profile.network
    inside: tuple[Inside, ...] = ("flat",)
    if network.hierarchical:
        inside = ("flat", "plain", "coded")
    for where in inside[:2]:
        yield Option(inside=where)
    for cost in profile.codecs:
        schemes: tuple[Scheme, ...] = ("allreduce",) if cost.summable else ("allgather", "alltoall")
        for scheme, where in product(schemes, inside):
            yield Option(cost.codec, scheme, where, cost.device)


def without_codec_cost(profile: Profile) -> Profile:
    """The same, where encoding and decoding take no time and wait for nothing: Espresso's upper bound of any
    plan."""
    free = {
        cost.codec: replace(
            cost, device="host",
            points=tuple(replace(one, encode=0.0, decode=0.0, add=0.0) for one in cost.points),
        )
        for cost in profile.codecs
    }  # fmt: skip
    return replace(profile, codecs=tuple(free.values()))


def paced(profile: Profile, times: float) -> Profile:
    """The same on a network whose collectives take so many times as long."""
    known = profile.network.collectives
    calls = (replace(one, fixed=one.fixed * times, per_byte=one.per_byte * times) for one in known)
    return replace(profile, network=replace(profile.network, collectives=tuple(calls)))
