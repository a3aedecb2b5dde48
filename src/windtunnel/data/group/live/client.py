"""The coordinator's side of a group: it starts engines, forms their chain, and issues operations.

Forming goes the same way at the start and after a loss. All members are fenced (from then on they take
nothing of an older epoch), `policy.decide` says from their answers who is in the chain and whose region
counts, what differs in others is copied, and the chain is connected from its tail to its head. Then
operations are sent to the head; the tail's word completes them, in their order.

On each failure:
- a member is gone, silent or fails: the group halts. What was under way has failed (`GroupHalted`), and may
  be in the regions or not; `Group.repair` goes on with who is left, in the next epoch.
- a newer epoch has begun: `StaleEpoch`, and nothing that is done here counts any more.
- the coordinator ends: nothing is under way for long. Its successor forms the next epoch; a transaction that
  it had in the journal is done to its end, or never began.
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
from dataclasses import dataclass, field
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
    Frame,
    Kind,
    Link,
    connect,
)
from windtunnel.data.group.policy import POLICIES, SLOT, Decision, Member, Observation, Standing
from windtunnel.store.eventlog import EventLog

CAPABILITY = "data.group"
COMMAND = ("-m", "windtunnel.data.group.live.engine")
STARTS = 60.0
"""Seconds for an engine to allocate its region."""
MOST = 32
"""Members, as many as an execute map has bits."""
LONG = 60.0
"""Seconds for what an engine reads or writes as a whole.  """
ASKED = 64 * CHUNK
"""Bytes whose digests are asked for at once."""


class GroupHalted(HostError):
    """The group does nothing more in this epoch. ``members``: who is gone, or fails, by name."""

    def __init__(self, message: str, members: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.members = tuple(members)


class StaleEpoch(HostError):
    """A newer epoch has begun. ``epoch``: the newest that was heard of."""

    def __init__(self, epoch: int, newest: int) -> None:
        super().__init__(f"epoch {epoch} is refused: {newest} is the newest")
        self.epoch = newest


@dataclass
class EngineProcess:
    """An engine that this process has started. ``address``: for `Member`; ``refused``: why it has no
    real-time priority, or ""."""

    address: str
    process: subprocess.Popen[bytes] = field(repr=False)
    refused: str = ""

    @property
    def pid(self) -> int:
        return self.process.pid

    def stop(self) -> None:
        """End it; what is in its region stays."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def start_engine(
    region: Path, size: int, *, listen: str, secret: bytes, realtime: bool = True,
    cores: Collection[int] | None = None,
) -> EngineProcess:  # fmt: skip
    """An engine of the file ``region`` with ``size`` bytes for the group (and a page of its own), made and
    allocated where there is none. ``listen``: ``unix:PATH`` or ``tcp:HOST:PORT``, where port 0 is any.

    Raises:
        UserError: ``listen`` is neither, or ``size`` is no multiple of the page.
        HostError: the region cannot be had (a full disk, another engine), or the address.
    """
    if not listen.startswith(("unix:/", "tcp:")) or (listen[0] == "t" and listen.count(":") != 2):
        raise UserError(f"`listen` is {listen!r}; accepted are unix:/PATH and tcp:HOST:PORT")
    if size <= 0 or size % 4096:
        raise UserError(f"`size` is {size}; accepted are multiples of 4096 bytes")
    words = (str(region), str(size), listen, "realtime" if realtime else "ordinary")
    given = ",".join(map(str, sorted(cores or ())))
    process = subprocess.Popen(
        [sys.executable, *COMMAND, *words, given],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    told: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError):
        process.stdin.write(secret.hex().encode() + b"\n")
        process.stdin.flush()
        if select.select([process.stdout], [], [], STARTS)[0]:
            told = json.loads(process.stdout.readline())
    if "address" not in told:
        EngineProcess("", process).stop()
        raise HostError(f"the engine of {region} does not start: {told.get('failed', 'it says nothing')}")
    return EngineProcess(told["address"], process, told["refused"])


