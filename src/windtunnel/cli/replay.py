"""``windtunnel replay``: the decisions of a recorded run, made anew."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from windtunnel.cli.common import Json, print_json, print_table

if TYPE_CHECKING:
    from windtunnel.replay import Part

SHOWN = 20


def replay(
    run: Annotated[
        str,
        typer.Argument(metavar="RUN", help="An id, 'last', a folder, an events.jsonl, or sandbox:NAME."),
    ],
    policy: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE.py", help="Another policy, by name or in a file with decide()."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Replay the decisions of a recorded run, and list those that differ.

    Example: windtunnel replay last --policy all
    """
    from windtunnel.replay import locate
    from windtunnel.replay import replay as again

    result = again(locate(run), policy)
    if as_json:
        return print_json(result.plain())
    for part in result.parts:
        _print(part)


def _print(part: Part) -> None:
    from windtunnel.replay import short

    by = ", ".join(f"{count} by {name}" for name, count in part.recorded_by.items())
    typer.echo(
        f"{part.capability}: {part.decisions} decisions ({by}), made anew by {part.policy}: "
        f"{part.same} the same, {len(part.differences)} not"
    )
    for key in part.replayed_cost or {}:
        before, after = (part.recorded_cost or {}).get(key, 0.0), (part.replayed_cost or {}).get(key, 0.0)
        typer.echo(f"  {key}: {before:.6g} recorded, {after:.6g} anew (emulated)")
    if not part.differences:
        return
    rows = []
    for difference in part.differences[:SHOWN]:
        both = (
            {key: kind.get(key) for key in difference.fields}
            for kind in (difference.recorded, difference.replayed)
        )
        rows.append((str(difference.number), *map(short, both), short(difference.observation, 240)))
    more = len(part.differences) - SHOWN
    note = f"… and {more} more; --json has all" if more > 0 else ""
    print_table(("#", "recorded", "anew", "observation"), rows, note=note)
