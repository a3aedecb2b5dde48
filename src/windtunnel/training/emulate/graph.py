"""The execution graph of one rank, as it was captured: plain data that every other part reads.

A *slice* is everything that one rank did: a table of distinct operators, a table of distinct collectives,
and one compact array of events that refer to them. A rank of a large job issues tens of thousands of
operators a step, but only a few hundred distinct ones, so whatever depends on shapes (FLOPs, bytes, time)
is worked out once for each row of the tables and applied to the events as arrays.

Units are SI: bytes, seconds, FLOP.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum
from typing import Any, NamedTuple

import numpy as np

DTYPE_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e4m3fnuz": 1,
    "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1, "float4_e2m1fn_x2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1,
    "bool": 1, "complex32": 4, "complex64": 8, "complex128": 16,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """Shape, dtype (``"bfloat16"``), stride (elements) and device (``"cuda"`` or ``"cpu"``) of a tensor."""

    shape: tuple[int, ...]
    dtype: str
    stride: tuple[int, ...] = ()
    device: str = "cuda"

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPE_BYTES.get(self.dtype, 4)


# An argument: a tensor, a list of tensors, or a plain value (int, float, bool, str, None, tuple of ints).
Arg = Any


@dataclass(frozen=True, slots=True)
class Operator:
    """One distinct call of an operator: the name with overload, as in ``"aten.mm.default"``.

    ``inputs`` are the arguments in schema order (keyword-only ones after the positional ones). ``outputs``
    are the tensors it returns; an in-place operator returns the tensors that it wrote. ``region`` is
    a positive number for operators of one ``torch.compile`` region and 0 outside. ``tf32``: the script lets
    products of float32 take TF32.
    """

    name: str
    inputs: tuple[Arg, ...]
    outputs: tuple[TensorMeta, ...]
    region: int = 0
    tf32: bool = False

    def tensors(self) -> list[TensorMeta]:
        """All input tensors, lists flattened."""
        tensor_metas: list[TensorMeta] = []
        for arg in self.inputs:
            if isinstance(arg, TensorMeta):
                tensor_metas.append(arg)
            elif isinstance(arg, tuple):
                tensor_metas.extend(item for item in arg if isinstance(item, TensorMeta))
        return tensor_metas


class Group(NamedTuple):
    """A process group: its global ranks in group order, and what it is for (``"dp"``, ``"tp"``…, from the
    mesh dimension; ``"world"`` for the default group; ``""`` when unknown). A tuple, since a large world has
    thousands, which every rank hands over."""

    name: str
    ranks: tuple[int, ...]
    label: str = ""


@dataclass(frozen=True, slots=True)
class Collective:
    """One distinct collective or point-to-point message, as seen by the rank that issues it.

    ``kind``: ``all_reduce, all_gather, reduce_scatter, broadcast, reduce, gather, scatter, all_to_all,
    barrier, send, recv``. ``group`` indexes the slice's groups. ``in_bytes`` and ``out_bytes`` are this
    rank's buffers. ``peer`` is the global rank at the other end of a send or recv, or the root of a rooted
    collective, else -1. ``backend`` is ``"nccl"`` or ``"gloo"``.
    """

    kind: str
    group: int
    in_bytes: int
    out_bytes: int
    dtype: str = "float32"
    peer: int = -1
    backend: str = "nccl"


@dataclass(frozen=True)
class Alternative:
    """Another way than NCCL's for some collectives: a fabric of its own, a switch that adds up.

    ``name``: what tables call it. ``takes``: which calls, in words. ``seconds(call, group)``: from the first
    byte that leaves to the last that has come, None for a call that it does not take; what NCCL loses in its
    kernels and proxies comes on top.
    """

    name: str
    takes: str
    seconds: Callable[[Collective, Group], float | None]


class EventKind(IntEnum):
    """What an event is; the columns ``ref`` and ``value`` mean different things for each."""

    OP = 0  # ref: row of the operator table, value: one more than its entry's place in the flow, 0 without
    ALLOC = 1  # ref: block (unique for each allocation), value: bytes, stream: the allocating stream
    FREE = 2  # ref: block
    COLLECTIVE = 3  # ref: row of the collective table, value: work handle (unique), stream: where it runs
    WORK_WAIT = 4  # value: work handle; `stream` waits for it (a blocking wait also has a SYNC after it)
    RECORD = 5  # ref: event record (unique), stream: where it was recorded
    WAIT = 6  # ref: event record that `stream` waits for
    SYNC = (
        7  # host waits: ref -1 the device, -2 stream `stream`, -3 work handle `value`, >= 0 an event record
    )
    RECORD_STREAM = 8  # ref: block that `stream` uses too (Tensor.record_stream)
    STEP = 9  # a call of an optimiser has ended
    CALL = 10  # ref: row of the call-site table; what follows was called from there (sparse: only changes)


class Phase(IntEnum):
    """What the host was doing when it issued an event."""

    OTHER = 0
    FORWARD = 1
    BACKWARD = 2
    OPTIMIZER = 3
    RECOMPUTE = 4  # a checkpointed module's forward, run again in backward


EVENT = np.dtype(
    [("kind", "u1"), ("phase", "u1"), ("stream", "i2"), ("scope", "i4"), ("ref", "i4"), ("value", "i8")]
)
"""One event, in the order in which the host issued it. ``scope`` indexes ``Slice.scopes`` (module paths).
Stream 0 is the default stream. Streams of process groups are numbered from ``COMM_STREAM`` up."""

COMM_STREAM = 1000
OUTLINED = (EventKind.COLLECTIVE, EventKind.STEP, EventKind.CALL)
"""Events of a rank that others may have to meet, or to know where they are."""


class Category(IntEnum):
    """What a block of device memory holds."""

    PARAMETER = 0
    GRADIENT = 1
    OPTIMIZER = 2
    ACTIVATION = 3
    COMMUNICATION = 4
    TEMPORARY = 5


class Place(NamedTuple):
    """An expression in a file of source: lines from 1, columns in bytes from 0, the end column behind it."""

    file: str
    line: int
    end_line: int
    column: int
    end_column: int


class NoteKind(Enum):
    """What a note is to a reader of the result."""

    APPROXIMATION = "approximation"  # something is only taken to be so, or costed as something like it
    WARNING = "warning"  # what a reader must know


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence for the report. ``of``: the place or rank it is true of; others may be told the same."""

    text: str
    kind: NoteKind = NoteKind.WARNING
    of: str = ""


