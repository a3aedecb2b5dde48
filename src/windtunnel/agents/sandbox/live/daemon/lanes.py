"""Where blocking calls of the host run: bounded threads, and one lane for each sandbox.

What changes a sandbox goes through its lane, one after the other in the order of arrival, and waits there
without a thread. What only looks does not wait. A call that was begun is finished, whoever stops waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class Lanes:
    """``calls`` threads for short calls, and ``commands`` for those that last as long as a command does."""

    def __init__(self, calls: int = 32, commands: int = 512) -> None:
        self._calls = ThreadPoolExecutor(calls, thread_name_prefix="sandbox-call")
        self._commands = ThreadPoolExecutor(commands, thread_name_prefix="sandbox-command")
        self._locks: dict[str, asyncio.Lock] = {}

    def lane(self, box: str) -> asyncio.Lock:
        """The lane of a sandbox; asyncio's locks are fair."""
        return self._locks.setdefault(box, asyncio.Lock())

    async def call(self, work: Callable[[], T]) -> T:
        """Run ``work`` on a thread."""
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._calls, work))

    async def ordered(self, box: str, work: Callable[[], T]) -> T:
        """Run ``work`` after all that the sandbox was told before."""

        async def turn() -> T:
            async with self.lane(box):
                return await self.call(work)

        return await asyncio.shield(asyncio.create_task(turn()))

    async def command(self, work: Callable[[], T]) -> T:
        """Run ``work``, which may last, on a thread; the caller holds the lane."""
        return await asyncio.get_running_loop().run_in_executor(self._commands, work)

    def forget(self, box: str) -> None:
        """Drop the lane of a sandbox that is gone."""
        lock = self._locks.get(box)
        if lock is not None and not lock.locked():
            del self._locks[box]

    def close(self) -> None:
        """Begin nothing more; what runs is not waited for."""
        self._calls.shutdown(wait=False, cancel_futures=True)
        self._commands.shutdown(wait=False, cancel_futures=True)
