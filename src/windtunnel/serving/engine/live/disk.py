"""Tensors of a prefix cache in files: the lower tier, on a disk or, below a tmpfs, in host memory.

A thread of its own writes them, so that no step waits for it; what is not written yet is read from memory.
Each file is held, when it is read, against a sum that was taken before it was written and that no file has:
what was torn, exchanged or forged meanwhile is not served.

The files are those of one worker, in a folder of its own below the directory. It is removed when the worker
ends; that of a worker that was killed, by the next one that begins there.
"""

from __future__ import annotations

import atexit
import hashlib
import shutil
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from safetensors import torch as safetensors
from torch import Tensor, uint8, zeros

from windtunnel.base import atomic
from windtunnel.store import alive

PREFIX = "windtunnel-prefixes-"
BEHIND = 1 << 28
"""Bytes that may wait to be written; what comes beyond is not taken."""
PROBE = 1 << 22
"""Bytes that are written and read to see how fast that is."""
Key = tuple[int, str]


@dataclass(eq=False)
class _File:
    """``sum`` is known, and ``tensors`` are forgotten, once it is written."""

    path: Path
    tensors: Mapping[str, Tensor] | None
    sum: bytes = b""


class Disk:
    """Below ``folder``. ``latency`` (seconds) and ``bandwidth`` (bytes/s) are those of reading a file that
    was just written. For one thread.

    Raises:
        OSError: nothing can be kept there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for other in folder.glob(f"{PREFIX}*"):
            if alive.is_gone({}, other):
                shutil.rmtree(other, ignore_errors=True)
        self._own = Path(tempfile.mkdtemp(prefix=PREFIX, dir=folder))
        atexit.register(self.close)
        self._writer = ThreadPoolExecutor(1)
        alive.hold(self._own)
        self.latency, seconds = self._tried(1), self._tried(PROBE)
        self.bandwidth = PROBE / max(seconds - self.latency, 1e-6)
        self._files: dict[Key, _File] = {}
        self._written: dict[Future[None], tuple[Key, _File, int]] = {}  # that is not known to be over
        self._count = 0

    def put(self, key: Key, tensors: Mapping[str, Tensor]) -> bool:
        """Keep ``tensors``, which nobody changes any more; False if too much waits to be written."""
        size = sum(each.nbytes for each in tensors.values())
        waiting = [size for one, (_, _, size) in self._written.items() if not one.done()]
        if waiting and sum(waiting) + size > BEHIND:
            return False
        self._count += 1
        self._files[key] = file = _File(self._own / str(self._count), tensors)
        self._written[self._writer.submit(_write, file)] = key, file, size
        return True

    def take(self, key: Key) -> Mapping[str, Tensor]:
        """What was put, which is not kept any longer.

        Raises:
            OSError: it cannot be read.
            ValueError: the file is not the one that was written.
        """
        tensors = (file := self._files[key]).tensors
        try:
            return _read(file) if tensors is None else tensors
        finally:
            self.drop(key)

    def drop(self, key: Key) -> None:
        """It is needed no longer."""
        if (file := self._files.pop(key, None)) is not None:
            file.tensors = None
            self._writer.submit(file.path.unlink, missing_ok=True)  # after it is written

    def __contains__(self, key: Key) -> bool:
        return key in self._files

    def failed(self) -> list[tuple[Key, str]]:
        """What could not be written since this was asked last, which is not kept, and why."""
        failed = []
        for one in [one for one in self._written if one.done()]:
            key, file, _ = self._written.pop(one)
            if (error := one.exception()) is not None and self._files.get(key) is file:
                del self._files[key]
                failed.append((key, getattr(error, "strerror", None) or str(error)))
        return failed

    def close(self) -> None:
        """Removes all."""
        self._writer.shutdown(cancel_futures=True)
        shutil.rmtree(self._own, ignore_errors=True)

    def _tried(self, size: int) -> float:
        """Seconds to read a file of ``size`` bytes, which is removed again."""
        _write(file := _File(self._own / "probe", {"probe": zeros(size, dtype=uint8)}))
        began = time.perf_counter()
        _read(file)
        spent = time.perf_counter() - began
        file.path.unlink()
        return spent


def _write(file: _File) -> None:
    if (tensors := file.tensors) is None:
        return  # it was dropped meanwhile
    data = safetensors.save({name: each.contiguous() for name, each in tensors.items()})
    file.sum = hashlib.blake2b(data).digest()
    atomic.replace(file.path, data)
    file.tensors = None


def _read(file: _File) -> dict[str, Tensor]:
    data = file.path.read_bytes()
    if hashlib.blake2b(data).digest() != file.sum:
        raise ValueError(f"{file.path} is not as it was written")
    found: dict[str, Tensor] = safetensors.load(data)
    return found
