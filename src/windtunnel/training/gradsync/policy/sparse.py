"""How a sparse gradient is summed: the schemes that there are, what each sends, and which is best.

A scheme is priced from one gradient's density d, and from how the density grows when n ranks are added up
(densification, gamma_n). With M the dense bytes and 4 bytes for an index beside each unit, a rank sends

    zen         (n-1)/n (1 + gamma_n) (M + index) d         balanced parallelism (ZEN, OSDI '25, section 2.3)
    hierarchy   sum of gamma_(2^(i-1)) (M + index) d        for i = 1 to log2 n (SparCML, SC '19)
    allgather   (n-1) (M + index) d
    dense       2 (n-1)/n M                                 the all-reduce that knows nothing of zeros

ZEN's theorem is that of all ways to sum one of the first two sends fewest bytes. *zen* sends the positions in
a rank's part as a bitmap where that is shorter than 4 bytes each.

*Which rank adds up which unit* (an element, or a row of a table), and where it lies: the units are put in an
order that looks random, which all ranks know from a seed, and that order is cut into slices of equal length:
unit u is of rank ``place(u) // length``, at ``place(u) % length``. So every rank gets about as many units of
any gradient as any other, however its indices are skewed, and nothing is agreed on or sent for that (first
level of ZEN's hierarchical hashing, section 3). The order is a permutation that is computed, forwards and
backwards: no unit is lost or doubled, and no table of all units is kept. It is of k bits, the fewest that
number all units: multiply by an odd number, fold the upper half onto the lower, three times over; what falls
outside of the units is permuted again until it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.training.gradsync.model import JobNetwork, Kind, Option, Sparsity
from windtunnel.training.gradsync.policy.options import BETWEEN, INSIDE, GroupTask

Ints = NDArray[np.int64]
ROUNDS = 3
"""Of the permutation."""
SCHEMES = ("zen", "hierarchy", "allgather", "dense")
NEAR, BESIDE = 1.5, 0.02
"""A scheme is worth a trial if it is predicted to take up to so many times as long as the best, and so many
seconds more: what processes' turns and their work add to any."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Of a scheme: bytes that a rank sends, and the rounds in which it waits for others."""

    nbytes: float
    rounds: float


def traffic(scheme: str, sparsity: Sparsity, world: int) -> Traffic:
    """What a scheme moves between ``world`` ranks. Lengths go ahead: all at once before rounds with everyone,
    with each message of a hierarchy."""
    if world == 1:
        return Traffic(0.0, 0)
    match scheme:
        case "dense":
            dense = sparsity.units * sparsity.width * sparsity.itemsize
            return Traffic(2 * (world - 1) / world * dense, 2 * (world - 1))
        case "zen":
            push, pull = (sparsity.message(ranks, 1 / world, bitmap=True) for ranks in (1, world))
            return Traffic((world - 1) * (push + pull), 2 * world)
        case "allgather":
            return Traffic((world - 1) * sparsity.message(1), world)
    levels = world.bit_length() - 1
    # ranks beyond a power of two give theirs to another, which is the busiest, and are given the sum
    folded = world > 2**levels
    sums = [1 << (level + folded) for level in range(levels)] + [world] * folded
    return Traffic(sum(map(sparsity.message, sums)), 2 * (levels + 2 * folded))


def seconds(scheme: str, sparsity: Sparsity, network: JobNetwork) -> float:
    """Predicted, of one sum: its rounds, and the bytes of a rank.

    Raises:
        UserError: a network whose collectives were not measured.
    """
    world = network.world
    if world == 1:
        return 0.0
    moved = traffic(scheme, sparsity, world)
    kind: Kind = "allreduce" if scheme == "dense" else "alltoall"
    turns = (2 if scheme == "dense" else 1) * (world - 1)
    empty = network.seconds("flat", kind, 0)
    each = (network.seconds("flat", kind, world) - empty) / turns
    return moved.rounds * empty / turns + moved.nbytes * each