PLACES = 4
"""That a sentence names, of all that it holds for."""


def sentences(notes: Iterable[Note], kind: NoteKind) -> list[str]:
    """What is told of this kind, in the order of the notes: those with one text as one sentence."""
    places: dict[str, dict[str, None]] = {}
    for note in notes:
        if note.kind == kind:
            places.setdefault(note.text, {}).update({note.of: None} if note.of else {})
    texts = []
    for text, places_of_text in places.items():
        named = [*places_of_text][:PLACES] + (
            [f"{len(places_of_text) - PLACES} more"] if len(places_of_text) > PLACES else []
        )
        texts.append(f"{text} ({'; '.join(named)})" if named else text)
    return texts


@dataclass
class Slice:
    """What one rank did, from the start of the script to the end of its steady steps.

    ``steps`` are half-open ranges of ``events``; the first is everything up to the end of the first step
    (set-up included), the last ``period`` of them are the steady ones, the sequence that repeats, of which
    ``kinds`` tells those that are alike by one number. ``block_category`` maps a block to its `Category`,
    ``block_name`` those of parameters, gradients and optimizer state to the parameter's name.
    ``groups`` are those that this rank is a member of and uses; ``world_groups`` are all that the script made
    anywhere in the world, in the order of their making (every rank makes the same ones). ``settled``: the
    steady steps were seen to repeat. ``after``: calls that followed them, where the script was run on from
    there; ``ended``: it came to its own end; ``varies``: the last later step of another kind, 0 for none;
    ``marked``: `windtunnel.step` ends its steps. ``flow``: from the first compiled region on, for each
    operator the call of a region that it belongs to (0: none), how many tensors it reads and writes, and for
    each of these, in the order of the operator's row, its block (-1: none) and byte offset. ``communicated``:
    blocks that collectives read or write. ``rank_answers``: where the user's own ``files`` asked which rank
    it is, with the first answers.
    """

    rank: int
    world_size: int
    device: str
    operators: list[Operator]
    collectives: list[Collective]
    groups: list[Group]
    world_groups: list[Group]
    events: np.ndarray[Any, np.dtype[Any]]
    steps: list[tuple[int, int]]
    scopes: list[str]
    period: int = 1
    kinds: tuple[int, ...] = (0,)
    call_sites: list[str] = field(default_factory=list)
    block_category: dict[int, int] = field(default_factory=dict)
    block_name: dict[int, str] = field(default_factory=dict)
    settled: bool = False
    flow: np.ndarray[Any, np.dtype[np.int64]] = field(default_factory=lambda: np.zeros(0, np.int64))
    communicated: np.ndarray[Any, np.dtype[np.int64]] = field(default_factory=lambda: np.zeros(0, np.int64))
    notes: list[Note] = field(default_factory=list)
    after: np.ndarray[Any, np.dtype[Any]] = field(default_factory=lambda: np.zeros(0, EVENT))
    ended: bool = False
    varies: int = 0
    marked: bool = False
    rank_answers: dict[Place, list[int]] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)

    def outline(self) -> Slice:
        """What the rank says to others, and when its steps end, without what it computes: a slice of calls,
        call sites and steps only, from the start of the script to where it was left."""
        outlined = np.isin(self.events["kind"], OUTLINED)
        before = np.concatenate([[0], np.cumsum(outlined)])
        return replace(
            self, operators=[], block_category={}, block_name={}, flow=self.flow[:0],
            communicated=self.communicated[:0], events=np.concatenate([self.events[outlined], self.after]),
            steps=[(int(before[a]), int(before[b])) for a, b in self.steps], after=self.after[:0],
        )  # fmt: skip

    def only(self, step: int) -> Slice:
        """With this step as the only steady one, and those before it."""
        return replace(self, steps=self.steps[: step + 1], period=1, kinds=(0,))

    def calls(self) -> list[tuple[Operator, int]]:
        """The operators of the steady steps, and how often each is called in all of the period."""
        events = self.events[slice(*self.steady)]
        count = np.bincount(events["ref"][events["kind"] == EventKind.OP], minlength=len(self.operators))
        return [(self.operators[row], int(count[row])) for row in np.flatnonzero(count)]

    @property
    def steady(self) -> tuple[int, int]:
        """The range of events of the steps that are reported."""
        return self.steps[-self.period][0], self.steps[-1][1]
