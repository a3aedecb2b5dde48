"""Data loaders that go on in the midst of an epoch with what they would have given.

A `DataLoader` in the state is *followed*: it stays the object that it is, and its class becomes one that also
counts the batches that the program took, and remembers the generators as they stood before the order of the
epoch was drawn. After a restore its next iteration is the rest of that epoch. The order is drawn again from
the generators as they stood then (the global ones, and those of the loader and its samplers), the indices of
what was taken are passed over without reading a sample, and the global generators are put back to where the
checkpoint has them. The seed of the workers, which a loader draws when it makes an iterator, is the same
again and is not drawn anew.

Undisturbed a followed loader draws what a plain one draws, but for what its workers draw: that depends on
the batch alone (`batches`), since a worker that starts in the midst of an epoch cannot know what the one
before it drew. An `IterableDataset` has no indices: what was taken is read again and dropped.

torchdata's `StatefulDataLoader` is followed as well, and goes on by its own state where its data set has one.
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter

from windtunnel.base.errors import UserError
from windtunnel.training.checkpoint.live import objects
from windtunnel.training.checkpoint.live.batches import Numbered, put_streams, streams
from windtunnel.training.elastic.determinism import seed_for

T = TypeVar("T")

KEY = "windtunnel"
_LOOKED = 3  # draws of an order that are held against the global generators
_OF_DATA = ("dataset_state", "dataset_iter_state")  # where a StatefulDataLoader keeps what its data set gave
_ENDED = object()

_iterating: weakref.WeakSet[Any] = weakref.WeakSet()
_begin = _BaseDataLoaderIter.__init__


def _begun(self: Any, loader: Any, *rest: Any) -> None:
    _begin(self, loader, *rest)
    if _course(loader) is None and not _is_placed(loader):
        _iterating.add(self)


_BaseDataLoaderIter.__init__ = _begun  # type: ignore[method-assign]


@dataclass
class _Course:
    """Where a loader is.

    ``epochs``: how many were begun. ``taken``: batches that the program took of the one under way. ``made``:
    the state of the generator that the seed of the workers came from. ``before``: what was to draw the order
    of the epoch, as it stood then. ``seed``: of the batches. ``epoch``: what the sampler was told by
    ``set_epoch``. ``resume``: batches after which the epoch is to be gone on with; ``replay``: the same,
    while its order is not yet drawn again. ``own``: whether the loader goes on by a state of its own.
    ``drawn``: whether the order of the epoch was asked for. ``current``: the iteration under way.
    ``making``: an iteration is being begun, and another generator stands in the place of the loader's,
    which is ``generator``.
    """

    epochs: int = 0
    taken: int = 0
    seed: int = 0
    made: bytes = b""
    before: bytes = b""
    epoch: int | None = None
    resume: int | None = None
    replay: int | None = None
    own: bool = False
    drawn: bool = False
    current: weakref.ref[_Taken] | None = None
    making: bool = False
    generator: torch.Generator | None = None
    doubts: set[str] = field(default_factory=set)

    @property
    def is_open(self) -> bool:
        """Whether the program is in the midst of an epoch."""
        now = self.current() if self.current is not None else None
        return self.resume is not None or (now is not None and not now.ended)


def follow(loader: DataLoader[Any]) -> DataLoader[Any]:
    """``loader``, which from now on knows where it is; it can stand in a state that is saved and restored.

    Raises:
        UserError: its class cannot be followed.
    """
    if _course(loader) is not None:
        return loader
    swapped: Any = loader
    kind: Any = type(loader)
    try:
        swapped.__class__ = _followed(kind)
    except (TypeError, AttributeError) as error:
        raise UserError(_refused(loader)) from error
    swapped._windtunnel = _Course()
    return loader


def _refused(loader: Any) -> str:
    return (
        f"a {type(loader).__name__} cannot be followed, since it does not read as a DataLoader does; "
        "accepted are DataLoader, StatefulDataLoader and what leaves alone how they take their indices"
    )


def follow_all(state: dict[str, Any]) -> None:
    """Every loader in ``state``, before its first iteration.

    Raises:
        UserError: one of them cannot be followed.
    """
    for value in state.values():
        if isinstance(value, DataLoader):
            follow(value)


def require_followed(state: dict[str, Any]) -> None:
    """Raises:
    UserError: a loader in ``state`` is not followed, so nobody knows where it is."""
    for item, value in state.items():
        if isinstance(value, DataLoader) and _course(value) is None:
            raise UserError(
                f"state {item}: the loader was not there when `restore` was called; have it in that state, "
                "or give it to `PeerCheckpointer.loader` before it is iterated"
            )


def doubts(state: dict[str, Any]) -> list[str]:
    """Why the data of a run with failures may differ from those of one without; sentences."""
    found: set[str] = set()
    for item, value in state.items():
        if (course := _course(value)) is not None:
            found.update(f"loader {item}: {doubt}" for doubt in course.doubts)
            if value.num_workers and not getattr(value, "in_order", True):
                found.add(f"loader {item}: with in_order=False its batches come in any order")
    for one in list(_iterating):
        if 0 < one._num_yielded < _length(one):
            found.add(
                f"a {type(one._dataset).__name__} is read by a loader that is not in the state, so its "
                "place in the epoch and its random numbers are not saved"
            )
    return sorted(found)


def _course(loader: Any) -> _Course | None:
    """Where a loader is that is followed."""
    return getattr(loader, "_windtunnel", None)


def _is_placed(loader: Any) -> bool:
    """Whether an adapter's cursor keeps the place of a loader that a framework iterates."""
    one = loader._index_sampler
    while one is not None and not getattr(one, "keeps_place", False):
        one = getattr(one, "batch_sampler", None)
    return one is not None


