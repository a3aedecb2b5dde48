"""``windtunnel sandbox``: agent sandboxes that survive, through the daemon of their home."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from windtunnel.cli import new_group
from windtunnel.cli.common import TlsCa, TlsCert, TlsKey
from windtunnel.cli.sandbox.common import SandboxPlace

VERBS = {
    "daemon": ("doctor", "setup", "serve", "down", "mcp"),
    "boxes": ("create", "list_all", "stop", "remove", "put", "get", "port"),
    "commands": ("execute", "interact"),
    "checkpoints": (
        "checkpoint", "restore", "rollback", "fork", "export", "import_", "notice", "gc", "log",
        "diff",
    ),
    "emulate": ("emulate",),
}  # fmt: skip
"""The functions of each module, from the host to what is done with checkpoints."""
NAMES = {"list_all": "ls", "remove": "rm", "execute": "exec", "interact": "shell", "import_": "import"}

group = new_group(
    "Sandboxes for agents that can be checkpointed, restored, forked and rolled back.\n\n"
    "Commands talk to the daemon of a home folder and start it when none runs.",
    {
        NAMES.get(function, function): f"sandbox.{module}:{function}"
        for module, functions in VERBS.items()
        for function in functions
    },
)


@group.callback()
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
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
) -> None:
    # A home that is named on the command line means that home, also where the environment names a URL.
    source = context.get_parameter_source("home")
    named = source is not None and source.name == "COMMANDLINE"
    tls: tuple[str, ...] = ()
    if tls_cert or tls_key or tls_ca:
        from windtunnel.base.tls import certificate_files

        tls = certificate_files(tls_cert, tls_key, tls_ca)
    context.obj = SandboxPlace(str(home) if home is not None and (named or not url) else url, tls)
