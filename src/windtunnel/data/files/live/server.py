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
import time
from pathlib import Path
from typing import Any

from windtunnel.base import rpc
from windtunnel.base.keys import Keys
from windtunnel.data.files.live.area import State
from windtunnel.data.files.live.process import run_process
from windtunnel.data.files.log import Entry, Ring, frame
from windtunnel.data.files.model import (
    ERRORS,
    WRITE_MOST,
    Done,
    HostSpec,
    NotPrimary,
    Operation,
    Position,
    Stat,
    Status,
)
from windtunnel.data.files.policy import LEASE
from windtunnel.data.files.protocol import FileCalls, HostCalls

_BEAT = LEASE / 10
_LOOK = 0.01  # seconds between two looks whether the log has room


class Server:
    """``state``: as the log has it. ``epoch``: in which this host is the primary; 0 if it is not."""

    def __init__(self, spec: HostSpec) -> None:
        self.spec, self.folder = spec, Path(spec.folder)
        self.secret = Keys.read(Path(spec.secret), "secret").secret
        self.ring: Ring | None = None
        self.state = State(self.folder)
        self.epoch = 0
        self.heard = 0.0
        self.last: Status | None = None
        self.nic: Any = None

    async def status(self) -> Status:
        return await self._nic("status")

    async def perform(self, operation: Operation, data: bytes) -> Done:
        while True:
            status = self._leading()
            if len(data) > WRITE_MOST:
                raise OSError(errno.EMSGSIZE, os.strerror(errno.EMSGSIZE), operation.path)
            state, tail = self.state, self.state.tail
            before = state.tree.clients.get(operation.client)
            if before is not None and operation.request <= before[0]:
                return Done(tail.sequence, status.synced, before[1])
            operation = state.tree.check(operation, len(data))
            framed = frame(operation, data, self.epoch, tail.sequence)
            if not status.wait and tail.offset + len(framed) - status.trim.offset <= self.spec.ring:
                break
            await asyncio.sleep(_LOOK)
            await self.look()
        assert self.ring is not None  # whoever leads has recovered from it
        self.ring.write(tail.offset, framed)
        after = Position(tail.sequence + 1, tail.offset + len(framed), self.epoch)
        state.apply(Entry(operation, data, tail.sequence, after))
        return Done(after.sequence, status.synced, operation.offset)

    async def sync(self, sequence: int) -> int:
        self._leading()
        return int(await self._nic("sync", sequence or self.state.tail.sequence))

    async def read(self, path: str, offset: int, length: int) -> bytes:
        self._leading()
        return self.state.read(path, offset, length)

    async def stat(self, path: str) -> Stat:
        self._leading()
        return self.state.tree.stat(path)

    async def names(self, path: str) -> tuple[str, ...]:
        self._leading()
        return self.state.tree.names(path)

    def _leading(self) -> Status:
        """The newest status, on the primary. Raises NotPrimary."""
        if self.last is None or not self.epoch or time.monotonic() - self.heard > LEASE:
            raise NotPrimary(f"{self.spec.name} is not the primary")
        return self.last

    async def _nic(self, call: str, *arguments: Any) -> Any:
        """Raises NotPrimary: it does not answer."""
        try:
            if self.nic is None or self.nic.ended:
                self.nic = await rpc.connect(HostCalls, self.spec.host.nic, secret=self.secret, errors=ERRORS)
            return await getattr(self.nic, call)(*arguments)
        except ConnectionError as error:
            raise NotPrimary(f"{self.spec.name}: its pipeline does not answer") from error

    async def look(self) -> None:
        """Ask the pipeline how things are, and lead or stop leading accordingly."""
        try:
            status: Status = await asyncio.wait_for(self._nic("serving"), LEASE)
        except (NotPrimary, TimeoutError):
            return
        self.last, self.heard = status, time.monotonic()
        if not status.leads:
            self.epoch = 0
        elif status.epoch != self.epoch:
            if not self.epoch:
                self.ring = self.ring or Ring(self.folder / "ring", self.spec.ring)
                self.state = State.recovered(self.folder, self.ring)
            self.epoch = status.epoch
        self.state.overlay.drop(status.published.sequence)

    async def run(self) -> None:
        """Until cancelled."""
        host = self.spec.host
        server = await rpc.serve(rpc.Service.of(FileCalls, self, ERRORS), host.server, secret=self.secret)
        try:
            while True:
                await self.look()
                await asyncio.sleep(_BEAT)
        finally:
            await server.close()


async def main(spec: HostSpec) -> None:
    await Server(spec).run()


if __name__ == "__main__":
    run_process(main)
