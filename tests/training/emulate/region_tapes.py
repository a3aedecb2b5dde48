"""A small captured rank, written by hand: regions whose operators read and write blocks."""

from __future__ import annotations

import numpy as np

from windtunnel.training.emulate.graph import EVENT, EventKind, Operator, Phase, Slice, TensorMeta


def meta(*shape: int, dtype: str = "bfloat16") -> TensorMeta:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return TensorMeta(shape, dtype, tuple(reversed(strides)) if shape else ())


class Tape:
    """Writes events: every result is a new block, blocks are freed where `free` says."""

    def __init__(self) -> None:
        self.events: list[tuple[int, int, int, int, int, int]] = []
        self.operators: list[Operator] = []
        self.flow: list[int] = []
        self.metas: list[TensorMeta] = []
        self.communicated: list[int] = []
        self.phase, self.call = Phase.FORWARD, 0

    def event(self, kind: EventKind, ref: int, value: int = 0, stream: int = 0) -> None:
        self.events.append((int(kind), int(self.phase), stream, 0, ref, value))

    def new(self, what: TensorMeta) -> int:
        self.metas.append(what)
        self.event(EventKind.ALLOC, len(self.metas) - 1, what.nbytes)
        return len(self.metas) - 1

    def op(self, name: str, reads: list[int], writes: list[TensorMeta], *plain: object) -> list[int]:
        """Blocks of the results."""
        blocks = [self.new(result) for result in writes]
        inputs = (*(self.metas[block] for block in reads), *plain)
        region = 1 if self.call and self.phase == Phase.FORWARD else 0
        self.operators.append(Operator(name, inputs, tuple(writes), region))
        pairs = [number for block in (*reads, *blocks) for number in (block, 0)]
        self.flow += [self.call, len(reads), len(blocks), *pairs]
        at = len(self.flow) - len(pairs) - 3
        self.event(EventKind.OP, len(self.operators) - 1, at + 1)
        return blocks

    def single(self, name: str, reads: list[int], out: TensorMeta | None = None, *plain: object) -> int:
        return self.op(name, reads, [out or self.metas[reads[0]]], *plain)[0]

    def free(self, *blocks: int) -> None:
        for block in blocks:
            self.event(EventKind.FREE, block)

    def gather(self, read: int) -> int:
        """An all-gather: what it reads and what it writes."""
        out = self.new(self.metas[read])
        self.communicated += [read, out]
        self.event(EventKind.COLLECTIVE, 0, len(self.communicated), stream=1000)
        self.event(EventKind.WORK_WAIT, -1, len(self.communicated))
        return out

    def slice(self) -> Slice:
        """All of it; what is not freed yet is freed at the end."""
        gone = {event[4] for event in self.events if event[0] == EventKind.FREE}
        self.free(*(block for block in range(len(self.metas)) if block not in gone))
        events = np.array(self.events, EVENT)
        return Slice(
            0, 1, "h100-sxm", self.operators, [], [], [], events, [(0, len(events))], [""],
            block_category=dict.fromkeys(range(len(self.metas)), 3),
            flow=np.array(self.flow, np.int64), communicated=np.array(self.communicated, np.int64),
        )  # fmt: skip


def operators_of(slice_: Slice) -> list[Operator]:
    """Those that are issued, in order; views left out."""
    kind = slice_.events["kind"] == EventKind.OP
    issued = [slice_.operators[row] for row in slice_.events["ref"][kind].tolist()]
    return [op for op in issued if op.tensors() or op.outputs]


def peak(slice_: Slice) -> int:
    """The most bytes at one time."""
    sizes: dict[int, int] = {}
    now = most = 0
    for kind, _, _, _, ref, value in slice_.events.tolist():
        if kind == EventKind.ALLOC:
            assert ref not in sizes, "a block is allocated twice"
            sizes[ref] = value
            now += value
        elif kind == EventKind.FREE:
            now -= sizes.pop(ref)
        most = max(most, now)
    return most
