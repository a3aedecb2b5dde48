"""What gradient synchronisation is described by: a profile goes in, a plan comes out.

A *profile* says what the gradients of a job are and when backward makes them, what each codec takes for each
size, and what each collective takes on the network. A *plan* cuts the gradients, in the order in which
backward makes them, into groups, and gives each group an *option*: which codec, between which ranks, by
which collectives. Each is one JSON file, in the twin and live alike.

Sizes are elements (``numel``) or bytes; times seconds. The *size* of a collective is what nccl-tests calls
so: the whole buffer of an all-reduce, the gathered output of an all-gather, the whole input of a
reduce-scatter, one rank's whole buffer of an all-to-all.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from windtunnel.base.errors import UserError
from windtunnel.base.plain import canonical, to_plain

VERSION = 4
"""Of the files of both."""

Kind = Literal["allreduce", "reduce_scatter", "allgather", "alltoall"]
Scope = Literal["flat", "inside", "between"]
Scheme = Literal["allreduce", "allgather", "alltoall", "sparse"]
Inside = Literal["flat", "plain", "coded"]

INDEX = 4
"""Bytes of an index or a position."""
NONE = "none"
"""The codec that leaves gradients as they are."""


@dataclass(frozen=True, slots=True)
class Sparsity:
    """Of a gradient: ``units`` (rows or elements) of ``width`` elements of ``itemsize`` bytes, of which
    ``density`` are not zero on one rank. ``growth``: densification, the density of the sum over 2, 4, 8 …
    ranks over ``density``."""

    units: int
    width: int
    itemsize: int
    density: float
    growth: tuple[float, ...] = ()

    def gamma(self, ranks: float) -> float:
        """Densification of so many: what was measured, between its points in proportion to the logarithm;
        beyond them as if indices were independent, which those of other ranks mostly are more than."""
        if ranks <= 1 or self.density == 0:
            return 1.0
        measured = (1.0, *self.growth)
        place = math.log2(ranks)
        low = int(place)
        if low + 1 < len(measured) or (low < len(measured) and place == low):
            upper = measured[min(low + 1, len(measured) - 1)]
            return measured[low] + (place - low) * (upper - measured[low])
        last = min(1.0, measured[-1] * self.density)
        more = 1 - (1 - last) ** (ranks / 2 ** (len(measured) - 1))
        return more / self.density

    def message(self, ranks: int, share: float = 1.0, *, bitmap: bool = False) -> float:
        """Bytes of the sum over so many ranks of a ``share`` of all units."""
        units = self.units * share
        count = units * min(1.0, self.density * self.gamma(ranks))
        index = min(INDEX * count, units / 8) if bitmap else INDEX * count
        return count * self.width * self.itemsize + index


@dataclass(frozen=True, slots=True)
class GradientTensor:
    """The gradient of one parameter.

    ``backward``: seconds of computing between the gradient before it and this one. ``sparsity``: where it
    comes as rows of a table (``sparse=True``), None where it is dense.
    """

    name: str
    numel: int
    backward: float
    sparsity: Sparsity | None = None


@dataclass(frozen=True, slots=True)
class CodecPoint:
    """What a codec takes for ``numel`` elements: to encode them, to decode one code, to add each further one
    to it, and the bytes of the code."""

    numel: int
    encode: float
    decode: float
    add: float
    nbytes: int


@dataclass(frozen=True)
class CodecCost:
    """Costs of a codec (``dragonn:0.01``), by size, ascending; between points they are
    interpolated, beyond the last in proportion. ``summable``: the sum of codes is the code of the sum, so
    that an all-reduce may add them."""

    codec: str
    points: tuple[CodecPoint, ...]
    summable: bool = False

    @cached_property
    def _costs(self) -> dict[int, CodecPoint]:
        return {}

    def at(self, numel: int) -> CodecPoint:
        """The cost of ``numel`` elements."""
        if (codec_point := self._costs.get(numel)) is None:
            codec_point = self._costs[numel] = self._at(numel)
        return codec_point

    def _at(self, numel: int) -> CodecPoint:
        place = bisect_left(self.points, numel, key=lambda codec_point: codec_point.numel)
        high = self.points[min(place, len(self.points) - 1)]
        low = CodecPoint(0, 0.0, 0.0, 0.0, 0)
        if place == 0:  # below the first point the fixed part of a call is what it takes
            low = replace(high, numel=0, nbytes=0)
        elif place < len(self.points):
            low = self.points[place - 1]
        share = (numel - low.numel) / (high.numel - low.numel)

        def mixed(a: float, b: float) -> float:
            return (1 - share) * a + share * b

        return CodecPoint(
            numel, mixed(low.encode, high.encode), mixed(low.decode, high.decode), mixed(low.add, high.add),
            max(1, round(mixed(low.nbytes, high.nbytes))),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class CollectiveFit:
    """``fixed`` + ``per_byte`` x size, and by what share of the times these differ from those measured."""

    scope: Scope
    kind: Kind
    fixed: float
    per_byte: float
    error: float = 0.0


@dataclass(frozen=True, slots=True)
class SumTime:
    """Seconds that the sparse sum of a gradient took by ``scheme`` between these ranks."""

    tensor: str
    scheme: str
    seconds: float


@dataclass(frozen=True)
class JobNetwork:
    """``hosts`` of ``ranks_per_host`` ranks, and what collectives take: *flat* over all ranks, *inside* a
    host, *between* the ranks of one place in all hosts while the ranks of all other places do the same.
    ``sums``: of the job's sparse gradients, over all ranks, by the schemes that were tried."""

    hosts: int
    ranks_per_host: int
    collectives: tuple[CollectiveFit, ...]
    sums: tuple[SumTime, ...] = ()

    @property
    def world(self) -> int:
        return self.hosts * self.ranks_per_host

    @property
    def hierarchical(self) -> bool:
        """Whether slices may be added up inside hosts before they go between them."""
        return self.hosts > 1 and self.ranks_per_host > 1

    def members(self, scope: Scope) -> int:
        if scope == "flat":
            return self.world
        return self.ranks_per_host if scope == "inside" else self.hosts

    def seconds(self, scope: Scope, kind: Kind, size: float) -> float:
        """Of one collective; none where there is only one rank.

        Raises:
            UserError: the profile does not know it.
        """
        if self.members(scope) == 1:
            return 0.0
        if (cost := self._fits.get((scope, kind))) is None:
            raise UserError(f"profile: network.collectives has no {kind} {scope}; measure it again")
        return cost.fixed + cost.per_byte * size

    @cached_property
    def _fits(self) -> dict[tuple[Scope, Kind], CollectiveFit]:
        return {(collective.scope, collective.kind): collective for collective in self.collectives}


