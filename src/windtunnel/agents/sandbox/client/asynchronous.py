"""The asynchronous client: the methods of the blocking one, awaitable.

Cancelling the task that awaits ``run`` closes its stream, and the daemon then cancels the command.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import IO, TypeVar

import httpx

from windtunnel.agents.sandbox import views
from windtunnel.agents.sandbox.client import calls, http, launch, wire
from windtunnel.agents.sandbox.client.address import Address, address
from windtunnel.agents.sandbox.client.calls import Call
from windtunnel.agents.sandbox.model import Facility, Manifest, SandboxSpec, Turn, TurnResult
from windtunnel.agents.sandbox.protocol import Log

T = TypeVar("T")


async def connect_async(
    where: str | os.PathLike[str] | None = None, token: str | None = None, *, start: bool = True
) -> AsyncClient:
    """As ``connect``, for asyncio."""
    place = address(where, token)
    start = start and place.home is not None
    if start and place.home is not None:
        await asyncio.to_thread(launch.ensure, place.home)
    return AsyncClient(place, start=start)


class AsyncClient:
    """The sandboxes of one host, through its daemon."""

    def __init__(self, place: Address, *, start: bool = False) -> None:
        self.place = place
        self._start = start
        transport = httpx.AsyncHTTPTransport(uds=http.socket_path(place), limits=http.LIMITS)
        with http.in_words(place):
            self._http = httpx.AsyncClient(
                transport=transport,
                base_url=place.url,
                headers=place.headers,
                timeout=http.TIMEOUT,
                trust_env=False,
            )

    async def create(self, spec: SandboxSpec) -> AsyncBox:
        """A new running sandbox."""
        return AsyncBox(self, (await self.call(calls.create(spec))).name)

    async def get(self, name: str) -> AsyncBox:
        """The sandbox of that name; UserError where there is none."""
        return AsyncBox(self, (await self.call(calls.info(name))).name)

    async def boxes(self) -> list[views.BoxInfo]:
        return await self.call(calls.boxes())

    async def fork(
        self, checkpoint: str, count: int = 1, *, names: Sequence[str] | None = None, lazy: bool = False
    ) -> list[AsyncBox]:
        """``count`` new sandboxes from a checkpoint's id, its beginning, or a sandbox's name."""
        made = await self.call(calls.fork(checkpoint, count, names, lazy))
        return [AsyncBox(self, one.name) for one in made]

    async def remove(self, name: str) -> None:
        await self.call(calls.remove(name))

    async def import_(self, url: str, name: str) -> AsyncBox:
        return AsyncBox(self, (await self.call(calls.import_(url, name))).name)

    async def export(self, checkpoint: str, url: str) -> Manifest:
        return await self.call(calls.export(checkpoint, url))

    async def notice(self, seconds: float) -> dict[str, str]:
        """The machine will be taken in ``seconds``: checkpoint every sandbox that runs."""
        return await self.call(calls.notice(seconds))

    async def gc(self, *, dry_run: bool = False) -> views.GcReport:
        return await self.call(calls.gc(dry_run))

    async def doctor(self) -> list[Facility]:
        return await self.call(calls.doctor())

    async def health(self) -> wire.Health:
        return await self.call(calls.health())

    async def down(self) -> None:
        """End the daemon and wait until it has let go of its home; its sandboxes run on."""
        await self.call(calls.down())
        if self.place.home is not None:
            await asyncio.to_thread(launch.wait_gone, self.place.home)

    async def events(self) -> AsyncIterator[views.Event]:
        """What happens on the host from now on, as it happens."""
        with http.in_words(self.place):
            async with self._opened("GET", "/v1/events") as response:
                async for line in http.lines_async(response.aiter_raw()):
                    yield wire.read(views.Event, wire.line(line))

    async def close(self) -> None:
        """Close the connections; the daemon and its sandboxes run on."""
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def call(self, call: Call[T]) -> T:
        """Send one request and read its answer."""

        def send() -> Awaitable[httpx.Response]:
            return self._http.request(call.method, call.path, json=call.body, params=call.query)

        with http.in_words(self.place):
            return call.read(http.checked(await self._again(send)))

    async def _again(self, send: Callable[[], Awaitable[T]]) -> T:
        """``send``; where nothing could be sent since the daemon has ended, once more with a new one."""
        try:
            return await send()
        except httpx.ConnectError:
            if not self._start or self.place.home is None:
                raise
            await asyncio.to_thread(launch.ensure, self.place.home)
            return await send()

    @contextlib.asynccontextmanager
    async def _opened(
        self, method: str, path: str, query: dict[str, str] | None = None, body: object = None
    ) -> AsyncIterator[httpx.Response]:
        request = self._http.build_request(method, path, params=query, json=body)
        response = await self._again(lambda: self._http.send(request, stream=True))
        try:
            if response.is_error:
                await response.aread()
                http.checked(response)
            yield response
        finally:
            await response.aclose()

    async def upload(self, path: str, query: dict[str, str], data: bytes | IO[bytes]) -> None:
        """Stream ``data`` to the daemon."""
        await self.health()  # a body that is a stream cannot be sent twice, so the daemon must be there
        with http.in_words(self.place):
            http.checked(await self._http.put(path, params=query, content=http.pieces_async(data)))

    async def download(self, path: str, query: dict[str, str], out: IO[bytes]) -> None:
        """Stream an answer into ``out``."""
        with http.in_words(self.place):
            async with self._opened("GET", path, query) as response:
                async for piece in response.aiter_raw():
                    out.write(piece)

    async def execute(
        self, path: str, body: dict[str, object], on_output: Callable[[str, bytes], None] | None
    ) -> TurnResult:
        """Run a command and collect what it did."""
        collector = wire.Collector(whole=on_output is None)
        with http.in_words(self.place):
            async with self._opened("POST", path, body=body) as response:
                async for line in http.lines_async(response.aiter_raw()):
                    piece = collector.feed(line)
                    if piece is not None and on_output is not None:
                        on_output(*piece)
        return collector.complete()


class AsyncPending:
    """The checkpoint of a turn, under way at the daemon."""

    def __init__(self, client: AsyncClient, box: str, answer: wire.TurnAnswer) -> None:
        self._client = client
        self.box = box
        self._answer = answer

    async def wait(self, timeout: float | None = None) -> Turn:
        """The turn's line of the log once its checkpoint is safe; TimeoutError, or SandboxError if it
        failed."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._answer.done:
            left = 20.0 if deadline is None else min(20.0, max(0.0, deadline - time.monotonic()))
            await self._ask(left)
            if not self._answer.done and deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"the checkpoint of sandbox {self.box} is not done after {timeout} s")
        assert self._answer.turn is not None
        return self._answer.turn

    async def done(self) -> bool:
        if not self._answer.done:
            await self._ask(0.0)
        return self._answer.done

    async def promote(self) -> None:
        """Somebody waits for it now."""
        if not self._answer.done:
            await self._ask(0.0, promote=True)

    async def _ask(self, timeout: float, promote: bool = False) -> None:
        ask = calls.pending(self.box, self._answer.ticket, timeout=timeout, promote=promote)
        self._answer = await self._client.call(ask)


