"""What every request of the daemon needs: the host, the lanes, and what is under way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from windtunnel.agents.sandbox.live.daemon.execution import Executions, Tickets
from windtunnel.agents.sandbox.live.daemon.faults import Refused
from windtunnel.agents.sandbox.live.daemon.lanes import Lanes
from windtunnel.agents.sandbox.live.place import checked_name
from windtunnel.agents.sandbox.model import Facility
from windtunnel.agents.sandbox.views import Event
from windtunnel.base.errors import UserError

BACKLOG = 1000
"""Events that a slow listener may be behind; it loses the oldest."""


class Events:
    """Hands what happens on the host to whoever listens."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listeners: set[asyncio.Queue[Event | None]] = set()

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def publish(self, event: Any) -> None:
        """Called by the host, on any of its threads."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            told = Event(event.kind, event.box, event.detail, event.seconds)
            loop.call_soon_threadsafe(self._hand_out, told)

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
    """The daemon's state. ``host`` is a ``Host``, or whatever has its methods."""

    host: Any
    home: Path
    events: Events
    doctor: Callable[[], list[Facility]]
    lanes: Lanes = field(default_factory=Lanes)
    tickets: Tickets = field(default_factory=Tickets)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    busy: int = 0
    """Requests under way."""
    last: float = field(default_factory=time.monotonic)
    """When the last request ended."""

    def __post_init__(self) -> None:
        self.executions = Executions(self.lanes, self.tickets)

    async def box(self, name: str) -> Any:
        """The sandbox of that name; refused as unknown where there is none. The host may be busy for a
        while, so even this is no matter for the event loop's own thread."""
        checked_name(name)
        try:
            return await self.lanes.call(lambda: self.host.get(name))
        except UserError as error:
            raise Refused("unknown", str(error)) from error

    def names(self) -> list[str]:
        return [info.name for info in self.host.boxes()]
