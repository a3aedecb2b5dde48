"""``windtunnel network hostrate``: windows that this host gives to its senders."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from windtunnel.cli import Group

group = typer.Typer(
    cls=Group, no_args_is_help=True, help="Keep this host's own queue short, whoever sends (CERA)."
)


def register(app: typer.Typer) -> None:
    """Add the verb to ``app``."""
    app.add_typer(group, name="hostrate")


@group.callback()
def _hostrate() -> None:
    pass


@group.command("run")
def run(
    device: Annotated[str, typer.Argument(metavar="IFACE", help="The interface whose queue is kept short.")],
    spec: Annotated[
        Path, typer.Argument(metavar="SPEC.yaml", help="Whose flows are held back: docs/hostrate.md.")
    ],
    policy: Annotated[
        str, typer.Option(help="weights; published: windows as in the paper; free: nobody is held back.")
    ] = "weights",
    log: Annotated[Path | None, typer.Option(metavar="FILE", help="Log decisions there, for replay.")] = None,
) -> None:
    """Give windows to new connections of these senders until interrupted; nothing is left behind.

    Example: windtunnel network hostrate run eth0 senders.yaml
    """
    from windtunnel.base.errors import UserError
    from windtunnel.network.hostrate.live import controller
    from windtunnel.network.hostrate.policy import POLICIES
    from windtunnel.network.hostrate.spec import read_spec

    if policy not in POLICIES:
        raise UserError(f"--policy is {policy!r}, accepted are {', '.join(POLICIES)}")
    stop, known = threading.Event(), read_spec(spec)
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, lambda *_: stop.set())
    controller.run(
        device, known, policy=policy, log=log, stop=stop,
        ready=lambda name: typer.echo(
            f"Runs  {device}, congestion control {name}, for new connections of {', '.join(known.entities)}"
        ),
    )  # fmt: skip
    typer.echo("Stopped")
