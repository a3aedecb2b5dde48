"""What every request of the daemon needs: the host, the order of its calls, and the commands under way.

What changes a sandbox goes one after the other in the order of arrival, and waits there without a thread.
What only looks does not wait. A call that was begun is finished, whoever stops waiting.

A command is a task of its own that outlives its request, and can be cancelled by name. Its output goes from
the thread that runs it through a queue to the response. The queue is bounded: a reader that is slow makes the
thread wait, while the command itself goes on and writes to its files. A command that is being cut off waits
for no reader; what such a reader did not take in time is dropped, and counted.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field

from windtunnel.agents.sandbox.client import wire
from windtunnel.agents.sandbox.errors import LessError, SandboxDied
from windtunnel.agents.sandbox.model import Event, Facility, TurnResult
from windtunnel.agents.sandbox.place import checked_name
from windtunnel.agents.sandbox.protocol import AnyHost, AnySandbox, PendingTurn
from windtunnel.base.errors import UserError

T = TypeVar("T")
LOG = logging.getLogger("windtunnel.sandbox.daemon")
PIECE = 1 << 20
WAITING = 16 << 20
"""Bytes of output that may wait for a reader."""
KEPT_TICKETS = 1024
BACKLOG = 1000
"""Events that a slow listener may be behind; it loses the oldest."""


class Body(BaseModel):
    """What a request may hold. A field that is not known is refused, so that a typo is not ignored."""

    model_config = ConfigDict(extra="forbid")


class Command(Body):
    """A command of a sandbox."""

    command: str = Field(description="Text for the shell.")
    shell: str = Field("main", description="The persistent shell that runs it.")
    timeout: float | None = Field(None, gt=0, description="Seconds until it is cut off; null: never.")
    cancel_on_disconnect: bool = Field(True, description="Cancel the command when the client goes away.")
    id: str = Field("", max_length=64, description="A name of the client's choice, to cancel it by.")
    turn: bool = Field(False, description="End the turn after it.")
    request: str = Field("", description="Id of the model request that the turn belongs to.")


class Refused(Exception):
    """An answer other than success, decided by the daemon itself. ``kind`` is one of ``wire.STATUS``."""

    def __init__(self, kind: str, sentence: str) -> None:
        super().__init__(sentence)
        self.kind = kind


def told(error: BaseException) -> dict[str, Any]:
    """The body of the answer for ``error``, never a traceback: its sentence, its kind as in ``wire.STATUS``,
    and what lacks."""
    kind, sentence = "fault", str(error) or type(error).__name__
    if isinstance(error, Refused):
        kind = error.kind
    elif isinstance(error, UserError):
        kind = "user"
    elif isinstance(error, LessError):
        return {"error": sentence, "kind": "less", **wire.told_less(error)}
    elif isinstance(error, SandboxDied):
        kind = "died"
    elif isinstance(error, TimeoutError):
        kind = "late"
    elif _disk_full(error):
        kind, sentence = "full", f"{error}; the disk is full: 'windtunnel sandbox gc' frees what can go"
    elif type(error).__module__ == "builtins" and not isinstance(error, OSError):
        LOG.error("a call failed unexpectedly", exc_info=error)
        sentence = f"sandbox: unexpected {type(error).__name__}: {error}"
    return {"error": sentence, "kind": kind}


def _disk_full(error: BaseException) -> bool:
    """Whether the disk (or a quota) was the reason, anywhere in the chain."""
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, OSError) and at.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        at = at.__cause__
    return False


class Threads:
    """``calls`` threads for short calls, and ``commands`` for those that last as long as a command does."""

    def __init__(self, calls: int = 32, commands: int = 512) -> None:
        self._calls = ThreadPoolExecutor(calls, thread_name_prefix="sandbox-call")
        self._commands = ThreadPoolExecutor(commands, thread_name_prefix="sandbox-command")
        self._locks: dict[str, asyncio.Lock] = {}

    def lock(self, box: str) -> asyncio.Lock:
        """The lock that orders what a sandbox is told; asyncio's locks are fair."""
        return self._locks.setdefault(box, asyncio.Lock())

    async def call(self, work: Callable[[], T]) -> T:
        """Run ``work`` on a thread."""
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._calls, work))

    async def ordered(self, box: str, work: Callable[[], T]) -> T:
        """Run ``work`` after all that the sandbox was told before."""

        async def turn() -> T:
            async with self.lock(box):
                return await self.call(work)

        return await asyncio.shield(asyncio.create_task(turn()))

    async def command(self, work: Callable[[], T]) -> T:
        """Run ``work``, which may last, on a thread; the caller holds the lock."""
        return await asyncio.get_running_loop().run_in_executor(self._commands, work)

    def forget(self, box: str) -> None:
        """Drop the lock of a sandbox that is gone."""
        lock = self._locks.get(box)
        if lock is not None and not lock.locked():
            del self._locks[box]

    def close(self) -> None:
        """Begin nothing more; what runs is not waited for."""
        self._calls.shutdown(wait=False, cancel_futures=True)
        self._commands.shutdown(wait=False, cancel_futures=True)


