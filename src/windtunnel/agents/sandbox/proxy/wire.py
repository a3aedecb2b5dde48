"""The side of the model proxy that agents talk to: requests in, replies out, in ASGI's words."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Iterable
from typing import Any

from starlette.types import Receive, Scope, Send

from windtunnel.agents.sandbox.proxy.conversation import Headers
from windtunnel.agents.sandbox.proxy.events import Bounds, Upstream
from windtunnel.agents.sandbox.proxy.target import leaves
from windtunnel.agents.sandbox.proxy.upstream import Asking, fault_body


class Refused(Exception):
    """The request is answered by the model proxy itself, with an error."""

    def __init__(self, status: int, kind: str, words: str, retry_after: int = 1) -> None:
        super().__init__(words)
        self.status = status
        self.kind = kind
        self.retry_after = retry_after


class Gone(Exception):
    """The client has left."""


class Ending(Refused):
    """The model proxy ends before the reply could be given; asked again, its successor will give it."""

    def __init__(self) -> None:
        super().__init__(503, "ending", "the model proxy is ending; ask again")


ECHOING = frozenset({"CONNECT", "TRACE"})
"""Methods that are not passed on: the one is for tunnels, the other shows what was added on the way."""


async def read_asking(scope: Scope, target: str, receive: Receive, bounds: Bounds) -> Asking:
    """The whole request. Raises Refused where it is too large, too slow or not for the upstream, Gone where
    it does not end."""
    if scope["method"] in ECHOING:
        raise Refused(405, "method_not_allowed", f"{scope['method']} is not passed on")
    headers = tuple(
        (name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in scope["headers"]
    )
    asking = Asking(scope["method"], target, headers, b"")
    told = asking.header("content-length")
    if told.isdigit() and int(told) > bounds.body:
        raise Refused(
            413, "request_too_large", f"the body has {told} bytes; at most {bounds.body} are accepted"
        )
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(bounds.sending):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise Gone
                parts.append(message.get("body", b""))
                size += len(parts[-1])
                if size > bounds.body:
                    words = f"the body has more than {bounds.body} bytes"
                    raise Refused(413, "request_too_large", words)
                if not message.get("more_body", False):
                    break
    except TimeoutError:
        words = f"the body did not arrive within {bounds.sending:g} s"
        raise Refused(408, "request_timeout", words) from None
    return Asking(asking.method, asking.path, headers, b"".join(parts))


def stays_below(upstream: Upstream, asking: Asking) -> None:
    """Raises Refused for a request that could leave the upstream's base path."""
    if leaves(upstream.url, asking.path):
        words = "the path would leave the base path of the upstream by '..'"
        raise Refused(400, "bad_request", words)


async def while_connected(receive: Receive, work: Coroutine[Any, Any, None], ending: asyncio.Event) -> bool:
    """Run ``work`` to its end, or until the client leaves; whether it came to its end. Raises Ending.

    The request's body has been read, so that the only thing still to be received is the client's leaving.
    """
    working = asyncio.ensure_future(work)
    others = [asyncio.ensure_future(_left(receive)), asyncio.ensure_future(ending.wait())]
    try:
        await asyncio.wait({working, *others}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
            return True
        if ending.is_set():
            raise Ending
        return False
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
    await send({"type": "http.response.start", "status": status, "headers": _raw(headers)})
    async for chunk in body:
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


async def send_whole(send: Send, status: int, headers: Headers, body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": _raw(headers)})
    await send({"type": "http.response.body", "body": body, "more_body": False})


async def send_fault(send: Send, status: int, kind: str, words: str, retry_after: int = 1) -> None:
    body = fault_body(kind, words)
    headers = [("content-type", "application/json"), ("content-length", str(len(body)))]
    if status == 503:
        headers.append(("retry-after", str(retry_after)))
    await send_whole(send, status, tuple(headers), body)


def _raw(headers: Iterable[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
