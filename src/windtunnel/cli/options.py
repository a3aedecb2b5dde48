"""Gives a command the options that a dataclass declares, see `windtunnel.base.options`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

from windtunnel.base.options import REQUIRED, Option, options, settled


def takes(kind: type, parameter: str = "options") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The command has the options of the dataclass ``kind`` in place of its ``parameter``, and is called with
    one of that kind."""
    declared = list(options(kind))

    def taking(command: Callable[..., None]) -> Callable[..., None]:
        def call(**given: Any) -> None:
            own = {one.name: given.pop(one.name) for one in declared}
            command(**given, **{parameter: kind(**settled(kind, own))})

        def parameters() -> Iterator[inspect.Parameter]:
            for one in inspect.signature(command, eval_str=True).parameters.values():
                if one.name == parameter:
                    yield from map(_parameter, declared)
                else:
                    yield one.replace(kind=inspect.Parameter.KEYWORD_ONLY)

        call.__signature__ = inspect.Signature(list(parameters()))  # type: ignore[attr-defined]
        call.__doc__, call.__name__ = command.__doc__, command.__name__
        call.__annotations__ = {name: one.annotation for name, one in call.__signature__.parameters.items()}  # type: ignore[attr-defined]
        return call

    return taking


def _parameter(one: Option) -> inspect.Parameter:
    info = typer.Option(
        *one.flags, help=one.help, min=one.least, max=one.most, envvar=one.environment, metavar=one.metavar
    )
    several = one.kind == list[str]
    default = None if several else inspect.Parameter.empty if one.default is REQUIRED else one.default
    kind: Any = one.kind | None if several else one.kind
    return inspect.Parameter(
        one.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, info]
    )