def _length(iterator: Any) -> float:
    try:
        return len(iterator)
    except TypeError:  # nobody knows
        return float("inf")


@functools.cache
def _followed(kind: type) -> type:
    return type(kind.__name__, (_Followed, kind), {"__module__": kind.__module__, "__doc__": kind.__doc__})


class _Followed(Generic[T]):
    """What a loader's class is mixed with; generic as that is, else it could not take its place."""

    _windtunnel: _Course

    def __iter__(self: Any) -> Iterator[Any]:
        course = self._windtunnel
        resume, course.resume = course.resume, None
        here = streams()
        source = torch.Generator()
        if resume is None:
            course.epochs += 1
            if not (self.persistent_workers and course.made):  # its workers stay
                drawn = torch.default_generator if self.generator is None else self.generator
                course.made = objects.bytes_of(drawn.get_state())
                torch.empty((), dtype=torch.int64).random_(generator=drawn)
        course.replay, course.drawn = resume, False
        source.set_state(objects.tensor_of(course.made))
        course.making, course.generator, self.generator = True, self.generator, source
        try:
            made = super().__iter__()  # type: ignore[misc]
            if resume is not None and isinstance(self.dataset, IterableDataset) and not course.own:
                for _ in range(resume):
                    next(made)
        finally:
            course.making, self.generator, course.generator = False, course.generator, None
            if resume is not None:
                put_streams(here)
        course.taken = resume or 0
        taken = _Taken(self, made)
        course.current = weakref.ref(taken)
        return taken

    @property
    def _index_sampler(self: Any) -> Any:
        return _Order(self, super()._index_sampler)  # type: ignore[misc]

    def state_dict(self: Any) -> dict[str, Any]:
        course = self._windtunnel
        going_on = course.is_open
        found: dict[str, Any] = {}
        parent: Any = super()
        if hasattr(parent, "state_dict"):
            # Asked before the first iteration it would begin one.
            found = parent.state_dict() if self._iterator is not None else dict(self.next_iter_state or {})
        found[KEY] = {
            "epochs": course.epochs,
            "taken": course.taken if going_on else None,
            "seed": course.seed,
            "made": course.made,
            "before": course.before if going_on else _packed({"own": _own(self)}),
            "epoch": course.epoch,
            "replicas": _replicas(self),
        }
        return found

    def load_state_dict(self: Any, state: dict[str, Any]) -> None:
        if KEY not in state:
            raise UserError("checkpoint: what it has of the loader was saved by another program")
        rest = {key: value for key, value in state.items() if key != KEY}
        mine = state[KEY]
        course = self._windtunnel = _Course(
            epochs=mine["epochs"],
            seed=mine["seed"],
            made=mine["made"],
            before=mine["before"],
            epoch=mine["epoch"],
        )
        self._iterator = None
        parent: Any = super()
        if hasattr(parent, "load_state_dict") and _has_data(rest):
            course.own = True
            parent.load_state_dict(rest)
        if mine["taken"] is None:
            _put_own(self, objects.unpack(course.before)["own"])
        else:
            # With another number of ranks, what all of them took together is what counts.
            course.taken = course.resume = mine["taken"] * mine["replicas"] // _replicas(self)


