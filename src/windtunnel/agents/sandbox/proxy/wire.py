"""The side of the model proxy that agents talk to: requests in, replies out, in ASGI's words.

Requests are read by llhttp, which refuses what two servers could read as two different requests: bare line
feeds, folded headers, two lengths. The rest of that kind is refused here, and so is what never ends: a head,
a trailer or a chunk's extension. Source: RFC 9112, sections 3.2, 6.1 and 7.1.

Clients that would rather speak HTTP/2 offer to upgrade with their first request (``Upgrade: h2c``). The offer
is passed over, as a server may (RFC 9110, section 7.8).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import httptools
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from windtunnel.agents.sandbox.proxy import limits
from windtunnel.agents.sandbox.proxy.upstream import AgentRequest, Headers, ProxyFault, fault_body

LARGEST_HEAD = 64 * 1024
LOG = logging.getLogger(__name__)
LOG.setLevel(logging.ERROR)  # uvicorn's: a warning for each odd request would let a sandbox fill the log


class _Parser(httptools.HttpRequestParser):
    """llhttp takes what follows an offer to upgrade for another protocol, the request's body too. So the head
    is read again without the offer."""

    def __init__(self, connection: AgentConnection) -> None:
        super().__init__(connection)
        self._connection = connection
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it

    def feed_data(self, data: Any) -> None:
        while data:
            try:
                return super().feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                data = self._connection.head_without_offer() + bytes(data[offer.args[0] :])


class AgentConnection(HttpToolsProtocol):
    """uvicorn's connection, strict. The scope of a request has its whole target, as it was sent, under
    ``target``."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.parser = _Parser(self)
        self.logger = LOG
        self._fault = ""
        self._unread = 0
        """Bytes that came since the last whole head or piece of a body."""

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._unread += len(data)
        super().data_received(data)
        if self._unread > LARGEST_HEAD and not self.transport.is_closing():
            self._fault = f"its head, or what is between the parts of its body, exceeds {LARGEST_HEAD} bytes"
            self.send_400_response("")

    def on_message_begin(self) -> None:
        self._unread = 0
        super().on_message_begin()

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        super().on_body(body)

    def _is_offer(self) -> bool:
        """Whether the head that was read offers to upgrade; CONNECT, which is refused, is no offer."""
        return bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"

    def head_without_offer(self) -> bytes:
        """Of a request that offers to upgrade; nothing for what follows a CONNECT, which is nobody's."""
        if not self._is_offer():
            return b""
        line = b"%s %s HTTP/%s" % (
            self.parser.get_method(),
            self.url,
            self.parser.get_http_version().encode(),
        )
        fields = [b"%s: %s" % field for field in self.headers if field[0] != b"upgrade"]
        return b"\r\n".join([line, *fields, b"", b""])

    def on_message_complete(self) -> None:
        if not self._is_offer():
            super().on_message_complete()

    def on_headers_complete(self) -> None:
        self._unread = 0
        if self._is_offer():
            return
        self._fault = head_fault(self.url, self.headers, self.parser.get_http_version())
        if self._fault:
            raise ValueError(self._fault)  # uvicorn answers with `send_400_response`
        self.scope["target"] = self.url.decode("ascii")  # type: ignore[typeddict-unknown-key]
        self.url = b"/"  # uvicorn's own reading of it would refuse some
        super().on_headers_complete()
        self.headers = []  # a trailer's fields would else become the request's

    def send_400_response(self, msg: str) -> None:
        cycle = self.cycle
        if cycle is None or cycle.response_complete or not cycle.response_started:
            body = fault_body("bad_request", f"the request is refused: {self._fault or 'it is malformed'}")
            head = (
                f"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()


def head_fault(target: bytes, headers: list[tuple[bytes, bytes]], version: str) -> str:
    """What is wrong with the head of a request, in words; empty: nothing."""
    values: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        values.setdefault(name, []).append(value)
    if len(target) + sum(len(name) + len(value) + 4 for name, value in headers) > LARGEST_HEAD:
        return f"its head has more than {LARGEST_HEAD} bytes"
    if version not in ("1.0", "1.1"):
        return f"HTTP/{version} is not spoken here"
    if not target.startswith(b"/") or not all(0x21 <= byte <= 0x7E for byte in target):
        return "the request's target must be a path"
    if len(values.get(b"host", ())) != 1 and (version != "1.0" or b"host" in values):
        return "header host must be given once"
    if b"transfer-encoding" in values and (
        values[b"transfer-encoding"] != [b"chunked"] or version == "1.0" or b"content-length" in values
    ):
        return "of transfer-encodings only chunked is accepted, in HTTP/1.1, without a content-length"
    return ""


async def read_request(scope: Scope, receive: Receive) -> AgentRequest:
    """The whole request. Raises ProxyFault where it is too large, too slow, cut off or not for the
    upstream."""
    if scope["method"] in ("CONNECT", "TRACE"):  # for tunnels, and to show what was added on the way
        raise ProxyFault(405, "method_not_allowed", f"{scope['method']} is not passed on")
    headers = tuple(
        (name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"]
    )
    size, body, more = int(dict(headers).get("content-length", 0)), bytearray(), True
    try:
        async with asyncio.timeout(limits.SENDING):
            while more and size <= limits.BODY:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ProxyFault(400, "bad_request", "the client left before its request was whole")
                body += message.get("body", b"")
                size, more = max(size, len(body)), message.get("more_body", False)
    except TimeoutError:
        words = f"the body did not arrive within {limits.SENDING:g} s"
        raise ProxyFault(408, "request_timeout", words) from None
    if size > limits.BODY:
        raise ProxyFault(413, "request_too_large", f"the body has more than {limits.BODY} bytes")
    return AgentRequest(scope["method"], scope["target"], headers, bytes(body))


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None], ending: asyncio.Event) -> None:
    """Run ``work`` to its end, or until the client leaves. Raises ProxyFault where the proxy ends first.

    The request's body has been read, so that the only thing still to be received is the client's leaving.
    """
    working = asyncio.ensure_future(work)
    others = [asyncio.ensure_future(_left(receive)), asyncio.ensure_future(ending.wait())]
    try:
        await asyncio.wait({working, *others}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
        elif ending.is_set():
            raise ProxyFault(503, "ending", "the model proxy is ending; ask again")
    finally:
        for task in (working, *others):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await task


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_reply(send: Send, status: int, headers: Headers, body: AsyncIterator[bytes]) -> None:
    """Send a reply as it comes. What ``body`` raises leaves the reply visibly unended."""
    await _begin(send, status, headers)
    async for chunk in body:
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def send_whole(send: Send, status: int, headers: Headers, body: bytes) -> None:
    await _begin(send, status, headers)
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def send_fault(send: Send, fault: ProxyFault) -> None:
    body = fault_body(fault.kind, str(fault))
    headers = [("content-type", "application/json"), ("content-length", str(len(body)))]
    if fault.status == 503:
        headers.append(("retry-after", str(fault.retry_after)))
    if fault.status in (408, 413):  # the rest of the body is not waited for
        headers.append(("connection", "close"))
    await send_whole(send, fault.status, tuple(headers), body)


async def _begin(send: Send, status: int, headers: Headers) -> None:
    raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
    await send({"type": "http.response.start", "status": status, "headers": raw})
