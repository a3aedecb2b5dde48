"""``windtunnel sandbox``: agent sandboxes that survive, through the daemon of their home.

Here stands what its commands share: the connection, how things are printed, and what makes a command of one
call of the protocol: its options are the method's parameters, declared there. Tables are plain text: to
import what draws nicer ones would double what a short command costs.
"""

from __future__ import annotations

import contextlib
import errno
import inspect
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windtunnel.agents.sandbox.protocol import AnyHost, AnySandbox
from windtunnel.base import units
from windtunnel.base.errors import HostError, UserError
from windtunnel.cli import common, new_group
from windtunnel.cli.common import Json, TlsCa, TlsCert, TlsKey
from windtunnel.cli.options import KEYWORD, described

if TYPE_CHECKING:
    from windtunnel.agents.sandbox.client import Client, RemoteBox

VERBS = (
    ("daemon", ("doctor", "setup", "serve", "down", "mcp")),
    ("boxes", ("create", "list_all", "stop", "remove", "put", "get", "port")),
    ("commands", ("execute", "interact")),
    ("boxes", ("checkpoint", "restore", "rollback", "fork", "export", "import_", "notice")),
    ("boxes", ("gc", "log", "diff")),
    ("emulate", ("emulate",)),
)
"""Modules with functions of theirs, from the host to what is done with checkpoints."""
NAMES = {"list_all": "ls", "remove": "rm", "execute": "exec", "interact": "shell", "import_": "import"}

group = new_group(
    "Sandboxes for agents that can be checkpointed, restored, forked and rolled back.\n\n"
    "Commands talk to the daemon of a home folder and start it when none runs.",
    {
        NAMES.get(function, function): f"sandbox.{module}:{function}"
        for module, functions in VERBS
        for function in functions
    },
)


@group.callback()
def where(
    context: typer.Context,
    home: Annotated[
        Path | None,
        typer.Option(
            envvar="WINDTUNNEL_SANDBOX_HOME",
            show_envvar=True,
            help="The folder that holds the sandboxes of this host.",
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            envvar="WINDTUNNEL_SANDBOX_URL",
            show_envvar=True,
            help="A daemon at tcp://HOST:PORT, instead of a home; the token is WINDTUNNEL_SANDBOX_TOKEN.",
        ),
    ] = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
) -> None:
    # A home that is named on the command line means that home, also where the environment names a URL.
    source = context.get_parameter_source("home")
    named = source is not None and source.name == "COMMANDLINE"
    tls: tuple[str, ...] = ()
    if tls_cert or tls_key or tls_ca:
        from windtunnel.base.tls import certificate_files

        tls = certificate_files(tls_cert, tls_key, tls_ca)
    context.obj = SandboxPlace(str(home) if home is not None and (named or not url) else url, tls)


Name = Annotated[str, typer.Argument(metavar="NAME", help="The sandbox.")]


@dataclass(frozen=True)
class SandboxPlace:
    """What the command line means: a home, or a URL (None: the default), and files for TLS."""

    where: str | None
    tls: tuple[str, ...]

    def need_home(self) -> Path:
        """The home; UserError where it is a URL."""
        from windtunnel.agents.sandbox.place import default_home

        where = self.where or ""
        if "://" in where:
            raise UserError(f"sandbox: this command needs a home of this host, not {where}; give --home")
        return Path(where).absolute() if where else default_home()


def client(context: typer.Context, *, start: bool = True) -> Client:
    """The daemon that the command line means; it is started where none runs."""
    from windtunnel.agents.sandbox.client import Client
    from windtunnel.agents.sandbox.daemon import address

    place: SandboxPlace = context.obj
    return Client(address(place.where, tls=place.tls or None), start=start)


def box(context: typer.Context, name: str) -> RemoteBox:
    """The sandbox of that name. Whether it exists is found out by the first call to it."""
    from windtunnel.agents.sandbox.client import RemoteBox

    return RemoteBox(client(context)._link, name)


def print_json(value: Any) -> None:
    common.print_json(value, indent=2)


@contextlib.contextmanager
def less_as_json(as_json: bool) -> Iterator[None]:
    """An IncompleteError in the block: what there is all the same is printed, where JSON is asked for."""
    from windtunnel.agents.sandbox.errors import IncompleteError

    try:
        yield
    except IncompleteError as error:
        if as_json:
            print_json(error.manifest or error.report)
        raise


def printable(text: str) -> str:
    """What a sandbox named, without what a terminal would obey."""
    return text if text.isprintable() else ascii(text)[1:-1]