class Tickets:
    """Checkpoints of turns under way, by name, so that another request can wait for them."""

    def __init__(self) -> None:
        self._pending: OrderedDict[str, PendingTurn] = OrderedDict()

    def add(self, pending: PendingTurn) -> wire.TurnAnswer:
        ticket = uuid4().hex
        self._pending[ticket] = pending
        settled = [name for name, one in self._pending.items() if one.done]
        for name in settled[: max(0, len(self._pending) - KEPT_TICKETS)]:
            del self._pending[name]
        # how it ended is told to who asks for it: a fault told now would pass for one of ending the turn
        return wire.TurnAnswer(ticket, False)

    def get(self, ticket: str) -> PendingTurn:
        if ticket not in self._pending:
            raise Refused("unknown", f"sandbox: no turn with ticket {ticket!r}; the log tells how it ended")
        return self._pending[ticket]

    def answer(self, ticket: str) -> wire.TurnAnswer:
        """How it stands; raises what the checkpoint failed with."""
        pending = self.get(ticket)
        if not pending.done:
            return wire.TurnAnswer(ticket, False)
        return wire.TurnAnswer(ticket, True, pending.wait(0))


@dataclass
class Execution:
    """One command. ``lines`` gets its output, then None; ``gone``: nobody reads it any more."""

    box: str
    cancel: threading.Event = field(default_factory=threading.Event)
    lines: asyncio.Queue[tuple[str, bytes] | None] = field(default_factory=asyncio.Queue)
    result: TurnResult | None = None
    turn: dict[str, Any] | None = None
    error: BaseException | None = None
    gone: bool = False
    sent: dict[str, int] = field(default_factory=lambda: {"stdout": 0, "stderr": 0})
    dropped: int = 0
    _waiting: int = 0
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def offer(
        self, stream: str, data: bytes, loop: asyncio.AbstractEventLoop, deadline: float | None
    ) -> None:
        """Queue a piece of output; called by the thread that runs the command."""
        with self._changed:
            while self._waiting > WAITING and not self._hurried(deadline):
                self._changed.wait(0.1)
            if self.gone or self._waiting > WAITING:
                self.dropped += len(data)
                return
            self._waiting += len(data)
        self.sent[stream] += len(data)
        loop.call_soon_threadsafe(self.lines.put_nowait, (stream, data))

    def taken(self, count: int) -> None:
        """The reader took ``count`` bytes."""
        with self._changed:
            self._waiting -= count
            self._changed.notify_all()

    def leave(self) -> None:
        """The reader has gone."""
        with self._changed:
            self.gone = True
            self._changed.notify_all()

    def _hurried(self, deadline: float | None) -> bool:
        late = deadline is not None and time.monotonic() > deadline
        return self.gone or late or self.cancel.is_set()


class Executions:
    """The commands that run or wait for their turn."""

    def __init__(self, threads: Threads, tickets: Tickets) -> None:
        self._threads, self._tickets = threads, tickets
        self._running: dict[str, Execution] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, box: AnySandbox, command: Command) -> Execution:
        """Queue a command of ``box``."""
        name = command.id or uuid4().hex
        if name in self._running:
            raise Refused("conflict", f"sandbox: an execution with id {name!r} runs already")
        execution = Execution(box.name)
        self._running[name] = execution
        self._tasks[name] = asyncio.create_task(self._run(name, execution, box, command))
        return execution

    def cancel(self, name: str) -> None:
        if name not in self._running:
            raise Refused("unknown", f"sandbox: no execution with id {name!r} runs")
        self._running[name].cancel.set()

    def cancel_all(self, box: str | None = None) -> None:
        """Cancel all commands of a sandbox (None: of all), also those that wait."""
        for execution in self._running.values():
            if box is None or execution.box == box:
                execution.cancel.set()

    async def finished(self, timeout: float) -> bool:
        """Wait until no command runs; False when some still do after ``timeout`` seconds."""
        if not self._tasks:
            return True
        return not (await asyncio.wait(list(self._tasks.values()), timeout=timeout))[1]

    async def _run(self, name: str, execution: Execution, box: AnySandbox, command: Command) -> None:
        loop = asyncio.get_running_loop()

        def work() -> TurnResult:
            deadline = None if command.timeout is None else time.monotonic() + command.timeout

            def on_output(stream: str, data: bytes) -> None:
                execution.offer(stream, bytes(data), loop, deadline)

            return box.run(
                command.command,
                shell=command.shell,
                timeout=command.timeout,
                cancel=execution.cancel,
                on_output=on_output,
            )

        try:
            async with self._threads.lock(box.name):
                if execution.cancel.is_set():
                    note = "cancelled before it began"
                    execution.result = TurnResult(b"", b"", None, 0.0, "cancelled", note)
                else:
                    execution.result = await self._threads.command(work)
                    if command.turn and execution.result.ended != "sandbox-died":
                        execution.turn = await self._end_turn(box, command)
        except BaseException as error:  # told to the client, in words
            execution.error = error
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            execution.lines.put_nowait(None)
            del self._running[name], self._tasks[name]

    async def _end_turn(self, box: AnySandbox, command: Command) -> dict[str, Any]:
        """The turn's end; a failure of it is no failure of the command."""
        try:
            pending = await self._threads.call(lambda: box.end_turn(request=command.request))
            return asdict(self._tickets.add(pending))
        except Exception as error:
            return {**told(error)}


