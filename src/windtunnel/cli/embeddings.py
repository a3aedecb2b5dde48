"""``windtunnel embeddings``."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from windtunnel.base.errors import UserError
from windtunnel.cli import new_group
from windtunnel.cli.common import Json, print_json, print_table, quantity

group = new_group("Profile embedding tables, and place their rows on devices (RecShard, FlexShard).")


SHOWN = 25
"""Tables that are shown, those most asked for."""
Value = TypeVar("Value", int, str)


@group.command("profile")
def profile(
    logs: Annotated[
        list[str],
        typer.Argument(help="Parquet, Arrow IPC or .npz files, folders or globs of them, here or at a URL."),
    ],
    out: Annotated[Path, typer.Option(help="New folder for statistics and row orders.")],
    feature: Annotated[
        list[str] | None, typer.Option(help="Read only this feature (may be repeated). Default: all.")
    ] = None,
    rows: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]N", help="Rows of the feature's table. Default: the highest id."),
    ] = None,
    hashes: Annotated[
        list[str] | None,
        typer.Option("--hash", metavar="[NAME=]HASH", help="Hash from ids to rows: splitmix64 or modulo."),
    ] = None,
    dim: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]N", help="Dimension of the feature's table. Default: 64."),
    ] = None,
    sequence: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A feature whose rows are not pooled (may be repeated)."),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Data type of all tables: float32, float16 or bfloat16.")
    ] = "float32",
    window: Annotated[
        int | None, typer.Option(min=1, help="Samples in a window of drift. Default: a file is a window.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Profile tables from logs of lookups: skew, pooling, coverage, unused rows, drift.

    Example: windtunnel embeddings profile 'logs/day-*.parquet' --out stats --dim 128
    """
    from windtunnel.base.plain import to_plain
    from windtunnel.cli import progress_bar
    from windtunnel.data.embeddings.files import fresh
    from windtunnel.data.embeddings.model import EmbeddingTable, checked
    from windtunnel.data.embeddings.profile import profile

    fresh(out)
    dims, sequences = _by_name("--dim", dim, int), set(sequence or ())
    like = {
        name: EmbeddingTable(name, 1, dims.get(name, dims.get("*", 64)), dtype, sequence=name in sequences)
        for name in {"*", *dims, *sequences}
    }
    checked(tuple(like.values()), "embeddings profile")
    with progress_bar("profile") as progress:
        statistics = profile(
            logs, features=feature or (), rows=_by_name("--rows", rows, int),
            hashes=_by_name("--hash", hashes, str), like=like, window=window, progress=progress,
        )  # fmt: skip
        statistics.save(out)
    if as_json:
        tables = [to_plain(table) | to_plain(statistics.facts[table.name]) for table in statistics.tables]
        return print_json({"folder": str(out), "tables": tables})
    _show(statistics, out)


def _by_name(option: str, texts: Sequence[str] | None, kind: Callable[[str], Value]) -> dict[str, Value]:
    """``NAME=VALUE`` by name; a ``VALUE`` alone is that of ``*``."""
    values = {}
    for text in texts or ():
        name, equals, value = text.rpartition("=")
        try:
            values[name if equals else "*"] = kind(value.replace("_", "") if kind is int else value)
        except ValueError:
            raise UserError(
                f"{option} {text}: {value!r} is not accepted, accepted is a whole number"
            ) from None
    return values


def _show(profile: Any, out: Path) -> None:
    import numpy as np

    from windtunnel.base import units

    order = sorted(profile.tables, key=lambda table: -profile.facts[table.name].lookups)
    rows = []
    for table in order[:SHOWN]:
        facts = profile.facts[table.name]
        retained = [day.kept_share / day.hot_share for day in facts.windows[1:] if day.hot_share]
        top = table.share(table.rows * np.array([0.01, 0.1]))
        shares = (1 - facts.rows_used / table.rows, *top, table.coverage)
        unused, percent, tenth, covered = (f"{share * 100:.0f} %" for share in shares)
        rows.append((
            table.name, units.count(table.rows), unused, units.decimal(facts.lookups).strip(),
            f"{table.pooling:.1f}", str(facts.lengths[2]) if facts.lengths else "-", covered, percent, tenth,
            f"{sum(retained) / len(retained) * 100:.0f} %" if retained else "-",
        ))  # fmt: skip
    head = ("table", ">rows", ">unused", ">lookups", ">pooling", ">p99", ">coverage", ">1%", ">10%", ">kept")
    note = (
        "1%, 10%: share of lookups that go to this share of the rows, the hottest; kept: of the lookups of a"
        " window's hot rows, the share that the hot rows of the window before get in it"
    )
    print_table(head, rows, note=note, rules=False)
    more = f", {len(order) - SHOWN} more than are shown" if len(order) > SHOWN else ""
    typer.echo(f"{out}: statistics of {len(order)} tables{more}")


@group.command("plan")
def plan(
    cluster: Annotated[
        str, typer.Option("--cluster", "-c", help="A name such as a100-80:2x8, or a file of a cluster.")
    ],
    synthetic: Annotated[
        str | None, typer.Option(metavar="NAME", help="Synthetic tables: rm1, rm2, rm3, dlrm2021 or small.")
    ] = None,
    statistics: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder that `windtunnel embeddings profile` wrote.")
    ] = None,
    policy: Annotated[
        str, typer.Option(help="Policy: recshard, search, size-lookup, size or lookup.")
    ] = "recshard",
    batch: Annotated[int, typer.Option(min=1, help="Samples in an iteration, over all devices.")] = 16_384,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", help="Device memory for rows, such as 24GB. Default: 30% of the device."
        ),
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Host memory for each device. Default: 128GB.")
    ] = None,
    state_bytes: Annotated[
        int | None,
        typer.Option(min=0, help="Optimiser state of a row, in bytes. Default: from the statistics."),
    ] = None,
    columns: Annotated[
        int, typer.Option(min=0, help="Fewest columns of a table's shard; 0: tables are not cut by column.")
    ] = 16,
    seed: Annotated[int, typer.Option(min=0, help="Seed of synthetic tables and the search.")] = 0,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="File for the plan.")
    ] = None,
    torchrec: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File for TorchRec's form of the plan."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Place each table on a device, and its hot rows in fast memory.

    Example: windtunnel embeddings plan --synthetic rm2 --cluster a100-80:2x8
    """
    from windtunnel.base.importing import uncollected

    with uncollected():
        from windtunnel.data.embeddings import files
        from windtunnel.data.embeddings.run import plan_run, show

    sizes = [
        None if text is None else quantity(name, text, "bytes", zero=True)
        for name, text in (("memory", memory), ("host_memory", host_memory))
    ]
    for option, path in (("--out", out), ("--torchrec", torchrec)):
        _check_place(option, path)
    planned = plan_run(
        cluster, synthetic=synthetic, statistics=statistics, policy=policy, batch=batch, memory=sizes[0],
        host_memory=sizes[1], state_bytes=state_bytes, columns=columns, seed=seed,
    )  # fmt: skip
    if out is not None:
        files.write_plan(out, planned.request.tables, planned.plan)
    if torchrec is not None:
        from windtunnel.data.embeddings.torchrec import write_sharding

        write_sharding(torchrec, planned.request.tables, planned.plan)
    if as_json:
        print_json(planned.plain())
    else:
        show(planned)


def _check_place(option: str, path: Path | None) -> None:
    if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):
        raise UserError(
            f"{option} {path}: a file in a folder that is there and may be written to is accepted"
        )
