"""``checkpoint``, ``restore``, ``rollback``, ``fork``, ``export``, ``import``, ``notice`` and ``gc``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from windtunnel.cli.sandbox.common import AsJson, Lazy, Name, box, client, local_url, print_json, size

if TYPE_CHECKING:
    from windtunnel.agents.sandbox.views import RestoreReport

Checkpoint = Annotated[
    str, typer.Argument(metavar="CHECKPOINT", help="An id, or the beginning of one; see `log`.")
]


def add_to(app: typer.Typer) -> None:
    for command in (checkpoint, restore, rollback, fork, export, notice, gc):
        app.command()(command)
    app.command("import")(import_)


def checkpoint(
    context: typer.Context,
    name: Name,
    label: Annotated[str, typer.Option(help="A name for it; a checkpoint with one is never dropped.")] = "",
    full: Annotated[bool, typer.Option("--full", help="Dump the processes in any case.")] = False,
    as_json: AsJson = False,
) -> None:
    """Keep the state of a sandbox as it is now."""
    made = box(context, name).checkpoint(label, full=full)
    if as_json:
        print_json(made)
        return
    frozen = f", frozen for {made.freeze_seconds * 1e3:.0f} ms" if made.freeze_seconds else ""
    typer.echo(f"{made.id}  {made.turn_class.word}{frozen}")
    typer.echo(f"  kept: {', '.join(made.covered)}")
    if made.not_covered:
        typer.echo(f"  not kept: {', '.join(made.not_covered)}")


def restore(
    context: typer.Context,
    name: Name,
    checkpoint: Annotated[
        str, typer.Argument(metavar="[CHECKPOINT]", help="By default the newest; see `log`.")
    ] = "",
    lazy: Lazy = False,
    as_json: AsJson = False,
) -> None:
    """Bring a checkpoint of a sandbox back. Whatever of it still runs is killed."""
    _told(box(context, name).restore(checkpoint, lazy=lazy), as_json)


def rollback(
    context: typer.Context, name: Name, checkpoint: Checkpoint, lazy: Lazy = False, as_json: AsJson = False
) -> None:
    """Go back to an earlier checkpoint. Later ones stay, as another branch of the tree."""
    _told(box(context, name).rollback(checkpoint, lazy=lazy), as_json)


def fork(
    context: typer.Context,
    source: Annotated[
        str, typer.Argument(metavar="CHECKPOINT|NAME", help="A checkpoint, or a sandbox: its state now.")
    ],
    count: Annotated[int, typer.Option(min=1, help="How many.")] = 1,
    name: Annotated[
        str, typer.Option(metavar="PREFIX", help="They are called PREFIX-1 and so on, or, if one, PREFIX.")
    ] = "",
    lazy: Lazy = False,
    as_json: AsJson = False,
) -> None:
    """Start sandboxes that go on from one checkpoint, each with an identity of its own."""
    names = None
    if name:
        names = [name] if count == 1 else [f"{name}-{number}" for number in range(1, count + 1)]
    with client(context) as daemon:
        made = daemon.fork(source, count, names=names, lazy=lazy)
        if as_json:
            print_json([one.info() for one in made])
            return
    for one in made:
        typer.echo(one.name)


def export(
    context: typer.Context,
    source: Annotated[
        str, typer.Argument(metavar="CHECKPOINT|NAME", help="A checkpoint, or a sandbox: its state now.")
    ],
    url: Annotated[
        str, typer.Argument(metavar="URL", help="A directory, or a URL such as s3://bucket/path.")
    ],
) -> None:
    """Write a checkpoint, complete in itself, so that another host can restore it."""
    with client(context) as daemon:
        made = daemon.export(source, local_url(url))
    typer.echo(f"exported {made.id} to {url}")


def import_(
    context: typer.Context,
    url: Annotated[str, typer.Argument(metavar="URL", help="Where `export` wrote it.")],
    name: Name,
) -> None:
    """Make a sandbox from an exported checkpoint, and start it."""
    from windtunnel.agents.sandbox.live.place import checked_name

    with client(context) as daemon:
        made = daemon.import_(local_url(url), checked_name(name))
    typer.echo(f"{made.name} runs")


def notice(
    context: typer.Context,
    seconds: Annotated[float, typer.Argument(min=0.001, help="How long the machine will still be there.")],
    as_json: AsJson = False,
) -> None:
    """The machine will be taken: checkpoint every sandbox that runs, cheapest first."""
    with client(context) as daemon:
        outcome = daemon.notice(seconds)
    if as_json:
        print_json(outcome)
        return
    for name, told in outcome.items():
        typer.echo(f"{name}: {told}")


def gc(
    context: typer.Context,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: AsJson = False,
) -> None:
    """Drop checkpoints that nothing needs, and whatever a crash left: mounts, cgroups, namespaces."""
    with client(context) as daemon:
        report = daemon.gc(dry_run=dry_run)
    if as_json:
        print_json(report)
        return
    would = "would drop" if dry_run else "dropped"
    for one in report.checkpoints:
        typer.echo(f"{would} checkpoint {one}")
    for left in report.leftovers:
        typer.echo(f"{would} {left}")
    if not dry_run:
        typer.echo(f"{size(report.bytes_freed)} freed")
    elif not (report.checkpoints or report.leftovers):
        typer.echo("nothing to drop")


def _told(report: RestoreReport, as_json: bool) -> None:
    if as_json:
        print_json(report)
        return
    typer.echo(f"{report.checkpoint} is back, turn {report.turn}, in {report.seconds * 1e3:.0f} ms")
    typer.echo(f"  back: {', '.join(report.restored)}")
    if report.lost:
        typer.echo(f"  not back: {', '.join(report.lost)}")
