"""The coordinator's side of a group: it starts engines, forms their chain, and issues operations.

Forming goes the same way at the start and after a loss. All members are fenced (from then on they take
nothing of an older epoch), `policy.decide` says from their answers who is in the chain and whose region
counts, what differs in others is copied, and the chain is connected from its tail to its head. Then
operations go to the head, and the tail's word completes them, in their order.

On each failure:
- a member is gone, silent or fails: the group halts. What was under way has failed (`GroupHalted`), and may
  be in the regions or not; `ReplicationGroup.repair` goes on with who is left, in the next epoch.
- a newer epoch has begun: `StaleEpoch`, and nothing that is done here counts any more.
- the coordinator ends: its successor forms the next epoch; a transaction that was in the journal is done to
  its end, or never began (`transactions`).
"""

from __future__ import annotations

import contextlib
import itertools
import json
import select
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any, NamedTuple

from typing_extensions import Buffer

from windtunnel.base import handshake
from windtunnel.base.errors import HostError, UserError
from windtunnel.data.group.live import transactions
from windtunnel.data.group.live.link import (
    CHUNK,
    DIGEST,
    STANDING,
    WORD,
    EngineLink,
    Frame,
    FrameKind,
    connect,
)
from windtunnel.data.group.policy import POLICIES, SLOT, Decision, Member, MemberState, Observation
from windtunnel.store.eventlog import EventLog, LogFailed

COMMAND = ("-m", "windtunnel.data.group.live.engine")
MOST, LONG, ASKED = 32, 60.0, 64 * CHUNK
"""Members, as an execute map has bits; seconds for what is about a whole region; bytes hashed at once."""
LAST_WORD = 0.5
"""Seconds in which a member that fails says so: the one before it may notice sooner that it is lost."""


class GroupHalted(HostError):
    """The group does nothing more in this epoch. ``members``: of whom it is known that they are gone, or
    fail, by name."""

    def __init__(self, message: str, members: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.members = tuple(members)


class StaleEpoch(HostError):
    """A newer epoch has begun. ``newest``: as far as was heard."""

    def __init__(self, epoch: int, newest: int) -> None:
        super().__init__(f"epoch {epoch} is refused: {newest} is the newest")
        self.newest = newest


class EngineProcess(NamedTuple):
    """An engine that this process has started. ``address``: for `Member`; ``refused``: why it has no
    real-time priority, or ""."""

    address: str
    pid: int
    refused: str
    process: subprocess.Popen[bytes]

    def stop(self) -> None:
        """End it; what is in its region stays."""
        self.process.kill()
        self.process.communicate()


def start_engine(
    region: Path, size: int, *, listen: str, secret: bytes, realtime: bool = True,
    cores: Collection[int] | None = None,
) -> EngineProcess:  # fmt: skip
    """An engine of the file ``region`` with ``size`` bytes for the group (and a page of its own), allocated
    where there is none. ``listen``: ``unix:/PATH`` or ``tcp:HOST:PORT``, where port 0 is any.

    Raises:
        UserError: ``listen`` is neither, or ``size`` is no multiple of the page.
        HostError: the region cannot be had (a full disk, another engine), or the address.
    """
    if not listen.startswith("unix:/") and (listen[:4] != "tcp:" or listen.count(":") != 2):
        raise UserError(f"`listen` is {listen!r}; accepted are unix:/PATH and tcp:HOST:PORT")
    if size <= 0 or size % 4096:
        raise UserError(f"`size` is {size}; accepted are multiples of 4096 bytes")
    words = [str(region), str(size), listen, ",".join(map(str, cores or ())), "realtime" * realtime]
    command, pipe = [sys.executable, *COMMAND, *words], subprocess.PIPE
    process = subprocess.Popen(command, start_new_session=True, stdin=pipe, stdout=pipe)
    assert process.stdin is not None and process.stdout is not None
    response: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError):
        process.stdin.write(secret.hex().encode() + b"\n")
        process.stdin.flush()
        if select.select([process.stdout], [], [], LONG)[0]:
            response = json.loads(process.stdout.readline())
    engine = EngineProcess(response.get("address", ""), process.pid, response.get("refused", ""), process)
    if not engine.address:
        engine.stop()
        raise HostError(f"the engine of {region} does not start: {response.get('failed', 'it says nothing')}")
    return engine


