"""What both clients do with httpx: one way to open it, to read lines, and to put failures into words."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import IO, Any

import httpx

from windtunnel.agents.sandbox.client.address import Address, socket_of
from windtunnel.agents.sandbox.client.wire import raised
from windtunnel.agents.sandbox.errors import SandboxError
from windtunnel.base.errors import UserError

CHUNK = 1 << 20
TIMEOUT = httpx.Timeout(None, connect=10.0)
"""A command or a restore takes as long as it takes; only reaching the daemon has a limit."""
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=32)


def socket_path(place: Address) -> str | None:
    return None if place.home is None else str(socket_of(place.home))


@contextmanager
def in_words(place: Address) -> Iterator[None]:
    """Turn failures of the connection into one sentence."""
    where = f"of home {place.home}" if place.home is not None else f"at {place.url}"
    try:
        yield
    except httpx.ConnectError as error:
        raise UserError(f"sandbox: no daemon {where} answers ({error})") from error
    except httpx.InvalidURL as error:
        raise UserError(f"sandbox: {place.url!r} is no URL: {error}") from error
    except httpx.TransportError as error:
        text = str(error) or type(error).__name__
        raise SandboxError(f"sandbox: the connection to the daemon {where} broke: {text}") from error


def checked(response: httpx.Response) -> Any:
    """The JSON of a response that was read; raises what the daemon answered with."""
    try:
        answer = response.json() if response.content else None
    except ValueError:
        answer = None
    if response.is_error:
        raise raised(answer, response.status_code)
    return answer


def lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Lines of a stream, by the line feed alone: text inside of a line may hold other separators."""
    rest = bytearray()
    for chunk in chunks:
        rest += chunk
        if b"\n" in chunk:
            *whole, last = bytes(rest).split(b"\n")
            rest = bytearray(last)
            yield from (line for line in whole if line)
    if rest:
        yield bytes(rest)


async def lines_async(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same, of an asynchronous stream."""
    rest = bytearray()
    async for chunk in chunks:
        rest += chunk
        if b"\n" in chunk:
            *whole, last = bytes(rest).split(b"\n")
            rest = bytearray(last)
            for line in whole:
                if line:
                    yield line
    if rest:
        yield bytes(rest)


def pieces(source: bytes | IO[bytes]) -> Iterator[bytes]:
    """A file's bytes in pieces."""
    if isinstance(source, bytes):
        yield source
        return
    while piece := source.read(CHUNK):
        yield piece


async def pieces_async(source: bytes | IO[bytes]) -> AsyncIterator[bytes]:
    """The same, for the asynchronous client."""
    for piece in pieces(source):
        yield piece
