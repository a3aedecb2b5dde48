"""How a sparse gradient is summed: the ways that there are, what each sends, and which is best.

The design space is ZEN's (OSDI '25, section 2.3): *communication* along a ring, a hierarchy, or from each to
each; *aggregation* incremental (sums travel on) or one-shot (all is sent as it is and added up once); the
tensor *whole* at each rank or *split* into parts that one rank each adds up; parts *balanced* or not. Beside
it, how indices are coded. `traffic` prices every point of it from one gradient's density d, how the density
grows when n ranks are added up (densification, gamma_n), and skew. ZEN's theorem, held by the tests over the
whole space: the fewest bytes are sent by one of

    balanced parallelism            T_BP = (n-1)/n (1 + gamma_n) 2 M d / b
    hierarchical centralization     T_HC = sum of gamma_(2^(i-1)) 2 M d / b  for i = 1 to log2 n

(M the dense bytes, twice that with an index for each element, b the bandwidth); whole rows of a table need
one index each, so that 2 M d becomes M d (1 + 4 / bytes of a row). Positions in a rank's part are sent as a
bitmap where that is shorter than 4 bytes each, which is where more than 1/32 of the part is there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from windtunnel.base.errors import UserError
from windtunnel.training.gradsync.model import Kind, Network, Option, Profile, SumTime, Tensor
from windtunnel.training.gradsync.policy.options import BETWEEN, ELEMENT, INSIDE, Task

Communication = Literal["ring", "hierarchy", "point-to-point"]
Aggregation = Literal["incremental", "one-shot"]
Partition = Literal["whole", "split"]
Index = Literal["none", "coo", "least", "block"]

INDEX = 4
"""Bytes of an index or a position."""
BLOCK = 256
"""Elements of a block that is sent if any of them is not zero (OmniReduce, SIGCOMM '21)."""
NEAR, BESIDE = 1.5, 0.02
"""A scheme is worth a trial if it is predicted to take up to so many times as long as the best, and so many
seconds more: what processes' turns and their work add to any."""


@dataclass(frozen=True, slots=True)
class Design:
    """A point of the space. ``index``: *none* (every unit is sent), *coo* (4 bytes a unit), *least* (that or
    a bitmap), *block* (4 bytes for each `BLOCK` elements)."""

    communication: Communication
    aggregation: Aggregation
    partition: Partition
    balanced: bool
    index: Index


SCHEMES = {
    "zen": Design("point-to-point", "one-shot", "split", True, "least"),
    "hierarchy": Design("hierarchy", "incremental", "whole", True, "coo"),
    "allgather": Design("point-to-point", "one-shot", "whole", True, "coo"),
    "blocks": Design("point-to-point", "one-shot", "split", False, "block"),
    "server": Design("point-to-point", "one-shot", "split", False, "coo"),
    "dense": Design("ring", "incremental", "split", True, "none"),
}
"""Those that run: ZEN's balanced parallelism; recursive doubling (SparCML, SC '19), which is hierarchical
centralization; sparse all-gather; OmniReduce's blocks; the sparse parameter server with a contiguous part at
each rank (Parallax, EuroSys '19); and the all-reduce that knows nothing of zeros."""


def space() -> Iterable[Design]:
    """All points that can be: from each to each nothing is left to be added up on the way, and whole tensors
    need no balance."""
    ways: tuple[Communication, ...] = ("ring", "hierarchy", "point-to-point")
    sums: tuple[Aggregation, ...] = ("incremental", "one-shot")
    cuts: tuple[Partition, ...] = ("whole", "split")
    indices: tuple[Index, ...] = ("coo", "least")
    for point in product(ways, sums, cuts, (True, False), indices):
        communication, aggregation, partition, balanced, index = point
        if communication == "point-to-point" and aggregation == "incremental":
            continue
        if partition == "whole" and (not balanced or index == "least"):
            continue
        yield Design(*point)


@dataclass(frozen=True)
class Sparsity:
    """Of a gradient on ``world`` ranks: ``units`` (rows or elements) of ``width`` elements of ``itemsize``
    bytes, of which ``density`` are not zero on one rank; ``growth`` and ``skew`` as in `Tensor`; ``blocks``:
    share of all blocks of `BLOCK` elements that are not zero on one rank."""

    units: int
    width: int
    itemsize: int
    density: float
    growth: tuple[float, ...] = ()
    skew: float = 1.0
    blocks: float = 1.0

    def gamma(self, ranks: float) -> float:
        """Densification of so many: what was measured, between its points in proportion to the logarithm;
        beyond them as if indices were independent, which those of other ranks mostly are more than."""
        if ranks <= 1 or self.density == 0:
            return 1.0
        known = (1.0, *self.growth)
        place = math.log2(ranks)
        low = int(place)
        if low + 1 < len(known) or (low < len(known) and place == low):
            share = place - low
            upper = known[min(low + 1, len(known) - 1)]
            return known[low] + share * (upper - known[low])
        last = min(1.0, known[-1] * self.density)
        more = 1 - (1 - last) ** (ranks / 2 ** (len(known) - 1))
        return more / self.density


def sparsity(tensor: Tensor, itemsize: int = ELEMENT) -> Sparsity:
    """What a profile knows of a gradient. How many blocks are not zero it does not tell: as many as if its
    units lay anywhere."""
    width = max(1, tensor.width)
    units = max(1, tensor.numel // width)
    touched = 1 - (1 - min(1.0, tensor.density)) ** max(1.0, BLOCK / width)
    return Sparsity(units, width, itemsize, tensor.density, tensor.growth, tensor.skew, touched)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Of a scheme: bytes that the busiest rank sends or receives, the bytes that one sends in the mean, and
    the rounds in which it is waited for others."""

    busiest: float
    sent: float
    rounds: float


def traffic(design: Design, one: Sparsity, world: int) -> Traffic:
    """What ``design`` moves between ``world`` ranks."""
    if world == 1:
        return Traffic(0.0, 0.0, 0)
    if design.index == "none":
        nbytes = 2 * (world - 1) / world * one.units * one.width * one.itemsize
        return Traffic(nbytes, nbytes, 2 * (world - 1))
    if design.index == "block":
        one = replace(one, units=-(-one.units * one.width // BLOCK), width=BLOCK, density=one.blocks)
    split, levels = design.partition == "split", world.bit_length() - 1
    # ranks beyond a power of two give theirs to another, which is the busiest, and are given the sum
    folded = world > 2**levels
    # turn after turn: messages where all is sent as it is, ranks in one where sums are, share of the tensor
    turns: dict[Communication, list[tuple[int, int, float]]] = {
        "ring": [(ranks if split else 1, ranks, 1 / world) for ranks in range(1, world)],
        "hierarchy": [(1 << k, 1 << (k + folded), 0.5 ** (k + 1)) for k in range(levels)]
        + [(1, world, 1.0)] * folded,
        "point-to-point": [(1, 1, 1 / world)] * (world - 1),
    }
    incremental = design.aggregation == "incremental"
    moved = [(1, ranks, share) if incremental else (times, 1, share) for times, ranks, share in
             turns[design.communication]]  # fmt: skip
    if split:  # and of the sum of its part each rank gives all others
        moved.append((world - 1, world, 1 / world))

    def nbytes_of(skew: float) -> float:
        """Of parts that are so much fuller than the mean."""
        total = 0.0
        for times, ranks, share in moved:
            units = one.units * (share if split else 1.0)
            count = units * min(1.0, one.density * one.gamma(ranks) * skew)
            index = min(INDEX * count, units / 8) if design.index == "least" else INDEX * count
            total += times * (count * one.width * one.itemsize + index)
        return total

    # lengths go ahead: all at once before rounds with everyone, with each message of a hierarchy
    rounds = 2 * (levels + 2 * folded) if design.communication == "hierarchy" else world
    sent = nbytes_of(1.0)
    busiest = sent if design.balanced else nbytes_of(max(1.0, min(one.skew, world)))
    return Traffic(busiest, sent, rounds * (2 if split else 1))


def seconds(scheme: str, one: Sparsity, network: Network) -> float:
    """Predicted, of one sum: its rounds, and the bytes of the busiest rank.

    Raises:
        UserError: an unknown scheme, or a network whose collectives were not measured.
    """
    design, world = found(scheme), network.world
    if world == 1:
        return 0.0
    moved = traffic(design, one, world)
    kind: Kind = "allreduce" if design.index == "none" else "alltoall"
    turns = (2 if design.index == "none" else 1) * (world - 1)
    empty = network.seconds("flat", kind, 0)
    each = (network.seconds("flat", kind, world) - empty) / turns
    return moved.rounds * empty / turns + moved.busiest * each


def promising(one: Sparsity, network: Network) -> list[str]:
    """The schemes that may be the best: what a sum takes beside rounds and bytes is not predicted."""
    every = {name: seconds(name, one, network) for name in SCHEMES}
    most = NEAR * min(every.values()) + BESIDE
    return [name for name, predicted in every.items() if predicted <= most]


def carried(job: Profile, network: Network) -> Network:
    """``network`` with what sums of the job's gradients would take on it: what they took on the job's own, as
    much longer or shorter as they are predicted to."""
    known = {tensor.name: sparsity(tensor) for tensor in job.tensors}

    def ratio(sum_time: SumTime) -> float:
        now, was = (
            seconds(sum_time.scheme, known[sum_time.tensor], links) for links in (network, job.network)
        )
        return now / was if was else 1.0

    sums = (replace(one, seconds=one.seconds * ratio(one)) for one in job.network.sums)
    return replace(network, sums=tuple(sums))


def found(scheme: str) -> Design:
    """The design of that name.

    Raises:
        UserError: there is none.
    """
    if scheme not in SCHEMES:
        raise UserError(f"sparse sum: scheme {scheme!r} is unknown; accepted are auto, {', '.join(SCHEMES)}")
    return SCHEMES[scheme]


def choose(one: Sparsity, network: Network | None, world: int) -> str:
    """The scheme that takes least; where no network is known, that whose busiest rank moves fewest bytes."""
    if network is None:
        return min(SCHEMES, key=lambda name: traffic(SCHEMES[name], one, world).busiest)
    return min(SCHEMES, key=lambda name: seconds(name, one, network))


def choices(tensor: Tensor, profile: Profile) -> list[tuple[Option, list[Task]]]:
    """The options of a sparse gradient, with their one task each: a scheme is one call. Where schemes were
    tried between these ranks, only those, by what they took."""
    one, network = sparsity(tensor), profile.network
    resource = INSIDE if network.hosts == 1 else BETWEEN
    options = []
    tried = {known.scheme: known.seconds for known in network.sums if known.tensor == tensor.name}
    for name in tried or SCHEMES:
        sent = traffic(found(name), one, network.world).sent
        taken = tried[name] if tried else seconds(name, one, network)
        work = [Task("sparse", resource, taken, sent)] if network.world > 1 else []
        options.append((Option(codec=name, scheme="sparse"), work))
    return options
