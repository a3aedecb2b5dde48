"""Sandboxes from another process or host: what users hold.

``connect()`` gives a `Client`, whose methods are those of `SandboxHost`; its sandboxes have those of `Box`.
What they are is declared by `protocol` alone: each call goes to the daemon as it is. `connect_async` gives
the same, awaitable. Folders go in and out as they are: files, modes, and links as links.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import shlex
import stat
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windtunnel.agents.sandbox.daemon import ERRORS, Address, Tls, address, ensure, wait_gone
from windtunnel.agents.sandbox.errors import IncompleteError, SandboxError
from windtunnel.agents.sandbox.model import Lack, SandboxSpec, TurnResult
from windtunnel.agents.sandbox.protocol import AnyDaemon, AnyHost, AnySandbox, Closing, PendingTurn
from windtunnel.base import atomic
from windtunnel.base.errors import UserError
from windtunnel.base.remote import CallLost, NobodyAnswers, RemoteLink, forwards

if TYPE_CHECKING:  # they have the same methods, which type checkers read there
    from windtunnel.agents.sandbox.box import Box as _Box
    from windtunnel.agents.sandbox.context import Pending
    from windtunnel.agents.sandbox.host import SandboxHost as _Host
    from windtunnel.agents.sandbox.model import TurnRecord

    _Pending = Pending[TurnRecord]
else:
    _Box, _Pending, _Host = AnySandbox, object, object

Where = str | os.PathLike[str] | None


class _Daemon(RemoteLink):
    """The connections to the daemon at ``place``, with what goes wrong in a sentence."""

    def __init__(self, place: Address, *, start: bool) -> None:
        self._home = home = place.home
        super().__init__(
            place.address, keys=place.keys, errors=ERRORS,
            start=functools.partial(ensure, home) if start and home is not None else None,
            objects={
                AnySandbox: functools.partial(RemoteBox, self),
                PendingTurn: functools.partial(RemotePending, self),
            },
        )  # fmt: skip

    def call(self, protocol: type, name: str, on: str, /, *args: Any, **kwargs: Any) -> Any:
        with self._in_words():
            return super().call(protocol, name, on, *args, **kwargs)

    def connect(self) -> None:
        with self._in_words():
            super().connect()

    @contextlib.contextmanager
    def _in_words(self) -> Iterator[None]:
        try:
            yield
        except NobodyAnswers as error:
            what = (
                f"no daemon of home {self._home} runs" if self._home else f"nobody answers at {self.address}"
            )
            raise UserError(f"sandbox: {what} ({error.__cause__ or error})") from error
        except CallLost as error:
            raise SandboxError(
                "sandbox: the daemon ended before it answered; whether it did what was asked is not known"
            ) from error
        except PermissionError as error:
            if error.errno is not None:
                raise
            raise UserError(f"sandbox: the token for {self.address} is missing or wrong") from error


@forwards(PendingTurn)
class RemotePending(_Pending):
    """The checkpoint of a turn, under way at the daemon."""

    def __init__(self, link: RemoteLink, ticket: str) -> None:
        self._link, self._on = link, ticket


@forwards(AnySandbox)
class RemoteBox(_Box):
    """One sandbox, through the daemon. Any thread may use it."""

    def __init__(self, link: RemoteLink, name: str) -> None:
        self._link, self._on = link, name

    @property
    def name(self) -> str:
        return self._on

    if not TYPE_CHECKING:  # as that of Box

        @functools.wraps(AnySandbox.run)
        def run(self, *args: Any, on_output: Any = None, **options: Any) -> TurnResult:
            outputs = {"stdout": bytearray(), "stderr": bytearray()}

            def collect(stream: str, data: bytes) -> None:
                outputs[stream] += data

            options["on_output"] = on_output or collect
            result: TurnResult = self._link.call(AnySandbox, "run", self._on, *args, **options)
            if on_output is not None:
                return result
            return replace(result, stdout=bytes(outputs["stdout"]), stderr=bytes(outputs["stderr"]), tails=())

    def get(self, path: str) -> bytes:
        """The bytes of a regular file of the sandbox; links are followed inside of it only."""
        out = io.BytesIO()
        self.get_to(path, out)
        return out.getvalue()


class _Connected(Closing):
    """``close`` ends its connections; the daemon and its sandboxes run on."""

    _link: RemoteLink

    def close(self) -> None:
        self._link.close()


@forwards(AnyDaemon)
@forwards(AnyHost)
class Client(_Connected, _Host):
    """The sandboxes of one host, through its daemon. Any thread may use it."""

    _on = ""

    def __init__(self, place: Address, *, start: bool = True) -> None:
        self.place = place
        self._link = _Daemon(place, start=start)

    def down(self) -> None:
        """End the daemon and wait until it has let go of its home; its sandboxes run on."""
        self._link.call(AnyDaemon, "down", "")
        if self.place.home is not None:
            wait_gone(self.place.home)


def connect(where: Where = None, token: str | None = None, *, tls: Tls = None, start: bool = True) -> Client:
    """A client of the daemon of a home folder, or of one at ``tcp://HOST:PORT`` (which needs a token).

    Where no daemon of the home runs, one is started, unless ``start`` is false. ``tls``: files of a
    certificate, its key and the CA of both sides; without, only this machine's own addresses are accepted.
    """
    client = Client(address(where, token, tls), start=start)
    if start:
        client._link.connect()
    return client


class Sandbox(_Connected, RemoteBox):
    """A new sandbox on this host, or on the one that ``where`` is a URL of.

        with Sandbox("demo") as box:
            with box.turn():
                box.run("echo hello > /workspace/a")
        box = Sandbox.connect().get("demo")  # it runs on when the block, and when this process has ended

    Args:
        spec: its name, or all that it is to be.
        where: as `connect` has it.
        **options: as `connect` has them.

    Raises:
        UserError: the name is taken, the image cannot be had, or no daemon answers at ``where``.
        SandboxError: the host failed.
    """

    connect = staticmethod(connect)

    def __init__(self, spec: str | SandboxSpec, *, where: Where = None, **options: Any) -> None:
        client = connect(where, **options)
        try:
            name = client.create(spec if isinstance(spec, SandboxSpec) else SandboxSpec(spec)).name
        except BaseException:
            client.close()
            raise
        super().__init__(client._link, name)


class Awaitable:
    """A `Client`, `RemoteBox` or `RemotePending` for asyncio: its methods, and its properties as methods.

    Each call is made in one of ``threads`` (None: the loop's own). A command whose task is cancelled is
    cancelled too; whatever else was begun is finished.
    """

    def __init__(self, sync: Any, threads: Any) -> None:
        self._sync, self._threads = sync, threads

    @property
    def name(self) -> str:
        return str(self._sync.name)

    def __getattr__(self, name: str) -> Any:
        import asyncio

        getattr(type(self._sync), name)  # raises AttributeError

        async def call(*args: Any, **kwargs: Any) -> Any:
            cancel = threading.Event()
            if name == "run":
                cancel = kwargs.setdefault("cancel", cancel)

            def work() -> Any:
                value = getattr(self._sync, name)
                return value(*args, **kwargs) if callable(value) else value

            try:
                answer = await asyncio.get_running_loop().run_in_executor(self._threads, work)
            except asyncio.CancelledError:
                cancel.set()
                raise
            several = isinstance(answer, list)
            results = [
                Awaitable(value, self._threads) if isinstance(value, RemoteBox | RemotePending) else value
                for value in (answer if several else [answer])
            ]
            return results if several else results[0]

        return call

    @contextlib.asynccontextmanager
    async def turn(self, request: str = "") -> Any:
        """A turn: at the end of the block it is classified and its checkpoint starts."""
        yield
        await self.end_turn(request)

    async def __aenter__(self) -> Awaitable:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
        self._threads.shutdown(wait=False)


async def connect_async(where: Where = None, *given: Any, **options: Any) -> Awaitable:
    """As `connect`, for asyncio."""
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    threads = ThreadPoolExecutor(512, thread_name_prefix="sandbox-client")
    open_client = functools.partial(connect, where, *given, **options)
    return Awaitable(await asyncio.get_running_loop().run_in_executor(threads, open_client), threads)


def put_path(box: AnySandbox, source: Path, target: str) -> None:
    """Copy the file or folder ``source`` of this machine to ``target``, with what it holds.

    Raises IncompleteError, after all else is copied, where it holds what is neither file, folder nor link.
    """
    if not source.is_dir():
        return _put_file(box, source, target)
    script, lacks = [f"mkdir -p -- {shlex.quote(target)}"], []
    files: list[tuple[Path, str]] = []
    for entry in sorted(source.rglob("*")):
        inside = f"{target}/{entry.relative_to(source)}"
        mode = entry.lstat().st_mode
        if stat.S_ISLNK(mode):
            script.append(f"ln -sfn -- {shlex.quote(os.readlink(entry))} {shlex.quote(inside)}")
        elif stat.S_ISDIR(mode):
            script.append(f"mkdir -p -m {mode & 0o777:o} -- {shlex.quote(inside)}")
        elif stat.S_ISREG(mode):
            files.append((entry, inside))
        else:
            lacks.append(Lack("files", str(entry), "it is neither file, folder nor link"))
    made = box.run('"${BASH:-sh}" -e', stdin=os.fsencode("\n".join(script)))
    if made.exit_code != 0:
        words = made.stderr.decode(errors="replace").strip() or made.note
        raise UserError(f"sandbox {box.name}: the folder cannot be made: {words}")
    for file, inside in files:
        _put_file(box, file, inside)
    return _refuse(lacks, source)


def _put_file(box: AnySandbox, source: Path, target: str) -> None:
    with source.open("rb") as data:
        box.put(target, data, os.fstat(data.fileno()).st_mode & 0o777)


def get_path(box: AnySandbox, source: str, target: Path) -> None:
    """Copy the file or folder ``source`` of a sandbox to ``target`` on this machine, with what it holds.
    Raises as `put_path` does."""
    try:
        entries = box.listdir(source)
    except (UserError, OSError):
        return _get_file(box, source, target)
    target.mkdir(parents=True, exist_ok=True)
    lacks = []
    for entry in entries:
        inside, here = f"{source.rstrip('/')}/{entry.name}", target / entry.name
        # what an earlier copy made a link, and is a folder now, must not lead out of the target
        if entry.kind == "link" or here.is_symlink():
            here.unlink(missing_ok=True)
        if entry.kind == "folder":
            get_path(box, inside, here)
        elif entry.kind == "link":
            here.symlink_to(entry.target)
        elif entry.kind == "file":
            _get_file(box, inside, here)
            here.chmod(entry.mode & 0o777)
        else:
            lacks.append(Lack("files", inside, "it is neither file, folder nor link"))
    return _refuse(lacks, source)


def _get_file(box: AnySandbox, source: str, target: Path) -> None:
    # a file that came only in part must not be taken for the whole one
    with atomic.replacing(target) as part, part.open("wb") as out:
        box.get_to(source, out)


def _refuse(lacks: list[Lack], source: object) -> None:
    if lacks:
        raise IncompleteError(f"not all of {source} is copied: {lacks[0]}", lacks)
