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


class SegmentPlace:
    """A slot of a `Slots`: ``index`` changes when others come and go."""

    __slots__ = ("index",)

    def __init__(self) -> None:
        self.index = -1


class Slots:
    """Tensors of shape (slots, …), one a key, of which the first ``len(places)`` slots are taken.

    A tensor is made when its key is first written. A slot is zeroed when it is taken: what an earlier owner
    left there, be it not a number, must not reach a product with a later one. Slots that nobody needs yet are
    made only where ``fits`` says that so many bytes more may be held.
    """

    def __init__(self, fits: Callable[[int], bool]) -> None:
        self._fits = fits
        self.tensors: dict[Key, Tensor] = {}
        self.places: list[SegmentPlace] = []
        self.room = self.slot_bytes = 0
        """Slots that there are, and bytes of one, all tensors together."""

    @property
    def held(self) -> int:
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

    def take(self, place: SegmentPlace) -> None:
        """A zeroed slot for ``place``."""
        place.index = len(self.places)
        if place.index == self.room:
            more = max(1, self.room // 2)
            self._resize(self.room + (more if self._fits(more * self.slot_bytes) else 1))
        self.places.append(place)
        for each in self.tensors.values():
            each[place.index].zero_()

    def give(self, place: SegmentPlace) -> None:
        """Frees the slot; the last one moves to where it was."""
        last = self.places.pop()
        if last is not place:
            for each in self.tensors.values():
                each[place.index].copy_(each[last.index])
            self.places[place.index] = last
            last.index = place.index
        place.index = -1
        if len(self.places) * 3 < self.room:
            self._resize(max(2, self.room // 2) if self.places else 0)

    def front(self, places: Ordered[SegmentPlace], exactly: bool = False) -> int:
        """Brings ``places`` near the front: all lie in the first slots, whose count is returned: at most
        twice as many as ``places``; with ``exactly`` as many."""
        count = len(places)
        if max(place.index for place in places) < (count if exactly else 2 * count):
            return max(place.index for place in places) + 1
        wanted = {place.index for place in places}
        near = [index for index in range(count) if index not in wanted]
        far = sorted(index for index in wanted if index >= count)
        for each in self.tensors.values():
            here, there = torch.tensor((near + far, far + near), device=each.device)
            each[here] = each[there]
        for a, b in zip(near, far, strict=True):
            self.places[a], self.places[b] = self.places[b], self.places[a]
            self.places[a].index, self.places[b].index = a, b
        return count

    def trim(self) -> None:
        """Gives free slots back."""
        if len(self.places) < self.room:
            self._resize(len(self.places))

    def _resize(self, room: int) -> None:
        for key, old in self.tensors.items():
            tensor = torch.zeros((room, *old.shape[1:]), dtype=old.dtype, device=old.device)
            tensor[: len(self.places)] = old[: len(self.places)]
            self.tensors[key] = tensor
        self.room = room


@dataclass(eq=False, slots=True)
class Piece:
    """``length``: tokens whose keys and values it holds; ``ends``: the paths that read it, by how far each
    reads. As soon as one does, nothing more is written to it."""

    slots: Slots
    capacity: int
    place: SegmentPlace = field(default_factory=SegmentPlace)
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
    """One stream of tokens, ``depth`` of which it has read: its frozen pieces, its growing tail, and where
    its states lie. Made by `Executor.new`, `fork` and `restore`; ended by `Executor.free`."""

    path: Path = ()
    tail: Piece | None = None
    place: SegmentPlace | None = None
    depth: int = 0


class SegmentStore:
    """All pieces, by capacity; ``fits`` as of `Slots`."""

    def __init__(self, fits: Callable[[int], bool]) -> None:
        self._fits = fits
        self.slots: dict[int, Slots] = {}

    def new(self, length: int) -> Piece:
        """An empty piece with room for ``length`` tokens."""
        capacity = capacity_for(length)
        piece = Piece(self._of(capacity), capacity)
        piece.slots.take(piece.place)
        return piece

    def reserve(self, piece: Piece, length: int) -> None:
        """Room for ``length`` tokens in all."""
        if length > piece.capacity:
            self._move(piece, capacity_for(length))

    def hold(self, piece: Piece, length: int) -> None:
        """One more path reads the first ``length`` tokens of a piece, which is frozen by that."""
        piece.ends[length] += 1

    def release(self, piece: Piece, length: int) -> None:
        """A path that read ``length`` tokens is no more; what nobody reads any longer is freed."""
        piece.ends[length] -= 1
        if not piece.ends[length]:
            del piece.ends[length]
        if not piece.ends:
            piece.slots.give(piece.place)
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
        old, slots, place = piece.slots, self._of(capacity), SegmentPlace()
        slots.take(place)
        for key, source in old.tensors.items():
            slots.tensors[key][place.index, :, : piece.length] = source[piece.place.index, :, : piece.length]
        old.give(piece.place)
        piece.slots, piece.place, piece.capacity = slots, place, capacity
