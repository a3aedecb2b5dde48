"""The blocking client: ``Client`` is a ``Host`` elsewhere, ``RemoteBox`` a ``Box``.

Every method may be called from any thread.
"""

from __future__ import annotations

import contextlib
import io
import os
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import IO, TypeVar

import httpx

from windtunnel.agents.sandbox import views
from windtunnel.agents.sandbox.client import calls, http, launch, wire
from windtunnel.agents.sandbox.client.address import Address, address
from windtunnel.agents.sandbox.client.calls import Call
from windtunnel.agents.sandbox.errors import SandboxError
from windtunnel.agents.sandbox.model import Facility, Manifest, SandboxSpec, Turn, TurnResult
from windtunnel.agents.sandbox.protocol import Log
from windtunnel.base.errors import UserError

T = TypeVar("T")
OnOutput = Callable[[str, bytes], None]


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
                    with contextlib.suppress(UserError, SandboxError):
                        self.call(calls.cancel(execution))
                    return

        watcher = threading.Thread(target=watch, name="sandbox-cancel", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()


class RemotePending:
    """The checkpoint of a turn, under way at the daemon."""

    def __init__(self, client: Client, box: str, answer: wire.TurnAnswer) -> None:
        self._client = client
        self.box = box
        self._answer = answer

    @property
    def done(self) -> bool:
        if not self._answer.done:
            self._ask(0.0)
        return self._answer.done

    def promote(self) -> None:
        """Somebody waits for it now."""
        if not self._answer.done:
            self._ask(0.0, promote=True)

    def wait(self, timeout: float | None = None) -> Turn:
        """The turn's line of the log once its checkpoint is safe.

        Raises TimeoutError when it is not in time, and SandboxError when the checkpoint failed.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._answer.done:
            left = 20.0 if deadline is None else min(20.0, max(0.0, deadline - time.monotonic()))
            self._ask(left)
            if not self._answer.done and deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"the checkpoint of sandbox {self.box} is not done after {timeout} s")
        assert self._answer.turn is not None
        return self._answer.turn

    def _ask(self, timeout: float, promote: bool = False) -> None:
        ask = calls.pending(self.box, self._answer.ticket, timeout=timeout, promote=promote)
        self._answer = self._client.call(ask)


class RemoteBox:
    """One sandbox, through the daemon."""

    def __init__(self, client: Client, name: str) -> None:
        self.client = client
        self.name = name

    def info(self) -> views.BoxInfo:
        return self.client.call(calls.info(self.name))

    @property
    def spec(self) -> SandboxSpec:
        return self.client.call(calls.spec(self.name))

    @property
    def tip(self) -> str:
        """Id of the newest checkpoint; empty before the first."""
        return self.info().tip

    @property
    def turns(self) -> int:
        return self.info().turns

    def shells(self) -> list[str]:
        """Names of its persistent shells."""
        return self.client.call(calls.shells(self.name))

    def run(
        self,
        command: str | Sequence[str],
        *,
        shell: str = "main",
        timeout: float | None = None,
        cancel: threading.Event | None = None,
        on_output: OnOutput | None = None,
    ) -> TurnResult:
        """Run a command (shell text, or arguments) in a persistent shell and wait for its end.

        With ``on_output`` the output is passed on as it comes, and the result holds only the end of it.
        """
        return self._execute(command, shell, timeout, cancel, on_output, turn=False, request="")[0]

    def run_turn(
        self,
        command: str | Sequence[str],
        *,
        shell: str = "main",
        timeout: float | None = None,
        cancel: threading.Event | None = None,
        on_output: OnOutput | None = None,
        request: str = "",
    ) -> tuple[TurnResult, RemotePending | None, str]:
        """``run`` and ``end_turn`` in one request: the result, the checkpoint under way, and, where the turn
        could not be ended, why."""
        result, turn = self._execute(command, shell, timeout, cancel, on_output, turn=True, request=request)
        if "ticket" not in turn:
            return result, None, str(turn.get("error", ""))
        return result, RemotePending(self.client, self.name, wire.read(wire.TurnAnswer, turn)), ""

    def put(self, path: str, data: bytes | IO[bytes], mode: int = 0o644) -> None:
        """Write a file of the sandbox."""
        query = {"path": path, "mode": f"{mode:o}"}
        self.client.upload(calls.of_box(self.name, "files"), query, data)

    def get_to(self, path: str, out: IO[bytes]) -> None:
        """Stream a file of the sandbox into ``out``."""
        self.client.download(calls.of_box(self.name, "files"), {"path": path}, out)

    def get(self, path: str) -> bytes:
        """The bytes of a file of the sandbox."""

        out = io.BytesIO()
        self.get_to(path, out)
        return out.getvalue()

    def listdir(self, path: str) -> list[views.Entry]:
        return self.client.call(calls.listdir(self.name, path))

    @contextlib.contextmanager
    def turn(self, request: str = "") -> Iterator[None]:
        """A turn: at the end of the block it is classified and its checkpoint starts."""
        yield
        self.end_turn(request)

    def end_turn(self, request: str = "", *, urgent: bool = False) -> RemotePending:
        answer = self.client.call(calls.end_turn(self.name, request, urgent))
        return RemotePending(self.client, self.name, answer)

    def wait(self, timeout: float | None = None) -> None:
        """Until the checkpoint under way, if any, is safe. Raises TimeoutError, or what it failed with."""
        self.client.call(calls.settle(self.name, timeout))

    def checkpoint(self, label: str = "", *, full: bool = False, pin: bool = False) -> Manifest:
        return self.client.call(calls.checkpoint(self.name, label, full, pin))

    def restore(self, checkpoint: str = "", *, lazy: bool = False) -> views.RestoreReport:
        return self.client.call(calls.restore(self.name, checkpoint, lazy))

    def rollback(self, checkpoint: str, *, lazy: bool = False) -> views.RestoreReport:
        return self.client.call(calls.rollback(self.name, checkpoint, lazy))

    def log(self) -> Log:
        return self.client.call(calls.log(self.name))

    def diff(self, older: str, newer: str = "") -> views.Diff:
        return self.client.call(calls.diff(self.name, older, newer))

    def stop(self) -> None:
        self.client.call(calls.stop(self.name))

    def remove(self) -> None:
        self.client.remove(self.name)

    def _execute(
        self,
        command: str | Sequence[str],
        shell: str,
        timeout: float | None,
        cancel: threading.Event | None,
        on_output: OnOutput | None,
        *,
        turn: bool,
        request: str,
    ) -> tuple[TurnResult, dict[str, object]]:
        execution = uuid.uuid4().hex
        body = calls.execute(
            command, execution=execution, shell=shell, timeout=timeout, turn=turn, request=request
        )
        return self.client.execute(calls.of_box(self.name, "exec"), body, cancel, on_output)


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
        self,
        spec: str | SandboxSpec,
        *,
        where: str | os.PathLike[str] | None = None,
        token: str | None = None,
        start: bool = True,
    ) -> None:
        client = connect(where, token, start=start)
        try:
            made = client.create(spec if isinstance(spec, SandboxSpec) else SandboxSpec(spec))
        except BaseException:
            client.close()
            raise
        super().__init__(client, made.name)

    @staticmethod
    def connect(
        where: str | os.PathLike[str] | None = None, token: str | None = None, *, start: bool = True
    ) -> Client:
        """All sandboxes of a host; as `connect`."""
        return connect(where, token, start=start)

    def close(self) -> None:
        """Close the connection; the sandbox runs on."""
        self.client.close()

    def __enter__(self) -> Sandbox:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
