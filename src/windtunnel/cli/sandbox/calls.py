"""Commands that are one call of the protocol: their options are the method's parameters, declared there."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

from windtunnel.agents.sandbox.protocol import AnySandbox
from windtunnel.base.errors import UserError
from windtunnel.cli.common import Json
from windtunnel.cli.options import KEYWORD, described
from windtunnel.cli.sandbox.common import Name, client, less_as_json, print_json

CHECKPOINT = typer.Argument(metavar="CHECKPOINT", help="An id, or the beginning of an id; see `log`.")
SOURCE = typer.Argument(metavar="CHECKPOINT|NAME", help="A checkpoint, or a sandbox: its state now.")


def local_url(text: str) -> str:
    """A URL as it is; a path of this machine made absolute, since the daemon has another directory."""
    if not text.strip():
        raise UserError("sandbox: the URL is empty; give a folder, or a URL such as s3://bucket/path")
    return text if "://" in text else os.path.abspath(os.path.expanduser(text))


_LESS = typer.Option("--allow-less", help="Report what lacks, but not as an error (status 3).")
TakesLess = Annotated[bool, _LESS]
WORDS = {
    "allow_less": _LESS,
    "label": typer.Option(help="A name for it; a checkpoint with a label is never dropped."),
    "full": typer.Option("--full", help="Dump the processes in any case."),
    "checkpoint": CHECKPOINT,
    "older": typer.Argument(metavar="A", help="A checkpoint."),
    "newer": typer.Argument(metavar="B", help="A later one; by default the state as it is now."),
    "url": typer.Argument(
        metavar="URL", help="A directory, or a URL such as s3://bucket/path.", parser=local_url
    ),
    "name": typer.Argument(metavar="NAME", help="The sandbox."),
    "key_file": typer.Option(
        metavar="FILE", help="Holds the key of its model API, as for 'create'.",
        parser=lambda text: text and os.path.abspath(text),
    ),
    "seconds": typer.Argument(min=0.001, help="How long the machine will still be there."),
    "dry_run": typer.Option("--dry-run", help="Only say what would go."),
    "what": typer.Argument(metavar="CHECKPOINT|NAME", help="A checkpoint, or a sandbox; by default all."),
    "port": typer.Argument(metavar="PORT", help="A TCP port that is listened on inside."),
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
        given.replace(kind=KEYWORD, annotation=Annotated[given.annotation, words[given.name]])
        for given in inspect.signature(method, eval_str=True).parameters.values()
        if given.name in words
    ]
    names = {given.name for given in declared}

    def calling(show: Callable[..., None]) -> Callable[..., None]:
        shown = inspect.signature(show, eval_str=True).parameters

        def call(context: typer.Context, as_json: bool = False, **given: Any) -> None:
            from windtunnel.agents.sandbox.client import RemoteBox

            with client(context) as daemon, less_as_json(as_json):
                on: Any = RemoteBox(daemon._link, given["name"]) if of_box else daemon
                result = getattr(on, method.__name__)(**{name: given[name] for name in names})
                if isinstance(result, RemoteBox):
                    result = result.info()
            if as_json and "as_json" not in shown:
                return print_json(result)
            given |= {"context": context, "as_json": as_json}
            return show(result, **{name: given[name] for name in list(shown)[1:]})

        def parameters() -> Iterator[inspect.Parameter]:
            yield inspect.Parameter("context", KEYWORD, annotation=typer.Context)
            if of_box:
                yield inspect.Parameter("name", KEYWORD, annotation=Name)
            yield from declared
            for own in list(shown.values())[1:]:
                if own.name not in {"context", "name", "as_json", *names}:
                    yield own.replace(kind=KEYWORD)
            yield inspect.Parameter("as_json", KEYWORD, default=False, annotation=Json)

        return described(call, show, parameters())

    return calling
