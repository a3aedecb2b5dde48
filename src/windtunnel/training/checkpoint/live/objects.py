"""State that is neither module nor optimizer (generators, schedulers, cursors, plain values): what is saved
of it, as bytes, and back without running anything that the bytes name.

A nested value is saved as its skeleton: the same dictionaries and lists, with a `Ref` where a tensor was.
Skeletons are pickled; the unpickler knows plain containers, numbers, NumPy arrays and torch's plain types,
and refuses every other class by name, when a state is saved for the first time and again at each load.
"""

from __future__ import annotations

import collections
import io
import pickle
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from windtunnel.base.errors import UserError
from windtunnel.training.checkpoint.live import loader

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


def check(objects: dict[str, Any]) -> None:
    """Whether what is saved could be loaded again.

    Raises:
        UserError: not so; the object is named.
    """
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
        return loader.state_of(value)
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
        loader.go_on(value, new)
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
