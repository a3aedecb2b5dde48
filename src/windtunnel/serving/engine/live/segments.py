"""Where keys, values and recurrent states lie: slots of equal size, kept without gaps.

What a sequence has read is a path of **pieces**. A piece holds the keys and values of some tokens for all
layers. The last piece of a sequence, its tail, grows and belongs to it alone; once frozen a piece never
changes and may be read by many paths, each from its beginning to a length of its own. So forking, keeping and
restoring copy no keys and values.

Pieces of similar size lie side by side in one `Slots` (tensors of shape (slots, heads, capacity, dim)), so
that one batched product serves all of them. Slots are kept dense, and those that a step reads are brought to
the front: a step takes a view, never a copy. States of linear-attention layers lie in a `Slots`, too, and are
updated in place there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Key = tuple[Any, ...]
"""Which tensor: ("k", layer) and ("v", layer) of pieces, the states' (kind, layer, index)."""


def capacity_for(length: int) -> int:
    """The smallest of 16, 24, 32, 48, 64, 96, … tokens that holds ``length``."""
    size = 16
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size * 4 // 3
    return size


class Slots:
    """Tensors of shape (slots, …), one a key, of which the first ``len(owners)`` slots are taken. An owner's
    ``index``, that of its slot, changes when others come and go.

    A tensor is made when its key is first written. A slot is zeroed when it is taken: what an earlier owner
    left there, be it not a number, must not reach a product with a later one. Slots that nobody needs yet are
    made only where ``fits`` says that so many bytes more may be held.
    """

    def __init__(self, fits: Callable[[int], bool]) -> None:
        self._fits = fits
        self.tensors: dict[Key, Tensor] = {}
        self.owners: list[Piece | Sequence] = []
        self.room = self.slot_bytes = 0
        """Slots that there are, and bytes of one, all tensors together."""

    @property
    def allocated(self) -> int:
        """Bytes of all tensors, free slots included."""
        return self.room * self.slot_bytes

    def tensor(self, key: Key, like: Tensor, shape: Ordered[int]) -> Tensor:
        """The tensor of ``key``: (slots, *shape), of ``like``'s type and device."""
        tensor = self.tensors.get(key)
        if tensor is None:
            tensor = self.tensors[key] = torch.zeros(
                (self.room, *shape), dtype=like.dtype, device=like.device
            )
            self.slot_bytes += tensor.stride(0) * tensor.element_size()
        return tensor

    def take(self, owner: Piece | Sequence) -> None:
        """A zeroed slot for ``owner``."""
        owner.index = len(self.owners)
        if owner.index == self.room:
            more = max(1, self.room // 2)
            self._resize(self.room + (more if self._fits(more * self.slot_bytes) else 1))
        self.owners.append(owner)
        for each in self.tensors.values():
            each[owner.index].zero_()

    def give(self, index: int) -> None:
        """Frees the slot; the last one moves to where it was."""
        last = self.owners.pop()
        if index < len(self.owners):
            for each in self.tensors.values():
                each[index].copy_(each[last.index])
            self.owners[index] = last
            last.index = index
        if len(self.owners) * 3 < self.room:
            self._resize(max(2, self.room // 2) if self.owners else 0)

    def front(self, owners: Ordered[Piece | Sequence], exactly: bool = False) -> int:
        """Brings those of ``owners`` near the front: all lie in the first slots, whose count is returned: at
        most twice as many as ``owners``; with ``exactly`` as many."""
        count, indices = len(owners), {owner.index for owner in owners}
        if (most := max(indices)) < (count if exactly else 2 * count):
            return most + 1
        near = [index for index in range(count) if index not in indices]
        far = sorted(index for index in indices if index >= count)
        for each in self.tensors.values():
            here, there = torch.tensor((near + far, far + near), device=each.device)
            each[here] = each[there]
        for a, b in zip(near, far, strict=True):
            self.owners[a], self.owners[b] = self.owners[b], self.owners[a]
            self.owners[a].index, self.owners[b].index = a, b
        return count

    def trim(self) -> None:
        """Gives free slots back."""
        if len(self.owners) < self.room:
            self._resize(len(self.owners))

    def _resize(self, room: int) -> None:
        for key, old in self.tensors.items():
            tensor = torch.zeros((room, *old.shape[1:]), dtype=old.dtype, device=old.device)
            tensor[: len(self.owners)] = old[: len(self.owners)]
            self.tensors[key] = tensor
        self.room = room


@dataclass(eq=False, slots=True)
class Piece:
    """``length``: tokens whose keys and values it holds; ``ends``: the paths that read it, by how far each
    reads. As soon as one does, nothing more is written to it."""

    slots: Slots
    capacity: int
    index: int = -1
    length: int = 0
    ends: Counter[int] = field(default_factory=Counter)

    @property
    def bytes(self) -> int:
        """Bytes that its slot takes."""
        return self.slots.slot_bytes


Path = tuple[tuple[Piece, int], ...]
"""Pieces, and how many tokens of each are read."""


@dataclass(eq=False, slots=True)
class Sequence:
    """One stream of tokens, ``depth`` of which it has read: its frozen pieces, its growing tail, and the
    slot of its states (-1: it has none). Made by `Executor.new`, `fork` and `restore`; ended by
    `Executor.free`."""

    path: Path = ()
    tail: Piece | None = None
    index: int = -1
    depth: int = 0


class SegmentStore:
    """All pieces, by capacity; ``fits`` as of `Slots`."""

    def __init__(self, fits: Callable[[int], bool]) -> None:
        self._fits = fits
        self.slots: dict[int, Slots] = {}

    def extended(self, tail: Piece | None, count: int) -> Piece:
        """``tail``, or a new piece where there is none, with room for ``count`` tokens more."""
        if tail is None:
            capacity = capacity_for(count)
            tail = Piece(self._of(capacity), capacity)
            tail.slots.take(tail)
        elif tail.length + count > tail.capacity:
            self._move(tail, capacity_for(tail.length + count))
        return tail

    def release(self, piece: Piece, length: int) -> None:
        """A path that read ``length`` tokens is no more; what nobody reads any longer is freed."""
        piece.ends[length] -= 1
        if not piece.ends[length]:
            del piece.ends[length]
        if not piece.ends:
            piece.slots.give(piece.index)
        elif (most := max(piece.ends)) < piece.length:
            piece.length = most
            if capacity_for(most) < piece.capacity:
                self._move(piece, capacity_for(most))

    def _of(self, capacity: int) -> Slots:
        slots = self.slots.get(capacity)
        if slots is None:
            like = next((each.tensors for each in self.slots.values() if each.tensors), {})
            slots = self.slots[capacity] = Slots(self._fits)
            for key, each in like.items():
                slots.tensor(key, each, (each.shape[1], capacity, each.shape[3]))
        return slots

    def _move(self, piece: Piece, capacity: int) -> None:
        old, index, slots = piece.slots, piece.index, self._of(capacity)
        slots.take(piece)
        for key, source in old.tensors.items():
            slots.tensors[key][piece.index, :, : piece.length] = source[index, :, : piece.length]
        old.give(index)
        piece.slots, piece.capacity = slots, capacity
