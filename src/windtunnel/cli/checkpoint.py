"""``windtunnel checkpoint``: look after the checkpoints that a job wrote to storage."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from windtunnel.base.errors import ScriptError, UserError
from windtunnel.cli import Group

if TYPE_CHECKING:
    from windtunnel.training.checkpoint.model import StoredStep

group = typer.Typer(cls=Group, no_args_is_help=True, help="Look after the checkpoints of a job in storage.")

Url = Annotated[
    str, typer.Argument(metavar="URL", help="A folder, or a URL of fsspec such as s3://bucket/run.")
]


def register(app: typer.Typer) -> None:
    """Add the verb to ``app``."""
    app.add_typer(group, name="checkpoint")


@group.command("list")
def list_steps(
    url: Url, as_json: Annotated[bool, typer.Option("--json", help="Print one JSON value.")] = False
) -> None:
    """Say which steps are there, and of those that cannot be restored why.

    Example: windtunnel checkpoint list s3://bucket/run
    """
    from rich.console import Console
    from rich.table import Table

    from windtunnel.base.units import amount

    found = _there(url)
    if as_json:
        rows = [
            {
                "step": one.step,
                "generation": one.generation,
                "world": one.shards[0].world if one.shards else 0,
                "bytes": sum(shard.nbytes for shard in one.shards),
                "bad": one.bad,
            }
            for one in found
        ]
        typer.echo(json.dumps(rows))
        return
    table = Table("step", "generation", "ranks", "bytes", "")
    for one in found:
        size = amount(sum(shard.nbytes for shard in one.shards)) if not one.bad else ""
        world = str(one.shards[0].world) if not one.bad else ""
        table.add_row(str(one.step), str(one.generation), world, size, one.bad or "complete")
    Console().print(table)


@group.command()
def verify(
    url: Url,
    step: Annotated[int | None, typer.Option(min=0, help="Only this one.")] = None,
) -> None:
    """Read all shards of all complete steps and hold them against their checksums.

    Exit status 1 if any is missing or damaged.

    Example: windtunnel checkpoint verify s3://bucket/run
    """
    from windtunnel.store.objects import ObjectError
    from windtunnel.training.checkpoint.live.storage import read_shard

    found = [one for one in _there(url) if not one.bad and step in (None, one.step)]
    if not found:
        which = "complete checkpoint" if step is None else f"complete step {step}"
        raise UserError(f"{url}: no {which} is there to verify")
    failed = []
    for one in found:
        for shard in one.shards:
            try:
                read_shard(url, shard)
            except ObjectError as error:
                failed.append(f"step {one.step}, generation {one.generation}: {error}")
        typer.echo(f"step {one.step}, generation {one.generation}: {len(one.shards)} shards read")
    if failed:
        raise ScriptError(f"{url}: not all is whole", "\n".join(failed))


@group.command()
def prune(
    url: Url, keep: Annotated[int, typer.Option(min=1, help="How many complete steps stay, the newest.")]
) -> None:
    """Remove older steps. Safe beside a job that is writing.

    Example: windtunnel checkpoint prune s3://bucket/run --keep 3
    """
    from windtunnel.training.checkpoint.live.storage import prune as remove

    _there(url)
    with _told():
        gone = remove(url, keep)
        kept = ", ".join(str(one.step) for one in _there(url) if not one.bad) or "none"
    typer.echo(f"removed {len(gone)} steps; kept {kept}")


@group.command()
def export(
    url: Url,
    folder: Annotated[Path, typer.Argument(help="Where to: must not exist or be empty.")],
    step: Annotated[int | None, typer.Option(min=0, help="The newest complete one if not given.")] = None,
) -> None:
    """Write a step as a checkpoint of torch.distributed.checkpoint.

    Example: windtunnel checkpoint export s3://bucket/run checkpoint/
    """
    from windtunnel.training.checkpoint.live.dcp import export_stored

    whole = [one.step for one in _there(url) if not one.bad]
    if step is None:
        if not whole:
            raise UserError(f"{url}: no complete checkpoint is there")
        step = max(whole)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} is not an empty folder; give one that is, or a new one")
    with _told():
        names = export_stored(url, step, folder)
    typer.echo(f"step {step}: {len(names)} tensors in {folder}")


@group.command("import")
def import_step(
    folder: Annotated[Path, typer.Argument(help="A checkpoint of torch.distributed.checkpoint.")],
    url: Url,
    step: Annotated[int, typer.Option(min=0, help="As which step it is stored.")],
) -> None:
    """Put a checkpoint of torch.distributed.checkpoint into storage, where a job of any size restores it.

    Example: windtunnel checkpoint import checkpoint/ s3://bucket/run
    """
    from windtunnel.training.checkpoint.live.dcp import import_stored

    with _told():
        names = import_stored(folder, url, step)
    typer.echo(f"step {step}: {len(names)} tensors in {url}")


def _there(url: str) -> list[StoredStep]:
    from windtunnel.training.checkpoint.live.storage import steps

    with _told():
        found = steps(url)
    if not found:
        raise UserError(f"{url}: no checkpoints are there; accepted is what a job was given as its storage")
    return found


@contextmanager
def _told() -> Iterator[None]:
    """A store that fails is told in one sentence."""
    from windtunnel.store.objects import ObjectError

    try:
        yield
    except ObjectError as error:
        raise UserError(str(error)) from None
