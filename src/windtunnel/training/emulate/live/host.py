"""Capture of a job whose device is the CPU: it runs for real, and every operator is written down.

Where the target's device is the host itself nothing needs to be absent: the script's tensors are real, one
rank of the world runs, and only its peers are pretended. A dispatch mode sees every operator and the life of
every storage. Storages are counted by `Storages`, which can count them in a real run too: so the two can be
held against each other.
"""

from __future__ import annotations

import array
import ctypes
import json
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from windtunnel.training.emulate.graph import EVENT, EventKind
from windtunnel.training.emulate.live.patches import replaces

COMMUNICATION = ("c10d", "_c10d_functional", "_c10d_functional_autograd")
"""Operators that are recorded as collectives, where they arrive at a process group."""


def install(native: Any) -> None:
    """Record this process's CPU operators and storages from now on, with the native library ``native``."""
    recorder = OperatorMode(native)
    native.wt_storage_block = recorder.storages.number
    native.wt_region = recorder.enter_region
    native.wt_collective_block_count = lambda: len(recorder.communicated)
    native.wt_collective_blocks = lambda: recorder.communicated.buffer_info()[0]
    recorder.__enter__()


class Storages:
    """Tells the life of every CPU storage: ``on_alloc(bytes)``, which returns a number for it, when one is
    first seen or has grown from nothing, and ``on_free(number)`` when it is gone or emptied.

    Counts bytes as they are held (``storage.nbytes()``), each storage once however many tensors view it.
    `watch` also sees storages that are resized in place, as FSDP does, which no operator tells.
    """

    def __init__(self, on_alloc: Callable[[int], int], on_free: Callable[[int], None]) -> None:
        self.on_alloc, self.on_free = on_alloc, on_free
        self.entries: dict[int, tuple[int, int]] = {}  # address of the storage -> (its number, bytes)
        self.watched: set[int] = set()

    def watch(self) -> None:
        """Follow `torch.UntypedStorage.resize_`. Call once."""

        @replaces(torch.UntypedStorage)
        def resize_(original: Any, storage: torch.UntypedStorage, size: int) -> Any:
            result = original(storage, size)
            self.measure(storage)
            return result

    def measure(self, storage: torch.UntypedStorage) -> None:
        """Take note of how many bytes ``storage`` holds now."""
        if storage.device.type != "cpu":
            return
        key, size = storage._cdata, storage.nbytes()
        number, old_size = self.entries.get(key, (-1, 0))
        if size != old_size:
            if old_size:
                del self.entries[key]
                self.on_free(number)
            if size:
                self.entries[key] = (self.on_alloc(size), size)
        if key not in self.watched:
            self.watched.add(key)
            weakref.finalize(storage, self._gone, key)

    def number(self, key: int) -> int:
        """The number of the storage at ``key``, or -1."""
        return self.entries.get(key, (-1, 0))[0]

    def _gone(self, key: int) -> None:
        self.watched.discard(key)
        number, last_size = self.entries.pop(key, (-1, 0))
        if last_size:
            self.on_free(number)


