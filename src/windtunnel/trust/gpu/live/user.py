"""The user's side: a claim on a device through its broker, arrays there, and the paths on which they go.

    with Host(folder, Path("programs.py")) as host, host.claim("pipelined") as gpu:
        x, y = gpu.array(a), gpu.empty(a.shape, a.dtype)
        gpu.run("softmax", [x], [y])
        b = gpu.read(y)

``double``: the broker opens what was sealed for it and seals it for the device. ``single``: the device opens
what the user sealed. ``pipelined``: as single, and each chunk as soon as it is there. ``plain``: nothing is
sealed.

On each failure: what the device does not allow, a chunk that was changed on its way too, raises `Denied`; a
broker or device that is gone ConnectionError, after which nothing goes on in this claim.
"""

from __future__ import annotations

import json
import math
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from windtunnel.base.errors import HostError, UserError
from windtunnel.store.eventlog import NAME
from windtunnel.trust.attest import AllowList, AttestedDevice, Manufacturer, Verifier, measure
from windtunnel.trust.gpu.live.link import (
    CHUNK,
    PEAL,
    TAG,
    WINDOW,
    Bells,
    Fields,
    GpuLink,
    Party,
    Seal,
    SharedWindow,
    chunks,
)

PATHS = ("plain", "double", "single", "pipelined")


