"""``windtunnel embeddings``."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from windtunnel.cli import Group

group = typer.Typer(
    cls=Group,
    no_args_is_help=True,
    help="Embedding tables: how they are asked for, and where their rows should lie.",
)


def register(app: typer.Typer) -> None:
    """Add the verb to ``app``."""
    app.add_typer(group, name="embeddings")


SHOWN = 25
"""Tables that are shown, those most asked for."""
Value = TypeVar("Value", int, str)


@group.command("profile")
def profile(
    logs: Annotated[
        list[str],
        typer.Argument(help="Parquet, Arrow IPC or .npz files, folders or globs of them, here or at a URL."),
    ],
    out: Annotated[Path, typer.Option(help="A new folder for the statistics and the tables' orders.")],
    feature: Annotated[
        list[str] | None, typer.Option(help="Read only this one (may be repeated); default: all.")
    ] = None,
    rows: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]N", help="Rows of its table; default: up to the highest id."),
    ] = None,
    hashes: Annotated[
        list[str] | None,
        typer.Option("--hash", metavar="[NAME=]HASH", help="How ids become rows: splitmix64 or modulo."),
    ] = None,
    dim: Annotated[
        list[str] | None, typer.Option(metavar="[NAME=]N", help="Dimension of its table; default: 64.")
    ] = None,
    sequence: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Its rows are not pooled.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of all tables: float32, float16 or bfloat16.")] = "float32",
    window: Annotated[
        int | None, typer.Option(min=1, help="Samples of a window of drift; default: a file is a window.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the statistics as JSON.")] = False,
) -> None:
    """What logs of lookups say of their tables: skew, pooling, coverage, unused rows, drift.

    Example: windtunnel embeddings profile 'logs/day-*.parquet' --out stats --dim 128
    """
    from windtunnel.base.plain import to_plain
    from windtunnel.cli import shown_progress
    from windtunnel.data.embeddings.files import fresh
    from windtunnel.data.embeddings.model import Table, checked
    from windtunnel.data.embeddings.profile import profile

    fresh(out)
    dims, sequences = _by_name("--dim", dim, int), set(sequence or ())
    like = {
        name: Table(name, 1, dims.get(name, dims.get("*", 64)), dtype, sequence=name in sequences)
        for name in {"*", *dims, *sequences}
    }
    checked(tuple(like.values()), "embeddings profile")
    with shown_progress("profile") as progress:
        found = profile(
            logs, features=feature or (), rows=_by_name("--rows", rows, int),
            hashes=_by_name("--hash", hashes, str), like=like, window=window, progress=progress,
        )  # fmt: skip
        found.save(out)
    if as_json:
        typer.echo(json.dumps({"folder": str(out), "tables": [
            {**to_plain(one), **to_plain(found.facts[one.name])} for one in found.tables
        ]}))  # fmt: skip
        return
    _show(found, out)


def _by_name(option: str, given: Sequence[str] | None, kind: Callable[[str], Value]) -> dict[str, Value]:
    """``NAME=VALUE`` by name; a ``VALUE`` alone is that of ``*``."""
    from windtunnel.base.errors import UserError

    found = {}
    for one in given or ():
        name, equals, value = one.rpartition("=")
        try:
            found[name if equals else "*"] = kind(value.replace("_", "") if kind is int else value)
        except ValueError:
            raise UserError(
                f"{option} {one}: {value!r} is not accepted, accepted is a whole number"
            ) from None
    return found


def _show(found: Any, out: Path) -> None:
    import numpy as np
    from rich.console import Console
    from rich.table import Table

    from windtunnel.base import units

    shown = Table(box=None, header_style="bold")
    titles = ("table", "rows", "unused", "lookups", "pooling", "p99", "coverage", "1%", "10%", "kept")
    for title in titles:
        shown.add_column(title, justify="left" if title == "table" else "right", no_wrap=title != "table")
    order = sorted(found.tables, key=lambda table: -found.facts[table.name].lookups)
    for one in order[:SHOWN]:
        facts = found.facts[one.name]
        kept = [day.kept_share / day.hot_share for day in facts.windows[1:] if day.hot_share]
        shares = (1 - facts.rows_used / one.rows, *one.share(one.rows * np.array([0.01, 0.1])), one.coverage)
        unused, percent, tenth, covered = (f"{share * 100:.0f} %" for share in shares)
        shown.add_row(
            one.name, units.count(one.rows), unused, units.decimal(facts.lookups).strip(),
            f"{one.pooling:.1f}", str(facts.lengths[2]) if facts.lengths else "-", covered, percent, tenth,
            f"{sum(kept) / len(kept) * 100:.0f} %" if kept else "-",
        )  # fmt: skip
    console = Console()
    console.print(shown)
    console.print(
        "1%, 10%: share of lookups that go to so many of the rows, the hottest; kept: of the lookups of a"
        " window's hot rows, what those of the window before get in it",
        style="dim",
    )
    more = f", {len(order) - SHOWN} more than are shown" if len(order) > SHOWN else ""
    console.print(f"{out}: statistics of {len(order)} tables{more}", highlight=False, soft_wrap=True)


@group.command("plan")
def plan(
    cluster: Annotated[
        str, typer.Option("--cluster", "-c", help="A name such as a100-80:2x8, or a file of a cluster.")
    ],
    synthetic: Annotated[
        str | None, typer.Option(metavar="NAME", help="Tables made up: rm1, rm2, rm3, dlrm2021 or small.")
    ] = None,
    statistics: Annotated[
        Path | None, typer.Option(metavar="DIR", help="What windtunnel embeddings profile wrote.")
    ] = None,
    policy: Annotated[str, typer.Option(help="recshard, search, size, lookup or size-lookup.")] = "recshard",
    batch: Annotated[int, typer.Option(min=1, help="Samples of an iteration, of all devices.")] = 16_384,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Of each device for rows, such as 24GB; default: 30% of it."),
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Of the host for each device; default: 128GB.")
    ] = None,
    state_bytes: Annotated[
        int | None,
        typer.Option(min=0, help="What the optimiser keeps for a row; default: as the statistics have it."),
    ] = None,
    columns: Annotated[
        int, typer.Option(min=0, help="The fewest of a shard of a table that is cut; 0: none is.")
    ] = 16,
    seed: Annotated[int, typer.Option(min=0, help="Of synthetic tables and the search.")] = 0,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="Write the plan there.")
    ] = None,
    torchrec: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write there what TorchRec needs to shard as the plan says."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON value.")] = False,
) -> None:
    """Which table lies on which device, and which of its rows in fast memory.

    Example: windtunnel embeddings plan --synthetic rm2 --cluster a100-80:2x8
    """
    from windtunnel.base.importing import uncollected

    with uncollected():
        from windtunnel.data.embeddings import files
        from windtunnel.data.embeddings.run import plan_run, show

    sizes = [_size(name, one) for name, one in (("--memory", memory), ("--host-memory", host_memory))]
    for option, path in (("--out", out), ("--torchrec", torchrec)):
        _check_place(option, path)
    made = plan_run(
        cluster, synthetic=synthetic, statistics=statistics, policy=policy, batch=batch, memory=sizes[0],
        host_memory=sizes[1], state_bytes=state_bytes, columns=columns, seed=seed,
    )  # fmt: skip
    if out is not None:
        files.write_plan(out, made.wanted.tables, made.plan)
    if torchrec is not None:
        from windtunnel.data.embeddings.torchrec import write_sharding

        write_sharding(torchrec, made.wanted.tables, made.plan)
    if as_json:
        typer.echo(json.dumps(made.plain()))
    else:
        show(made)


def _size(option: str, given: str | None) -> float | None:
    from windtunnel.base.errors import UserError
    from windtunnel.base.units import parse_quantity

    try:
        return None if given is None else parse_quantity(given, "bytes", zero=True)
    except ValueError as error:
        raise UserError(f"{option} is {given!r}, {error}") from None


def _check_place(option: str, path: Path | None) -> None:
    import os

    from windtunnel.base.errors import UserError

    if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):
        raise UserError(
            f"{option} {path}: a file in a folder that is there and may be written to is accepted"
        )