class _Control:
    """The coordinator's connection to one engine, read by a thread of its own."""

    def __init__(self, group: Group, member: Member) -> None:
        self.member, self._group = member, group
        self._link = connect(member.address, group.secret, group.patience)
        self._link.sock.settimeout(None)
        self._asked: dict[int, Future[Frame]] = {}
        self._numbers = itertools.count(1)
        self._turn = threading.Lock()
        self._error: Exception | None = None
        threading.Thread(target=self._read, name=f"group-{member.name}", daemon=True).start()

    def ask(
        self, kind: Kind, a: int = 0, b: int = 0, payload: bytes = b"", patience: float | None = None
    ) -> Frame:
        """What the engine answers. Raises GroupHalted, StaleEpoch."""
        name, future = self.member.name, Future[Frame]()
        with self._turn:
            if self._error is not None:
                raise self._error
            number = next(self._numbers)
            self._asked[number] = future
            frame = Frame(kind, self._group.epoch, number, a, b, payload=payload)
            with contextlib.suppress(OSError):  # the reader says why
                self._link.sock.sendall(self._link.pack(frame))
        try:
            answer = future.result(patience or self._group.patience)
        except FutureTimeout as error:
            raise GroupHalted(f"{name} does not answer", [name]) from error
        finally:
            self._asked.pop(number, None)
        if answer.kind == Kind.STALE:
            raise StaleEpoch(self._group.epoch, answer.a)
        if answer.kind == Kind.FAILED:
            raise GroupHalted(f"{name} fails: {answer.payload.decode()}", [name])
        return answer

    def _read(self) -> None:
        try:
            while True:
                frame = self._link.receive()
                if frame.kind == Kind.ACK:
                    self._group._completed(frame)
                elif (future := self._asked.pop(frame.sequence, None)) is not None:
                    future.set_result(frame)
                else:
                    self._group._heard(self.member, frame)
        except OSError as error:
            if self._error is None:
                self._group._halt(GroupHalted(f"{self.member.name} is gone: {error}", [self.member.name]))

    def close(self, error: Exception) -> None:
        """Whoever waits gets ``error``."""
        self._error = self._error or error
        self._link.close()
        with self._turn:
            for future in list(self._asked.values()):
                with contextlib.suppress(InvalidStateError):  # it was answered meanwhile
                    future.set_exception(error)


class _Pending(NamedTuple):
    sequence: int
    future: Future[Any]
    began: float


