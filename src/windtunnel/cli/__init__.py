"""The command line: one module a verb, each of which parses, calls and prints.

A call imports the module of its own verb alone, and that module what is heavy only where it is used: a
command of a sandbox is over in milliseconds, and must not cost half a second of imports each time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any, ClassVar

import typer
from typer.core import TyperGroup

from windtunnel.cli.values import read_plainly

SCRIPT = {"allow_interspersed_args": False, "ignore_unknown_options": False}
"""Settings of a command that runs a script: what follows SCRIPT is the script's own."""


class VerbGroup(TyperGroup):
    """A verb that has verbs of its own; its help has the whole first sentence of each."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        rows = [(name, verb.get_short_help_str(limit=1000)) for name, verb in commands if verb]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        read_plainly(self.get_params(ctx))
        rest: list[str] = super().parse_args(ctx, args)
        return rest

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            read_plainly(command.get_params(ctx))
        return command


def new_group(help: str, table: Mapping[str, str] | None = None) -> typer.Typer:
    """A verb with verbs of its own: those that are added to it, or those of ``table``, see `Lazy`."""
    kind = VerbGroup if table is None else type("Verbs", (Lazy,), {"table": table})
    return typer.Typer(cls=kind, no_args_is_help=True, help=help)


class Lazy(VerbGroup):
    """Verbs by name, each made when it is called or its help is asked for.

    ``table``: where each is, in the order of the help: a module of `windtunnel.cli` with a ``group`` or a
    function of the verb's name; or ``module:function``.
    """

    table: ClassVar[Mapping[str, str]]

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _Verbs(self.table)  # type: ignore[assignment]  # nothing is added to it later


class _Verbs(Mapping[str, Any]):
    """The commands of a table."""

    def __init__(self, table: Mapping[str, str]) -> None:
        self._table = table
        self._commands: dict[str, Any] = {}

    def __getitem__(self, verb: str) -> Any:
        if verb not in self._commands:
            name, _, function = self._table[verb].partition(":")
            module = import_module(f"{__name__}.{name}")
            holder = typer.Typer(rich_markup_mode=None)
            if function or not hasattr(module, "group"):
                command = getattr(module, function or verb)
                script = "arguments" in inspect.signature(command).parameters
                holder.command(verb, context_settings=SCRIPT if script else None)(command)
            else:
                holder.add_typer(module.group, name=verb)
            self._commands |= typer.main.get_group(holder).commands
        return self._commands[verb]

    def __iter__(self) -> Iterator[str]:
        return iter(self._table)

    def __len__(self) -> int:
        return len(self._table)


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[str, float], None]]:
    """A function to call with what is being done and the fraction of it that is done: a bar on a terminal, on
    standard error, and nothing elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=1.0)

        def update(step: str, fraction: float) -> None:
            bar.update(task, description=f"{title}: {step}", completed=fraction)

        yield update
