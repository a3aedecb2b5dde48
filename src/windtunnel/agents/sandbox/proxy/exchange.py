"""A reply of the model that is arriving, for whoever waits for it.

A request once sent is read to its end, whether its client still waits or has died: a restored sandbox asks
again, and is given this reply. A reply counts as complete when its last byte is recorded; its closing event
is held back until then, so that an agent never acts on a reply that a restore could not give it again. Of a
stream, everything before the closing event is passed on as it comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx

from windtunnel.agents.sandbox.proxy.conversation import Entry, Headers, Reply
from windtunnel.agents.sandbox.proxy.upstream import (
    Request,
    Upstream,
    UpstreamFault,
    fault_body,
    forward,
    reply_headers,
)

CLOSING = (b"[DONE]", b"message_stop", b"response.completed", b"response.incomplete", b"response.failed")
"""What the last event of a stream holds, in the shapes that are understood."""
LONGEST = max(map(len, CLOSING))


class BrokeOff(Exception):
    """The reply ended before its end."""


class Exchange:
    """A reply that is arriving. Lives on the event loop."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.began = asyncio.Event()
        """Status and headers are there."""
        self.status = 0
        self.headers: Headers = ()
        self.fault = ""
        self._shown: list[bytes] = []
        self._held: list[bytes] = []
        self._tail = b""
        self._size = 0
        self._ended = False
        self._grown = asyncio.Event()

    async def run(
        self,
        client: httpx.AsyncClient,
        upstream: Upstream,
        request: Request,
        limit: int,
        record: Callable[[Reply], Awaitable[None]],
    ) -> None:
        """Ask, collect up to ``limit`` bytes, and record."""
        try:
            async with forward(client, upstream, request) as response:
                self._begin(response.status_code, reply_headers(response))
                stream = dict(self.headers).get("content-type", "").startswith("text/event-stream")
                async for chunk in response.aiter_raw():
                    self._take(chunk, stream, limit)
            if 200 <= self.status < 300:
                await record(Reply(self.status, self.headers, b"".join(self._shown + self._held)))
        except UpstreamFault as fault:
            self._fail(fault)
        except BaseException:
            self._fail(UpstreamFault(503, "ending", "the model proxy is ending"))
            raise
        finally:
            self._shown += self._held
            self._held, self._ended = [], True
            self._wake()

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body from its beginning, as it comes. Raises BrokeOff where it ends too soon."""
        place = 0
        while True:
            while place < len(self._shown):
                place += 1
                yield self._shown[place - 1]
            if self._ended:
                if self.fault:
                    raise BrokeOff(self.fault)
                return
            await self._grown.wait()

    def _begin(self, status: int, headers: Headers) -> None:
        self.status, self.headers = status, headers
        self.began.set()

    def _take(self, chunk: bytes, stream: bool, limit: int) -> None:
        self._size += len(chunk)
        if self._size > limit:
            raise UpstreamFault(502, "reply_too_large", f"the reply is larger than {limit} bytes")
        near = self._tail + chunk  # an event may come in several pieces
        self._tail = near[-LONGEST:]
        if self._held or not stream or any(mark in near for mark in CLOSING):
            self._held.append(chunk)
        else:
            self._shown.append(chunk)
            self._wake()

    def _fail(self, fault: UpstreamFault) -> None:
        if self.began.is_set():
            # what was held back stays back: an agent that saw the closing event would act on this reply
            self.fault, self._held = str(fault), []
            return
        # nothing was passed on yet: the failure can be said in a reply of its own
        body = fault_body(fault.kind, str(fault))
        self._begin(fault.status, (("content-type", "application/json"), ("content-length", str(len(body)))))
        self._held = [body]

    def _wake(self) -> None:
        """Tell all readers; each waits for the next event from then on."""
        self._grown.set()
        self._grown = asyncio.Event()
