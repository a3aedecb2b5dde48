"""The command: ``python -m benchmarks NAME``."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from benchmarks.harness import run, show
from benchmarks.harness.measure import ended_by_sigterm, host_facts
from windtunnel.base.errors import UserError, WindtunnelError
from windtunnel.cli import progress_bar

if TYPE_CHECKING:
    from rich.console import Console

    from benchmarks.harness.rows import Row

WIDTH = 120  # characters of a line where there is no terminal


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def bench(
    name: Annotated[str, typer.Argument(help="Such as agents.sandbox, or engines.flows.")],
    only: Annotated[list[str] | None, typer.Option(help="A section to run alone; may be repeated.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repeats, and no large jobs.")] = False,
    trace: Annotated[
        Path | None, typer.Option(help="A published trace's file, for the sections that take one.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the rows and what they were measured on as JSON.")
    ] = False,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print tables in Markdown.")] = False,
) -> None:
    """Hold a capability against real runs, published figures and its peers, side by side.

    Example: python -m benchmarks training.emulate --quick --markdown
    """

    if as_json and as_markdown:
        raise UserError("benchmarks: --json and --markdown are given; accepted is one of them")
    console, host = _output(), host_facts()
    piped = as_json or as_markdown

    def show_rows(rows: list[Row]) -> None:
        if not piped:
            _print(console, name, rows)

    with ended_by_sigterm(), progress_bar(f"benchmarks {name}") as progress:
        rows = run.run(name, only or (), quick=quick, trace=trace, progress=progress, section_done=show_rows)
    if as_json:
        typer.echo(json.dumps(show.document(name, rows, host, quick=quick)))
    elif as_markdown:
        typer.echo(show.markdown(name, rows, host, quick=quick), nl=False)
    elif words := show.targets(rows):
        console.print(words, highlight=False)


def _output() -> Console:
    """Standard output: as wide as the terminal, and wide enough for tables in a file."""
    from rich.console import Console

    console = Console(markup=False)  # what stands in brackets is said, not a style
    return console if console.is_terminal else Console(width=WIDTH, markup=False)


def _print(console: Console, name: str, rows: list[Row]) -> None:
    """A section, as soon as it is done: an hour's work is not lost with its last minute."""

    if not rows:
        return
    table = show.table(f"{name}: {rows[0].section}", rows)
    if table.row_count:
        console.print(table)
    for words in show.remarks(rows):
        console.print(words, style="dim", highlight=False)
    console.print()


def main() -> None:
    try:
        app()
    except WindtunnelError as error:
        typer.echo(f"benchmarks: {str(error).removeprefix('benchmarks: ')}", err=True)
        sys.exit(error.status)


if __name__ == "__main__":
    main()