def size(count: float) -> str:
    """Bytes at a scale that reads well."""
    return units.size(count, places=1, largest="GiB")


def moment(seconds: float) -> str:
    """When something happened, in local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


@contextlib.contextmanager
def file_errors(what: str) -> Iterator[None]:
    """What is wrong with a file of this machine, in a sentence: a full disk is a fault of the host."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # a time that ran out at the daemon
            raise
        kind = HostError if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO) else UserError
        raise kind(f"{what}: {error.strerror}") from error


SOURCE = typer.Argument(metavar="CHECKPOINT|NAME", help="A checkpoint, or a sandbox: its state now.")


def local_url(text: str) -> str:
    """A URL as it is; a path of this machine made absolute, since the daemon has another directory."""
    if not text.strip():
        raise UserError("sandbox: the URL is empty; give a folder, or a URL such as s3://bucket/path")
    return text if "://" in text else os.path.abspath(os.path.expanduser(text))


_LESS = typer.Option("--allow-less", help="Report what is missing without exit status 3.")
TakesLess = Annotated[bool, _LESS]
WORDS = {
    "allow_less": _LESS,
    "label": typer.Option(help="A name for it; a checkpoint with a label is never dropped."),
    "full": typer.Option("--full", help="Dump the processes even if they did not change."),
    "checkpoint": typer.Argument(metavar="CHECKPOINT", help="An id, or the beginning of an id; see `log`."),
    "count": typer.Option(min=1, help="Number of sandboxes."),
    "older": typer.Argument(metavar="A", help="A checkpoint."),
    "newer": typer.Argument(metavar="B", help="A later checkpoint. Default: the current state."),
    "url": typer.Argument(
        metavar="URL", help="A directory, or a URL such as s3://bucket/path.", parser=local_url
    ),
    "name": typer.Argument(metavar="NAME", help="The sandbox."),
    "key_file": typer.Option(
        metavar="FILE", help="File with the key of the model API, as for 'create'.",
        parser=lambda text: text and os.path.abspath(text),
    ),
    "seconds": typer.Argument(min=0.001, help="Seconds until the machine is taken."),
    "dry_run": typer.Option("--dry-run", help="Print what would be removed, and remove nothing."),
    "port": typer.Argument(metavar="PORT", help="A listening TCP port inside the sandbox."),
}  # fmt: skip
"""How the parameters of methods are written; those that are not here are not on the command line."""


def calls(method: Callable[..., Any], **words: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The command calls ``method`` of `AnySandbox` or `AnyHost`; the decorated function prints the result.

    Its further parameters are those of the method, by name, or options of its own. Where it has ``as_json``,
    it prints JSON itself. ``words``: instead of `WORDS`.
    """
    of_box = method.__qualname__.startswith(AnySandbox.__name__)
    words = WORDS | words
    declared = [
        arguments.replace(kind=KEYWORD, annotation=Annotated[arguments.annotation, words[arguments.name]])
        for arguments in inspect.signature(method, eval_str=True).parameters.values()
        if arguments.name in words
    ]
    names = {arguments.name for arguments in declared}

    def calling(show: Callable[..., None]) -> Callable[..., None]:
        accepted = inspect.signature(show, eval_str=True).parameters

        def call(context: typer.Context, as_json: bool = False, **arguments: Any) -> None:
            from windtunnel.agents.sandbox.client import RemoteBox

            with client(context) as daemon, less_as_json(as_json):
                on: Any = RemoteBox(daemon._link, arguments["name"]) if of_box else daemon
                result = getattr(on, method.__name__)(**{name: arguments[name] for name in names})
                if isinstance(result, RemoteBox):
                    result = result.info()
                elif method is AnyHost.fork:
                    result = [box.info() for box in result]
            if as_json and "as_json" not in accepted:
                return print_json(result)
            arguments |= {"context": context, "as_json": as_json}
            return show(result, **{name: arguments[name] for name in list(accepted)[1:]})

        def parameters() -> Iterator[inspect.Parameter]:
            yield inspect.Parameter("context", KEYWORD, annotation=typer.Context)
            if of_box:
                yield inspect.Parameter("name", KEYWORD, annotation=Name)
            yield from declared
            for own in list(accepted.values())[1:]:
                if own.name not in {"context", "name", "as_json", *names}:
                    yield own.replace(kind=KEYWORD)
            yield inspect.Parameter("as_json", KEYWORD, default=False, annotation=Json)

        return described(call, show, parameters())

    return calling
