"""The command line: one module a verb, each of which parses, calls and prints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from typer.core import TyperGroup


class Group(TyperGroup):
    """A verb that has verbs of its own; its help has the whole first sentence of each."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        known = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        rows = [(name, one.get_short_help_str(limit=1000)) for name, one in known if one and not one.hidden]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)


@contextmanager
def shown_progress(title: str) -> Iterator[Callable[[str, float], None]]:
    """A function to call with what is being done and the fraction of it that is done: a bar on a terminal, on
    standard error, and nothing elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=1.0)

        def tell(what: str, fraction: float) -> None:
            bar.update(task, description=f"{title}: {what}", completed=fraction)

        yield tell