class AsyncBox:
    """One sandbox, through the daemon."""

    def __init__(self, client: AsyncClient, name: str) -> None:
        self.client = client
        self.name = name

    async def info(self) -> views.BoxInfo:
        return await self.client.call(calls.info(self.name))

    async def spec(self) -> SandboxSpec:
        return await self.client.call(calls.spec(self.name))

    async def tip(self) -> str:
        """Id of the newest checkpoint; empty before the first."""
        return (await self.info()).tip

    async def turns(self) -> int:
        return (await self.info()).turns

    async def shells(self) -> list[str]:
        return await self.client.call(calls.shells(self.name))

    async def run(
        self,
        command: str | Sequence[str],
        *,
        shell: str = "main",
        timeout: float | None = None,
        on_output: Callable[[str, bytes], None] | None = None,
    ) -> TurnResult:
        """Run a command (shell text, or arguments) in a persistent shell and wait for its end."""
        body = calls.execute(
            command, execution=uuid.uuid4().hex, shell=shell, timeout=timeout, turn=False, request=""
        )
        return await self.client.execute(calls.of_box(self.name, "exec"), body, on_output)

    async def put(self, path: str, data: bytes | IO[bytes], mode: int = 0o644) -> None:
        """Write a file of the sandbox."""
        query = {"path": path, "mode": f"{mode:o}"}
        await self.client.upload(calls.of_box(self.name, "files"), query, data)

    async def get_to(self, path: str, out: IO[bytes]) -> None:
        """Stream a file of the sandbox into ``out``."""
        await self.client.download(calls.of_box(self.name, "files"), {"path": path}, out)

    async def get(self, path: str) -> bytes:
        """The bytes of a file of the sandbox."""
        out = io.BytesIO()
        await self.get_to(path, out)
        return out.getvalue()

    async def listdir(self, path: str) -> list[views.Entry]:
        return await self.client.call(calls.listdir(self.name, path))

    @contextlib.asynccontextmanager
    async def turn(self, request: str = "") -> AsyncIterator[None]:
        """A turn: at the end of the block it is classified and its checkpoint starts."""
        yield
        await self.end_turn(request)

    async def end_turn(self, request: str = "", *, urgent: bool = False) -> AsyncPending:
        answer = await self.client.call(calls.end_turn(self.name, request, urgent))
        return AsyncPending(self.client, self.name, answer)

    async def wait(self, timeout: float | None = None) -> None:
        """Until the checkpoint under way, if any, is safe. Raises TimeoutError, or what it failed with."""
        await self.client.call(calls.settle(self.name, timeout))

    async def checkpoint(self, label: str = "", *, full: bool = False, pin: bool = False) -> Manifest:
        return await self.client.call(calls.checkpoint(self.name, label, full, pin))

    async def restore(self, checkpoint: str = "", *, lazy: bool = False) -> views.RestoreReport:
        return await self.client.call(calls.restore(self.name, checkpoint, lazy))

    async def rollback(self, checkpoint: str, *, lazy: bool = False) -> views.RestoreReport:
        return await self.client.call(calls.rollback(self.name, checkpoint, lazy))

    async def log(self) -> Log:
        return await self.client.call(calls.log(self.name))

    async def diff(self, older: str, newer: str = "") -> views.Diff:
        return await self.client.call(calls.diff(self.name, older, newer))

    async def stop(self) -> None:
        await self.client.call(calls.stop(self.name))

    async def remove(self) -> None:
        await self.client.remove(self.name)
