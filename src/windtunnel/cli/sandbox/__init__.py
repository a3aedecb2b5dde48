"""``windtunnel sandbox``: agent sandboxes that survive, through the daemon of their home."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from windtunnel.cli import Group
from windtunnel.cli.sandbox import boxes, checkpoints, commands, daemon, emulate

sandbox = typer.Typer(
    name="sandbox",
    cls=Group,
    help="Sandboxes for agents that can be checkpointed, restored, forked and rolled back.\n\n"
    "Commands talk to the daemon of a home folder and start it when none runs.",
    no_args_is_help=True,
)


@sandbox.callback()
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
            help="A daemon that serves HTTP, instead of a home; the token is WINDTUNNEL_SANDBOX_TOKEN.",
        ),
    ] = None,
) -> None:
    # A home that is named on the command line means that home, also where the environment names a URL.
    source = context.get_parameter_source("home")
    named = source is not None and source.name == "COMMANDLINE"
    context.obj = str(home) if home is not None and (named or not url) else url


COMMANDS: dict[str, Callable[..., None]] = {
    "doctor": daemon.doctor,
    "setup": daemon.setup,
    "serve": daemon.serve,
    "down": daemon.down,
    "create": boxes.create,
    "ls": boxes.list_all,
    "ps": boxes.ps,
    "stop": boxes.stop,
    "rm": boxes.remove,
    "put": boxes.put,
    "get": boxes.get,
    "exec": commands.execute,
    "shell": commands.interact,
    "checkpoint": checkpoints.checkpoint,
    "restore": checkpoints.restore,
    "rollback": checkpoints.rollback,
    "fork": checkpoints.fork,
    "export": checkpoints.export,
    "import": checkpoints.import_,
    "notice": checkpoints.notice,
    "gc": checkpoints.gc,
    "log": checkpoints.log,
    "diff": checkpoints.diff,
    "emulate": emulate.emulate,
}
for name, command in COMMANDS.items():
    sandbox.command(name)(command)


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.add_typer(sandbox)
