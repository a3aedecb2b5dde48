"""The device: a process that stands for what HIX trusts of a GPU, its memory and the checks before it.

It has the ownership table, decides each request by `policy`, and only then touches a byte. ``programs`` is a
file of Python functions on tensors, which the device measures and runs: its digest is part of what it proves.
PyTorch is what computes, on CUDA where there is one, else on the CPU.

On each failure: a chunk that was changed is refused, and what came before it stays written (dirty) until it
is scrubbed. A program that raises is told to its user. A killed device has lost its memory: the cold reset.
"""

from __future__ import annotations

import math
import pickle
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch

from windtunnel.base.errors import UserError
from windtunnel.store.eventlog import EventLog
from windtunnel.trust.attest import AttestedDevice
from windtunnel.trust.gpu.live.link import (
    TAG,
    Bells,
    Denied,
    Fields,
    Party,
    Seal,
    SharedWindow,
    chunks,
    serve,
)
from windtunnel.trust.gpu.policy import Kind, Observation, Range, Request, Table, decide

PAGE = 1 << 16
"""Bytes of a page."""
WAYS = ("user>device", "device>user", "broker>device", "device>broker")


class GpuDevice:
    """``pages`` of memory, and the functions in the text ``programs``."""

    def __init__(self, pages: int, programs: str, log: EventLog) -> None:
        where = "cuda" if torch.cuda.is_available() else "cpu"
        self._memory = torch.zeros(pages * PAGE, dtype=torch.uint8, device=where)
        self._programs: dict[str, Any] = {}
        exec(compile(programs, "programs", "exec"), self._programs)
        self._table, self._log, self._turn = Table(pages), log, threading.Lock()
        self._broker = ""  # whose request is done
        self._seals: dict[str, Seal] = {}
        self._shared: dict[str, SharedWindow] = {}
        self._bells: Bells | None = None

    def handle(self, broker: str, request: Fields) -> Fields:
        """A request of the broker, for the user ``who``; the end of a broker changes nothing here."""
        do = request.pop("do")
        method: dict[str, Callable[..., Fields]] = {"claim": self.claim, "copy": self.copy, "run": self.run}
        with self._turn:
            self._broker = broker
            if do == "ended":
                return {}
            if do in method:
                return method[do](**request)
            if do not in ("bind", "register", "scrub", "release", "reset"):
                raise UserError(f"request {do!r} is unknown")
            self._do(do, request.get("who", ""), request.get("epoch", 0), tuple(request.get("pages", (0, 0))))
            if do == "bind":
                self._shared = {peer: SharedWindow(path) for peer, path in request["shared"].items()}
            return {"page": PAGE}

    def claim(self, who: str, public: str, both: str) -> Fields:
        """``public``: of the user; ``both``: the broker's secret times that."""
        self._do("claim", who)
        if self._bells is not None:
            self._bells.close()
            self._bells = None
        own = Party()
        key = own.times(both)
        self._seals = {way: Seal(key, way) for way in WAYS}
        return {"epoch": self._table.epoch, "public": own.public, "third": own.times(public)}

    def copy(
        self, who: str, epoch: int, path: str, into: bool, offset: int, length: int, bell: int
    ) -> Fields:  # fmt: skip
        """Chunks between shared memory and ``length`` bytes of memory at ``offset``. ``bell``: the number of
        the first, where the path is pipelined."""
        view = self._view("write" if into else "read", who, epoch, offset, length)
        peer, shared = (
            ("broker", self._shared["device"]) if path == "double" else ("user", self._shared["user"])
        )
        seal = None if path == "plain" else self._seals[f"{peer}>device" if into else f"device>{peer}"]
        if path == "pipelined" and self._bells is None:
            self._bells = Bells(shared.path, user=False)
        bells = self._bells if path == "pipelined" else None
        for number, at, count in chunks(offset, length):
            part, about = view[at - offset :][:count], f"{epoch}:{at}:{count}"
            room = part if part.is_cpu else part.cpu()
            plain, data = room.numpy().data, shared.place(number, count + TAG * (seal is not None))
            if bells is not None and into and not bells.there(bell + number):
                raise Denied("the user has ended", "ended")
            if seal is None:
                source, target = (data, plain) if into else (plain, data)
                target[:] = source
            elif into:
                seal.take(data, about, plain)
            else:
                seal.put(plain, about, data)
            if into:
                part.copy_(room)
            elif bells is not None:
                bells.ring(bell + number, at + count == offset + length)
        return {}

    def run(self, who: str, epoch: int, program: str, tensors: list[Any], numbers: Fields) -> Fields:
        """``tensors``: (read or write, offset, dtype, shape) of each argument of the function."""
        function = self._programs.get(program)
        if not callable(function):
            raise UserError(
                f"program {program!r} is unknown; accepted are the functions of the device's file"
            )
        arguments = []
        for kind, offset, name, shape in tensors:
            dtype: torch.dtype = getattr(torch, name)
            view = self._view(kind, who, epoch, offset, math.prod(shape) * dtype.itemsize)
            arguments.append(view.view(dtype).reshape(shape))
        try:
            function(*arguments, **numbers)
        except Exception as error:  # whatever the user's program does, it is told to him
            raise UserError(f"program {program!r} failed: {type(error).__name__}: {error}") from None
        return {}

    def _view(self, kind: Kind, who: str, epoch: int, offset: int, length: int) -> torch.Tensor:
        """Those bytes of memory, if the owner may have them."""
        return self._do(kind, who, epoch, (offset // PAGE, -(-(offset + length) // PAGE)), offset, length)

    def _do(
        self, kind: Kind, who: str, epoch: int = 0, pages: Range = (0, 0), offset: int = 0, length: int = 0
    ) -> torch.Tensor:  # fmt: skip
        """Decide, do that, and log both: the bytes of memory that were wanted.

        Raises:
            Denied: it is refused.
        """
        observation = Observation(self._table, Request(kind, self._broker, who, epoch, pages))
        decision = decide(observation)
        self._log.decision("trust.gpu", "exclusive", observation, decision)
        if decision.refusal:
            raise Denied(decision.reason, decision.refusal)
        scrubbed = [self._memory[first * PAGE : end * PAGE] for first, end in decision.scrub]
        for part in scrubbed:
            part.zero_()
        self._table = decision.table
        if not self._table.owner:
            self._seals = {}
        view = self._memory[offset : offset + length]
        self._log.append(
            "effect", request=kind, owner=self._table.owner, keys=len(self._seals),
            bytes=[view.storage_offset(), view.storage_offset() + view.numel()],
            scrubbed=[[part.storage_offset(), part.storage_offset() + part.numel()] for part in scrubbed],
            left=sum(int(torch.count_nonzero(part)) for part in scrubbed),
        )  # fmt: skip
        return view


def main() -> None:
    """One line of JSON on standard input says what to be, one on standard output that it is there."""
    spec = pickle.load(sys.stdin.buffer)
    torch.set_num_threads(1)
    programs = spec["programs"].read_bytes()
    layers = {"device": Path(__file__).read_bytes()}
    boot = partial(AttestedDevice.boot, spec["fuse"], layers, {"programs": programs})
    with closing(EventLog(spec["log"])) as log:
        gpu = GpuDevice(spec["pages"], programs.decode(), log)
        serve(spec["address"], boot, gpu.handle)


if __name__ == "__main__":
    main()
