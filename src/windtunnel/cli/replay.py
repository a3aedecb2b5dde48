"""``windtunnel replay``: the decisions of a recorded run, made anew."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from windtunnel.replay import Part

SHOWN = 20


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command("replay")(replay)


def replay(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="An id, 'last', a folder, an events.jsonl, or sandbox:NAME."),
    ],
    policy: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE.py", help="Another policy, by name or in a file with decide()."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print all differences, whole, as one JSON object.")
    ] = False,
) -> None:
    """Make the decisions of a recorded run anew, and list those that come out otherwise.

    Example: windtunnel replay last --policy all
    """
    from rich.console import Console

    from windtunnel.replay import locate
    from windtunnel.replay import replay as again

    found = again(locate(run), policy)
    if as_json:
        typer.echo(json.dumps(found.plain()))
        return
    console = Console()
    for part in found.parts:
        _print(console, part)


def _print(console: Console, part: Part) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.markup import escape
    from rich.table import Table

    from windtunnel.replay import short

    by = ", ".join(f"{count} by {name}" for name, count in part.recorded_by.items())
    console.print(
        f"{part.capability}: {part.decisions} decisions ({by}) made anew by {part.policy}: "
        f"{part.same} the same, {len(part.differences)} not",
        highlight=False,
        soft_wrap=True,
    )
    for key in part.made_cost or {}:
        before, after = (part.recorded_cost or {}).get(key, 0.0), (part.made_cost or {}).get(key, 0.0)
        console.print(f"  {key}: {before:.6g} recorded, {after:.6g} anew (emulated)", highlight=False)
    if not part.differences:
        return
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("#", "recorded", "anew", "seen"):
        table.add_column(name, overflow="fold")
    for one in part.differences[:SHOWN]:
        both = ({key: kind.get(key) for key in one.fields} for kind in (one.recorded, one.made))
        table.add_row(
            str(one.number), *(escape(short(kind)) for kind in both), escape(short(one.observation, 240))
        )
    console.print(table)
    if len(part.differences) > SHOWN:
        console.print(f"  … and {len(part.differences) - SHOWN} more; --json has all", highlight=False)