def promising(sparsity: Sparsity, network: JobNetwork) -> list[str]:
    """The schemes that may be the best: what a sum takes beside rounds and bytes is not predicted."""
    predicted = {name: seconds(name, sparsity, network) for name in SCHEMES}
    most = NEAR * min(predicted.values()) + BESIDE
    return [name for name in SCHEMES if predicted[name] <= most]


def choose(sparsity: Sparsity, world: int) -> str:
    """The scheme whose ranks send fewest bytes, where no network is known."""
    return min(SCHEMES, key=lambda name: traffic(name, sparsity, world).nbytes)


def choices(tensor: str, sparsity: Sparsity, network: JobNetwork) -> list[tuple[Option, list[GroupTask]]]:
    """The options of a sparse gradient, with their one task each: a scheme is one call. Where schemes were
    tried between these ranks, only those, by what they took."""
    resource = INSIDE if network.hosts == 1 else BETWEEN
    tried = {sum_time.scheme: sum_time.seconds for sum_time in network.sums if sum_time.tensor == tensor}
    options = []
    for name, predicted in (tried or {name: seconds(name, sparsity, network) for name in SCHEMES}).items():
        sent = traffic(name, sparsity, network.world).nbytes
        work = [GroupTask("sparse", resource, predicted, sent)] if network.world > 1 else []
        options.append((Option(codec=name, scheme="sparse"), work))
    return options


def slice_length(units: int, parts: int) -> int:
    """Of each of ``parts`` equal slices; the last ones may be shorter, or empty."""
    return -(-units // parts)


@dataclass(frozen=True)
class Order:
    """An order of ``units``: by ``seed``, or, where it is None, as they are. Its methods take int64 arrays of
    NumPy or torch, on any device, and give new ones."""

    units: int
    seed: int | None

    def places(self, units: Any) -> Any:
        """``place(u)`` of each."""
        mask, shift, rounds = self._keys()

        def once(x: Any) -> Any:
            for add, odd, _ in rounds:
                x = ((x ^ add) * odd) & mask
                x ^= x >> shift
            return x

        return self._inside(units, once)

    def units_at(self, places: Any) -> Any:
        """The inverse: folding with a shift of half the bits undoes itself."""
        mask, shift, rounds = self._keys()

        def once(x: Any) -> Any:
            for add, _, inverse in rounds[::-1]:
                x = (((x ^ (x >> shift)) * inverse) & mask) ^ add
            return x

        return self._inside(places, once)

    def _keys(self) -> tuple[int, int, list[tuple[int, int, int]]]:
        bits = max(2, (self.units - 1).bit_length())
        if self.seed is None:
            return 0, 0, []
        rng = np.random.default_rng([self.seed, self.units])
        rounds = []
        for _ in range(ROUNDS):
            add, odd = int(rng.integers(1 << bits)), int(rng.integers(1 << bits)) | 1
            rounds.append((add, odd, pow(odd, -1, 1 << bits)))
        return (1 << bits) - 1, (bits + 1) // 2, rounds

    def _inside(self, x: Any, once: Callable[[Any], Any]) -> Any:
        x = once(x)
        while (outside := x >= self.units).any():
            x[outside] = once(x[outside])
        return x


def growth_of(sets: Sequence[Ints]) -> tuple[float, ...]:
    """Densification over 2, 4, 8 … ranks (neighbours, as *hierarchy* adds them up), from the index sets of
    the ranks, or from samples of these."""
    world = len(sets)
    mean = sum(map(len, sets)) / world
    growth, step = list[float](), 2
    while mean and step <= world:
        groups = [sets[begin : begin + step] for begin in range(0, world - step + 1, step)]
        growth.append(sum(len(np.unique(np.concatenate(group))) for group in groups) / len(groups) / mean)
        step *= 2
    return tuple(growth)
