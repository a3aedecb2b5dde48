"""``windtunnel sandbox``: agent sandboxes that survive, through the daemon of their home."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar

import typer

from windtunnel.cli import Lazy
from windtunnel.cli.sandbox.common import Place

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
        "port": BOXES + "port",
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
        "mcp": DAEMON + "mcp",
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
            help="A daemon at tcp://HOST:PORT, instead of a home; the token is WINDTUNNEL_SANDBOX_TOKEN.",
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Certificate, for TCP and HTTP.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Its private key; mode 600.")] = None,
    tls_ca: Annotated[Path | None, typer.Option(metavar="FILE", help="The CA of both sides.")] = None,
) -> None:
    # A home that is named on the command line means that home, also where the environment names a URL.
    source = context.get_parameter_source("home")
    named = source is not None and source.name == "COMMANDLINE"
    tls: tuple[str, ...] = ()
    if tls_cert or tls_key or tls_ca:
        from windtunnel.base.tls import given

        tls = given(tls_cert, tls_key, tls_ca)
    context.obj = Place(str(home) if home is not None and (named or not url) else url, tls)


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.add_typer(sandbox)
