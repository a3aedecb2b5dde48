"""Connections to a daemon, blocking and asynchronous, and how what is said over them is written only once.

A `Call` is one request as data. A *plan* is a call, or a generator that yields calls and is sent their
answers. A method under `request` returns a plan, which the link of its object performs: a `Link` gives the
result, an `AsyncLink` something to await.

What an `AsyncLink` is made of is imported with the first one: a command of the command line is over in less
time than that takes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from dataclasses import dataclass, field
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Protocol,
    TypeAlias,
    TypeVar,
    overload,
)

from windtunnel.agents.sandbox.client import launch, wire
from windtunnel.agents.sandbox.client.http import Answer, Broken, Pool, Unreachable, Untaken
from windtunnel.agents.sandbox.client.launch import Address
from windtunnel.agents.sandbox.errors import SandboxError
from windtunnel.base.errors import UserError

if TYPE_CHECKING:
    import httpx

PAUSES = (0.0, 0.01, 0.1, 1.0)
"""Seconds before the same is sent once more: a daemon that is just dying still takes it for a moment."""
P = ParamSpec("P")
T = TypeVar("T")
Result = TypeVar("Result", covariant=True)


@dataclass(frozen=True)
class Call(Generic[T]):
    """One request. ``read`` makes the answer's JSON into what the caller gets."""

    method: str
    path: str
    read: Callable[[Any], T]
    body: dict[str, Any] | None = None
    query: dict[str, Any] = field(default_factory=dict)
    content: Iterator[bytes] | None = None
    """What is uploaded; it cannot be sent twice."""
    take: Callable[[bytes], object] | None = None
    """Gets the answer piece by piece as it comes; ``read`` is then given None."""
    cancel: tuple[threading.Event, Call[None]] | None = None
    """When the event is set before the answer has ended, the call is sent too (by a blocking link)."""

    def __iter__(self) -> Generator[Call[Any], Any, T]:
        answer: T = yield self
        return answer


Steps: TypeAlias = Generator[Call[Any], Any, T]


class Plan(Protocol[Result]):
    """A call, or the generator of several."""

    def __iter__(self) -> Generator[Call[Any], Any, Result]: ...


