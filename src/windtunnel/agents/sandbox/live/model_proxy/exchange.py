"""One request of the main loop on its way to the model and back, independent of who waits for it.

The reply is collected here. Those who asked (the first request, and repeats of it while it is under way) each
read it from its beginning, at their own speed. When all of them are gone, the exchange still ends and is
recorded: the model has been paid, and the agent will ask again after its restore.

The end of a reply is let out only once the whole is recorded, so that an agent never acts on a reply that a
restore could not give it again. Of a stream, everything before the closing event is passed on as it comes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import httpx

from windtunnel.agents.sandbox.live.model_proxy.conversation import Entry, Headers, Reply
from windtunnel.agents.sandbox.live.model_proxy.events import Bounds, Upstream
from windtunnel.agents.sandbox.live.model_proxy.forward import (
    Asking,
    UpstreamFault,
    asked_upstream,
    fault_body,
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
        self.asked = time.monotonic()
        self.began = asyncio.Event()
        """Status and headers are there."""
        self.think = 0.0
        self.status = 0
        self.headers: Headers = ()
        self.fault = ""
        self._shown: list[bytes] = []
        self._held: list[bytes] = []
        self._size = 0
        self._ended = False
        self._grown = asyncio.Event()

    @property
    def complete(self) -> bool:
        """It ended well, and its reply can be given again."""
        return self._ended and not self.fault and 200 <= self.status < 300

    async def run(
        self,
        client: httpx.AsyncClient,
        upstream: Upstream,
        asking: Asking,
        bounds: Bounds,
        record: Callable[[Reply], Awaitable[None]],
    ) -> None:
        """Ask, collect and record."""
        try:
            async with asked_upstream(client, upstream, asking) as response:
                headers = reply_headers(response.headers.multi_items())
                stream = dict(headers).get("content-type", "").startswith("text/event-stream")
                self._begin(response.status_code, headers)
                async for chunk in response.aiter_raw():
                    self._take(chunk, stream, bounds.reply)
            if 200 <= self.status < 300:
                await record(Reply(self.status, self.headers, b"".join(self._shown + self._held)))
        except UpstreamFault as fault:
            self._fail(fault)
        except BaseException:
            self._fail(UpstreamFault(503, "ending", "the model proxy is ending"))
            raise
        finally:
            self._end()

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
        self.think = time.monotonic() - self.asked
        self.began.set()

    def _take(self, chunk: bytes, stream: bool, limit: int) -> None:
        self._size += len(chunk)
        if self._size > limit:
            raise UpstreamFault(502, "reply_too_large", f"the reply is larger than {limit} bytes")
        before = self._shown[-1][-LONGEST:] if self._shown else b""
        if self._held or not stream or any(mark in before + chunk for mark in CLOSING):
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

    def _end(self) -> None:
        self._shown += self._held
        self._held = []
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        """Tell all readers; each waits for the next event from then on."""
        self._grown.set()
        self._grown = asyncio.Event()
