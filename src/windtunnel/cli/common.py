"""What verbs share: options that many have, values read from text, and how results are printed."""

from __future__ import annotations

import json
import math
import signal
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from windtunnel.base.errors import UserError

Word = TypeVar("Word", bound=str)
Number = TypeVar("Number", int, float)
Json = Annotated[bool, typer.Option("--json", help="Print one JSON value.")]
LogFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="File for the log of decisions, for replay.")
]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port; 0: a free port.")]
Script = Annotated[str, typer.Argument(metavar="SCRIPT", help="A torchrun-style training script.")]
Arguments = Annotated[list[str] | None, typer.Argument(metavar="ARGS", help="The script's own arguments.")]
CLUSTER = typer.Option("--cluster", "-c", help="A name such as h100-sxm:16x8,nic=ib-200, or a YAML file.")
OUT = typer.Option("--out", "-o", metavar="FILE", help="Write it there.")
TlsCert = Annotated[Path | None, typer.Option(metavar="FILE", help="Certificate for encryption (TLS 1.3).")]
TlsKey = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Private key of the certificate (mode 0600).")
]
TlsCa = Annotated[Path | None, typer.Option(metavar="FILE", help="CA certificate of both sides.")]


def quantity(name: str, text: str, unit: str, *, zero: bool = False) -> float:
    """``text``, such as 20GB, in ``unit``; UserError where option ``name`` is none."""
    from windtunnel.base.units import parse_quantity

    try:
        return parse_quantity(text, unit, zero=zero)
    except ValueError as error:
        raise UserError(f"`{name}` {text!r} is not accepted; {error}") from None


def choice(name: str, value: str, accepted: Iterable[Word]) -> Word:
    """The word of ``accepted`` that ``value`` is; UserError where option ``name`` does not accept it."""
    words = {str(word): word for word in accepted}
    if value not in words:
        raise UserError(f"`{name}` {value!r} is unknown; accepted are {', '.join(words)}")
    return words[value]


def numbers(name: str, text: str, kind: type[Number], least: float, most: float = math.inf) -> list[Number]:
    """``text`` with commas between, in order; UserError where option ``name`` does not accept a number."""
    try:
        values = [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        values = [kind("-1")]
    if not all(least <= value <= most and math.isfinite(value) for value in values):
        bounds = f"from {least:g} " + (f"to {most:g}" if math.isfinite(most) else "up")
        raise UserError(f"`{name}` {text!r} is not accepted; accepted are numbers {bounds}, such as 2,4,8")
    return values


def print_json(value: Any, *, indent: int | None = None) -> None:
    """One JSON value; dataclasses as their fields."""
    from windtunnel.base.plain import to_plain

    typer.echo(json.dumps(to_plain(value), indent=indent, ensure_ascii=False))


def emit(as_json: bool, value: Any, lines: Iterable[str]) -> None:
    """Print one JSON value, or the lines that say the same to a reader."""
    if as_json:
        return print_json(value)
    for line in lines:
        typer.echo(line)


def print_columns(head: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()) -> None:
    """Columns of plain text as wide as what they hold; those named in ``right`` have numbers."""
    cells = [head, *rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        padded = [
            cell.rjust(width) if name in right else cell.ljust(width)
            for name, cell, width in zip(head, row, widths, strict=True)
        ]
        typer.echo("  ".join(padded).rstrip())


def print_table(
    head: Sequence[str], rows: Iterable[Sequence[str]], title: str = "", note: str = "", *, rules: bool = True
) -> None:
    """A table in the terminal's width; a column whose name begins with ``>`` has numbers. ``rules``: a line
    below the head. A cell may be a text of Rich."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, 140)  # what is piped is searched or cut: do not fold it
    table = Table(title=title or None, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    if not rules:
        table = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="dim")
    for name in head:
        number = name.startswith(">")
        justify: Any = "right" if number else "left"
        table.add_column(name.removeprefix(">"), justify=justify, no_wrap=number, overflow="fold")
    for row in rows:
        table.add_row(*(escape(cell) if isinstance(cell, str) else cell for cell in row))
    console.print(table)
    if note:
        console.print(f"[dim]{escape(note)}[/]", soft_wrap=True)


def stop_event() -> threading.Event:
    """Set by SIGTERM and SIGINT."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return stop