class Link:
    """A blocking connection to the daemon at ``place``; any thread may use it."""

    def __init__(self, place: Address, *, start: bool) -> None:
        self.place, self._start = place, start and place.home is not None
        self._http = Pool(place.url, _socket(place), place.headers)
        self.close = self._http.close

    def perform(self, plan: Plan[T]) -> T:
        """Send the calls of ``plan``; its result."""
        steps, answer = iter(plan), None
        while True:
            try:
                call = steps.send(answer)
            except StopIteration as end:
                result: T = end.value
                return result
            with self.opened(call) as pieces, self._cancelling(call):
                if call.take is None:
                    answer = call.read(_checked(200, b"".join(pieces)))
                else:
                    for piece in pieces:
                        call.take(piece)
                    answer = call.read(None)

    @contextlib.contextmanager
    def opened(self, call: Call[Any]) -> Iterator[Iterator[bytes]]:
        """The pieces of a call's answer as they come; leaving the block early ends it at the daemon too.

        Where nothing could be sent or was read since the daemon has ended, it is sent again, to a new one.
        """
        with _in_words(self.place):
            for pause in PAUSES:
                try:
                    answer = self._sent(call)
                    break
                except Unreachable as error:
                    if call.content is not None or not (self._start or isinstance(error, Untaken)):
                        raise
                time.sleep(pause)
                self.start()
            else:
                answer = self._sent(call)
        with contextlib.closing(answer):
            pieces = self._pieces(answer)
            if answer.status >= 400:
                _checked(answer.status, b"".join(pieces))
            yield pieces

    def _sent(self, call: Call[Any]) -> Answer:
        return self._http.send(call.method, call.path, call.query, call.body, call.content)

    def _pieces(self, answer: Answer) -> Iterator[bytes]:
        with _in_words(self.place):
            yield from answer.pieces()

    def start(self) -> None:
        """Make sure that a daemon runs, if that is this link's to do."""
        if self._start and self.place.home is not None:
            launch.ensure(self.place.home)

    @contextlib.contextmanager
    def _cancelling(self, call: Call[Any]) -> Iterator[None]:
        """Send what cancels ``call`` as soon as its event is set within the block."""
        if call.cancel is None:
            yield
            return
        cancel, stopping = call.cancel
        over = threading.Event()

        def watch() -> None:
            while not over.is_set():
                if cancel.wait(0.05):
                    # a daemon that has just gone is told by the stream itself
                    with contextlib.suppress(UserError, SandboxError):
                        self.perform(stopping)
                    return

        watcher = threading.Thread(target=watch, name="sandbox-cancel", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()


class AsyncLink:
    """The same, for asyncio. Cancelling the task that performs a plan closes what it reads."""

    def __init__(self, place: Address, *, start: bool) -> None:
        self.place, self._start = place, start and place.home is not None
        import httpx

        limits = httpx.Limits(max_connections=None, max_keepalive_connections=32)
        transport = httpx.AsyncHTTPTransport(uds=_socket(place), limits=limits)
        # A command or a restore takes as long as it takes; only reaching the daemon has a limit.
        timeout = httpx.Timeout(None, connect=10.0)
        with _async_in_words(place):
            self._http = httpx.AsyncClient(
                transport=transport,
                base_url=place.url,
                headers=place.headers,
                timeout=timeout,
                trust_env=False,
            )
        self.close = self._http.aclose

    async def perform(self, plan: Plan[T]) -> T:
        """Send the calls of ``plan``; its result."""
        steps, answer = iter(plan), None
        while True:
            try:
                call = steps.send(answer)
            except StopIteration as end:
                result: T = end.value
                return result
            async with self.opened(call) as response:
                if call.take is None:
                    await response.aread()
                    answer = call.read(_checked(response.status_code, response.content))
                else:
                    async for piece in response.aiter_raw():
                        call.take(piece)
                    answer = call.read(None)

    @contextlib.asynccontextmanager
    async def opened(self, call: Call[Any]) -> AsyncIterator[httpx.Response]:
        """A response whose body is still to be read; else as `Link.opened`, but what was sent and not read is
        not sent again: httpx does not tell it from what was."""
        import httpx

        with _async_in_words(self.place):
            content = None if call.content is None else _awaitable(call.content)
            request = self._http.build_request(**_parts(call), content=content)
            try:
                response = await self._http.send(request, stream=True)
            except httpx.ConnectError:
                if not self._start or call.content is not None:
                    raise
                await self.start()
                response = await self._http.send(request, stream=True)
            try:
                if response.is_error:
                    await response.aread()
                    _checked(response.status_code, response.content)
                yield response
            finally:
                await response.aclose()

    async def start(self) -> None:
        """As `Link.start`."""
        import asyncio

        if self._start and self.place.home is not None:
            await asyncio.to_thread(launch.ensure, self.place.home)


L = TypeVar("L", Link, AsyncLink)


class Linked(Generic[L]):
    """Something at the other end of a link."""

    _link: L


class request(Generic[P, T]):
    """A method that says what to send, as one that sends it."""

    def __init__(self, plan: Callable[Concatenate[Any, P], Plan[T]]) -> None:
        self._plan = plan

    @overload
    def __get__(self, instance: None, kind: type) -> Callable[..., Any]: ...
    @overload
    def __get__(self, instance: Linked[Link], kind: type) -> Callable[P, T]: ...
    @overload
    def __get__(self, instance: Linked[AsyncLink], kind: type) -> Callable[P, Coroutine[Any, Any, T]]: ...
    def __get__(self, instance: Any, kind: type) -> Any:
        if instance is None:
            return self._plan

        @functools.wraps(self._plan)
        def perform(*arguments: Any, **options: Any) -> Any:
            return instance._link.perform(self._plan(instance, *arguments, **options))

        return perform


def _socket(place: Address) -> str | None:
    return None if place.home is None else str(launch.socket_of(place.home))


def _parts(call: Call[Any]) -> dict[str, Any]:
    return {"method": call.method, "url": call.path, "params": call.query, "json": call.body}


async def _awaitable(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


@contextlib.contextmanager
def _in_words(place: Address) -> Iterator[None]:
    """Turn failures of the connection into one sentence."""
    where = f"of home {place.home}" if place.home is not None else f"at {place.url}"
    try:
        yield
    except Unreachable as error:
        raise UserError(f"sandbox: no daemon {where} answers ({error})") from error
    except Broken as error:
        raise SandboxError(f"sandbox: the connection to the daemon {where} broke: {error}") from error


@contextlib.contextmanager
def _async_in_words(place: Address) -> Iterator[None]:
    """The same for those of httpx."""
    import httpx

    with _in_words(place):
        try:
            yield
        except httpx.ConnectError as error:
            raise Unreachable(str(error)) from error
        except httpx.InvalidURL as error:
            raise UserError(f"sandbox: {place.url!r} is no URL: {error}") from error
        except httpx.TransportError as error:
            raise Broken(str(error) or type(error).__name__) from error


def _checked(status: int, content: bytes) -> Any:
    """The JSON of an answer; raises what the daemon answered with."""
    try:
        answer = json.loads(content) if content else None
    except ValueError:
        answer = None
    if status >= 400:
        raise wire.raised(answer, status)
    return answer
