"""``windtunnel checkpoint``: look after the checkpoints that a job wrote to storage."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windtunnel.base.errors import ScriptError, UserError
from windtunnel.cli import new_group
from windtunnel.cli.common import Json, print_json, print_table

if TYPE_CHECKING:
    from windtunnel.training.checkpoint.model import StoredStep

group = new_group("List, verify, prune, export and import the checkpoints of a job in storage.")

Url = Annotated[
    str, typer.Argument(metavar="URL", help="A folder, or a URL of fsspec such as s3://bucket/run.")
]


@group.command("list")
def list_steps(url: Url, as_json: Json = False) -> None:
    """List the steps in storage, and why some cannot be restored.

    Example: windtunnel checkpoint list s3://bucket/run
    """
    from windtunnel.base.units import amount

    rows: list[dict[str, Any]] = [
        {
            "step": stored.step, "generation": stored.generation,
            "world": stored.shards[0].world if stored.shards else 0,
            "bytes": sum(shard.nbytes for shard in stored.shards), "bad": stored.bad,
        }
        for stored in _steps(url)
    ]  # fmt: skip
    if as_json:
        return print_json(rows)
    cells = []
    for row in rows:
        counts = ("", "", row["bad"]) if row["bad"] else (str(row["world"]), amount(row["bytes"]), "complete")
        cells.append((str(row["step"]), str(row["generation"]), *counts))
    print_table((">step", ">generation", ">ranks", ">bytes", ""), cells)


@group.command()
def verify(
    url: Url,
    step: Annotated[int | None, typer.Option(min=0, help="Only this step.")] = None,
) -> None:
    """Read all shards of all complete steps and compare them with their checksums.

    Exit status 1 if any is missing or damaged.

    Example: windtunnel checkpoint verify s3://bucket/run
    """
    from windtunnel.store.objects import ObjectError
    from windtunnel.training.checkpoint.live.storage import read_shard

    complete = [stored for stored in _steps(url) if not stored.bad and step in (None, stored.step)]
    if not complete:
        which = "complete checkpoint" if step is None else f"complete step {step}"
        raise UserError(f"{url}: no {which} is there to verify")
    failed = []
    for stored in complete:
        for shard in stored.shards:
            try:
                read_shard(url, shard)
            except ObjectError as error:
                failed.append(f"step {stored.step}, generation {stored.generation}: {error}")
        typer.echo(f"step {stored.step}, generation {stored.generation}: {len(stored.shards)} shards read")
    if failed:
        raise ScriptError(f"{url}: a shard is missing or damaged", "\n".join(failed))


@group.command()
def prune(url: Url, keep: Annotated[int, typer.Option(min=1, help="Newest complete steps to keep.")]) -> None:
    """Remove older steps. Safe beside a job that is writing.

    Example: windtunnel checkpoint prune s3://bucket/run --keep 3
    """
    from windtunnel.training.checkpoint.live.storage import prune as remove

    _steps(url)
    with _object_errors():
        removed = remove(url, keep)
    left = ", ".join(str(stored.step) for stored in _steps(url) if not stored.bad) or "none"
    typer.echo(f"removed {len(removed)} steps; kept {left}")


@group.command()
def export(
    url: Url,
    folder: Annotated[Path, typer.Argument(help="Target folder. It must not exist, or be empty.")],
    step: Annotated[
        int | None, typer.Option(min=0, help="Step to export. Default: the newest complete step.")
    ] = None,
) -> None:
    """Write a step as a checkpoint of torch.distributed.checkpoint.

    Example: windtunnel checkpoint export s3://bucket/run checkpoint/
    """
    from windtunnel.training.checkpoint.live.whole import export_stored

    complete = [stored.step for stored in _steps(url) if not stored.bad]
    if step is None:
        if not complete:
            raise UserError(f"{url}: no complete checkpoint is there")
        step = max(complete)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is not an empty folder; give one that is, or a new one")
    with _object_errors():
        names = export_stored(url, step, folder)
    typer.echo(f"step {step}: {len(names)} tensors in {folder}")


def _steps(url: str) -> list[StoredStep]:
    from windtunnel.training.checkpoint.live.storage import steps

    with _object_errors():
        stored = steps(url)
    if not stored:
        raise UserError(f"{url}: no checkpoints are there; give the storage that a job was given")
    return stored


@contextmanager
def _object_errors() -> Iterator[None]:
    """The failure of a store as bad input, in one sentence."""
    from windtunnel.store.objects import ObjectError

    try:
        yield
    except ObjectError as error:
        raise UserError(str(error)) from None
