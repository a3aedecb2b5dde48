"""Which bytes of a checkpoint are sent in which idle span of the network (GEMINI, section 5).

A training step uses the network the same way each time: between its collectives lie *idle spans* of known
length. The bytes of every copy that goes to a peer are cut into chunks, and each span takes as many as fit
into its ``safety`` share. A chunk of s bytes takes ``startup + s / bandwidth``. A chunk is at most one part
of the receiver's staging buffer, so that the next one is received while one is copied away. What fits in no
span goes after the last one, and may make the step longer; better spread the checkpoint over ``every`` steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

_COUNTED = 1000
"""Beyond so many steps the quotient is near enough."""


@dataclass(frozen=True)
class Chunk:
    """Bytes ``offset`` .. ``offset + nbytes`` of copy ``copy`` (1 for the first peer), in span ``span``.

    ``span`` equals the number of spans for what is sent after the last.
    """

    span: int
    copy: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class ChunkPlan:
    """``spilled``: bytes that go after the last span. ``every``: over how many steps one checkpoint must be
    spread so that none do; 0 where no span has room for anything."""

    chunks: tuple[Chunk, ...]
    spilled: int
    every: int


def plan_chunks(
    spans: Sequence[float],
    nbytes: int,
    copies: int,
    buffer: int,
    parts: int,
    bandwidth: float,
    startup: float,
    safety: float,
) -> ChunkPlan:
    """The plan for one step.

    ``spans``: seconds. ``nbytes``: of one copy. ``copies``: with the one at home, which needs no network.
    ``buffer``: bytes of staging memory, in ``parts`` parts. ``bandwidth``: bytes/s. ``startup``: seconds a
    chunk. ``safety``: the share of a span that is used, in (0, 1].

    Raises:
        ValueError: a number outside its range.
    """
    part = buffer // parts if parts > 0 else 0
    if part < 1 or bandwidth <= 0 or startup < 0 or not 0 < safety <= 1 or nbytes < 0 or copies < 1:
        raise ValueError(
            f"no plan for buffer={buffer}, parts={parts}, bandwidth={bandwidth}, startup={startup}, "
            f"safety={safety}, nbytes={nbytes}, copies={copies}"
        )
    rooms = [safety * span for span in spans]
    filler = partial(_Filler, nbytes, copies, part, bandwidth, startup)
    fill = filler()
    chunks = [chunk for at, room in enumerate(rooms) for chunk in fill.span(at, room)]
    placed = sum(chunk.nbytes for chunk in chunks)
    rest = fill.span(len(rooms), math.inf)
    spilled = sum(chunk.nbytes for chunk in rest)
    every = 1
    if spilled:
        about = -(-(copies - 1) * nbytes // placed) if placed else 0
        every = about if about > _COUNTED or not placed else _every(rooms, filler())
    return ChunkPlan((*chunks, *rest), spilled, every)


class _Filler:
    """Hands out chunk after chunk of all copies, in order."""

    def __init__(self, nbytes: int, copies: int, part: int, bandwidth: float, startup: float) -> None:
        self._nbytes, self._copies = nbytes, copies
        self._part, self._bandwidth, self._startup = part, bandwidth, startup
        self._copy, self._offset = 1, 0

    @property
    def done(self) -> bool:
        return self._copy >= self._copies or self._nbytes == 0

    def span(self, at: int, room: float) -> list[Chunk]:
        """The chunks that fit into ``room`` seconds."""
        out = []
        while not self.done:
            size = min(self._largest(room), self._nbytes - self._offset)
            if size <= 0:
                break
            out.append(Chunk(at, self._copy, self._offset, size))
            room -= self._startup + size / self._bandwidth
            self._offset += size
            if self._offset == self._nbytes:
                self._copy, self._offset = self._copy + 1, 0
        return out

    def _largest(self, room: float) -> int:
        if self._startup + self._part / self._bandwidth <= room:
            return self._part
        # What rounding took from the room must not cost a byte, and a chunk more.
        return int((room - self._startup) * self._bandwidth * (1 + 1e-12))


def _every(rooms: Sequence[float], fill: _Filler) -> int:
    """The fewest steps whose spans, one after the other, take it all."""
    count = 0
    while not fill.done:
        for at, room in enumerate(rooms):
            fill.span(at, room)
        count += 1
    return count
