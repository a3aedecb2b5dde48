"""An event loop in a thread of its own, for what listens while the rest of the host works in threads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from windtunnel.base.errors import UserError

T = TypeVar("T")


class LoopThread:
    """``call`` may be used from any thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        """Run ``work`` on the loop and wait for it. Raises what it raises, UserError after `close`, and
        TimeoutError where it takes longer than ``seconds``."""
        if self.closed:
            work.close()
            raise UserError(f"{self._name}: it is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(seconds)

    def close(self) -> None:
        """End; what still runs on the loop is left where it is."""
        if not self.closed:
            self.closed = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


async def copy_stream(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, length: int | None = None
) -> None:
    """All that comes, and its end; or ``length`` bytes. Raises OSError."""
    left = length
    while left != 0 and (data := await reader.read(min(left or 2**16, 2**16))):
        left = None if left is None else left - len(data)
        writer.write(data)
        await writer.drain()
    if left is None and writer.can_write_eof():
        writer.write_eof()