@dataclass(frozen=True)
class SyncProfile:
    """A job, its codecs and its network. ``tensors``: in the order in which backward makes them.
    ``forward``: seconds of computing before backward begins, ``after``: after its last gradient, before the
    optimizer could begin. ``handing``: for which backward stands still for each group, beside encoding, where
    not all are left as they are. ``emulated``: what of this was not measured, in words; "" where all was."""

    tensors: tuple[GradientTensor, ...]
    codecs: tuple[CodecCost, ...]
    network: JobNetwork
    forward: float = 0.0
    after: float = 0.0
    handing: float = 0.0
    emulated: str = ""

    def cost(self, codec: str) -> CodecCost | None:
        return next((cost for cost in self.codecs if cost.codec == codec), None)


@dataclass(frozen=True, slots=True)
class Option:
    """How a group of gradients is synchronised.

    ``scheme``: *allreduce* adds codes on the way (plain gradients, summable codecs); *allgather* gives every
    rank all codes (indivisible); *alltoall* gives every rank the codes of one slice, which it decodes, adds,
    encodes again and gives to all (divisible); *sparse* is a lossless sparse sum, ``codec`` its scheme.
    ``inside``: *flat* is over all ranks at once; else slices are first added inside each host (*plain*
    by reduce-scatter, *coded* by an all-to-all of codes), ``scheme`` runs between hosts, and the slices are
    gathered inside.
    """

    codec: str = NONE
    scheme: Scheme = "allreduce"
    inside: Inside = "flat"

    def words(self) -> str:
        """For a table: ``dragonn:0.01 allgather, plain inside``."""
        return f"{self.codec} {self.scheme}" + (f", {self.inside} inside" if self.inside != "flat" else "")


PLAIN = Option()


@dataclass(frozen=True)
class GradientGroup:
    """Consecutive gradients that are synchronised as one, and why so."""

    tensors: tuple[str, ...]
    option: Option
    reason: str = ""


@dataclass(frozen=True)
class IterationForecast:
    """Predicted seconds of an iteration for a choice, and the bytes that a rank sends in it. ``steps``: that
    training needs to a loss, over those that it needs without compression."""

    choice: str
    seconds: float
    nbytes: int
    steps: float = 1.0

    @property
    def to_loss(self) -> float:
        """Seconds until the loss that training without compression has after one iteration."""
        return self.seconds * self.steps


@dataclass(frozen=True)
class SyncPlan:
    """What every rank of ``world`` on ``hosts`` does. ``groups``: in the order of backward, every gradient in
    exactly one. ``order``: the collectives in the order in which all ranks call them, each as (group, step of
    the group's). ``forecasts``: of the plan first, then of what it was compared with, of which plain
    gradients in DDP's buckets are the first. ``bound``: seconds where encoding and decoding took none.
    ``seed``: of all codecs' random numbers. ``numel``: of all gradients, 0 where there was no profile."""

    groups: tuple[GradientGroup, ...]
    order: tuple[tuple[int, int], ...]
    forecasts: tuple[IterationForecast, ...]
    bound: float
    world: int
    hosts: int
    seed: int = 0
    emulated: str = ""
    notes: tuple[str, ...] = ()
    numel: int = 0

    def digest(self) -> str:
        """Of what must be equal on all ranks."""
        ruling = to_plain([self.groups, self.order, self.world, self.hosts, self.seed, VERSION])
        for group in ruling[0]:
            group.pop("reason")
        return hashlib.sha256(canonical(ruling)).hexdigest()
