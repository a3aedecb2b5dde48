"""The command line: one module a verb, each of which parses, calls and prints.

A call imports the module of its own verb alone, and that module what is heavy only where it is used: a
command of a sandbox is over in milliseconds, and must not cost half a second of imports each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, ClassVar

import typer
from typer.core import TyperGroup

from windtunnel.cli.values import read_plainly


class Group(TyperGroup):
    """A verb that has verbs of its own; its help has the whole first sentence of each."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        known = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        rows = [(name, one.get_short_help_str(limit=1000)) for name, one in known if one and not one.hidden]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        read_plainly(self.get_params(ctx))
        rest: list[str] = super().parse_args(ctx, args)
        return rest

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = super().get_command(ctx, cmd_name)
        if found is not None:
            read_plainly(found.get_params(ctx))
        return found


class Lazy(Group):
    """Verbs by name, each made when it is called or its help is asked for.

    ``table``: where each stands, in the order of the help: a module of `windtunnel.cli` whose ``register``
    adds it, or ``module:function``.
    """

    table: ClassVar[Mapping[str, str]]

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _Verbs(self.table)  # type: ignore[assignment]  # nothing is added to it later


class _Verbs(Mapping[str, Any]):
    """The commands of a table."""

    def __init__(self, table: Mapping[str, str]) -> None:
        self._table = table
        self._made: dict[str, Any] = {}

    def __getitem__(self, verb: str) -> Any:
        if verb not in self._made:
            module, _, function = self._table[verb].partition(":")
            holder, found = typer.Typer(rich_markup_mode=None), import_module(f"{__name__}.{module}")
            if function:
                holder.command(verb)(getattr(found, function))
            else:
                found.register(holder)
            self._made |= typer.main.get_group(holder).commands
        return self._made[verb]

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)


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
