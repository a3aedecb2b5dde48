"""What a step is: every parameter is updated at most once in it.

A job's step is seldom one call of one optimiser. ZeRO steps its optimiser once for each group of parameters,
Megatron and Muon chain several, a GAN has two, and an optimiser for each layer steps while backward runs; a
wrapper (Accelerate, Lightning, Lookahead) calls the one inside it. None of these updates a parameter a second
time before all of it begins again. So a step has ended when a parameter is about to be updated a second
time; micro-batches, which only accumulate gradients, end none. The first step tells in which calls a step
consists, and the later ones end with the last of these. Where the program says it by ``windtunnel.step()``,
that alone ends steps.

Steps need not be alike: some save, some generate, some talk to other islands. A *period* is the sequence of
steps that repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

Mark = TypeVar("Mark")
on_mark: list[Callable[[], None]] = []
"""Called where the program says that a step has ended."""


def step() -> None:
    """Say that a step of training ends here, for loops of which the optimisers' calls do not tell it. It does
    nothing where the program is not emulated."""
    for mark in on_mark:
        mark()


@dataclass
class Calls(Generic[Mark]):
    """The calls of optimisers so far. A ``Mark`` is whatever the caller wants to know a place in time by."""

    pattern: tuple[frozenset[int], ...] = ()  # what each call of the first step updates
    current: list[frozenset[int]] = field(default_factory=list)
    last: Mark | None = None  # after the last call of a step that has not ended yet

    def add(self, updated: frozenset[int], mark: Mark) -> list[Mark]:
        """A call has ended that updated these parameters. Returns the ends of steps that are now known."""
        ends = []
        if self.last is not None and any(updated & before for before in self.current):
            self.pattern = self.pattern or tuple(self.current)
            ends.append(self.last)
            self.current = []
        self.current.append(updated)
        self.last = mark
        if tuple(self.current) == self.pattern:
            ends.append(mark)
            self.current, self.last = [], None
        return ends


@dataclass(frozen=True)
class Period:
    """``before``: steps that come before the sequence that repeats, the first one with its set-up at least.
    ``length``: steps of that sequence. ``repeats``: it came a second time, whole."""

    before: int
    length: int
    repeats: bool

    @property
    def end(self) -> int:
        """Steps up to the end of the first such sequence."""
        return self.before + self.length


def find_period(kinds: Sequence[Hashable]) -> Period:
    """The shortest story that tells these steps: a beginning, and a sequence that repeats from there. Of
    several that are equally short, that with the longest sequence in which some steps are alike: where none
    is, all but the last may be a beginning."""
    period = Period(0, 1, False)
    for length in range(1, len(kinds)):
        before = len(kinds) - length
        while before > 1 and kinds[before - 1] == kinds[before - 1 + length]:
            before -= 1
        end, alike = before + length, len(set(kinds[before : before + length])) < length
        if length == 1 or end < period.end or (end == period.end and alike):
            period = Period(before, length, len(kinds) >= before + 2 * length)
    return period
