"""Commands under way: each is a task of its own that outlives its request, and can be cancelled by name.

The output goes from the thread that runs the command through a queue to the response. The queue is bounded: a
reader that is slow makes the thread wait, while the command itself goes on and writes to its files. A command
that is being cut off waits for no reader; what such a reader did not take in time is dropped, and counted.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any
from uuid import uuid4

from windtunnel.agents.sandbox.client import wire
from windtunnel.agents.sandbox.live.daemon.faults import Refused, told
from windtunnel.agents.sandbox.live.daemon.lanes import Lanes
from windtunnel.agents.sandbox.live.daemon.schema import Command
from windtunnel.agents.sandbox.model import TurnResult

PIECE = 1 << 20
WAITING = 16 << 20
"""Bytes of output that may wait for a reader."""
KEPT_TICKETS = 1024


class Tickets:
    """Checkpoints of turns under way, by name, so that another request can wait for them."""

    def __init__(self) -> None:
        self._pending: OrderedDict[str, Any] = OrderedDict()

    def add(self, pending: Any) -> wire.TurnAnswer:
        ticket = uuid4().hex
        self._pending[ticket] = pending
        settled = [name for name, one in self._pending.items() if one.done]
        for name in settled[: max(0, len(self._pending) - KEPT_TICKETS)]:
            del self._pending[name]
        return self.answer(ticket)

    def get(self, ticket: str) -> Any:
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
    timeout: float | None = None
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
    """The commands that run or wait for their lane."""

    def __init__(self, lanes: Lanes, tickets: Tickets) -> None:
        self._lanes, self._tickets = lanes, tickets
        self._running: dict[str, Execution] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, box: Any, command: Command) -> Execution:
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

    async def _run(self, name: str, execution: Execution, box: Any, command: Command) -> None:
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
            async with self._lanes.lane(box.name):
                if execution.cancel.is_set():
                    note = "cancelled before it began"
                    execution.result = TurnResult(b"", b"", None, 0.0, "cancelled", note)
                else:
                    execution.result = await self._lanes.command(work)
                    if command.turn and execution.result.ended != "sandbox-died":
                        execution.turn = await self._end_turn(box, command)
        except BaseException as error:  # told to the client, in words
            execution.error = error
            if isinstance(error, asyncio.CancelledError):
                raise
        finally:
            execution.lines.put_nowait(None)
            del self._running[name], self._tasks[name]

    async def _end_turn(self, box: Any, command: Command) -> dict[str, Any]:
        """The turn's end; a failure of it is no failure of the command."""
        try:
            pending = await self._lanes.call(lambda: box.end_turn(request=command.request))
            return asdict(self._tickets.add(pending))
        except Exception as error:
            return dict(told(error))


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
        yield wire.json_line(dict(told(execution.error)))
    elif execution.result is not None:
        yield wire.result_line(_told_result(execution), execution.sent, execution.turn)


def _told_result(execution: Execution) -> TurnResult:
    """The result with notes that are right for somebody who read the whole stream."""
    assert execution.result is not None
    # The host says that its result holds only the end of what it passed on; the reader has all of it.
    notes = [note for note in execution.result.note.split("; ") if note and "was passed on whole" not in note]
    if execution.dropped:
        notes.append(f"{execution.dropped} bytes of output were dropped: the reader was too slow")
    return replace(execution.result, note="; ".join(notes))
