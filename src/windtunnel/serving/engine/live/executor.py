"""The tensors of a running engine: sequences are prefilled, decoded together, forked, kept and restored.

A `Sequence` is a path of frozen pieces that it may share with others, a tail of its own, and the states of
its linear-attention layers. A step decodes any sequences together, whatever their lengths, or prefills one.
Forking, keeping and restoring freeze the tail: they copy states, never keys and values. Joining branches (the
default way) is no operation of its own: the branches' tokens are prefilled on the parent, which a fork leaves
as it was.

The caller keeps the rules (who takes part, what is kept, what is evicted); this module keeps the bytes. After
an error in the middle of a step the sequences that took part are undefined: free them. Not for several
threads at once.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Collection
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from windtunnel.base.errors import UserError
from windtunnel.serving.engine.live import adapter
from windtunnel.serving.engine.live.attention import AttentionPass
from windtunnel.serving.engine.live.segments import Path, SegmentStore, Sequence, Slots


@dataclass(frozen=True, eq=False, slots=True)
class Snapshot:
    """A sequence at a depth: never changed, restored any number of times."""

    depth: int
    path: Path
    states: adapter.States

    @property
    def state_bytes(self) -> int:
        """Bytes of its states, which are its own; its pieces may be shared."""
        return sum(each.nbytes for each in self.states.values())


Owned = TypeVar("Owned", Sequence, Snapshot)


class Executor:
    """Sequences over one causal model of Transformers, which is made ready by `adapter.prepare`."""

    def __init__(self, model: Any) -> None:
        """Raises `UserError` where the model cannot be served, by name."""
        self.ready = adapter.prepare(model)
        weight = next(model.parameters())
        self.device: torch.device = weight.device
        self.dtype: torch.dtype = weight.dtype
        self.vocabulary: int = self.ready.config.vocab_size
        self.limit: int | None = getattr(self.ready.config, "max_position_embeddings", None)  # tokens at most
        if self.device.type == "cpu":
            _keep_freed_memory()
        self.bound = sys.maxsize
        """Bytes beyond which no slots are kept for later."""
        self.store, self.pool = SegmentStore(self._fits), Slots(self._fits)
        self.sequences: set[Sequence] = set()
        self.snapshots: set[Snapshot] = set()
        probe = self.new()
        self.prefill(probe, [0, 0])
        assert probe.tail is not None
        self.token_bytes = probe.tail.bytes // probe.tail.capacity
        """Bytes of the keys and values of one token, all layers together."""
        self.state_bytes = self.pool.slot_bytes
        """Bytes of the states of one sequence."""
        self.free(probe)

    # sequences

    def new(self) -> Sequence:
        """An empty sequence, to be prefilled."""
        return self._keep(Sequence(), self.sequences)

    @torch.inference_mode()
    def step(self, parts: Ordered[tuple[Sequence, Ordered[int]]], chunks: int) -> Tensor:
        """Each sequence reads its tokens: the first ``chunks`` one or more of a prompt, every other one that
        was decoded. Logits of the last ones, shape (parts, vocabulary). A model without states takes all in
        one pass, others take a pass for each chunk."""
        for sequence, tokens in parts:
            self._room(sequence, len(tokens))
        sequences, reads = [sequence for sequence, _ in parts], [tokens for _, tokens in parts]
        if not self.pool.tensors:
            return self._pass(sequences, reads, reading=True)
        tensors = [self._pass([sequences[at]], [reads[at]], reading=True) for at in range(chunks)]
        if rows := sequences[chunks:]:
            self.pool.front(rows, exactly=True)
            order = sorted(range(len(rows)), key=lambda at: rows[at].index)
            ordered = [rows[at] for at in order], [reads[chunks + at] for at in order]
            logits = self._pass(*ordered, reading=False)
            tensors.append(logits[torch.tensor(order, device=self.device).argsort()])
        return torch.cat(tensors)

    def prefill(self, sequence: Sequence, tokens: Ordered[int]) -> Tensor:
        """Reads one token or more: the logits of the last one, shape (vocabulary,)."""
        return self.step([(sequence, tokens)], 1)[0]

    def decode(self, rows: Ordered[Sequence], tokens: Ordered[int]) -> Tensor:
        """Each of ``rows``, prefilled ones, reads its token of ``tokens``: logits of shape (rows,
        vocabulary)."""
        return self.step([(row, [token]) for row, token in zip(rows, tokens, strict=True)], 0)

    def fork(self, sequence: Sequence, count: int) -> list[Sequence]:
        """``count`` sequences that have read what ``sequence`` has. It stays as it is."""
        self._freeze(sequence)
        return [self._branch(sequence.path, sequence.depth, self._states(sequence)) for _ in range(count)]

    @torch.inference_mode()
    def snapshot(self, sequence: Sequence) -> Snapshot:
        """The sequence as it is now: its states copied, its pieces shared."""
        self._freeze(sequence)
        states = {key: state.clone() for key, state in self._states(sequence).items()}
        return self._keep(Snapshot(sequence.depth, sequence.path, states), self.snapshots)

    def restore(self, snapshot: Snapshot, depth: int | None = None) -> Sequence:
        """A sequence that has read what the snapshot has, or the first ``depth`` tokens of that: of a model
        without linear attention only, since a state cannot be taken back."""
        depth = snapshot.depth if depth is None else depth
        return self._branch(_cut(snapshot.path, depth), depth, snapshot.states)

    def cut(self, owner: Sequence | Snapshot, depth: int, states: adapter.States | None = None) -> Snapshot:
        """The keys and values of its first ``depth`` tokens, with ``states`` as those behind them. Of a model
        that has states, and without them, it is kept for those that go on from it."""
        if isinstance(owner, Sequence):
            self._freeze(owner)
        return self._keep(Snapshot(depth, _cut(owner.path, depth), states or {}), self.snapshots)

    @torch.inference_mode()
    def free(self, owner: Sequence | Snapshot) -> None:
        """Ends a sequence, or forgets a snapshot."""
        if isinstance(owner, Snapshot):
            self.snapshots.remove(owner)
        else:
            self.sequences.remove(owner)
            if owner.tail is not None:
                owner.tail.slots.give(owner.tail.index)
            if owner.index >= 0:
                self.pool.give(owner.index)
        for piece, length in owner.path:
            self.store.release(piece, length)

    # bytes

    @property
    def allocated(self) -> int:
        """Of all tensors, as they are."""
        states = sum(each.state_bytes for each in self.snapshots)
        return states + sum(each.allocated for each in (self.pool, *self.store.slots.values()))

    @staticmethod
    def held(snapshots: Collection[Snapshot]) -> int:
        """Of the slots and states of ``snapshots``."""
        pieces = {piece for each in snapshots for piece, _ in each.path}
        return sum(each.state_bytes for each in snapshots) + sum(piece.bytes for piece in pieces)

    # within

    def _fits(self, more: int) -> bool:
        """Whether ``more`` bytes fit, at the worst without any free slots."""
        if self.allocated + more > self.bound:
            for each in (self.pool, *self.store.slots.values()):
                each.trim()
        return self.allocated + more <= self.bound

    def _keep(self, owner: Owned, among: set[Owned]) -> Owned:
        among.add(owner)
        for piece, length in owner.path:
            piece.ends[length] += 1
        return owner

    @torch.inference_mode()
    def _branch(self, path: Path, depth: int, states: adapter.States) -> Sequence:
        sequence = self._keep(Sequence(path, depth=depth), self.sequences)
        self._place(sequence, states)
        return sequence

    def _states(self, sequence: Sequence) -> adapter.States:
        """Views of its states, (1, …)."""
        at = sequence.index
        return {key: each[at : at + 1] for key, each in self.pool.tensors.items() if at >= 0}

    def _place(self, sequence: Sequence, states: adapter.States) -> None:
        """A slot for copies of ``states``."""
        if states:
            self.pool.take(sequence)
        for key, state in states.items():
            self.pool.tensor(key, state, state.shape[1:])[sequence.index] = state[0]

    def _freeze(self, sequence: Sequence) -> None:
        tail = sequence.tail
        if tail is not None and tail.length:
            tail.ends[tail.length] += 1
            sequence.path, sequence.tail = (*sequence.path, (tail, tail.length)), None

    def _room(self, sequence: Sequence, count: int) -> None:
        if self.limit is not None and sequence.depth + count > self.limit:
            raise UserError(f"{sequence.depth + count} tokens are more than the model's {self.limit}")
        sequence.tail = self.store.extended(sequence.tail, count)

    def _pass(self, rows: Ordered[Sequence], tokens: Ordered[Ordered[int]], reading: bool) -> Tensor:
        """One forward pass. With states, it is one row of several tokens, or the pool's first ones of one
        each; without, rows of any lengths are one after another."""
        counts = [len(each) for each in tokens]
        step = AttentionPass(rows, counts, self.device)
        at = rows[0].index
        span = slice(at, at + len(rows))
        row_states: adapter.States = {}
        if at >= 0:
            row_states = {key: each[span] for key, each in self.pool.tensors.items()}
        tensor = torch.tensor(
            [
                (token, row.depth + at)
                for row, each in zip(rows, tokens, strict=True)
                for at, token in enumerate(each)
            ],
            device=self.device,
        )
        ids, positions = tensor.T.reshape(2, len(rows) if row_states else 1, -1)
        ends = (
            None if row_states or len(rows) == 1 else torch.tensor(counts, device=self.device).cumsum(0) - 1
        )
        logits, states = adapter.forward(
            self.ready, ids, positions, step, rows[0].depth, row_states or None, reading, ends
        )
        if row_states:
            for key, state in states.items():
                if state.data_ptr() != row_states[key].data_ptr():  # some kernels make new ones
                    row_states[key].copy_(state)
        else:
            self._place(rows[0], states)
        for row, read in zip(rows, tokens, strict=True):
            assert row.tail is not None
            row.tail.length += len(read)
            row.depth += len(read)
        return logits


def _keep_freed_memory() -> None:
    """Has glibc keep what a step frees for the next one, for this process. Otherwise it gives tensors of some
    megabytes back to the kernel at once, and a step of a hybrid model spends two thirds of its time on page
    faults."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(-1, 1 << 30)  # M_TRIM_THRESHOLD
        mallopt(-3, 1 << 25)  # M_MMAP_THRESHOLD: its maximum


def _cut(path: Path, depth: int) -> Path:
    """The path's first ``depth`` tokens."""
    cut, left = [], depth
    for piece, length in path:
        if left > 0:
            cut.append((piece, min(length, left)))
        left -= length
    return tuple(cut)
