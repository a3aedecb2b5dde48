"""``windtunnel network hostrate``: windows that this host gives to its senders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from windtunnel.cli import new_group
from windtunnel.cli.common import LogFile, choice, stop_event

group = new_group("Keep this host's send queue short (CERA).")


@group.command("run")
def run(
    device: Annotated[str, typer.Argument(metavar="IFACE", help="The interface whose queue is kept short.")],
    spec: Annotated[
        Path, typer.Argument(metavar="SPEC.yaml", help="The senders and their queue: docs/hostrate.md.")
    ],
    policy: Annotated[
        str,
        typer.Option(
            help="Policy: weights, published (windows as in the paper), or free (no limit on windows)."
        ),
    ] = "weights",
    log: LogFile = None,
) -> None:
    """Set the windows of new connections of these senders until interrupted, then remove everything.

    Example: windtunnel network hostrate run eth0 senders.yaml
    """
    from windtunnel.network.hostrate.live import controller
    from windtunnel.network.hostrate.policy import POLICIES
    from windtunnel.network.hostrate.spec import read_spec

    choice("policy", policy, POLICIES)
    rules = read_spec(spec)
    controller.run(
        device, rules, policy=policy, log=log, stop=stop_event(),
        ready=lambda name: typer.echo(
            f"Runs  {device}, congestion control {name}, for new connections of {', '.join(rules.entities)}"
        ),
    )  # fmt: skip
    typer.echo("Stopped")
