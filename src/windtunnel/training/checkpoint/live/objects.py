"""State that is neither module nor optimizer (generators, schedulers, cursors, plain values): what is saved
of it, as bytes, and back without running anything that the bytes name.

A nested value is saved as its skeleton: the same dictionaries and lists, with a `Ref` where a tensor was.
Skeletons are pickled; the unpickler knows plain containers, numbers, NumPy arrays and torch's plain types,
and refuses every other class by name, when a state is saved and again at each load.

*Data loaders* are torchdata's `StatefulDataLoader`, which says itself where it is in its epoch. Two things
are added. A loader that nobody has iterated yet is not asked for its state: it would begin an epoch for that,
and draw. And one that is restored begins its iteration at once, before the global generators are put back, so
that what it draws then shifts nobody's random numbers. So the epoch that `set_epoch` told a sampler is saved,
and put before. What its state has not is said as a doubt: what workers draw at random, and the order of a
sampler that draws it from a global generator and has no state.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import io
import pickle
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler, Sampler, SequentialSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from windtunnel.base.errors import UserError

_STATEFUL = "torchdata.stateful_dataloader"
LENGTH = 8  # bytes of the length before the pickled objects

_PLAIN = {
    "builtins": {"complex", "set", "frozenset", "bytearray", "range", "slice"},
    "collections": {"OrderedDict", "Counter", "deque"},
    "datetime": {"datetime", "date", "time", "timedelta", "timezone"},
    "fractions": {"Fraction"},
    "decimal": {"Decimal"},
    "torch": {"Size", "device"},
}
_ATOMS = {int, float, bool, str, bytes, type(None)}
_NUMPY = {"_reconstruct", "scalar", "_frombuffer", "ndarray", "dtype"}


@dataclass(frozen=True)
class Ref:
    """Stands for the tensor of this name."""

    name: str


def skeleton(value: Any, path: str, emit: Callable[[str, torch.Tensor], None]) -> Any:
    """``value`` with a `Ref` for every tensor in it; ``found(name, tensor)`` is told of each."""
    if isinstance(value, torch.Tensor):
        emit(path, value)
        return Ref(path)
    if isinstance(value, dict):
        items = [(key, skeleton(inner, f"{path}/{key}", emit)) for key, inner in value.items()]
        if isinstance(value, collections.Counter):
            return value
        return collections.OrderedDict(items) if isinstance(value, collections.OrderedDict) else dict(items)
    if type(value) in (list, tuple):
        if set(map(type, value)) <= _ATOMS:  # Python's generator alone has 625 of them
            return type(value)(value)
        return type(value)(skeleton(inner, f"{path}/{i}", emit) for i, inner in enumerate(value))
    return value


def flesh(value: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """The inverse of `skeleton`."""
    if isinstance(value, Ref):
        return tensor(value.name)
    if isinstance(value, dict) and not isinstance(value, collections.Counter):
        items = [(key, flesh(inner, tensor)) for key, inner in value.items()]
        return collections.OrderedDict(items) if isinstance(value, collections.OrderedDict) else dict(items)
    if type(value) in (list, tuple):
        return type(value)(flesh(inner, tensor) for inner in value)
    return value


def pack(objects: dict[str, Any]) -> bytes:
    """The objects by name, as bytes that `unpack` reads.

    Raises:
        UserError: one of them cannot be pickled; it is named.
    """
    try:
        return pickle.dumps(objects, protocol=5)
    except Exception as whole:
        for name, value in objects.items():
            try:
                pickle.dumps(value, protocol=5)
            except Exception as error:
                raise UserError(
                    f"state {name}: a {type(value).__name__} cannot be saved ({error}); numbers, strings, "
                    "containers, arrays and tensors are accepted"
                ) from error
        raise UserError(f"state: cannot be saved ({whole})") from whole


def unpack(data: bytes | memoryview) -> dict[str, Any]:
    """The inverse of `pack`.

    Raises:
        UserError: it holds something of a class that is not accepted, or is truncated.
    """
    try:
        content = _Plain(io.BytesIO(data)).load()
    except UserError:
        raise
    except Exception as error:
        raise UserError(f"checkpoint: its objects are not readable ({error!r})") from error
    if not isinstance(content, dict):
        raise UserError("checkpoint: its objects are not a dictionary")
    return content


def check(objects: dict[str, Any], packed: bytes = b"") -> None:
    """Whether what is saved could be loaded again. ``packed``: all of it, where that is at hand.

    Raises:
        UserError: not so; the object is named.
    """
    with contextlib.suppress(UserError):
        unpack(packed)
        return
    for name, value in objects.items():
        try:
            unpack(pack({name: value}))
        except UserError as error:
            raise UserError(f"state {name}: {error}") from error


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _PLAIN.get(module, ()):
            return super().find_class(module, name)
        if module == __name__ and name == "Ref":
            return Ref
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.partition(".")[0] == "numpy" and (
            name in _NUMPY or (module == "numpy.dtypes" and isinstance(getattr(np.dtypes, name, None), type))
        ):
            return super().find_class(module, name)
        raise UserError(
            f"a {module}.{name} is not accepted in a checkpoint; numbers, strings, containers, arrays and "
            "tensors are, and what has state_dict and load_state_dict made of them"
        )


def is_generator(value: Any) -> bool:
    """Whether it is a generator of random numbers of torch, NumPy or Python."""
    return isinstance(value, torch.Generator | np.random.Generator | random.Random)


def saved_of(value: Any) -> Any:
    """What is saved of ``value``."""
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, DataLoader):
        return loader_state(value)
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return value.state_dict()
    return value


def put_saved(state: dict[str, Any], item: str, value: Any, new: Any) -> None:
    """Give ``value``, which stands at ``state[item]``, what was saved of it; a plain value is replaced."""
    if isinstance(value, torch.Generator):
        value.set_state(new)
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = new
    elif isinstance(value, random.Random):
        value.setstate(new)
    elif isinstance(value, DataLoader):
        go_on(value, new)
    elif hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        value.load_state_dict(new)
    elif isinstance(value, dict) and isinstance(new, dict):
        value.clear()
        value.update(new)
    elif isinstance(value, list) and isinstance(new, list):
        value[:] = new
    else:
        state[item] = new


def generators() -> dict[str, Any]:
    """The states of the global generators of torch, Python and NumPy."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if "numpy" in sys.modules:
        states["numpy"] = np.random.get_state(legacy=False)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def bytes_of(state: torch.Tensor) -> bytes:
    """A generator's state as a plain value, which no walk over the program's state goes through."""
    return state.numpy().tobytes()


