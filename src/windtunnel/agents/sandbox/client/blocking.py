"""The blocking client: ``Client`` is a ``Host`` elsewhere.

Every method may be called from any thread.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import IO, TypeVar

import httpx

from windtunnel.agents.sandbox import views
from windtunnel.agents.sandbox.client import calls, http, launch, wire
from windtunnel.agents.sandbox.client.address import Address, address
from windtunnel.agents.sandbox.client.calls import Call
from windtunnel.agents.sandbox.client.remote import OnOutput, RemoteBox
from windtunnel.agents.sandbox.model import Facility, Manifest, SandboxSpec, TurnResult
from windtunnel.base.errors import UserError

T = TypeVar("T")


def connect(
    where: str | os.PathLike[str] | None = None, token: str | None = None, *, start: bool = True
) -> Client:
    """A client of the daemon of a home folder or at a URL (which needs a token).

    Where no daemon of the home runs, one is started, unless ``start`` is false.
    """
    return Client(address(where, token), start=start)


class Client:
    """The sandboxes of one host, through its daemon."""

    def __init__(self, place: Address, *, start: bool = True) -> None:
        self.place = place
        self._start = start and place.home is not None
        if self._start:
            self._ensure()
        transport = httpx.HTTPTransport(uds=http.socket_path(place), limits=http.LIMITS)
        with http.in_words(place):
            self._http = httpx.Client(
                transport=transport,
                base_url=place.url,
                headers=place.headers,
                timeout=http.TIMEOUT,
                trust_env=False,
            )

    def create(self, spec: SandboxSpec) -> RemoteBox:
        """A new running sandbox."""
        return RemoteBox(self, self.call(calls.create(spec)).name)

    def get(self, name: str) -> RemoteBox:
        """The sandbox of that name; UserError where there is none."""
        return RemoteBox(self, self.call(calls.info(name)).name)

    def boxes(self) -> list[views.BoxInfo]:
        return self.call(calls.boxes())

    def fork(
        self, checkpoint: str, count: int = 1, *, names: Sequence[str] | None = None, lazy: bool = False
    ) -> list[RemoteBox]:
        """``count`` new sandboxes from a checkpoint's id, its beginning, or a sandbox's name."""
        made = self.call(calls.fork(checkpoint, count, names, lazy))
        return [RemoteBox(self, one.name) for one in made]

    def remove(self, name: str) -> None:
        self.call(calls.remove(name))

    def import_(self, url: str, name: str) -> RemoteBox:
        return RemoteBox(self, self.call(calls.import_(url, name)).name)

    def export(self, checkpoint: str, url: str) -> Manifest:
        return self.call(calls.export(checkpoint, url))

    def notice(self, seconds: float) -> dict[str, str]:
        """The machine will be taken in ``seconds``: checkpoint every sandbox that runs."""
        return self.call(calls.notice(seconds))

    def gc(self, *, dry_run: bool = False) -> views.GcReport:
        return self.call(calls.gc(dry_run))

    def doctor(self) -> list[Facility]:
        return self.call(calls.doctor())

    def health(self) -> wire.Health:
        return self.call(calls.health())

    def down(self) -> None:
        """End the daemon and wait until it has let go of its home; its sandboxes run on."""
        self.call(calls.down())
        if self.place.home is not None:
            launch.wait_gone(self.place.home)

    def events(self) -> Iterator[views.Event]:
        """What happens on the host from now on, as it happens."""
        with http.in_words(self.place), self._opened("GET", "/v1/events") as response:
            for line in http.lines(response.iter_raw()):
                yield wire.read(views.Event, wire.line(line))

    def close(self) -> None:
        """Close the connections; the daemon and its sandboxes run on."""
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def call(self, call: Call[T]) -> T:
        """Send one request and read its answer."""

        def send() -> httpx.Response:
            return self._http.request(call.method, call.path, json=call.body, params=call.query)

        with http.in_words(self.place):
            return call.read(http.checked(self._again(send)))

    def _again(self, send: Callable[[], T]) -> T:
        """``send``; where nothing could be sent since the daemon has ended, once more with a new one."""
        try:
            return send()
        except httpx.ConnectError:
            if not self._start:
                raise
            self._ensure()
            return send()

    def _ensure(self) -> None:
        assert self.place.home is not None
        launch.ensure(self.place.home)

    @contextlib.contextmanager
    def _opened(
        self, method: str, path: str, query: dict[str, str] | None = None, body: object = None
    ) -> Iterator[httpx.Response]:
        """A response whose body is still to be read; leaving the block early ends it at the daemon too."""
        request = self._http.build_request(method, path, params=query, json=body)
        response = self._again(lambda: self._http.send(request, stream=True))
        try:
            if response.is_error:
                response.read()
                http.checked(response)
            yield response
        finally:
            response.close()

    def upload(self, path: str, query: dict[str, str], data: bytes | IO[bytes]) -> None:
        """Stream ``data`` to the daemon."""
        self.health()  # a body that is a stream cannot be sent twice, so the daemon must be there
        with http.in_words(self.place):
            http.checked(self._http.put(path, params=query, content=http.pieces(data)))

    def download(self, path: str, query: dict[str, str], out: IO[bytes]) -> None:
        """Stream an answer into ``out``."""
        with http.in_words(self.place), self._opened("GET", path, query) as response:
            for piece in response.iter_raw():
                out.write(piece)

    def execute(
        self, path: str, body: dict[str, object], cancel: threading.Event | None, on_output: OnOutput | None
    ) -> tuple[TurnResult, dict[str, object]]:
        """Run a command and collect what it did; with the end of its turn, where that was asked for."""
        collector = wire.Collector(whole=on_output is None)
        with (
            http.in_words(self.place),
            self._opened("POST", path, body=body) as response,
            self._cancelling(str(body["id"]), cancel),
        ):
            for line in http.lines(response.iter_raw()):
                piece = collector.feed(line)
                if piece is not None and on_output is not None:
                    on_output(*piece)
        return collector.complete(), collector.turn

    @contextlib.contextmanager
    def _cancelling(self, execution: str, cancel: threading.Event | None) -> Iterator[None]:
        """Tell the daemon to cancel as soon as ``cancel`` is set within the block."""
        if cancel is None:
            yield
            return
        over = threading.Event()

        def watch() -> None:
            while not over.is_set():
                if cancel.wait(0.05):
                    # a daemon that has just gone is told by the stream itself
                    with contextlib.suppress(UserError, wire.SandboxFault):
                        self.call(calls.cancel(execution))
                    return

        watcher = threading.Thread(target=watch, name="sandbox-cancel", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()