@dataclass(frozen=True)
class Buffer:
    """An array in the device's memory, at ``offset`` bytes. ``dtype``: NumPy's and PyTorch's name of it."""

    offset: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class Gpu:
    """A device that is claimed, for one thread at a time; see `claim`. ``epoch``: of the claim."""

    def __init__(self, link: GpuLink, facts: Fields, path: str) -> None:
        party, self._shared = Party(), SharedWindow(facts["shared"])
        self._bells = Bells(self._shared.path, user=True) if path == "pipelined" else None
        try:
            answer = link.call("claim", public=party.public)
        except BaseException:
            self.close()
            raise
        key, peer = party.times(answer["both"]), "broker" if path == "double" else "device"
        self.epoch: int = answer["epoch"]
        self._chunks = self.epoch << 32  # bells of an older claim may still be in the pipes
        self.path, self._link, self._page, self._next = path, link, facts["page"], 0
        self._puts, self._takes = Seal(key, f"user>{peer}"), Seal(key, f"{peer}>user")

    def call(self, do: str, **fields: Any) -> Fields:
        """A request in this claim; `link.Link.receive` says what it raises."""
        return self._link.call(do, epoch=self.epoch, **fields)

    def empty(self, shape: Sequence[int], dtype: DTypeLike) -> Buffer:
        """Room for an array, on pages of its own: zeros. `Denied` where the device has none left."""
        buffer = Buffer(self._next * self._page, tuple(shape), np.dtype(dtype).name)
        end = self._next + max(1, -(-buffer.nbytes // self._page))
        self.call("register", pages=(self._next, end))
        self._next = end
        return buffer

    def array(self, content: NDArray[Any]) -> Buffer:
        """`empty` and `write`."""
        buffer = self.empty(content.shape, content.dtype)
        self.write(buffer, content)
        return buffer

    def write(self, buffer: Buffer, content: NDArray[Any]) -> None:
        """All of a buffer becomes ``content``, of the same shape and dtype."""
        if (content.shape, content.dtype.name) != (buffer.shape, buffer.dtype):
            wrong = f"{content.shape} {content.dtype.name}"
            raise UserError(f"`content` is {wrong}, accepted is {buffer.shape} {buffer.dtype}")
        data = np.ascontiguousarray(content).reshape(-1).view(np.uint8).data

        def put(number: int, at: int, count: int) -> None:
            part, place = data[at - buffer.offset :][:count], self._place(number, count)
            if self.path == "plain":
                place[:] = part
            else:
                self._puts.put(part, f"{self.epoch}:{at}:{count}", place)

        self._move(buffer, put, into=True)

    def read(self, buffer: Buffer) -> NDArray[Any]:
        """What a buffer holds."""
        content = np.empty(buffer.nbytes, np.uint8)

        def take(number: int, at: int, count: int) -> None:
            part, place = content.data[at - buffer.offset :][:count], self._place(number, count)
            if self.path == "plain":
                part[:] = place
            else:
                self._takes.take(place, f"{self.epoch}:{at}:{count}", part)

        self._move(buffer, take, into=False)
        return content.view(buffer.dtype).reshape(buffer.shape)

    def run(self, program: str, reads: Sequence[Buffer], writes: Sequence[Buffer], **numbers: float) -> None:
        """Call ``program(*reads, *writes, **numbers)``, a function of the device's file, on tensors; what it
        computes it leaves in those that it writes. UserError where there is none, or it fails."""
        kinds = ["read"] * len(reads) + ["write"] * len(writes)
        tensors = [(k, b.offset, b.dtype, b.shape) for k, b in zip(kinds, [*reads, *writes], strict=True)]
        self.call("run", program=program, tensors=tensors, numbers=numbers)

    def _place(self, number: int, count: int) -> memoryview:
        return self._shared.place(number, count + TAG * (self.path != "plain"))

    def _move(self, buffer: Buffer, each: Callable[[int, int, int], None], *, into: bool) -> None:
        """``each`` (place, offset, length) of every chunk, before the device's copy or after it; where there
        are bells, beside it, chunk by chunk."""
        end = buffer.offset + buffer.nbytes
        bells = self._bells if buffer.nbytes > PEAL * CHUNK else None
        path = "single" if self.path == "pipelined" and bells is None else self.path
        for offset in range(buffer.offset, end, WINDOW * CHUNK):
            length, first = min(WINDOW * CHUNK, end - offset), self._chunks
            parts = [*chunks(offset, length)]
            self._chunks += len(parts)
            for part in parts if into and bells is None else ():
                each(*part)
            where = {"offset": offset, "length": length, "bell": first}
            self._link.send("copy", epoch=self.epoch, path=path, into=into, **where)
            for number, part in enumerate(parts if bells is not None else (), first):
                assert bells is not None
                while not into and not bells.there(number):
                    if self._link.answered(bells.hears) and not bells.there(number):
                        self._link.receive()  # it is refused, or over
                each(*part)
                if into:
                    bells.ring(number, part == parts[-1])
            self._link.receive()
            for part in parts if not into and bells is None else ():
                each(*part)

    def close(self) -> None:
        if self._bells is not None:
            self._bells.close()


@contextmanager
def claim(broker: str, allow: AllowList, me: AttestedDevice, path: str = "pipelined") -> Iterator[Gpu]:
    """The device behind the broker at that address, scrubbed and released at the end. ``allow``: what the
    broker must prove; ``me``: what proves itself to it; ``path``: of `PATHS`.

    Raises:
        UserError: there is no such path.
        Refused: the broker is not accepted.
        Denied: somebody else has the device.
        ConnectionError: no broker answers there, or it does not accept the user.
    """
    if path not in PATHS:
        raise UserError(f"`path`: {path!r} is unknown; accepted are {', '.join(PATHS)}")
    link = GpuLink(broker, Verifier(allow))
    try:
        m2 = me.answer(bytes.fromhex(link.call("challenge")["m1"]))
        m4 = me.accept(bytes.fromhex(link.call("prove", m2=m2.hex())["m3"]))
        gpu = Gpu(link, link.call("proven", m4=m4.hex()), path)
        with closing(gpu):
            yield gpu
            gpu.call("scrub")
            gpu.call("release")
    finally:
        link.close()


class GpuHost:
    """A device of ``pages`` (64 KiB each) that runs the functions in ``programs``, and its broker, with keys
    of a manufacturer made for them. ``folder``: of sockets and the log; ``shared``: of the memory through
    which data pass, on /dev/shm as a rule. As a context it ends both.

    Raises:
        UserError: there is no such file.
        HostError: one of both does not start.
    """

    def __init__(
        self, folder: Path, programs: Path, *, pages: int = 1024, shared: Path | None = None
    ) -> None:  # fmt: skip
        if not programs.is_file():
            raise UserError(f"`programs`: {programs} is no file; accepted is one of functions on tensors")
        maker, program = Manufacturer(), b"a user of windtunnel.trust.gpu"

        def allow(**measured: bytes) -> AllowList:
            return AllowList((maker.root,), {name: (measure(code),) for name, code in measured.items()})

        broker, device = (
            Path(__file__).with_name(f"{name}.py").read_bytes() for name in ("broker", "device")
        )
        self.me, self.allow = (
            partial(AttestedDevice.boot, maker.fuse(), {"user": program}),
            allow(broker=broker),
        )
        folder.mkdir(parents=True, exist_ok=True)
        self._shared = TemporaryDirectory(prefix="windtunnel-gpu-", dir=shared or folder)
        self.spec: dict[str, Fields] = {
            "device": {
                "address": f"{folder}/device.sock", "programs": programs, "pages": pages,
                "log": folder / NAME, "fuse": maker.fuse(),
            },
            "broker": {
                "address": f"{folder}/broker.sock", "device": f"{folder}/device.sock",
                "folder": Path(self._shared.name), "fuse": maker.fuse(), "users": allow(user=program),
                "devices": allow(device=device, programs=programs.read_bytes()),
            },
        }  # fmt: skip
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.cold_reset()

    def claim(self, path: str = "pipelined") -> AbstractContextManager[Gpu]:
        """`claim` by this process."""
        return claim(self.spec["broker"]["address"], self.allow, self.me(), path)

    def cold_reset(self) -> None:
        """The device loses power and comes back, empty, and a broker is bound to it."""
        self.kill()
        try:
            self.start("device")
            self.start("broker")
        except BaseException:
            self.kill()
            raise

    def start(self, which: str) -> None:
        """The device or the broker, once it answers; HostError where it does not."""
        command = [sys.executable, "-m", f"{__package__}.{which}"]
        Path(self.spec[which]["address"]).unlink(missing_ok=True)
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._processes[which] = process
        assert process.stdin is not None and process.stdout is not None
        with suppress(BrokenPipeError):
            pickle.dump(self.spec[which], process.stdin)
            process.stdin.flush()
        answer = json.loads(process.stdout.readline() or '{"failed": "see what it wrote"}')
        if "failed" in answer:
            self.kill(which)
            raise HostError(f"the {which} did not start: {answer['failed']}")

    def kill(self, *which: str) -> None:
        """Both, or one of them: gone, with all that was in its memory."""
        for name in which or tuple(self._processes):
            with self._processes.pop(name) as process:
                process.kill()

    def __enter__(self) -> GpuHost:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._shared.cleanup()