class _Control:
    """The coordinator's connection to one engine, read by a thread of its own."""

    def __init__(self, group: ReplicationGroup, member: Member) -> None:
        self.name, self._group = member.name, group
        self._link = connect(member.address, group.secret, group.patience)
        self._link.sock.settimeout(None)
        self._requests: dict[int, Future[Frame]] = {}
        self._numbers, self._turn = itertools.count(1), threading.Lock()
        self._error: Exception | None = None
        threading.Thread(target=self._read, name=f"group-{self.name}", daemon=True).start()

    def ask(
        self, kind: FrameKind, a: int = 0, b: int = 0, payload: bytes = b"", patience: float | None = None
    ) -> bytes:
        """What the engine answers. Raises GroupHalted, StaleEpoch."""
        future = Future[Frame]()
        with self._turn:
            if self._error is not None:
                raise self._error
            self._requests[number := next(self._numbers)] = future
            frame = Frame(kind, self._group.epoch, number, a, b, payload=payload)
            with contextlib.suppress(OSError):  # the reader says why
                self._link.sock.sendall(self._link.pack(frame))
        try:
            answer = future.result(patience or self._group.patience)
        except FutureTimeout as error:
            raise GroupHalted(f"{self.name} does not answer", [self.name]) from error
        finally:
            self._requests.pop(number, None)
        if answer.kind == FrameKind.STALE:
            raise StaleEpoch(self._group.epoch, answer.a)
        if answer.kind == FrameKind.FAILED:
            raise GroupHalted(f"{self.name} fails: {answer.payload.decode()}", [self.name])
        return answer.payload

    def _read(self) -> None:
        try:
            while True:
                frame = self._link.receive()
                if frame.sequence not in self._requests or frame.kind < FrameKind.STALE:
                    self._group._receive(self.name, frame)
                else:
                    with contextlib.suppress(InvalidStateError, KeyError):  # nobody waits any more
                        self._requests[frame.sequence].set_result(frame)
        except OSError as error:
            if self._error is None:
                self._group._halt(GroupHalted(f"{self.name} is gone: {error}", [self.name]))

    def close(self, error: Exception) -> None:
        """Whoever waits gets ``error``."""
        self._error = self._error or error
        self._link.close()
        with self._turn:
            for future in list(self._requests.values()):
                with contextlib.suppress(InvalidStateError):  # it was answered meanwhile
                    future.set_exception(error)