class _Taken:
    """One iteration of a followed loader; it counts what the program takes."""

    def __init__(self, loader: Any, inner: Any) -> None:
        self.ended = False
        self._loader, self._inner = loader, inner
        self._course: _Course = loader._windtunnel

    def __iter__(self) -> _Taken:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._inner)
        except StopIteration:
            self.ended = True
            raise
        if not self._course.drawn:
            raise UserError(_refused(self._loader))
        if self._course.current is not None and self._course.current() is self:
            self._course.taken += 1
        return batch

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class _Order:
    """Stands for the sampler of a followed loader's indices. It must not hold the loader, which may hold the
    iterator that holds this: workers are to end with the last reference."""

    def __init__(self, loader: Any, inner: Any) -> None:
        self._loader, self._inner = weakref.ref(loader), inner

    def __iter__(self) -> Iterator[Any]:
        return _ordered(self._loader, self._inner)

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _ordered(followed: weakref.ref[Any], inner: Any) -> Iterator[Any]:
    """The indices of an epoch: from its beginning, or the rest of one that is drawn again."""
    loader: Any = followed()
    course: _Course = loader._windtunnel
    resume, course.replay, course.drawn = course.replay, None, True
    sampler = _sampler(loader)
    told = getattr(sampler, "epoch", None)
    iterable = isinstance(loader.dataset, IterableDataset)
    again: dict[str, Any] | None = None
    if resume is None:
        course.epoch = told if isinstance(told, int) else None
        course.before = drawn(loader)
        course.seed = _seed_of(course)
    else:
        if course.epoch is not None and told != course.epoch:
            raise UserError(
                f"the loader is in epoch {course.epoch} of its sampler, but set_epoch({told}) was called "
                "after the restore; have the number of the epoch in the state"
            )
        again = _unpacked(course.before)
        _put_own(loader, again.pop("own"))
        again.pop("cuda", None)  # no order is drawn there
    numbered = iterable or loader.num_workers > 0
    passed = resume if resume is not None and not (iterable or course.own) else 0
    del loader
    draws: Iterator[Any] | None = None
    number = 0
    while True:
        if again is not None and number < max(resume or 0, 1):
            here = streams()
            put_streams(again)
            try:
                draws = draws or iter(inner)
                indices = next(draws, _ENDED)
                again = streams()
            finally:
                put_streams(here)
        else:
            draws = draws or iter(inner)
            looked = _packed(streams()) if 0 < number < _LOOKED else b""
            indices = next(draws, _ENDED)
            if looked and looked != _packed(streams()):
                course.doubts.add(
                    f"its {type(sampler).__name__} draws from a global generator in the midst of an epoch"
                )
        if indices is _ENDED:
            return
        number += 1
        if number > passed:
            yield Numbered(indices, seed_for(course.seed, number)) if numbered else indices


def _seed_of(course: _Course) -> int:
    """As the seed of plain workers it follows from torch's generator alone: few seed the others."""
    told = hashlib.blake2b(course.made, digest_size=8).digest()
    return seed_for(int.from_bytes(told, "big"), course.epochs)


def _sampler(loader: Any) -> Any:
    """What says which samples come in which order."""
    outer = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return getattr(outer, "sampler", outer)


def _replicas(loader: Any) -> int:
    found = getattr(_sampler(loader), "num_replicas", None)
    return found if isinstance(found, int) and found > 0 else 1


def drawn(loader: Any) -> bytes:
    """The states of the global generators, and of those that ``loader`` (or None) and its samplers have."""
    return _packed(objects.generators() | {"own": _own(loader)})


def draw_again(loader: Any, states: bytes) -> None:
    """The inverse of `drawn`."""
    found = _unpacked(states)
    _put_own(loader, found.pop("own"))
    objects.put_generators(found, None)


def _generators(loader: Any) -> list[Any]:
    """Generators that are the loader's or its samplers' own, each once, in an order that stays."""
    course = _course(loader)
    made = course.generator if course is not None and course.making else getattr(loader, "generator", None)
    found: dict[int, Any] = {} if made is None else {id(made): made}
    owners: list[Any] = [loader]
    for owner in owners:  # which grow
        values = vars(owner) if owner is not loader else {}
        found |= {id(one): one for _, one in sorted(values.items()) if objects.is_generator(one)}
        inner = [getattr(owner, name, None) for name in ("batch_sampler", "sampler", "_inside")]
        owners += [
            one for one in inner if hasattr(one, "__dict__") and not any(one is other for other in owners)
        ]
    return list(found.values())


def _own(loader: Any) -> list[Any]:
    states = [objects.saved_of(generator) for generator in _generators(loader)]
    return [objects.bytes_of(state) if isinstance(state, torch.Tensor) else state for state in states]


def _put_own(loader: Any, states: list[Any]) -> None:
    for generator, state in zip(_generators(loader), states, strict=False):  # some samplers make theirs late
        put = objects.tensor_of(state) if isinstance(generator, torch.Generator) else state
        objects.put_saved({}, "", generator, put)


def _has_data(state: Any) -> bool:
    """Whether a StatefulDataLoader's state holds anything that the data set gave."""
    if not isinstance(state, dict):
        return False
    return any((key in _OF_DATA and value is not None) or _has_data(value) for key, value in state.items())


def _packed(states: dict[str, Any]) -> bytes:
    """As bytes, so that a state that is saved each step is not walked through each time."""
    plain = {
        key: objects.bytes_of(one) if isinstance(one, torch.Tensor) else one for key, one in states.items()
    }
    return objects.pack(plain)


def _unpacked(states: bytes) -> dict[str, Any]:
    """The inverse of `_packed`."""
    plain = objects.unpack(states)
    return {key: objects.tensor_of(one) if isinstance(one, bytes) else one for key, one in plain.items()}
