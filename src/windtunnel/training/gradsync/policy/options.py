"""Options as tasks: what a way to synchronise a group of gradients takes of which resource, step by step.

The design space is Espresso's (EuroSys '23, section 4.2: compress or not, scheme, where encoding and decoding
sit), without its paths that others equal or better: a code is decoded where it is added up, and nowhere else.
What runs backward also encodes and decodes.
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
    Scheme,
    Scope,
    SyncProfile,
)

COMPUTE, INSIDE, BETWEEN = range(3)
"""Resources: the device that runs backward, the links inside a host, the network."""
RESOURCES = ("compute", "inside", "network")
ELEMENT = 4
"""Bytes of an element that is synchronised as it is (float32, as DDP's gradients mostly are)."""


class GroupTask(NamedTuple):
    """One step of a group: ``what`` is *encode*, *decode* or the collective's kind. ``sent``: bytes that a
    rank sends in it to other ranks."""

    what: str
    resource: int
    seconds: float
    sent: float = 0.0


def sent_by_each(kind: Kind, members: int, size: float) -> float:
    """Bytes that each of ``members`` sends in a collective of ``size``, by algorithms that send fewest."""
    return size * (members - 1) / members * (2 if kind == "allreduce" else 1)


def tasks(option: Option, numel: int, profile: SyncProfile) -> list[GroupTask]:
    """The steps, in their order, that synchronise ``numel`` elements in this way.

    Raises:
        UserError: the profile has no cost of the codec.
    """
    network, steps = profile.network, list[GroupTask]()
    cost = profile.cost(option.codec)
    if cost is None and option.codec != NONE:
        raise UserError(f"profile: codec {option.codec!r} has no cost")

    def work(what: str, seconds: float) -> None:
        if seconds:
            steps.append(GroupTask(what, COMPUTE, seconds))

    def nbytes(numel: int) -> int:
        return ELEMENT * numel if cost is None else cost.at(numel).nbytes

    def call(scope: Scope, kind: Kind, size: float) -> None:
        if (members := network.members(scope)) > 1:
            resource = INSIDE if scope == "inside" or network.hosts == 1 else BETWEEN
            sent = sent_by_each(kind, members, size)
            steps.append(GroupTask(kind, resource, network.seconds(scope, kind, size), sent))

    def encode(numel: int) -> None:
        if cost is not None:
            work("encode", cost.at(numel).encode)

    def decode(numel: int, codes: int = 1) -> None:
        """The sum of that many codes of ``numel`` elements."""
        if cost is not None:
            point = cost.at(numel)
            work("decode", point.decode + (codes - 1) * point.add)

    def gather(scope: Scope, part: int) -> None:
        encode(part)
        call(scope, "allgather", network.members(scope) * nbytes(part))

    def scatter(scope: Scope, numel: int) -> int:
        """Give each rank its part of all codes, and add up those of one's own; the elements of a part."""
        part = -(-numel // network.members(scope))
        encode(numel)
        call(scope, "alltoall", network.members(scope) * nbytes(part))
        decode(part, network.members(scope))
        return part

    mine = numel
    scope: Scope = "flat" if option.inside == "flat" else "between"
    if option.inside == "plain":
        mine = -(-numel // network.ranks_per_host)
        call("inside", "reduce_scatter", ELEMENT * numel)
    elif option.inside == "coded":
        mine = scatter("inside", numel)
    match option.scheme:
        case "allreduce":
            encode(mine)
            call(scope, "allreduce", nbytes(mine))
            decode(mine)
        case "allgather":
            gather(scope, mine)
            decode(mine, network.members(scope))
        case "alltoall":
            gather(scope, scatter(scope, mine))
            decode(mine)
        case "sparse":
            raise UserError("a sparse sum is priced by its own policy")
    if option.inside == "plain":
        call("inside", "allgather", ELEMENT * numel)
    elif option.inside == "coded":
        gather("inside", mine)
        decode(numel)
    return steps


def options(profile: SyncProfile) -> Iterator[Option]:
    """Every option that the codecs of the profile and the shape of its network allow, plain first."""
    inside: tuple[Inside, ...] = ("flat", "plain", "coded") if profile.network.hierarchical else ("flat",)
    for where in inside[:2]:
        yield Option(inside=where)
    for cost in profile.codecs:
        schemes: tuple[Scheme, ...] = ("allreduce",) if cost.summable else ("allgather", "alltoall")
        for scheme, where in product(schemes, inside):
            yield Option(cost.codec, scheme, where)


def without_codec_cost(profile: SyncProfile) -> SyncProfile:
    """The same, where encoding and decoding take no time: Espresso's upper bound of any plan."""

    def free(cost: CodecCost) -> CodecCost:
        return replace(
            cost, points=tuple(replace(point, encode=0.0, decode=0.0, add=0.0) for point in cost.points)
        )

    return replace(profile, codecs=tuple(map(free, profile.codecs)))


def paced(profile: SyncProfile, times: float) -> SyncProfile:
    """The same on a network whose collectives take so many times as long."""
    collectives = profile.network.collectives
    calls = (
        replace(
            collective_cost, fixed=collective_cost.fixed * times, per_byte=collective_cost.per_byte * times
        )
        for collective_cost in collectives
    )
    return replace(profile, network=replace(profile.network, collectives=tuple(calls)))
