"""What users hold: ``Client`` is a ``Host`` elsewhere, ``RemoteBox`` a ``Box``; and the same, awaitable.

Here stands only what differs between blocking and awaiting: properties, contexts, and what is iterated.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING

from windtunnel.agents.sandbox import model
from windtunnel.agents.sandbox.client import calls, launch, wire
from windtunnel.agents.sandbox.client.calls import BoxCalls, HostCalls, OnOutput, PendingCalls
from windtunnel.agents.sandbox.client.links import AsyncLink, Call, Link, Plan, Steps, request
from windtunnel.agents.sandbox.model import SandboxSpec, TurnResult
from windtunnel.agents.sandbox.protocol import AnyHost, AnySandbox, PendingTurn

Where = str | os.PathLike[str] | None


class RemotePending(PendingCalls[Link]):
    """The checkpoint of a turn, under way at the daemon."""

    @property
    def done(self) -> bool:
        return self._link.perform(self._ask())


class RemoteBox(BoxCalls[Link, RemotePending]):
    """One sandbox, through the daemon. Any thread may use it."""

    client: Client
    _pending = RemotePending

    @property
    def spec(self) -> SandboxSpec:
        return self._link.perform(self._spec())

    @property
    def tip(self) -> str:
        """Id of the newest checkpoint; empty before the first."""
        return self.info().tip

    @property
    def turns(self) -> int:
        return self.info().turns

    @request
    def run(
        self,
        command: str | Sequence[str],
        *,
        shell: str = "main",
        timeout: float | None = None,
        cancel: threading.Event | None = None,
        on_output: OnOutput | None = None,
    ) -> Steps[TurnResult]:
        """Run a command (shell text, or arguments) in a persistent shell and wait for its end.

        With ``on_output`` the output is passed on as it comes, and the result holds only the end of it.
        """
        result, _ = yield from self._command(command, shell, timeout, on_output, cancel)
        return result

    @request
    def run_turn(
        self,
        command: str | Sequence[str],
        *,
        shell: str = "main",
        timeout: float | None = None,
        cancel: threading.Event | None = None,
        on_output: OnOutput | None = None,
        request: str = "",
    ) -> Steps[tuple[TurnResult, RemotePending | None, Exception | None]]:
        """``run`` and ``end_turn`` in one request: the result, the checkpoint under way, and, where the turn
        could not be ended, why: the command has run then, all the same."""
        asked = self._command(command, shell, timeout, on_output, cancel, turn=True, request=request)
        result, turn = yield from asked
        if "ticket" not in turn:
            return result, None, wire.raised(turn) if "error" in turn else None
        return result, self._started(turn), None

    @contextlib.contextmanager
    def turn(self, request: str = "") -> Iterator[None]:
        """A turn: at the end of the block it is classified and its checkpoint starts."""
        yield
        self.end_turn(request)


class Client(HostCalls[Link, RemoteBox]):
    """The sandboxes of one host, through its daemon. Any thread may use it."""

    _box = RemoteBox

    def down(self) -> None:
        """End the daemon and wait until it has let go of its home; its sandboxes run on."""
        self._link.perform(calls.DOWN)
        if self.place.home is not None:
            launch.wait_gone(self.place.home)

    def events(self) -> Iterator[model.Event]:
        """What happens on the host from now on, as it happens."""
        lines = wire.Lines()
        with self._link.opened(calls.EVENTS) as pieces:
            for data in pieces:
                for line in lines.feed(data):
                    yield wire.read(model.Event, wire.line(line))

    def close(self) -> None:
        """Close the connections; the daemon and its sandboxes run on."""
        self._link.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect(where: Where = None, token: str | None = None, *, start: bool = True) -> Client:
    """A client of the daemon of a home folder or at a URL (which needs a token).

    Where no daemon of the home runs, one is started, unless ``start`` is false.
    """
    link = Link(launch.address(where, token), start=start)
    link.start()
    return Client(link)


class Sandbox(RemoteBox):
    """A new sandbox on this host, or on the one that ``where`` is a URL of.

        with Sandbox("demo") as box:
            with box.turn():
                box.run("echo hello > /workspace/a")
        box = Sandbox.connect().get("demo")  # it runs on when the block, and when this process has ended

    Args:
        spec: its name, or all that it is to be.
        where, token, start: as `connect` has them.

    Raises:
        UserError: the name is taken, the image cannot be had, or no daemon answers at ``where``.
        SandboxError: the host failed.
    """

    def __init__(
        self, spec: str | SandboxSpec, *, where: Where = None, token: str | None = None, start: bool = True
    ) -> None:
        client = connect(where, token, start=start)
        try:
            made = client.create(spec if isinstance(spec, SandboxSpec) else SandboxSpec(spec))
        except BaseException:
            client.close()
            raise
        super().__init__(client, made.name)

    @staticmethod
    def connect(where: Where = None, token: str | None = None, *, start: bool = True) -> Client:
        """All sandboxes of a host; as `connect`."""
        return connect(where, token, start=start)

    def close(self) -> None:
        """Close the connection; the sandbox runs on."""
        self.client.close()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncPending(PendingCalls[AsyncLink]):
    """The checkpoint of a turn, under way at the daemon."""

    @request
    def done(self) -> Plan[bool]:
        return self._ask()


class AsyncBox(BoxCalls[AsyncLink, AsyncPending]):
    """One sandbox, through the daemon, for asyncio."""

    _pending = AsyncPending

    @request
    def spec(self) -> Call[SandboxSpec]:
        return self._spec()

    async def tip(self) -> str:
        """Id of the newest checkpoint; empty before the first."""
        return (await self.info()).tip

    async def turns(self) -> int:
        return (await self.info()).turns

    @request
    def run(
        self,
        command: str | Sequence[str],
        *,
        shell: str = "main",
        timeout: float | None = None,
        on_output: OnOutput | None = None,
    ) -> Steps[TurnResult]:
        """As `RemoteBox.run`. Cancelling the task that awaits it closes its stream, and so cancels the
        command."""
        result, _ = yield from self._command(command, shell, timeout, on_output)
        return result

    @contextlib.asynccontextmanager
    async def turn(self, request: str = "") -> AsyncIterator[None]:
        """A turn: at the end of the block it is classified and its checkpoint starts."""
        yield
        await self.end_turn(request)


class AsyncClient(HostCalls[AsyncLink, AsyncBox]):
    """The sandboxes of one host, through its daemon, for asyncio."""

    _box = AsyncBox

    async def down(self) -> None:
        """As `Client.down`."""
        import asyncio

        await self._link.perform(calls.DOWN)
        if self.place.home is not None:
            await asyncio.to_thread(launch.wait_gone, self.place.home)

    async def events(self) -> AsyncIterator[model.Event]:
        """What happens on the host from now on, as it happens."""
        lines = wire.Lines()
        async with self._link.opened(calls.EVENTS) as response:
            async for data in response.aiter_raw():
                for line in lines.feed(data):
                    yield wire.read(model.Event, wire.line(line))

    async def close(self) -> None:
        """Close the connections; the daemon and its sandboxes run on."""
        await self._link.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def connect_async(where: Where = None, token: str | None = None, *, start: bool = True) -> AsyncClient:
    """As ``connect``, for asyncio."""
    link = AsyncLink(launch.address(where, token), start=start)
    await link.start()
    return AsyncClient(link)


if TYPE_CHECKING:  # these are what the protocols ask for, with their answers
    _HOST: type[AnyHost] = Client
    _BOX: type[AnySandbox] = RemoteBox
    _PENDING: type[PendingTurn] = RemotePending