def tensor_of(state: bytes) -> torch.Tensor:
    """The inverse of `bytes_of`."""
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def put_generators(states: dict[str, Any], reseed: int | None) -> None:
    """The inverse of `generators`; with ``reseed`` they begin anew from that number."""
    if reseed is not None:
        torch.manual_seed(reseed >> 1)
        random.seed(reseed)
        np.random.seed(reseed % (1 << 32))
        return
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def require_stateful(state: dict[str, Any]) -> None:
    """Raises:
    UserError: a loader in ``state`` does not know its place."""
    for item, value in state.items():
        if isinstance(value, DataLoader) and not _is_stateful(value):
            raise UserError(
                f"state {item}: a {type(value).__name__} does not say where it is in its epoch; torchdata's "
                "StatefulDataLoader, which takes what DataLoader takes, is accepted"
            )


def loader_state(loader: Any) -> dict[str, Any]:
    """What is saved of a loader: its own state ({} where nobody has iterated it), its sampler's epoch, and
    the generator that it was given."""
    begun = loader._iterator is not None
    return {
        "loader": loader.state_dict() if begun else dict(loader.next_iter_state or {}),
        "epoch": getattr(_sampler(loader), "epoch", None),
        "generator": None if loader.generator is None else loader.generator.get_state(),
    }


def go_on(loader: Any, state: dict[str, Any]) -> None:
    """Have the next iteration of a loader go on where ``state`` was taken."""
    if state["epoch"] is not None:
        _sampler(loader).set_epoch(state["epoch"])
    loader.load_state_dict(state["loader"])
    if state["loader"]:
        loader.state_dict()  # makes the iterator that is then iterated
    if state["generator"] is not None:
        loader.generator.set_state(state["generator"])


def loader_doubts(state: dict[str, Any]) -> list[str]:
    """Why the data of a run with failures may differ from those of one without; sentences."""
    reasons: set[str] = set()
    for item, value in state.items():
        if not isinstance(value, DataLoader):
            continue
        sampler = _sampler(value)
        if isinstance(sampler, Sampler) and not _goes_on(sampler):
            reasons.add(f"loader {item}: the order that its {type(sampler).__name__} draws is drawn anew")
        if value.num_workers:
            reasons.add(f"loader {item}: what its workers draw at random is drawn anew after a failure")
        if value.num_workers and not getattr(value, "in_order", True):
            reasons.add(f"loader {item}: with in_order=False its batches come in any order")
    return sorted(reasons)


def read_outside(state: dict[str, Any]) -> list[str]:
    """Of loaders that are in the midst of an epoch and not in ``state``, a sentence each. Looks at every
    object that there is, so it is not for every step."""
    inside = [getattr(value, "_iterator", None) for value in state.values() if isinstance(value, DataLoader)]
    names: set[str] = set()
    for iterator in _iterators():
        if any(iterator is other for other in inside):
            continue
        if _is_placed(iterator._index_sampler):
            return []  # by a framework, whose adapter keeps the place; its other loaders only validate
        if 0 < iterator._num_yielded < _length(iterator):
            names.add(
                f"a {type(iterator._dataset).__name__} is read by a loader that is not in the state, so its "
                "place in the epoch and its random numbers are not saved"
            )
    return sorted(names)


def _iterators() -> Iterator[Any]:
    """All iterators of loaders. An object refers to its class; a list of all objects would hold those, too,
    that other threads are just building, and a tuple that somebody holds cannot be built on."""
    kinds = [_BaseDataLoaderIter]
    for kind in kinds:
        kinds += kind.__subclasses__()
    yield from (user for user in gc.get_referrers(*kinds) if type(user) in kinds)


def _is_stateful(loader: Any) -> bool:
    return any(kind.__module__.startswith(_STATEFUL) for kind in type(loader).__mro__)


def _sampler(loader: Any) -> Any:
    """What says which samples come in which order."""
    outer = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    return getattr(outer, "sampler", outer)


def _goes_on(sampler: Any) -> bool:
    """Whether the order that it gave comes again."""
    return (
        isinstance(sampler, SequentialSampler | DistributedSampler)
        or hasattr(sampler, "state_dict")
        or type(sampler).__module__.startswith(_STATEFUL)
    )


def _is_placed(sampler: Any) -> bool:
    """Whether an adapter's cursor keeps the place of what reads by this sampler."""
    while sampler is not None and not getattr(sampler, "keeps_place", False):
        sampler = getattr(sampler, "batch_sampler", None)
    return sampler is not None


def _length(iterator: Any) -> float:
    try:
        return len(iterator)
    except TypeError:  # nobody knows
        return float("inf")
