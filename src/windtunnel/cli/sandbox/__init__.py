"""``windtunnel sandbox``: agent sandboxes that survive, through the daemon of their home."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from windtunnel.cli import Lazy

BOXES, CHECKPOINTS, COMMANDS, DAEMON = (
    f"sandbox.{module}:" for module in ("boxes", "checkpoints", "commands", "daemon")
)


class Verbs(Lazy):
    """The commands, from the host to what is done with checkpoints."""

    table: ClassVar[Mapping[str, str]] = {
        "doctor": DAEMON + "doctor",
        "setup": DAEMON + "setup",
        "serve": DAEMON + "serve",
        "down": DAEMON + "down",
        "create": BOXES + "create",
        "ls": BOXES + "list_all",
        "ps": BOXES + "ps",
        "stop": BOXES + "stop",
        "rm": BOXES + "remove",
        "put": BOXES + "put",
        "get": BOXES + "get",
        "exec": COMMANDS + "execute",
        "shell": COMMANDS + "interact",
        "checkpoint": CHECKPOINTS + "checkpoint",
        "restore": CHECKPOINTS + "restore",
        "rollback": CHECKPOINTS + "rollback",
        "fork": CHECKPOINTS + "fork",
        "export": CHECKPOINTS + "export",
        "import": CHECKPOINTS + "import_",
        "notice": CHECKPOINTS + "notice",
        "gc": CHECKPOINTS + "gc",
        "verify": CHECKPOINTS + "verify",
        "log": CHECKPOINTS + "log",
        "diff": CHECKPOINTS + "diff",
        "emulate": "sandbox.emulate:emulate",
    }


sandbox = typer.Typer(
    name="sandbox",
    cls=Verbs,
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


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.add_typer(sandbox)
