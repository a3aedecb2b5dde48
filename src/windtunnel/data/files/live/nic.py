"""The process of a host that stands for its SmartNIC: it runs the pipeline, and knows the other hosts.

    python -m windtunnel.data.files.live.nic SPEC

Beside it run the host's server, whose log it passes on, and the engine of `data.group`, which it starts. It
is pinned to the cores that are set aside. Every `BEAT` it hears of the other hosts and decides (`policy`):

- The primary's group breaks, or a host is silent for a lease: an epoch without it, which begins where the
  host that lacks most has published.
- The primary is silent, or its server is: the one with most of the log takes over, in the same way.
- A newer epoch is heard of: it is read from the store. Who followed follows on. Who led, or is not in it,
  forgets its log and its files, copies those that the primary has published, and is admitted again.

An epoch is valid once it stands in the store. A member's engine refuses what an older one sends
(`data.group`), so a primary that wakes up too late changes nothing, and no fsync of it returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from pathlib import Path
from typing import Any

from windtunnel.base import atomic, rpc
from windtunnel.base.keys import Keys
from windtunnel.base.plain import canonical, from_plain, to_plain
from windtunnel.base.remote import Blocking
from windtunnel.data.files import policy
from windtunnel.data.files.live import area as areas
from windtunnel.data.files.live.area import PublicArea
from windtunnel.data.files.live.membership import MembershipStore
from windtunnel.data.files.live.pipeline import PipelineClosed, PublishingPipeline
from windtunnel.data.files.live.process import run_process
from windtunnel.data.files.log import LogRing
from windtunnel.data.files.model import (
    ERRORS,
    ChainMembership,
    FilesError,
    FilesHost,
    FilesHostSpec,
    NotPrimary,
    Position,
    Status,
    TooFew,
)
from windtunnel.data.files.policy import LEASE
from windtunnel.data.files.protocol import HostCalls
from windtunnel.data.files.tree import FileTree
from windtunnel.data.group import (
    EngineProcess,
    GroupHalted,
    Member,
    ReplicationGroup,
    StaleEpoch,
    start_engine,
)
from windtunnel.store.eventlog import EventLog

BEAT = LEASE / 5
_HOLD = 60.0  # seconds for which the log is kept for a host that copies the files
_RETRY = 0.5
_PIECE = 4 << 20


class Nic:
    """The state of one host's process. All but the pipeline and what others ask runs in one event loop."""

    def __init__(self, spec: FilesHostSpec) -> None:
        self.spec, self.folder = spec, Path(spec.folder)
        self.keys = Keys.read(Path(spec.secret), "secret")
        self.store = MembershipStore(spec.store)
        self.log = EventLog(self.folder / "events.jsonl", host=spec.name)
        self.area = PublicArea(self.folder)
        self.membership = ChainMembership(0, spec.copies, ())
        self.peers: dict[str, tuple[float, Status | None]] = {}
        self.remotes: dict[str, Any] = {}
        self.engine: EngineProcess | None = None
        self.group: ReplicationGroup | None = None
        self.pipeline: PublishingPipeline | None = None
        self.leads = self.broken = self.promise = False
        self.joining: FilesHost | None = None
        self.stalled = ""
        self.again = 0.0  # when an epoch is tried again, after one whose hosts could not be connected
        self.stuck: tuple[Position, Position] | None = None  # where the pipeline stood when it failed
        self.served = 0.0  # when the host's own server asked last
        self.hold: tuple[float, Position] | None = None
        self.begun = time.monotonic()
        self.flow = policy.decide(policy.PipelineLoad(spec.mode, spec.cores))
        self.turn = asyncio.Lock()  # of changes of the epoch and of the pipeline
        self.loop = asyncio.get_running_loop()

    # -- what others ask

    def status(self) -> Status:
        pipeline = self.pipeline
        return Status(
            self.spec.name, self.membership.epoch, tuple(host.name for host in self.membership.chain),
            self.spec.copies, self.leads and self.able, self.able,
            pipeline.written.sequence if pipeline else self.area.applied.sequence,
            pipeline.synced if pipeline else 0, self.area.published, self.trim(),
            self.flow.wait, self.promise, self.stalled, dict(pipeline.seconds) if pipeline else {},
        )  # fmt: skip

    def serving(self) -> Status:
        """Of the host's own server: that it asks says that it lives."""
        self.served = time.monotonic()
        return self.status()

    @property
    def able(self) -> bool:
        return time.monotonic() - self.served < LEASE

    def sync(self, sequence: int) -> int:
        while True:
            pipeline = self.pipeline
            if pipeline is None or not self.leads:
                raise NotPrimary(f"{self.spec.name} is not the primary")
            if not self.promise:
                holders = f"{len(self.membership.chain)} of {self.spec.copies} hosts hold the files"
                raise TooFew(f"{holders}; an fsync needs {self.spec.least}")
            try:
                return pipeline.sync(sequence, LEASE)
            except TimeoutError:
                continue
            except PipelineClosed:
                time.sleep(BEAT / 4)  # the next epoch's goes on with it, or this host leads no more

    def admit(self, host: FilesHost) -> int:
        return asyncio.run_coroutine_threadsafe(self.take_in(host), self.loop).result()

    async def take_in(self, host: FilesHost) -> int:
        async with self.turn:
            self.joining = host
            await self.check_membership()
        if host.name not in (member.name for member in self.membership.chain) or not self.leads:
            raise NotPrimary(f"{self.spec.name} is not the primary")
        return self.membership.epoch

    def snapshot(self) -> bytes:
        tree, position = areas.newest(self.folder)
        self.hold = (time.monotonic(), position)
        return canonical({"tree": tree.plain(), "position": to_plain(position)})

    def content(self, inode: int, offset: int, length: int) -> bytes:
        return areas.read(self.folder, inode, offset, length)

    # -- what goes on

    def trim(self) -> Position:
        """Up to where no host needs the log any more."""
        published = [status.published for _, _, status in self.others() if status is not None]
        if self.hold is not None and time.monotonic() - self.hold[0] < _HOLD:
            published.append(self.hold[1])
        if len(published) < len(self.membership.chain) - 1:
            return Position()
        return min([self.area.published, *published], key=lambda position: position.sequence)

    def others(self) -> list[tuple[FilesHost, float, Status | None]]:
        """The other hosts of the chain, when each was last heard of, and what it said then."""
        return [
            (host, *self.peers.get(host.name, (self.begun, None)))
            for host in self.membership.chain
            if host.name != self.spec.name
        ]

    async def run(self) -> None:
        """Until cancelled."""
        self.start_engine()
        self.ring = LogRing(self.folder / "ring", self.spec.ring)
        for folder in (self.folder, self.folder.parent):  # the names of what was made now are on the disk
            atomic.sync_folder(folder)
        server = rpc.RpcServer(rpc.RpcService.of(HostCalls, self, ERRORS), self.spec.host.nic, self.keys)
        try:
            while True:
                try:
                    async with self.turn:
                        if self.engine is None or self.engine.process.poll() is not None:
                            self.start_engine()
                        await self.hear()
                        await self.check_membership()
                        self.watch_flow()
                        if self.stuck != (self.area.applied, self.area.published):
                            self.stalled, self.stuck = "", None
                except (OSError, FilesError, GroupHalted) as error:
                    self.stalled = f"{self.spec.name}: {error}"
                await asyncio.sleep(BEAT)
        finally:
            server.close()
            await self.end_pipeline()
            if self.engine is not None:
                self.engine.stop()

    def start_engine(self) -> None:
        if self.engine is not None:
            self.engine.stop()
        realtime = self.spec.mode != "host"
        self.engine = start_engine(
            self.folder / "ring", self.spec.ring, listen=self.spec.host.engine, realtime=realtime,
            cores=self.flow.cores or None, secret=self.keys.secret,
        )  # fmt: skip

    async def hear(self) -> None:
        """Ask all other hosts of the chain how they are."""

        def ask(host: FilesHost) -> None:
            with contextlib.suppress(OSError):
                self.hear_of(host)

        await asyncio.gather(*(asyncio.to_thread(ask, host) for host, _, _ in self.others()))

    def hear_of(self, host: FilesHost) -> Status:
        """Raises OSError: it does not answer in time."""
        if host.nic not in self.remotes:
            self.remotes[host.nic] = self.remote(host, LEASE / 2)
        status: Status = self.remotes[host.nic].status()
        self.peers[host.name] = (time.monotonic(), status)
        return status

    def remote(self, host: FilesHost, timeout: float | None) -> Any:
        """The calls of another host. Raises ConnectionError."""
        return Blocking(HostCalls, host.nic, keys=self.keys, errors=ERRORS, timeout=timeout)

    async def check_membership(self) -> None:
        """Decide about the epoch, and do it."""
        if not self.membership.epoch:
            await self.read_store()
            return
        now = time.monotonic()
        if now < self.again:
            return
        peers = []
        for host, last, message in self.others():
            fields = (
                (message.written, message.epoch, message.leads, message.able)
                if message
                else (0, 0, True, True)
            )
            peers.append(policy.ChainPeer(host.name, now - last, *fields))
        status = self.status()
        membership = policy.ChainView(
            self.spec.name, status.written, status.epoch, status.chain, tuple(peers), self.spec.least,
            self.leads and self.able, self.able, self.broken, self.joining.name if self.joining else "",
        )  # fmt: skip
        decision = policy.decide(membership)
        self.promise = decision.promise and self.leads
        if decision.act == "keep":
            return
        self.log.decision("data.files", "linefs", membership, decision)
        if decision.act == "read":
            await self.read_store()
        else:
            await self.change(decision)

    async def read_store(self) -> None:
        """Take up the newest epoch, or begin the first."""
        newest = await asyncio.to_thread(self.store.newest)
        if newest is None:
            await self.change(policy.ChainChange("change", 1, (self.spec.name,), self.spec.least <= 1))
            return
        led, names = self.leads, [host.name for host in newest.chain]
        self.leads = self.promise = False
        if self.spec.name not in names or (led and names[0] != self.spec.name):
            await self.end_pipeline()
            await self.join(newest)
        else:
            self.membership = newest
            if led or self.pipeline is None:
                self.begin_pipeline()
        self.effect()

    async def change(self, decision: policy.ChainChange) -> None:
        """Begin an epoch of which this host is the primary."""
        hosts = {host.name: host for host in (*self.membership.chain, self.spec.host)}
        if self.joining is not None:
            hosts[self.joining.name] = self.joining
        chain = tuple(hosts[name] for name in decision.chain)
        start = [self.area.published]
        for host in chain[1:]:  # before the epoch is written: one that is gone is left out of the next try
            start.append((await asyncio.to_thread(self.hear_of, host)).published)
        membership = ChainMembership(decision.epoch, self.spec.copies, chain)
        if not await asyncio.to_thread(self.store.create, membership):
            await self.read_store()
            return
        self.joining = self.hold = None
        await self.end_pipeline()
        if not self.leads:
            self.start_engine()  # anew: what the old primary still sends does not reach this log any more
        self.membership, self.leads, self.promise = membership, True, decision.promise
        members = [Member(host.name, host.engine.removeprefix("tcp:"), host.domain) for host in chain[1:]]
        try:
            if members:
                self.group = await asyncio.to_thread(
                    ReplicationGroup, members, epoch=decision.epoch, secret=self.keys.secret, log=self.log
                )
        except (GroupHalted, OSError) as error:
            self.broken, self.stalled, self.again = True, str(error), time.monotonic() + LEASE
            self.effect()
            return
        self.broken = False
        self.begin_pipeline(min(start, key=lambda position: position.sequence))
        self.effect()

    def effect(self) -> None:
        """What a decision about the epoch has come to."""
        chain = [host.name for host in self.membership.chain]
        self.log.append(
            "effect", capability="data.files", epoch=self.membership.epoch, chain=chain, leads=self.leads
        )

    def begin_pipeline(self, start: Position | None = None) -> None:
        self.pipeline = PublishingPipeline(
            self.ring, self.area, self.flow, start or self.area.applied, self.failed, primary=self.leads,
            group=self.group,
        )  # fmt: skip

    async def end_pipeline(self) -> None:
        pipeline, group, self.pipeline, self.group = self.pipeline, self.group, None, None
        if pipeline is not None:
            await asyncio.to_thread(pipeline.close)
        if group is not None:
            await asyncio.to_thread(group.close)

    def failed(self, error: Exception) -> None:
        """A thread of the pipeline has ended with this error."""

        def tell() -> None:
            self.stalled = f"{self.spec.name}: {error}"
            self.stuck = (self.area.applied, self.area.published)
            if isinstance(error, StaleEpoch | GroupHalted):
                self.broken = True
            else:
                self.loop.create_task(self.begin_again())

        self.loop.call_soon_threadsafe(tell)

    async def begin_again(self) -> None:
        """After an error of this host's own disk: from where it stopped."""
        await asyncio.sleep(_RETRY)
        async with self.turn:
            if self.pipeline is not None:
                await asyncio.to_thread(self.pipeline.close)
                self.begin_pipeline(
                    min(self.area.applied, self.pipeline.transferred, key=lambda p: p.sequence)
                )

    async def join(self, newest: ChainMembership) -> None:
        """Copy the files that the primary has published, and be admitted. Raises OSError, FilesError."""
        primary = await asyncio.to_thread(self.remote, newest.chain[0], None)
        snapshot = json.loads(await asyncio.to_thread(primary.snapshot))
        tree, position = FileTree.of(snapshot["tree"]), from_plain(Position, snapshot["position"])
        self.ring.clear()
        self.area.clear()
        for node in tree.files():
            offset = 0
            while piece := await asyncio.to_thread(primary.content, node.inode, offset, _PIECE):
                await asyncio.to_thread(self.area.write, node.inode, offset, piece)
                offset += len(piece)
        await asyncio.to_thread(self.area.install, tree, position)
        await asyncio.to_thread(primary.admit, self.spec.host)
        primary.close()
        membership = await asyncio.to_thread(self.store.newest)
        assert membership is not None
        self.membership = membership
        self.begin_pipeline()

    def watch_flow(self) -> None:
        """Decide how wide the pipeline is, and whether writers wait."""
        if self.pipeline is None:
            return
        used = (self.pipeline.written.offset - self.trim().offset) / self.spec.ring
        pipeline = policy.PipelineLoad(
            self.spec.mode, self.spec.cores, self.pipeline.queued, self.flow.width, used, self.flow.wait
        )
        flow = policy.decide(pipeline)
        if flow != self.flow:
            self.log.decision("data.files", "linefs", pipeline, flow)
            self.flow = self.pipeline.flow = flow


async def main(spec: FilesHostSpec) -> None:
    if spec.cores and spec.mode != "host":
        os.sched_setaffinity(0, spec.cores)
    await Nic(spec).run()


if __name__ == "__main__":
    run_process(main)
