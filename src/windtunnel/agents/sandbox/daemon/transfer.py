"""Files in and out, streamed: neither side holds a whole file.

The host's calls are blocking and read or write a file object; the request's body is asynchronous. A reader
and a writer here make one into the other, a piece at a time, so that the slower side sets the pace.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from typing import IO, Any, cast

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect

from windtunnel.agents.sandbox import model
from windtunnel.agents.sandbox.daemon.service import Refused, Service

Path = Query(description="An absolute path inside the sandbox.")
Piece = bytes | BaseException | None


class Incoming(io.RawIOBase):
    """The body of a request as a file that a thread reads."""

    def __init__(self, pieces: AsyncIterator[bytes], loop: asyncio.AbstractEventLoop) -> None:
        self._pieces, self._loop = pieces, loop
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            try:
                piece = asyncio.run_coroutine_threadsafe(_next(self._pieces), self._loop).result()
            except ClientDisconnect as error:
                raise OSError("the client went away before the whole file was sent") from error
            if piece is None:
                return 0
            self._rest = memoryview(piece)
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


class Outgoing(io.RawIOBase):
    """A file that a thread writes; the pieces go to a short queue."""

    def __init__(self, queue: asyncio.Queue[Piece], loop: asyncio.AbstractEventLoop) -> None:
        self._queue, self._loop = queue, loop
        self.gone = False
        """Nobody reads any more."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if self.gone:
            raise BrokenPipeError("the client went away")
        piece = bytes(data)
        asyncio.run_coroutine_threadsafe(self._queue.put(piece), self._loop).result()
        return len(piece)


async def _next(pieces: AsyncIterator[bytes]) -> bytes | None:
    return await anext(pieces, None)


def file_routes(service: Service) -> APIRouter:
    """Files of one sandbox."""
    routes = APIRouter(prefix="/v1/boxes", tags=["files"])
    threads = service.threads

    @routes.put("/{name}/files", summary="Write a file; the body is its bytes")
    async def put(name: str, request: Request, path: str = Path, mode: str = "644") -> None:
        source = io.BufferedReader(Incoming(request.stream(), asyncio.get_running_loop()), 1 << 20)
        bits = _mode(mode)
        await service.change(name, lambda box: box.put(path, source, bits))

    @routes.get("/{name}/files", summary="Read a file", response_class=StreamingResponse)
    async def get(name: str, path: str = Path) -> StreamingResponse:
        box = await service.box(name)
        queue: asyncio.Queue[Piece] = asyncio.Queue(4)
        out = Outgoing(queue, asyncio.get_running_loop())

        async def fill() -> None:
            try:
                await threads.call(lambda: box.get_to(path, cast(IO[bytes], out)))
            except Exception as error:
                await queue.put(error)
            else:
                await queue.put(None)

        task = asyncio.create_task(fill())
        first = await queue.get()
        if isinstance(first, BaseException):
            raise first

        async def body() -> AsyncIterator[bytes]:
            piece: Piece = first
            try:
                while isinstance(piece, bytes):
                    yield piece
                    piece = await queue.get()
                if isinstance(piece, BaseException):
                    raise piece  # the connection breaks: the client must not take what it has for the file
            finally:
                out.gone = True
                while not task.done():
                    while not queue.empty():
                        queue.get_nowait()
                    await asyncio.wait([task], timeout=0.05)

        return StreamingResponse(body(), media_type="application/octet-stream")

    @routes.get("/{name}/entries", summary="The entries of a folder")
    async def entries(name: str, path: str = Path) -> list[model.Entry]:
        return await service.look(name, lambda box: box.listdir(path))

    return routes


def _mode(text: str) -> int:
    try:
        mode = int(text, 8)
    except ValueError:
        mode = -1
    if not 0 <= mode <= 0o7777:
        raise Refused("user", f"put: mode {text!r} is not accepted; use octal digits such as 644 or 755")
    return mode