class ReplicationGroup:
    """Members with equal regions, in an order of the policy's choice (`members`, head first).

    ``epoch``: above that of any group of these members before. ``secret``: that of the engines. ``window``:
    operations in flight at most; a further call blocks. ``patience``: seconds without an answer after which a
    member counts as gone. ``coordinator``: the failure domain of this process. ``least``: members that must
    answer, all if None. ``journal``: where in the region `transaction` keeps its lock and its record.

    Callers may be several threads. Operations complete in the order in which they were called, or fail with
    `GroupHalted` or `StaleEpoch`. What is called when a future is done must not call the group.

    Raises:
        UserError: members of one name, none, or more than 32; an unknown policy; another secret.
        StaleEpoch: a member knows this epoch, or a newer one.
        GroupHalted: too few members answer, or one fails.
    """

    def __init__(
        self, members: Sequence[Member], *, epoch: int, secret: bytes, log: EventLog | None = None,
        window: int = 64, patience: float = 2.0, coordinator: str = "", policy: str = "domains",
        least: int | None = None, journal: int | None = None,
    ) -> None:  # fmt: skip
        names = {member.name for member in members}
        if not 1 <= len(names) == len(members) <= MOST:
            raise UserError(f"`members` are {len(members)} of {len(names)} names; accepted are 1 to {MOST}")
        if policy not in POLICIES:
            raise UserError(f"`policy` is {policy!r}; accepted are {', '.join(POLICIES)}")
        self.members, self.size, self.epoch, self.secret = tuple(members), 0, epoch, secret
        self.patience, self.journal, self._log, self._newest = patience, journal, log, epoch
        self._options: dict[str, Any] = {"window": window, "coordinator": coordinator, "policy": policy}
        self._controls: dict[str, _Control] = {}
        self._data: EngineLink | None = None
        self._fault: Exception | None = None
        self._lost: set[str] = set()
        self._lock, self._sending = threading.Lock(), threading.Lock()
        self._pending: deque[tuple[int, Future[Any], float]] = deque()  # sequence, …, began
        self._room, self._over = threading.Semaphore(0), threading.Event()
        try:
            self._form(policy, coordinator, len(members) if least is None else least, window)
            threading.Thread(target=self._watch, name="group-watch", daemon=True).start()
            if journal is not None:
                transactions.recover(self, journal)
        except BaseException:
            self.close()
            raise

    # --- forming

    def _form(self, policy: str, coordinator: str, least: int, window: int) -> None:
        with ThreadPoolExecutor(len(self.members)) as pool:
            standings = tuple(pool.map(self._fence, self.members))
        observation = Observation(self.epoch, standings, coordinator, least, window)
        decision = POLICIES[policy](observation)
        if self._log is not None:
            self._log.decision("data.group", policy, observation, decision)
        if not decision.chain:
            raise GroupHalted(f"no chain for epoch {self.epoch}: {decision.reason}", decision.dropped)
        member = {member.name: member for member in self.members}
        self.members = tuple(member[name] for name in decision.chain)
        self.size, self._sequence = (
            next(standing.size for standing in standings if standing.answers),
            decision.sequence,
        )
        copied = {name: self._copy(decision.source, name) for name in decision.compare}
        self._connect(decision)
        if self._log is not None:
            statuses = [
                STANDING.unpack(self._controls[name].ask(FrameKind.STATUS)) for name in decision.chain
            ]
            self._log.append(
                "effect", epoch=[status[1] for status in statuses],
                sequence=[status[2] for status in statuses], chain=[member.name for member in self.members],
                source=decision.source, copied=copied,
            )  # fmt: skip

    def _fence(self, member: Member) -> MemberState:
        try:
            control = self._controls[member.name] = _Control(self, member)
            answer = control.ask(FrameKind.FENCE)
        except handshake.HandshakeRefused as error:
            raise UserError(f"`secret` is not that of {member.name} at {member.address}") from error
        except (OSError, GroupHalted) as error:
            if member.name in self._controls:
                self._controls.pop(member.name).close(error)
            return MemberState(member.name, member.domain, answers=False)
        return MemberState(member.name, member.domain, True, *STANDING.unpack(answer))

    def _copy(self, source: str, name: str) -> int:
        """Let the region of ``name`` be the source's: how many chunks differed."""
        copied, (here, there) = 0, (self._controls[member] for member in (source, name))
        for at in range(0, self.size, ASKED):
            length = min(ASKED, self.size - at)
            ours, theirs = (
                control.ask(FrameKind.HASH, at, length, patience=LONG) for control in (here, there)
            )
            for place in range(0, len(ours), DIGEST):
                if ours[place : place + DIGEST] != theirs[place : place + DIGEST]:
                    copied, first = copied + 1, at + place // DIGEST * CHUNK
                    for offset in range(first, min(first + CHUNK, self.size), SLOT):
                        part = here.ask(FrameKind.READ, offset, min(SLOT, self.size - offset), patience=LONG)
                        there.ask(FrameKind.PATCH, offset, payload=part, patience=LONG)
        return copied

    def _connect(self, decision: Decision) -> None:
        """The chain, from its tail to its head; then this process to the head."""
        after = ""
        for index, member in reversed(list(enumerate(self.members))):
            spec = json.dumps({"index": index, "next": after, "window": decision.window}).encode()
            self._controls[member.name].ask(FrameKind.CHAIN, decision.sequence, payload=spec, patience=LONG)
            after = member.address
        try:
            self._data = connect(after, self.secret, self.patience)
            self._data.join(self.epoch, decision.window)
            self._data.sock.settimeout(None)
        except OSError as error:
            raise GroupHalted(
                f"{decision.chain[0]} takes no operations: {error}", decision.chain[:1]
            ) from error
        for _ in range(decision.window):
            self._room.release()

    def repair(self, survivors: Sequence[Member] | None = None) -> ReplicationGroup:
        """The group in the next epoch, of those of ``survivors`` that answer; if None, of all members but
        those of which it is known that they are gone. This one is closed. Raises as the group itself; may be
        called again."""
        if isinstance(self._fault, StaleEpoch):
            raise self._fault
        self.close()
        self._newest += 1
        if survivors is None:
            survivors = [member for member in self.members if member.name not in self._lost]
        try:
            return ReplicationGroup(
                survivors, epoch=self._newest, secret=self.secret, log=self._log, patience=self.patience,
                journal=self.journal, least=1, **self._options,
            )  # fmt: skip
        except GroupHalted as error:
            self._lost |= set(error.members)
            raise

    # --- operations

    def write(self, offset: int, data: Buffer, *, packed: bytes | None = None) -> Future[None]:
        """gWRITE: the bytes at ``offset`` in every region. More than `SLOT` bytes are several operations, of
        which the last is what completes. ``packed``: at most as many, compressed by zstd: they travel so."""
        view, future = memoryview(data).cast("B"), Future[None]()
        self.check(offset, len(view))
        if packed is not None:
            return self._submit(FrameKind.WRITE, offset, c=len(view), payload=packed)
        if not len(view):
            future.set_result(None)
        for at in range(0, len(view), SLOT):
            future = self._submit(FrameKind.WRITE, offset + at, payload=bytes(view[at : at + SLOT]))
        return future

    def memcpy(self, source: int, target: int, length: int) -> Future[None]:
        """gMEMCPY: every member copies within its region, also where both places overlap."""
        self.check(source, length)
        self.check(target, length)
        return self._submit(FrameKind.MEMCPY, source, target, length)

    def cas(
        self, offset: int, expected: int, new: int, execute: Collection[str] | None = None
    ) -> Future[tuple[int, ...]]:
        """gCAS: the 8-byte little-endian word at ``offset`` becomes ``new`` where it is ``expected``, at the
        members that ``execute`` names (None: all). Each member's word before, in the order of `members`."""
        self.check(offset, WORD.size)
        if offset % WORD.size or not all(0 <= value < 1 << 64 for value in (expected, new)):
            raise UserError(f"`offset` is {offset}, for {expected} and {new}; accepted are words of 64 bits")
        mask = sum(
            (execute is None or member.name in execute) << bit for bit, member in enumerate(self.members)
        )
        return self._submit(FrameKind.CAS, offset, expected, new, mask)

    def flush(self) -> Future[None]:
        """gFLUSH: all operations before it are on the disk of every member."""
        return self._submit(FrameKind.FLUSH)

    def read(self, member: Member | str, offset: int, length: int) -> bytes:
        """The bytes in one member's region. Of the tail (`members[-1]`) they are what was acknowledged, and
        never go back; others may be ahead of it. A member that a newer epoch left out may still answer.

        Raises:
            GroupHalted: it does not answer. StaleEpoch. UserError: there is no such member.
        """
        name = member if isinstance(member, str) else member.name
        self.check(offset, length)
        if name not in (names := [member.name for member in self.members]):
            raise UserError(f"`member` is {name!r}; accepted are {', '.join(names)}")
        each = range(offset, offset + length, SLOT)
        ask = self._controls[name].ask
        return b"".join(ask(FrameKind.READ, at, min(SLOT, offset + length - at)) for at in each)

    def transaction(self, writes: Sequence[tuple[int, Buffer]], patience: float = 10.0) -> None:
        """All of ``writes`` (offset and bytes) or none, on the disks of all members, whoever dies meanwhile.
        Blocks; raises as `transactions.commit`."""
        if self.journal is None:
            raise UserError("`journal` is not given; a transaction needs a place for its lock and record")
        transactions.commit(self, self.journal, writes, patience)

    def check(self, offset: int, length: int) -> None:
        """Raises UserError: it is not within the region."""
        if offset < 0 or length < 0 or offset + length > self.size:
            raise UserError(f"`offset` is {offset}, for {length} bytes; accepted is within {self.size}")

    def _submit(
        self, kind: FrameKind, a: int = 0, b: int = 0, c: int = 0, mask: int = 0, payload: bytes = b""
    ) -> Future[Any]:
        future = Future[Any]()
        future.set_running_or_notify_cancel()  # what is under way cannot be taken back
        self._room.acquire()
        with self._sending:
            with self._lock:
                if self._fault is not None or self._data is None:
                    self._room.release()
                    raise self._fault or GroupHalted("the group is closed")
                self._sequence += 1
                sequence, data = self._sequence, self._data
                self._pending.append((sequence, future, time.monotonic()))
            try:
                data.sock.sendall(data.pack(Frame(kind, self.epoch, sequence, a, b, c, mask, b"", payload)))
            except (OSError, ValueError):  # ValueError: it was closed meanwhile
                if not self._over.wait(self.patience):  # who is gone, or fences, says so on another way
                    self._halt(GroupHalted(f"{self.members[0].name} takes no operations"))
        return future

    # --- what engines say

    def _receive(self, name: str, frame: Frame) -> None:
        match frame.kind:
            case FrameKind.ACK if name == self.members[-1].name:
                with self._lock:
                    sequence, future, _ = self._pending.popleft() if self._pending else (0, Future(), 0)
                if sequence == frame.sequence:
                    self._room.release()
                    future.set_result(tuple(word for (word,) in WORD.iter_unpack(frame.results)) or None)
                else:
                    self._halt(GroupHalted(f"operation {frame.sequence} came out of its turn"))
            case FrameKind.STALE:
                self._halt(StaleEpoch(self.epoch, frame.a))
            case FrameKind.BROKEN:
                self._halt(GroupHalted(f"{name} fails: {frame.payload.decode()}", [name]))
            case FrameKind.LOST:
                # nothing is done any more; the lost one says itself why, if it still can
                if not self._over.wait(LAST_WORD):
                    self._halt(GroupHalted(f"{name} lost the member behind it"))

    def _halt(self, error: Exception) -> None:
        with self._lock:
            silent = self._fault is not None or self._log is None or self._over.is_set()
            if self._fault is None:
                self._fault, self._lost = error, set(getattr(error, "members", ()))
            fault, pending, self._pending = self._fault, self._pending, deque()
        self._over.set()
        if self._data is not None:
            self._data.close()
        for control in list(self._controls.values()):
            control.close(fault)
        for _, future, _ in pending:
            future.set_exception(fault)
        self._room.release()  # to one who waits for room, who passes it on
        if self._log is not None and not silent:
            with contextlib.suppress(LogFailed):  # all who wait have been told
                self._log.append("halted", epoch=self.epoch, why=str(error))

    def _watch(self) -> None:
        """Who is frozen closes no connection: where nothing completes, all are asked."""
        while not self._over.wait(self.patience / 4):
            with self._lock:
                oldest = self._pending[0] if self._pending else None
            if oldest is None or (waited := time.monotonic() - oldest[2]) < self.patience:
                continue
            silent = []
            for member in self.members:
                try:
                    self._controls[member.name].ask(FrameKind.STATUS, patience=self.patience / 2)
                except (GroupHalted, StaleEpoch):
                    silent.append(member.name)
            if silent:
                self._halt(GroupHalted(f"{', '.join(silent)} silent for {self.patience:g} s", silent))
            elif waited > 2 * self.patience and self._pending and self._pending[0] is oldest:
                self._halt(GroupHalted("members answer, and hand nothing on"))

    def close(self) -> None:
        """Forget it; engines and regions stay."""
        self._over.set()
        self._halt(GroupHalted("the group is closed"))

    def __enter__(self) -> ReplicationGroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