async def lines(execution: Execution) -> AsyncIterator[bytes]:
    """The lines of a command as they come; pieces that wait already are sent as one."""
    held: tuple[str, bytearray] | None = None
    while (piece := await execution.lines.get()) is not None:
        stream, data = piece
        execution.taken(len(data))
        if held is not None and (held[0] != stream or len(held[1]) > PIECE):
            yield wire.output_line(held[0], bytes(held[1]))
            held = None
        held = held or (stream, bytearray())
        held[1].extend(data)
        if execution.lines.empty():
            yield wire.output_line(stream, bytes(held[1]))
            held = None
    if held is not None:
        yield wire.output_line(held[0], bytes(held[1]))
    if execution.error is not None:
        yield wire.json_line({**told(execution.error)})
    elif execution.result is not None:
        yield wire.result_line(_told_result(execution), execution.sent, execution.turn)


def _told_result(execution: Execution) -> TurnResult:
    """The result, as it is for whoever read the stream."""
    result = execution.result
    assert result is not None
    if not execution.dropped:
        return result
    dropped = f"{execution.dropped} bytes of output were dropped: the reader was too slow"
    return replace(result, note="; ".join(filter(None, (result.note, dropped))))


class Events:
    """Hands what happens on the host to whoever listens."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listeners: set[asyncio.Queue[Event | None]] = set()

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def publish(self, event: Event) -> None:
        """Called by the host, on any of its threads."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._hand_out, event)

    def listen(self) -> asyncio.Queue[Event | None]:
        queue: asyncio.Queue[Event | None] = asyncio.Queue()
        self._listeners.add(queue)
        return queue

    def leave(self, queue: asyncio.Queue[Event | None]) -> None:
        self._listeners.discard(queue)

    def end(self) -> None:
        """Tell all listeners that nothing more comes."""
        self._hand_out(None)

    def _hand_out(self, event: Event | None) -> None:
        for queue in self._listeners:
            if queue.qsize() >= BACKLOG:
                queue.get_nowait()
            queue.put_nowait(event)


@dataclass
class Service:
    """The daemon's state."""

    host: AnyHost
    home: Path
    events: Events
    doctor: Callable[[], list[Facility]]
    threads: Threads = field(default_factory=Threads)
    tickets: Tickets = field(default_factory=Tickets)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    busy: int = 0
    """Requests under way."""
    last: float = field(default_factory=time.monotonic)
    """When the last request ended."""

    def __post_init__(self) -> None:
        self.executions = Executions(self.threads, self.tickets)

    async def box(self, name: str) -> AnySandbox:
        """The sandbox of that name; refused as unknown where there is none. The host may be busy for a
        while, so even this is no matter for the event loop's own thread."""
        checked_name(name)
        try:
            return await self.threads.call(lambda: self.host.get(name))
        except UserError as error:
            raise Refused("unknown", str(error)) from error

    async def look(self, name: str, work: Callable[[AnySandbox], T]) -> T:
        """Ask a sandbox something that changes nothing."""
        box = await self.box(name)
        return await self.threads.call(lambda: work(box))

    async def change(self, name: str, work: Callable[[AnySandbox], T], *, cancel: bool = False) -> T:
        """Do something to a sandbox, after all that it was told before; ``cancel``: its commands first."""
        box = await self.box(name)
        if cancel:
            self.executions.cancel_all(name)
        return await self.threads.ordered(name, lambda: work(box))

    def names(self) -> list[str]:
        return [info.name for info in self.host.boxes()]
