"""``windtunnel network``: networks that are shared, planned and emulated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import typer

from windtunnel.cli import Lazy


class Verbs(Lazy):
    """What the host has, then the capabilities."""

    table: ClassVar[Mapping[str, str]] = {
        "probe": "network.probe:probe",
        "run": "network.run",
        "aggregation": "network.aggregation",
        "sharing": "network.sharing",
        "multicast": "network.multicast",
        "torus": "network.torus",
        "hostrate": "network.hostrate",
        "mobilerate": "network.mobilerate",
        "dag": "network.dag",
    }


network = typer.Typer(
    name="network",
    cls=Verbs,
    help="Networks that are shared: by whom, in which order, and what that costs.",
    no_args_is_help=True,
)


@network.callback()
def _root() -> None:
    pass


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.add_typer(network)
