"""Options that are declared once, as the fields of a dataclass: the command line, files of options and Python
are made from them.

    @dataclass(frozen=True)
    class Options:
        jitter: float = option(0.0, "Sigma of random operator times.", least=0.0, most=1.0)

`windtunnel.cli.options.takes` gives a command these options; `settled` is what a file of them is read into.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from windtunnel.base.errors import UserError

KEY = "option"
REQUIRED: Any = ...
"""In the place of a default: the option has to be given."""


@dataclass(frozen=True)
class OptionSpec:
    """How an option is written. ``kind``: the type of what is written. ``least``, ``most``, ``among``:
    what is accepted. ``flags``: as the command line has it, where not by its name. ``unit``: so many of
    what the field holds are one of what is written. ``environment``: the variables of which the first
    that is set is read where it is not given. ``words``: what is accepted, where the limits do not say it.
    ``read``: makes the field's value of what is written; its ValueError says what is accepted."""

    name: str
    default: Any
    kind: Any
    help: str
    least: float | None = None
    most: float | None = None
    among: tuple[str, ...] = ()
    unit: float | None = None
    environment: tuple[str, ...] = ()
    metavar: str | None = None
    flags: tuple[str, ...] = ()
    words: str = ""
    read: Callable[[Any], Any] | None = None

    @property
    def accepted(self) -> str:
        """What is accepted, for errors."""
        if self.words or self.least is None:
            *others, last = self.among or (self.words,)
            return f"{', '.join(others)} or {last}" if others else last
        number = "a whole number" if self.kind in (int, int | None) else "a number"
        return f"{number} from {self.least:g} " + ("up" if self.most is None else f"to {self.most:g}")

    def value(self, written: Any) -> Any:
        """What the field holds, of what was written. Raises UserError where that is not accepted."""
        if self.read is not None:
            try:
                return self.read(written)
            except ValueError as error:
                text = ", ".join(written) if isinstance(written, list) else written
                raise UserError(f"`{self.name}` {text!r} is not accepted; {error}") from None
        return written if self.unit is None or written is None else written * self.unit


def option(default: Any = REQUIRED, help: str = "", *, kind: Any = None, **more: Any) -> Any:
    """A field that is an option; the arguments are those of `OptionSpec`, ``default`` as it is written."""
    metadata = {KEY: {"default": default, "kind": kind, "help": help, **more}}
    if default is REQUIRED:
        return dataclasses.field(metadata=metadata)
    if (read := more.get("read")) and isinstance(read(default), dict):
        return dataclasses.field(default_factory=lambda: read(default), metadata=metadata)
    unit = more.get("unit")
    value = read(default) if read else default * unit if unit else default
    return dataclasses.field(default=value, metadata=metadata)


def options(kind: type) -> Iterator[OptionSpec]:
    """The options that the dataclass ``kind`` declares, in order. Fields that are none are passed over."""
    types = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if KEY in field.metadata:
            declared = dict(field.metadata[KEY])
            written = declared.pop("kind") or types[field.name]
            yield OptionSpec(name=field.name, kind=written, **declared)


def read_pairs(written: list[str] | None) -> dict[str, str]:
    """``KEY=VALUE`` texts as a mapping."""
    values = {}
    for text in written or ():
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise ValueError("write KEY=VALUE")
        if key in values:
            raise ValueError(f"{key} is given twice")
        values[key] = value
    return values


def or_none(read: Callable[[str], Any], accepted: str) -> Callable[[str], Any]:
    """``read``, where ``none`` is accepted too."""

    def read_or_none(text: str) -> Any:
        try:
            return None if text.lower() == "none" else read(text)
        except ValueError:
            raise ValueError(f"give {accepted}, or 'none'") from None

    return read_or_none


def settled(kind: type, written: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of ``kind`` that were written."""
    return {
        option.name: option.value(written[option.name]) for option in options(kind) if option.name in written
    }
