"""To the service behind the model proxy and back: addresses, headers, what went wrong in words; and
`Exchange`, one request of the main loop on its way, independent of who waits for it.

A reply is collected there. Those who asked (the first request, and repeats of it while it is under way) each
read it from its beginning, at their own speed. When all of them are gone, the exchange still ends and is
recorded: the model has been paid, and the agent will ask again after its restore.

The end of a reply is let out only once the whole is recorded, so that an agent never acts on a reply that a
restore could not give it again. Of a stream, everything before the closing event is passed on as it comes.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from windtunnel.agents.sandbox.proxy.conversation import Entry, Headers, Reply
from windtunnel.agents.sandbox.proxy.events import Bounds, Upstream
from windtunnel.agents.sandbox.proxy.key import CREDENTIALS, key_header, read_key
from windtunnel.agents.sandbox.proxy.target import checked_base, joined
from windtunnel.base.errors import UserError

HOP_BY_HOP = frozenset({"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"})
FORWARDED = frozenset({"forwarded", "via", "x-real-ip"})
"""What proxies tell of where a request came from; from inside a sandbox it would be made up."""
NOT_KEPT = frozenset({"set-cookie", "set-cookie2"})


class UpstreamFault(Exception):
    """The service could not be reached, or broke off."""

    def __init__(self, status: int, kind: str, words: str) -> None:
        super().__init__(words)
        self.status = status
        self.kind = kind


@dataclass(frozen=True)
class Asking:
    """A request of an agent, read in full. ``path``: as it was sent, with its query."""

    method: str
    path: str
    headers: Headers = field(repr=False)
    body: bytes = field(repr=False)

    @property
    def route(self) -> str:
        """The path without its query."""
        return self.path.split("?", 1)[0]

    def header(self, name: str) -> str:
        return next((value for one, value in self.headers if one == name), "")


def address(upstream: Upstream, target: str) -> tuple[str, dict[str, bytes]]:
    """Where a request for ``target`` goes: the URL to connect to, and what makes httpx ask there for exactly
    that target, which it would otherwise normalise."""
    origin, base = checked_base(upstream.url)
    return origin, {"target": joined(base, target).encode("latin-1")}


def request_headers(asking: Asking, upstream: Upstream) -> Headers:
    """What goes to the upstream of an agent's headers, and what the host adds. Raises UpstreamFault where the
    key cannot be read."""
    own = {name.lower(): value for name, value in upstream.headers.items()}
    replaced: frozenset[str] = frozenset()
    if upstream.key_file is not None:
        try:
            key = read_key(upstream.key_file)
        except UserError as error:
            words = str(error).removeprefix("model proxy: ")
            raise UpstreamFault(503, "key_unreadable", words) from None
        name, value = key_header(key, asking.route, frozenset(dict(asking.headers)))
        own[name], replaced = value, CREDENTIALS
    left = replaced | _named_in_connection(asking.headers) | {"host", "content-length", "expect"} | own.keys()
    kept = ((name, value) for name, value in asking.headers if name not in left and not _of_the_way(name))
    return (*kept, *own.items())


def reply_headers(headers: Iterable[tuple[str, str]]) -> Headers:
    given = tuple((name.lower(), value) for name, value in headers)
    left = HOP_BY_HOP | NOT_KEPT | _named_in_connection(given)
    return tuple((name, value) for name, value in given if name not in left and name[:6] != "proxy-")


def _of_the_way(name: str) -> bool:
    """Whether a header of a request is about the way that it took, not about what is asked."""
    return name in HOP_BY_HOP | FORWARDED or name.startswith(("x-forwarded-", "proxy-"))


def _named_in_connection(headers: Headers) -> set[str]:
    return {
        part.strip().lower() for name, value in headers if name == "connection" for part in value.split(",")
    }


def timeouts(bounds: Bounds) -> httpx.Timeout:
    return httpx.Timeout(bounds.silence, connect=bounds.connect, pool=bounds.connect)


@asynccontextmanager
async def asked_upstream(
    client: httpx.AsyncClient, upstream: Upstream, asking: Asking
) -> AsyncIterator[httpx.Response]:
    """The service's response, its body not yet read. Raises UpstreamFault, also for what happens while the
    body is read within the block."""
    try:
        url, exactly = address(upstream, asking.path)
        request = httpx.Request(
            asking.method,
            url,
            headers=list(request_headers(asking, upstream)),
            content=asking.body,
            extensions={"timeout": client.timeout.as_dict(), **exactly},
        )
        response = await client.send(request, stream=True)
        try:
            yield response
        finally:
            await response.aclose()
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
        raise fault_of(error, upstream) from error


def fault_of(error: Exception, upstream: Upstream) -> UpstreamFault:
    where = httpx.URL(upstream.url).host
    words = str(error) or type(error).__name__
    if isinstance(error, httpx.PoolTimeout):
        return UpstreamFault(503, "overloaded", "too many requests are under way")
    if isinstance(error, httpx.ConnectTimeout):
        return UpstreamFault(504, "upstream_timeout", f"{where} cannot be reached: {words}")
    if isinstance(error, httpx.ConnectError | httpx.UnsupportedProtocol | httpx.InvalidURL):
        return UpstreamFault(502, "upstream_unreachable", f"{where} cannot be reached: {words}")
    if isinstance(error, httpx.TimeoutException):
        return UpstreamFault(504, "upstream_timeout", f"{where} did not answer in time: {words}")
    return UpstreamFault(502, "upstream_broke_off", f"{where} broke off: {words}")


def fault_body(kind: str, words: str) -> bytes:
    """An error as both OpenAI's and Anthropic's clients understand it."""
    told: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": f"windtunnel: {words}"}}
    return json.dumps(told).encode()


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
