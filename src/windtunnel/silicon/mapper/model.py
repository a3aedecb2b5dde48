"""What the mapper speaks of: loop nests, memories, mappings, and the words that a mapping moves.

A layer is seven loops around one multiply and add,

    O[n, k, y, x] += W[k, c, fy, fx] * I[n, c, s y + fy, s x + fx]

(Yang et al., Interstellar, ASPLOS 2020, arXiv:1809.04070). A matrix product is the same nest with FX, FY, OX
and OY one: M is ON, K is IC, N is OC.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

DIMS = ("FX", "FY", "OX", "OY", "IC", "OC", "ON")
"""The loops: kernel columns and rows, output columns and rows, input and output channels, images."""
LETTERS = ("FX", "FY", "OX", "OY", "C", "K", "B")
"""The same as dataflows are called by, such as C|K (Interstellar, section 3)."""
OPERANDS = ("I", "W", "O")
IRRELEVANT = ((5,), (2, 3, 6), (0, 1, 4))
"""Of each operand: the loops that stay on the same words. The three are disjoint, and together are all."""


@dataclass(frozen=True)
class Layer:
    """``bounds``: of the loops in the order of `DIMS`. ``groups``: nests that run one after another and share
    nothing: groups of a convolution, matrices of a batch, heads of an attention."""

    name: str
    bounds: tuple[int, ...]
    stride: int = 1
    groups: int = 1

    @property
    def macs(self) -> int:
        return math.prod(self.bounds) * self.groups


@dataclass(frozen=True)
class Level:
    """A memory. ``capacity``: bytes, of each PE's own where ``per_pe`` (None: no limit); ``energy``: joules
    of a word; ``bandwidth``: bytes/s (None: no limit); ``holds``: the operands that do not pass it by.
    ``scale``: capacities and joules of a word, for `sized`."""

    name: str
    capacity: float | None
    energy: float
    bandwidth: float | None = None
    per_pe: bool = False
    holds: tuple[str, ...] = OPERANDS
    scale: tuple[tuple[float, float], ...] = ()

    def sized(self, capacity: float) -> Level:
        """With another capacity and its energy: a power law between the nearest entries of the scale."""
        inner = range(1, len(self.scale) - 1)
        after = next((n for n in inner if capacity <= self.scale[n][0]), len(self.scale) - 1)
        (small, low), (large, high) = self.scale[after - 1], self.scale[after]
        energy = low * (capacity / small) ** (math.log(high / low) / math.log(large / small))
        return replace(self, capacity=capacity, energy=energy)


@dataclass(frozen=True)
class Accelerator:
    """``levels`` from the PE outwards: those of each PE hold all operands, and so does the last, which is
    shared and takes whatever there is. ``word``: bytes; ``clock``: Hz; ``mac``, ``hop``: joules of a multiply
    and add, and of a word that goes to a PE. ``double_buffered``: tiles take half of a level, and moving is
    hidden behind computing; else they take all of it, and what each level moves comes on top."""

    name: str
    array: tuple[int, int]
    levels: tuple[Level, ...]
    word: int
    clock: float
    mac: float
    hop: float
    double_buffered: bool = False

    @property
    def inner(self) -> int:
        """How many levels are per PE: the array lies above them."""
        return sum(level.per_pe for level in self.levels)

    def above(self, level: int, operand: str) -> int:
        """The next level that holds ``operand``."""
        return next(n for n in range(level + 1, len(self.levels)) if operand in self.levels[n].holds)

    def room(self, level: int) -> float:
        """Words that tiles may take of a level."""
        capacity = self.levels[level].capacity
        return math.inf if capacity is None else capacity / self.word / (2 if self.double_buffered else 1)


@dataclass(frozen=True)
class Mapping:
    """``dataflow``: such as C|K; ``unroll``: PEs along each loop of `DIMS`; ``loops``: of each level, from
    the PE outwards, those that run in it (number in `DIMS`, bound), inner to outer. A level's tile is what
    its loops and those below it go through."""

    dataflow: str
    unroll: tuple[int, ...]
    loops: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def steps(self) -> int:
        """Cycles of computing: the product of all loops of all levels."""
        return math.prod(bound for level in self.loops for _, bound in level)

    @property
    def pes(self) -> int:
        return math.prod(self.unroll)


@dataclass(frozen=True)
class LevelTraffic:
    """Words of one operand between level ``below`` and level ``above``: ``read`` and ``written`` at the upper
    one, ``moved`` (both ways) at the lower one, where each PE gets a copy of its own."""

    operand: str
    below: int
    above: int
    read: int
    written: int
    moved: int
