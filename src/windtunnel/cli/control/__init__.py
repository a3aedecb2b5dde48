"""``windtunnel control``: a cluster's state in a database, and agents that learn on a host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import typer

from windtunnel.cli import Lazy


class Verbs(Lazy):
    """The control plane's own verbs, then agents on a host."""

    table: ClassVar[Mapping[str, str]] = {
        "init": "control.database:init",
        "serve": "control.database:serve",
        "worker": "control.database:worker",
        "submit": "control.database:submit",
        "ps": "control.database:ps",
        "sql": "control.database:sql",
        "demo": "control.database:demo",
        "node": "control.node",
    }


control = typer.Typer(
    name="control",
    cls=Verbs,
    help="A cluster's state in a database: tasks, workers, messages, files; and agents on its hosts.",
    no_args_is_help=True,
)


@control.callback()
def _root() -> None:
    pass


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.add_typer(control)