class StorageMode(TorchDispatchMode):
    """Shows every operator's results to `Storages`; the base of what records operators as well."""

    supports_higher_order_operators = True

    def __init__(self, storages: Storages) -> None:
        super().__init__()
        self.storages = storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # DTensor and the like come again as local operators
        self.before(func)
        out = func(*args, **(kwargs or {}))
        self.after(func, args, kwargs or {}, out)
        return out

    def before(self, func: Any) -> None:
        """Called before each operator runs."""

    def after(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Called after each operator, with its arguments and results."""
        for tensor in tensors_of(out):
            self.storages.measure(tensor.untyped_storage())


class HeldBytes:
    """Bytes held by all storages now, and the most since the last `take_peak`."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self.sizes: list[int] = []

    def follow(self) -> StorageMode:
        """Count this thread's storages from now on, until the mode that it gives is left."""
        storages = Storages(self.alloc, self.free)
        storages.watch()
        return StorageMode(storages).__enter__()

    def alloc(self, size: int) -> int:
        self.sizes.append(size)
        self.now += size
        self.peak = max(self.peak, self.now)
        return len(self.sizes) - 1

    def free(self, number: int) -> None:
        self.now -= self.sizes[number]

    def take_peak(self) -> int:
        """The peak of the step that ends here; the next one begins with what is held."""
        peak, self.peak = self.peak, self.now
        return peak


class Launches:
    """Writes operators that the native library does not see to its event list, on the current stream."""

    def __init__(self, native: Any) -> None:
        self.native = native
        self._rows: dict[str, int] = {}

    def row(self, described: dict[str, Any]) -> int:
        """In the table of operators: the same for what is described alike."""
        text = json.dumps(described)
        if text not in self._rows:
            self._rows[text] = int(self.native.wt_add_operator(text.encode()))
        return self._rows[text]

    def issue(self, row: int, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> None:
        """An operator of that row has run on these."""
        blocks = [self.native.wt_storage_block(t.untyped_storage()._cdata) for t in (*reads, *writes)]
        flow = self.native.wt_flow((ctypes.c_int64 * len(blocks))(*blocks), len(reads), len(writes))
        self.native.wt_event(int(EventKind.OP), self.native.wt_stream(), row, flow)

    def record(
        self, name: str, inputs: Sequence[Any], outputs: Iterable[torch.Tensor],
        changed: Iterable[torch.Tensor] = (),
    ) -> None:  # fmt: skip
        """One launch of a kernel of the script's own on ``inputs``, its arguments in order; it may write
        ``changed`` of them."""
        runs, arguments = list(outputs), list(inputs)
        row = self.row({"n": name, "i": plain(arguments), "o": plain(runs), "r": 0})
        self.issue(row, list(tensors_of(arguments)), [*runs, *changed])

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """What the host knew of the values of these is overwritten by something that is not run."""
        for tensor in tensors:
            if tensor.is_cuda:
                self.native.wt_forget(tensor.untyped_storage()._cdata)


class OperatorMode(StorageMode):
    """Writes operators and storages to the native event list."""

    def __init__(self, native: Any) -> None:
        self.native = native
        self.launches = Launches(native)
        self.rows: dict[Any, int] = {}
        self.communicated = array.array("q")
        self.unwaited: list[int] = []
        self.region = 0
        self.native_region = native.wt_region
        super().__init__(Storages(self._alloc, self._free))
        self.storages.watch()

    def enter_region(self, region: int) -> None:
        """What follows is of this ``torch.compile`` region, 0 for none."""
        self.region = region
        self.native_region(region)

    def _alloc(self, size: int) -> int:
        number = int(self.native.wt_new_block())
        self.native.wt_event(int(EventKind.ALLOC), 0, number, size)
        return number

    def _free(self, number: int) -> None:
        self.native.wt_event(int(EventKind.FREE), 0, number, 0)

    def before(self, func: Any) -> None:
        # DDP waits for its reductions through futures, of which nobody is told, after autograd's last node.
        if self.unwaited and torch._C._current_autograd_node() is None:
            for handle in self.unwaited:
                self.native.wt_event(int(EventKind.SYNC), 0, -3, handle)
            self.unwaited.clear()

    def after(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        super().after(func, args, kwargs, out)
        if func.namespace in COMMUNICATION:
            self._communicated(func, args, kwargs)
            return
        if any(tensor.device.type != "cpu" for tensor in tensors_of((args, out))):
            return  # shapes that PyTorch works out on its meta device (DTensor does) are no work
        self.native.wt_note_node()
        view = func.is_view
        # As on a device: one row for each view operator, whatever it views.
        key = func if view else (func, _key(args), _key(kwargs), _key(out), self.region)
        if key not in self.rows:
            self.rows[key] = self.launches.row(describe(func, args, kwargs, out, view, self.region))
        reads = [] if view else list(tensors_of((args, kwargs)))
        writes = [] if view else list(tensors_of(out))
        self.launches.issue(self.rows[key], reads, writes)

    def _communicated(self, func: Any, args: Any, kwargs: Any) -> None:
        for tensor in tensors_of((args, kwargs)):
            number = self.storages.number(tensor.untyped_storage()._cdata)
            if number >= 0:
                self.communicated.append(number)
        if func.namespace == "c10d" and torch._C._current_autograd_node() is not None:
            handle = self._last_handle()
            if handle is not None:
                self.unwaited.append(handle)

    def _last_handle(self) -> int | None:
        """The handle of the collective that was recorded just now, unless the host waits for it already."""
        count = self.native.wt_event_count()
        for back in range(1, min(count, 4) + 1):
            address = self.native.wt_events() + (count - back) * EVENT.itemsize
            event = np.frombuffer(ctypes.string_at(address, EVENT.itemsize), EVENT)[0]
            if event["kind"] == EventKind.SYNC:
                return None
            if event["kind"] == EventKind.COLLECTIVE:
                return int(event["value"])
        return None


def describe(
    func: Any, args: Any, kwargs: Any, out: Any, view: bool = False, region: int = 0
) -> dict[str, Any]:
    """A call as a row of the operator table: arguments in schema order, and as results what is written where
    nothing is returned.

    The value of a number that meets tensors (a learning rate, an index that the data loader counts up)
    changes no shape and no cost, so it is written as one of its type, except for an exponent.
    """
    schema = func._schema
    with_tensors = not schema.name.startswith("aten::pow") and next(tensors_of(args), None) is not None
    inputs: list[Any] = []
    values: list[Any] = []
    for position, argument in enumerate(() if view else schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and with_tensors and str(argument.type) in ("number", "Tensor"):
            value = type(value)(1)
        values.append(value)
        inputs.append(plain(value))
    results = [plain(tensor) for tensor in tensors_of(out)]
    if not results:
        written = (a.alias_info is not None and a.alias_info.is_write for a in schema.arguments)
        results = [
            plain(tensor)
            for value, is_written in zip(values, written, strict=False) if is_written
            for tensor in tensors_of(value)
        ]  # fmt: skip
    return {"n": str(func), "i": inputs, "o": results, "r": 0 if view else region}


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in a structure of lists, tuples and dictionaries."""
    if isinstance(value, torch.Tensor):
        return iter((value,))
    return (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


def plain(value: Any) -> Any:
    """A value among the arguments or results of an operator, as JSON."""
    if isinstance(value, torch.Tensor):
        fields = {
            "t": str(value.dtype).removeprefix("torch."), "s": list(value.shape), "d": list(value.stride()),
        }  # fmt: skip
        return {**fields, "c": 1} if value.device.type == "cpu" else fields
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, torch.dtype):
        return 0  # PyTorch's own number, which Python does not see; the output tells the dtype
    if isinstance(value, float) and not np.isfinite(value):
        return str(value)
    return value if isinstance(value, int | float | bool | str) else None


def _key(value: Any) -> Any:
    """What tells calls apart, cheaply."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.stride()
    if isinstance(value, list | tuple):
        return tuple(_key(item) for item in value)
    if isinstance(value, dict):
        return tuple((name, _key(item)) for name, item in value.items())
    return (type(value), value) if isinstance(value, int | float | bool | str) else str(value)
