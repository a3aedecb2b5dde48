"""To the service behind the model proxy and back: addresses, headers, and what went wrong in words."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from windtunnel.agents.sandbox.live.model_proxy.conversation import Headers
from windtunnel.agents.sandbox.live.model_proxy.events import Bounds, Upstream

HOP_BY_HOP = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
NOT_KEPT = frozenset({"set-cookie", "set-cookie2"})


class UpstreamFault(Exception):
    """The service could not be reached, or broke off. ``sent``: it may have seen the request."""

    def __init__(self, status: int, kind: str, words: str, *, sent: bool = True) -> None:
        super().__init__(words)
        self.status = status
        self.kind = kind
        self.sent = sent


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


def address(upstream: Upstream, path: str) -> str:
    """Where a request for ``path`` goes. A base that ends in a version does not repeat it."""
    base = upstream.url.rstrip("/")
    last = base.rsplit("/", 1)[1]
    if last[:1] == "v" and last[1:].isdigit() and path.startswith(f"/{last}/"):
        path = path[len(last) + 1 :]
    return base + path


def request_headers(asking: Asking, upstream: Upstream) -> Headers:
    own = {name.lower(): value for name, value in upstream.headers.items()}
    left = (
        HOP_BY_HOP | _named_in_connection(asking.headers) | {"host", "content-length", "expect"} | own.keys()
    )
    kept = ((name, value) for name, value in asking.headers if name not in left)
    return (*kept, *own.items())


def reply_headers(headers: Iterable[tuple[str, str]]) -> Headers:
    given = tuple((name.lower(), value) for name, value in headers)
    left = HOP_BY_HOP | NOT_KEPT | _named_in_connection(given)
    return tuple((name, value) for name, value in given if name not in left)


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
        request = httpx.Request(
            asking.method,
            address(upstream, asking.path),
            headers=list(request_headers(asking, upstream)),
            content=asking.body,
            extensions={"timeout": client.timeout.as_dict()},
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
        return UpstreamFault(503, "overloaded", "too many requests are under way", sent=False)
    if isinstance(error, httpx.ConnectTimeout):
        return UpstreamFault(504, "upstream_timeout", f"{where} cannot be reached: {words}", sent=False)
    if isinstance(error, httpx.ConnectError | httpx.UnsupportedProtocol | httpx.InvalidURL):
        return UpstreamFault(502, "upstream_unreachable", f"{where} cannot be reached: {words}", sent=False)
    if isinstance(error, httpx.TimeoutException):
        return UpstreamFault(504, "upstream_timeout", f"{where} did not answer in time: {words}")
    return UpstreamFault(502, "upstream_broke_off", f"{where} broke off: {words}")


def fault_body(kind: str, words: str) -> bytes:
    """An error as both OpenAI's and Anthropic's clients understand it."""
    told: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": f"windtunnel: {words}"}}
    return json.dumps(told).encode()
