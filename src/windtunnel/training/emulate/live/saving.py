"""What a script saves goes to the host, as it would, and no further.

The weights of a device that is not there have no values, and a file of zeros must never take the place of a
real checkpoint: ``torch.save``, ``safetensors`` and ``torch.distributed.checkpoint`` copy what is on the
device to the host and leave the file as it is. So they do with a host tensor that was copied from the device
before; the native library knows those. What the script then moves and removes is answered by `Rotation`. What
is read back (``torch.load``, ``torch.distributed.checkpoint.load``) is read for real.
"""

from __future__ import annotations

import builtins
import concurrent.futures
import contextlib
import ctypes
import functools
import io
import os
import pickle
import shutil
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.distributed.checkpoint as checkpoint
from torch.utils._pytree import tree_leaves

from windtunnel.base.importing import after_import
from windtunnel.training.emulate.live.names import refuse
from windtunnel.training.emulate.live.patches import replaces

Note = Callable[[str], None]
LIGHTNING = ("lightning.fabric.utilities.cloud_io", "lightning_fabric.utilities.cloud_io")


def install(native: ctypes.CDLL, note: Note, began: float) -> Rotation:
    """Replace the functions that write checkpoints. ``note`` takes one sentence for the report; ``began``:
    when the emulation did, in seconds since the epoch. Call once, and `Rotation.leave` at the rank's end."""
    rotation = Rotation(note, began)
    rotation.install()

    def instead(of: str, tensors: list[torch.Tensor], where: Any, more: str = "") -> None:
        copy_to_host(tensors)
        rotation.saved(where)
        note(f"{of}: device tensors are copied to the host and not written{more}")

    @replaces(torch)
    def save(original: Any, obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        tensors = unknown(native, obj)
        if not tensors and not rotation.keeps(f):
            original(obj, f, *args, **kwargs)
            return
        remark = "" if _is_path(f) else "; a file that the script opened for them is empty"
        instead("torch.save", tensors, f, remark)

    @replaces(checkpoint.state_dict_saver, "save", "save_state_dict", everywhere=True)
    def save_sharded(_: Any, state_dict: Any, *args: Any, **kwargs: Any) -> None:
        where = kwargs.get("checkpoint_id", args[0] if args else None)
        states = checkpoint.state_dict_saver._stateful_to_state_dict(state_dict)
        instead("torch.distributed.checkpoint.save", unknown(native, states), where)

    @replaces(checkpoint.state_dict_saver, everywhere=True)
    def async_save(_: Any, state_dict: Any, *args: Any, **kwargs: Any) -> concurrent.futures.Future[None]:
        save_sharded(None, state_dict, *args, **kwargs)
        done: concurrent.futures.Future[None] = concurrent.futures.Future()
        done.set_result(None)
        return done

    _replace_safetensors(native, rotation, instead)
    for name in LIGHTNING:
        after_import(name, functools.partial(_let_lightning_save, native))
    return rotation


def _replace_safetensors(
    native: ctypes.CDLL, rotation: Rotation, instead: Callable[[str, list[torch.Tensor], Any], None]
) -> None:
    try:
        import safetensors.torch as library
    except ImportError:
        return
    why = "its bytes would be zeros in the place of the weights; use safetensors.torch.save_file"

    @replaces(library)
    def save_file(
        write: Any, tensors: dict[str, torch.Tensor], filename: Any, *args: Any, **kwargs: Any
    ) -> None:
        missing = unknown(native, tensors)
        if not missing and not rotation.keeps(filename):
            write(tensors, filename, *args, **kwargs)
            return
        instead("safetensors.torch.save_file", missing, filename)

    @replaces(library)
    def save(serialize: Any, tensors: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> bytes:
        if unknown(native, tensors):
            refuse("safetensors.torch.save", why)()
        return bytes(serialize(tensors, *args, **kwargs))


def _let_lightning_save(native: ctypes.CDLL, module: ModuleType) -> None:
    """Lightning saves into a buffer and writes that to the file: nothing, where nothing was saved. Here what
    has no values goes by ``torch.save`` to the file itself, which is left as it is."""

    @replaces(module)
    def _atomic_save(original: Any, checkpoint: Any, filepath: Any) -> None:
        write = torch.save if unknown(native, checkpoint) else original
        write(checkpoint, filepath)


class _TensorFinder(pickle.Pickler):
    """Goes through an object as ``torch.save`` does, and gathers the tensors in it."""

    def __init__(self) -> None:
        super().__init__(_Nowhere(), protocol=2)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, obj: Any) -> str | None:
        if isinstance(obj, torch.Tensor):
            self.tensors.append(obj)
            return "tensor"
        return "storage" if isinstance(obj, torch.UntypedStorage | torch.TypedStorage) else None


class _Nowhere(io.RawIOBase):
    def write(self, data: Any) -> int:
        return len(data)


def unknown(native: ctypes.CDLL, value: Any) -> list[torch.Tensor]:
    """The local tensors in an object whose values nobody knows: those on the device, and those on the host
    that were copied from it."""
    finder = _TensorFinder()
    try:
        finder.dump(value)
    except Exception:
        finder.tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    local = [getattr(tensor, "_local_tensor", tensor) for tensor in finder.tensors]
    return [item for item in local if item.is_cuda or _copied(native, item)]


def _copied(native: ctypes.CDLL, tensor: torch.Tensor) -> bool:
    has_storage = tensor.device.type == "cpu" and tensor.layout == torch.strided
    return has_storage and bool(native.wt_unknown(tensor.untyped_storage()._cdata))


def copy_to_host(tensors: list[torch.Tensor]) -> None:
    """Copy those that are on the device to the host, one after another, as saving does."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.detach().cpu()


SUFFIXES = (".bin", ".ckpt", ".distcp", ".pt", ".pth", ".safetensors", ".tar")
"""What the names of files of weights end with."""


class Rotation:
    """What a script does with checkpoints beside saving them: it changes none that was there before, and is
    not stopped by one that was not written.

    A script's rotation must not remove the real ones, nor may what is not real take their place, and later
    ranks must find what earlier ones found. What was saved and not written is no file: removing, renaming or
    copying it is answered, so that rotation, a copy of the best, and saving by way of a temporary name come
    through. Folders that were made for such files alone are removed with the rank: a folder for each
    checkpoint says to a later rank, and to the script when it is run for real, that there is one. Python's
    own functions are answered, not other programs that a script starts.

    ``began``: seconds since the epoch at which the emulation began, before any rank. ``note`` takes a
    sentence for the report."""

    def __init__(self, note: Callable[[str], None], began: float) -> None:
        self.note, self.began = note, began
        self._unwritten: set[str] = set()
        self._places: set[str] = set()  # where anything was saved and not written
        self._folders: list[str] = []  # that the script made

    def saved(self, path: Any) -> None:
        """Note that a script has saved there, and nothing was written. What is no path is left out."""
        if _is_path(path):
            self._unwritten.add(_name(path))
            self._places.add(_name(path))

    def keeps(self, path: Any) -> bool:
        """Whether a checkpoint is there, in a file or folder, that was there before the emulation."""
        if not _is_path(path) or not os.path.lexists(path):
            return False
        inside = [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]
        files = [entry for entry in [os.fspath(path), *inside] if str(entry).endswith(SUFFIXES)]
        real = any(os.path.isfile(file) and os.stat(file).st_ctime < self.began for file in files)
        if real:
            self.note(
                "a checkpoint was there before the emulation: the script neither removes, renames nor"
                " overwrites it"
            )
        return real

    def leave(self) -> None:
        """The rank is over: remove the folders that were made for what was not written."""
        for folder in reversed(self._folders):
            if any(place.startswith(folder + os.sep) for place in self._places):
                with contextlib.suppress(OSError):
                    os.rmdir(folder)

    def install(self) -> None:
        """Replace the functions that remove, rename, copy and overwrite. Call once."""

        @replaces(shutil, "rmtree")
        @replaces(os, "remove", "unlink", "rmdir")
        def remove(original: Any, path: Any, *args: Any, **options: Any) -> None:
            named = _is_path(path) and options.get("dir_fd") is None
            if not named or not (self.keeps(path) or self._missing(path)):
                original(path, *args, **options)
            if named:
                self._unwritten.discard(_name(path))

        @replaces(os, "rename", "replace")
        def rename(original: Any, src: Any, dst: Any, **options: Any) -> None:
            if any(place is not None for place in options.values()):
                original(src, dst, **options)
            elif self._missing(src) or self.keeps(src):
                self._unwritten.discard(_name(src))
                self.saved(dst)
            elif not self.keeps(dst):
                original(src, dst, **options)

        @replaces(shutil, "copy", "copy2", "copyfile")
        @replaces(os, "link", "symlink")
        def copy(original: Any, src: Any, dst: Any, *args: Any, **options: Any) -> Any:
            if not _is_path(src) or not _is_path(dst):
                return original(src, dst, *args, **options)
            target, source = dst, src
            if original.__module__ == "shutil" and os.path.isdir(dst):
                target = os.path.join(dst, os.path.basename(src))
            elif original.__name__ == "symlink":
                source = os.path.join(os.path.dirname(dst), src)
            if _name(source) in self._unwritten:
                self.saved(target)
            elif not self.keeps(target):
                return original(src, dst, *args, **options)
            return target

        @replaces(builtins, "open")
        @replaces(io, "open")
        def open_file(original: Any, file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            overwrites = isinstance(mode, str) and "w" in mode and "+" not in mode  # which maps a file
            if overwrites and _is_path(file) and str(file).endswith(SUFFIXES):
                file = os.devnull if self.keeps(file) else file
            return original(file, mode, *args, **options)

        @replaces(os)
        def mkdir(original: Any, path: Any, *args: Any, **options: Any) -> None:
            original(path, *args, **options)
            if options.get("dir_fd") is None:
                self._folders.append(_name(path))

    def _missing(self, path: Any) -> bool:
        """Whether it was saved, and not written."""
        return _is_path(path) and not os.path.lexists(path) and _name(path) in self._unwritten


def _is_path(value: Any) -> bool:
    return isinstance(value, str | os.PathLike)


def _name(path: str | os.PathLike[str]) -> str:
    return os.path.abspath(os.fspath(path))