class Group:
    """The members in an order of the policy's choice (`members`, head first), with equal regions.

    ``epoch``: above that of any group before, of these members. ``secret``: that of the engines. ``window``:
    operations in flight at most; a further call blocks. ``patience``: seconds without an answer after which a
    member counts as gone. ``coordinator``: the failure domain of this process. ``least``: members that must
    answer, all if None. ``journal``: where in the region `transaction` keeps its lock and its record.

    Callers may be several threads. Operations complete in the order in which they were called.

    Raises:
        UserError: members of one name, none, or more than 32; an unknown policy.
        StaleEpoch: a member knows this epoch, or a newer one. GroupHalted: too few members answer, or one
            fails.
    """

    def __init__(
        self, members: Sequence[Member], *, epoch: int, secret: bytes, log: EventLog | None = None,
        window: int = 64, patience: float = 2.0, coordinator: str = "", policy: str = "domains",
        least: int | None = None, journal: int | None = None,
    ) -> None:  # fmt: skip
        names = {one.name for one in members}
        if not 1 <= len(names) == len(members) <= MOST:
            raise UserError(f"`members` are {len(members)} of {len(names)} names; accepted are 1 to {MOST}")
        if policy not in POLICIES:
            raise UserError(f"`policy` is {policy!r}; accepted are {', '.join(POLICIES)}")
        self.epoch, self.secret, self.patience, self.journal = epoch, secret, patience, journal
        self.size, self.members = 0, tuple(members)
        self._log, self._given = log, {
            "log": log, "window": window, "patience": patience, "coordinator": coordinator, "policy": policy,
            "journal": journal,
        }  # fmt: skip
        self._controls: dict[str, _Control] = {}
        self._data: Link | None = None
        self._fault: Exception | None = None
        self._lost: set[str] = set()
        self._newest = epoch
        self._lock, self._sending = threading.Lock(), threading.Lock()
        self._pending: deque[_Pending] = deque()
        self._room, self._over = threading.Semaphore(0), threading.Event()
        try:
            self._form(policy, coordinator, len(members) if least is None else least, window)
            if journal is not None:
                transactions.recover(self)
        except BaseException as error:
            self._halt(error if isinstance(error, Exception) else GroupHalted("the group was given up"))
            raise
        threading.Thread(target=self._watch, name="group-watch", daemon=True).start()

    # --- forming

    def _form(self, policy: str, coordinator: str, least: int, window: int) -> None:
        with ThreadPoolExecutor(len(self.members)) as pool:
            standings = tuple(pool.map(self._fence, self.members))
        seen = Observation(self.epoch, standings, coordinator, least, window)
        made = POLICIES[policy](seen)
        if self._log is not None:
            self._log.decision(CAPABILITY, policy, seen, made)
        if not made.chain:
            raise GroupHalted(f"no chain for epoch {self.epoch}: {made.reason}", made.dropped)
        member = {one.name: one for one in self.members}
        self.members = tuple(member[name] for name in made.chain)
        self.size, self._sequence = next(one.size for one in standings if one.answers), made.sequence
        copied = {name: self._copy(made.source, name) for name in made.compare}
        self._chain(made)
        if self._log is not None:
            held = [STANDING.unpack(self._controls[name].ask(Kind.STATUS).payload) for name in made.chain]
            self._log.append(
                "effect", epoch=[one[0] for one in held], sequence=[one[2] for one in held],
                chain=[one.name for one in self.members], copied=copied, source=made.source,
            )  # fmt: skip

    def _fence(self, member: Member) -> Standing:
        try:
            control = self._controls[member.name] = _Control(self, member)
            answer = control.ask(Kind.FENCE)
        except handshake.Refused as error:
            raise UserError(f"{member.name} at {member.address}: {error}") from error
        except (OSError, GroupHalted) as error:
            if member.name in self._controls:
                self._controls.pop(member.name).close(error)
            return Standing(member.name, member.domain, answers=False)
        return Standing(member.name, member.domain, True, *STANDING.unpack(answer.payload))

    def _copy(self, source: str, name: str) -> int:
        """Let the region of ``name`` be the source's: how many chunks differed."""
        copied, ends = 0, [self._controls[one] for one in (source, name)]
        for at in range(0, self.size, ASKED):
            asked = [end.ask(Kind.HASH, at, min(ASKED, self.size - at), patience=LONG) for end in ends]
            ours, theirs = (one.payload for one in asked)
            for place in range(0, len(ours), DIGEST):
                if ours[place : place + DIGEST] != theirs[place : place + DIGEST]:
                    copied += 1
                    first = at + place // DIGEST * CHUNK
                    for offset in range(first, min(first + CHUNK, self.size), SLOT):
                        part = ends[0].ask(Kind.READ, offset, min(SLOT, self.size - offset))
                        ends[1].ask(Kind.PATCH, offset, payload=part.payload)
        return copied

    def _chain(self, made: Decision) -> None:
        """Connect it, from its tail to its head; then this process to the head."""
        after = ""
        for index in range(len(self.members) - 1, -1, -1):
            spec = json.dumps({"index": index, "next": after, "window": made.window}).encode()
            self._controls[made.chain[index]].ask(Kind.CHAIN, made.sequence, payload=spec, patience=LONG)
            after = self.members[index].address
        for name in self._controls.keys() - set(made.chain):
            self._controls.pop(name).close(GroupHalted(f"{name} is not of the chain"))
        try:
            self._data = connect(after, self.secret, self.patience)
            self._data.join(self.epoch, made.window)
            self._data.sock.settimeout(None)
        except OSError as error:
            name = made.chain[0]
            raise GroupHalted(f"{name} takes no operations: {error}", [name]) from error
        for _ in range(made.window):
            self._room.release()

    def repair(self, survivors: Sequence[Member] | None = None) -> Group:
        """The group in the next epoch, of those of ``survivors`` that answer; if None, of all members but
        those of which it is known that they are gone. This one is closed.

        Raises: as the group itself; may be called again, with other survivors.
        """
        if isinstance(self._fault, StaleEpoch):
            raise self._fault
        self.close()
        if survivors is None:
            survivors = [one for one in self.members if one.name not in self._lost]
        self._newest += 1
        given: dict[str, Any] = {"least": 1, **self._given}
        try:
            return Group(survivors, epoch=self._newest, secret=self.secret, **given)
        except GroupHalted as error:
            self._lost |= set(error.members)
            raise

    # --- operations

    def write(self, offset: int, data: Buffer) -> Future[None]:
        """gWRITE: the bytes at ``offset`` in every region. More than `SLOT` bytes are several operations, of
        which the last is what completes."""
        view = memoryview(data).cast("B")
        self._check(offset, len(view))
        future: Future[None] = Future()
        if not len(view):
            future.set_result(None)
        for at in range(0, len(view), SLOT):
            future = self._submit(Kind.WRITE, offset + at, payload=bytes(view[at : at + SLOT]))
        return future

    def memcpy(self, source: int, target: int, length: int) -> Future[None]:
        """gMEMCPY: every member copies within its region, also where both places overlap."""
        self._check(source, length)
        self._check(target, length)
        return self._submit(Kind.MEMCPY, source, target, length)

    def cas(
        self, offset: int, expected: int, new: int, execute: Collection[str] | None = None
    ) -> Future[tuple[int, ...]]:
        """gCAS: the 8-byte word at ``offset`` becomes ``new`` where it is ``expected``, at the members that
        ``execute`` names (None: all). Each member's word before, in the order of `members`."""
        self._check(offset, WORD.size)
        if offset % WORD.size or not all(0 <= value < 1 << 64 for value in (expected, new)):
            raise UserError(
                f"gCAS of {expected} at `offset` {offset}; accepted are 64-bit words in their places"
            )
        names = [one.name for one in self.members]
        mask = sum(1 << place for place, name in enumerate(names) if execute is None or name in execute)
        return self._submit(Kind.CAS, offset, expected, new, mask)

    def flush(self) -> Future[None]:
        """gFLUSH: all operations before it are on the disk of every member."""
        return self._submit(Kind.FLUSH)

    def read(self, member: Member | str, offset: int, length: int) -> bytes:
        """The bytes in one member's region. Of the tail (`members[-1]`) they are what was acknowledged, and
        never go back; other members may be ahead of it.

        Raises:
            GroupHalted: it does not answer. StaleEpoch. UserError: there is no such member.
        """
        name = member if isinstance(member, str) else member.name
        self._check(offset, length)
        if name not in {one.name for one in self.members}:
            names = ", ".join(one.name for one in self.members)
            raise UserError(f"`member` is {name!r}; accepted are {names}")
        if self._fault is not None:
            raise self._fault
        parts = []
        for at in range(offset, offset + length, SLOT):
            asked = self._controls[name].ask(Kind.READ, at, min(SLOT, offset + length - at))
            parts.append(asked.payload)
        return b"".join(parts)

    def transaction(self, writes: Sequence[tuple[int, Buffer]], patience: float = 10.0) -> None:
        """All of ``writes`` (offset and bytes) or none, on the disks of all members, whoever dies meanwhile.
        Blocks; see `transactions.commit` for what it raises."""
        transactions.commit(self, writes, patience)

    def _check(self, offset: int, length: int) -> None:
        if offset < 0 or length < 0 or offset + length > self.size:
            raise UserError(f"`offset` {offset} with {length} bytes; accepted is within {self.size}")

    def _submit(
        self, kind: Kind, a: int = 0, b: int = 0, c: int = 0, mask: int = 0, payload: bytes = b""
    ) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # what is under way cannot be taken back
        self._room.acquire()
        with self._sending:
            with self._lock:
                if self._fault is not None or self._data is None:
                    self._room.release()
                    raise self._fault or GroupHalted("the group is closed")
                self._sequence += 1
                sequence, data = self._sequence, self._data
                self._pending.append(_Pending(sequence, future, time.monotonic()))
            try:
                data.sock.sendall(data.pack(Frame(kind, self.epoch, sequence, a, b, c, mask, b"", payload)))
            except (OSError, ValueError):  # ValueError: it was closed meanwhile
                head = self.members[0].name
                self._halt(GroupHalted(f"{head} takes no operations", [head]))
        return future

    # --- what engines say

    def _completed(self, frame: Frame) -> None:
        with self._lock:
            done = self._pending.popleft() if self._pending else None
        if done is None or done.sequence != frame.sequence:
            self._halt(GroupHalted(f"operation {frame.sequence} was acknowledged out of its turn"))
            return
        self._room.release()
        words = tuple(word for (word,) in WORD.iter_unpack(frame.results))
        done.future.set_result(words or None)

    def _heard(self, member: Member, frame: Frame) -> None:
        match frame.kind:
            case Kind.STALE:
                self._halt(StaleEpoch(self.epoch, frame.a))
            case Kind.BROKEN:
                self._halt(GroupHalted(f"{member.name} fails: {frame.payload.decode()}", [member.name]))
            case Kind.LOST:
                after = self.members[self.members.index(member) + 1].name
                self._halt(GroupHalted(f"{after} is gone, says {member.name}", [after]))

    def _halt(self, error: Exception) -> None:
        with self._lock:
            if self._fault is None and self._log is not None and not self._over.is_set():
                self._log.append("halted", epoch=self.epoch, why=str(error))
            self._fault = fault = self._fault or error
            self._lost |= set(getattr(error, "members", ()))
            pending, self._pending = self._pending, deque()
        self._over.set()
        for link in (self._data, *list(self._controls.values())):
            if isinstance(link, _Control):
                link.close(fault)
            elif link is not None:
                link.close()
        for one in pending:
            one.future.set_exception(fault)
        for _ in range(len(pending) + 1):
            self._room.release()

    def _watch(self) -> None:
        """Whoever is frozen closes no connection: where nothing completes, all are asked."""
        while not self._over.wait(self.patience / 4):
            with self._lock:
                oldest = self._pending[0] if self._pending else None
            if oldest is None or (waited := time.monotonic() - oldest.began) < self.patience:
                continue
            silent, done = [], []
            for name, control in list(self._controls.items()):
                try:
                    done.append(
                        STANDING.unpack(control.ask(Kind.STATUS, patience=self.patience / 2).payload)[2]
                    )
                except (GroupHalted, StaleEpoch):
                    silent.append(name)
            if silent:
                self._halt(
                    GroupHalted(f"{', '.join(silent)} does not answer for {self.patience:g} s", silent)
                )
            elif waited > 2 * self.patience and self._pending and self._pending[0] is oldest:
                self._halt(GroupHalted(f"operation {oldest.sequence} goes no further; members did {done}"))

    def close(self) -> None:
        """Forget it; engines and regions stay."""
        self._over.set()
        self._halt(GroupHalted("the group is closed"))

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
