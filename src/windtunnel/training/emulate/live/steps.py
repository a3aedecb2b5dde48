"""What a step is: every parameter is updated at most once in it.

A job's step is seldom one call of one optimiser. ZeRO steps its optimiser once for each group of parameters,
Megatron and Muon chain several, a GAN has two, and an optimiser for each layer steps while backward runs; a
wrapper (Accelerate, Lightning, Lookahead) calls the one inside it. None of these updates a parameter a second
time before all of it begins again. So a step has ended when a parameter is about to be updated a second
time; micro-batches, which only accumulate gradients, end none. The first step tells in which calls a step
consists, and the later ones end with the last of these.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

Mark = TypeVar("Mark")


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
