"""The process of a host that clients talk to: it writes their operations to the log, and answers what they
read.

    python -m windtunnel.data.files.live.server SPEC

It runs on the cores of the applications, and does little: an operation is checked against the tree, framed,
put into the ring, applied to the tree. The pipeline (`nic`) takes it from there; an `fsync` is asked of it.
What is read comes from the public area, with what the log has beyond it laid over.

It asks the pipeline all the time how things are. When this host has become the primary it makes the tree
anew, from the newest checkpoint and the log; when the pipeline says nothing, or another host leads, nobody is
answered here.
"""

from __future__ import annotations

import asyncio
import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

from windtunnel.base import rpc
from windtunnel.base.keys import Keys
from windtunnel.base.remote import Blocking
from windtunnel.data.files.live.area import FilesState
from windtunnel.data.files.live.process import run_process
from windtunnel.data.files.log import LogFrame, LogRing, frame
from windtunnel.data.files.model import (
    ERRORS,
    WRITE_MOST,
    FilesHostSpec,
    NotPrimary,
    Operation,
    OperationResult,
    Position,
    Stat,
    Status,
)
from windtunnel.data.files.policy import LEASE
from windtunnel.data.files.protocol import FileCalls, HostCalls

_BEAT = LEASE / 10
_LOOK = 0.01  # seconds between two looks whether the log has room


class FileServer:
    """``state``: as the log has it. ``epoch``: in which this host is the primary; 0 if it is not. Calls come
    in threads, and take turns at both."""

    def __init__(self, spec: FilesHostSpec) -> None:
        self.spec, self.folder = spec, Path(spec.folder)
        self.keys = Keys.read(Path(spec.secret), "secret")
        self.ring: LogRing | None = None
        self.state = FilesState(self.folder)
        self.epoch = 0
        self.last_check = 0.0
        self.last: Status | None = None
        self.turn = threading.RLock()
        self.nics: dict[float | None, Any] = {}

    def status(self) -> Status:
        return self._nic("status")

    def perform(self, operation: Operation, data: bytes) -> OperationResult:
        while (done := self._performed(operation, data)) is None:
            time.sleep(_LOOK)
            self.check_pipeline()
        return done

    def _performed(self, operation: Operation, data: bytes) -> OperationResult | None:
        """None: there is no room in the log."""
        with self.turn:
            status = self._leading()
            if len(data) > WRITE_MOST:
                raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE), operation.path)
            state, tail = self.state, self.state.tail
            before = state.tree.clients.get(operation.client)
            if before is not None and operation.request <= before[0]:
                return OperationResult(tail.sequence, status.synced, before[1])
            operation = state.tree.check(operation, len(data))
            framed = frame(operation, data, self.epoch, tail.sequence)
            if status.wait or tail.offset + len(framed) - status.trim.offset > self.spec.ring:
                return None
            assert self.ring is not None  # whoever leads has recovered from it
            self.ring.write(tail.offset, framed)
            after = Position(tail.sequence + 1, tail.offset + len(framed), self.epoch)
            state.apply(LogFrame(operation, data, tail.sequence, after))
            return OperationResult(after.sequence, status.synced, operation.offset)

    def sync(self, sequence: int) -> int:
        self._leading()
        return int(self._nic("sync", sequence or self.state.tail.sequence, timeout=None))

    def read(self, path: str, offset: int, length: int) -> bytes:
        with self.turn:
            self._leading()
            return self.state.read(path, offset, length)

    def stat(self, path: str) -> Stat:
        with self.turn:
            self._leading()
            return self.state.tree.stat(path)

    def names(self, path: str) -> tuple[str, ...]:
        with self.turn:
            self._leading()
            return self.state.tree.names(path)

    def _leading(self) -> Status:
        """The newest status, on the primary. Raises NotPrimary."""
        if self.last is None or not self.epoch or time.monotonic() - self.last_check > LEASE:
            raise NotPrimary(f"{self.spec.name} is not the primary")
        return self.last

    def _nic(self, call: str, *arguments: Any, timeout: float | None = LEASE) -> Any:
        """Raises NotPrimary: it does not answer."""
        try:
            if timeout not in self.nics:
                self.nics[timeout] = Blocking(
                    HostCalls, self.spec.host.nic, keys=self.keys, errors=ERRORS, timeout=timeout
                )
            return getattr(self.nics[timeout], call)(*arguments)
        except ConnectionError as error:
            raise NotPrimary(f"{self.spec.name}: its pipeline does not answer") from error

    def check_pipeline(self) -> None:
        """Ask the pipeline how things are, and lead or stop leading accordingly."""
        try:
            status: Status = self._nic("serving")
        except (NotPrimary, TimeoutError):
            return
        with self.turn:
            self.last, self.last_check = status, time.monotonic()
            if not status.leads:
                self.epoch = 0
            elif status.epoch != self.epoch:
                if not self.epoch:
                    self.ring = self.ring or LogRing(self.folder / "ring", self.spec.ring)
                    self.state = FilesState.recovered(self.folder, self.ring)
                self.epoch = status.epoch
            self.state.overlay.drop(status.published.sequence)

    async def run(self) -> None:
        """Until cancelled."""
        server = rpc.RpcServer(rpc.RpcService.of(FileCalls, self, ERRORS), self.spec.host.server, self.keys)
        try:
            while True:
                await asyncio.to_thread(self.check_pipeline)
                await asyncio.sleep(_BEAT)
        finally:
            server.close()


async def main(spec: FilesHostSpec) -> None:
    await FileServer(spec).run()


if __name__ == "__main__":
    run_process(main)
