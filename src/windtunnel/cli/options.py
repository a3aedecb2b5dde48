"""Gives a command the options that a dataclass declares, see `windtunnel.base.options`."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any

import typer

from windtunnel.base.options import KEY, REQUIRED, OptionSpec, options, settled

KEYWORD = inspect.Parameter.KEYWORD_ONLY


def takes(kind: type, parameter: str = "options") -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The command has the options of the dataclass ``kind`` in place of its ``parameter``, and is called with
    an object of that kind. Arguments of the command are fields too, where ``kind`` needs them."""
    declared = list(options(kind))
    needed = [
        field.name
        for field in dataclasses.fields(kind)
        if KEY not in field.metadata and field.default is field.default_factory is dataclasses.MISSING
    ]

    def taking(command: Callable[..., None]) -> Callable[..., None]:
        def call(**given: Any) -> None:
            own = {option.name: given.pop(option.name) for option in declared}
            own = settled(kind, own) | {name: given[name] for name in needed}
            command(**given, **{parameter: kind(**own)})

        def parameters() -> Iterator[inspect.Parameter]:
            for own in inspect.signature(command, eval_str=True).parameters.values():
                if own.name == parameter:
                    yield from map(_parameter, declared)
                else:
                    yield own.replace(kind=KEYWORD)

        return described(call, command, parameters())

    return taking


def described(
    call: Callable[..., None], command: Callable[..., None], parameters: Iterable[inspect.Parameter]
) -> Callable[..., None]:
    """``call`` with the name and help of ``command``, and with ``parameters``."""
    call.__signature__ = inspect.Signature(list(parameters))  # type: ignore[attr-defined]
    call.__doc__, call.__name__ = command.__doc__, command.__name__
    call.__annotations__ = {name: own.annotation for name, own in call.__signature__.parameters.items()}  # type: ignore[attr-defined]
    return call


def _parameter(option: OptionSpec) -> inspect.Parameter:
    info = typer.Option(
        *option.flags, help=option.help, min=option.least, max=option.most, metavar=option.metavar,
        envvar=list(option.environment) or None,
    )  # fmt: skip
    several = option.kind == list[str]
    required = option.default is REQUIRED
    default = None if several else inspect.Parameter.empty if required else option.default
    kind: Any = option.kind | None if several else option.kind
    return inspect.Parameter(option.name, KEYWORD, default=default, annotation=Annotated[kind, info])
