"""What is done with checkpoints: `checkpoint` to `import`, `notice`, `gc`, `verify`, `log` and `diff`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from windtunnel.base.errors import UserError
from windtunnel.cli.sandbox.common import (
    AsJson,
    Name,
    box,
    client,
    lacking,
    less_as_json,
    local_url,
    moment,
    print_json,
    printable,
    show_table,
    size,
)

if TYPE_CHECKING:
    from windtunnel.agents.sandbox.model import Manifest, RestoreReport
    from windtunnel.agents.sandbox.protocol import Log

AllowLess = Annotated[
    bool, typer.Option("--allow-less", help="That something lacks is told, and no error (exit status 3).")
]
Checkpoint = Annotated[
    str, typer.Argument(metavar="CHECKPOINT", help="An id, or the beginning of one; see `log`.")
]

CHANGES = {"created": "+", "deleted": "-", "modified": "~", "renamed": ">"}


def checkpoint(
    context: typer.Context,
    name: Name,
    label: Annotated[str, typer.Option(help="A name for it; a checkpoint with one is never dropped.")] = "",
    full: Annotated[bool, typer.Option("--full", help="Dump the processes in any case.")] = False,
    allow_less: AllowLess = False,
    as_json: AsJson = False,
) -> None:
    """Keep the state of a sandbox as it is now. One that lacks something is kept too.

    Exit status 3: it lacks something. With --allow-less a reply that is held for it goes out.

    Example: windtunnel sandbox checkpoint demo --label before-upgrade
    """
    with less_as_json(as_json):
        manifest = box(context, name).checkpoint(label, full=full, allow_less=allow_less)
    if as_json:
        return print_json(manifest)
    frozen = f", frozen for {manifest.freeze_seconds * 1e3:.0f} ms" if manifest.freeze_seconds else ""
    typer.echo(f"{manifest.id}  {manifest.turn_class.word}{frozen}")
    typer.echo(f"  kept: {', '.join(manifest.kept)}")
    lacking(manifest.lacks)


def restore(
    context: typer.Context,
    name: Name,
    checkpoint: Annotated[
        str, typer.Argument(metavar="[CHECKPOINT]", help="By default the newest; see `log`.")
    ] = "",
    allow_less: AllowLess = False,
    as_json: AsJson = False,
) -> None:
    """Bring a checkpoint of a sandbox back. Whatever of it still runs is killed.

    Exit status 3: something would not come back. What runs is left alone where that is known beforehand;
    where it turned out, the sandbox is stopped.

    Example: windtunnel sandbox restore demo
    """
    with less_as_json(as_json):
        report = box(context, name).restore(checkpoint, allow_less=allow_less)
    _report(report, as_json)


def rollback(
    context: typer.Context,
    name: Name,
    checkpoint: Checkpoint,
    allow_less: AllowLess = False,
    as_json: AsJson = False,
) -> None:
    """Go back to an earlier checkpoint. Later ones stay, as another branch of the tree.

    Exit status 3: as of `restore`.

    Example: windtunnel sandbox rollback demo CHECKPOINT
    """
    with less_as_json(as_json):
        report = box(context, name).rollback(checkpoint, allow_less=allow_less)
    _report(report, as_json)


def fork(
    context: typer.Context,
    source: Annotated[
        str, typer.Argument(metavar="CHECKPOINT|NAME", help="A checkpoint, or a sandbox: its state now.")
    ],
    count: Annotated[int, typer.Option(min=1, help="How many.")] = 1,
    name: Annotated[
        str, typer.Option(metavar="PREFIX", help="They are called PREFIX-1 and so on, or, if one, PREFIX.")
    ] = "",
    allow_less: AllowLess = False,
    as_json: AsJson = False,
) -> None:
    """Start sandboxes that go on from one checkpoint, each with an identity of its own.

    Exit status 3: something would lack; none is started then.

    Example: windtunnel sandbox fork demo --count 4
    """
    names = None
    if name:
        names = [name] if count == 1 else [f"{name}-{number}" for number in range(1, count + 1)]
    with client(context) as daemon, less_as_json(as_json):
        forks = daemon.fork(source, count, names=names, allow_less=allow_less)
        infos = [fork.info() for fork in forks]
    if as_json:
        return print_json(infos)
    for info in infos:
        typer.echo(info.name)
        lacking(info.lacks)


def export(
    context: typer.Context,
    source: Annotated[
        str, typer.Argument(metavar="CHECKPOINT|NAME", help="A checkpoint, or a sandbox: its state now.")
    ],
    url: Annotated[
        str, typer.Argument(metavar="URL", help="A directory, or a URL such as s3://bucket/path.")
    ],
    allow_less: AllowLess = False,
) -> None:
    """Write a checkpoint, complete in itself, so that another host can restore it.

    Exit status 3: the sandbox's state now cannot be kept whole; nothing is written then.

    Example: windtunnel sandbox export demo s3://bucket/demo
    """
    with client(context) as daemon:
        manifest = daemon.export(source, local_url(url), allow_less=allow_less)
    typer.echo(f"exported {manifest.id} to {url}")
    lacking(manifest.lacks)


def import_(
    context: typer.Context,
    url: Annotated[str, typer.Argument(metavar="URL", help="Where `export` wrote it.")],
    name: Name,
    key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Holds the key of its model API, as for 'create'."),
    ] = None,
    allow_less: AllowLess = False,
    as_json: AsJson = False,
) -> None:
    """Make a sandbox from an exported checkpoint, and start it.

    Exit status 3: something would not come back; no sandbox is made then.

    Example: windtunnel sandbox import s3://bucket/demo demo-2
    """
    with client(context) as daemon, less_as_json(as_json):
        key = "" if key_file is None else str(key_file.absolute())
        sandbox = daemon.import_(local_url(url), name, key_file=key, allow_less=allow_less)
        info = sandbox.info()
    if as_json:
        return print_json(info)
    typer.echo(f"{info.name} runs")
    lacking(info.lacks)


def notice(
    context: typer.Context,
    seconds: Annotated[float, typer.Argument(min=0.001, help="How long the machine will still be there.")],
    allow_less: AllowLess = False,
    as_json: AsJson = False,
) -> None:
    """The machine will be taken: checkpoint every sandbox that runs, cheapest first.

    Exit status 3: not all of every sandbox is kept.

    Example: windtunnel sandbox notice 120
    """
    from windtunnel.agents.sandbox.errors import LessError

    with client(context) as daemon:
        outcome = daemon.notice(seconds)
    if as_json:
        print_json(outcome)
    else:
        for name, saved in outcome.items():
            typer.echo(f"{name}: {saved.fault or saved.checkpoint}")
            lacking(saved.lacks)
            if saved.fault or saved.whole:
                typer.echo(f"  whole: {saved.whole or saved.checkpoint}")
    less = [name for name, saved in outcome.items() if saved.fault or saved.less]
    if less and not allow_less:
        raise LessError(f"notice: not all is kept of {', '.join(less)}; --allow-less takes it as it is")


def gc(
    context: typer.Context,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would go.")] = False,
    as_json: AsJson = False,
) -> None:
    """Drop checkpoints that nothing needs, and whatever a crash left: mounts, cgroups, namespaces.

    Example: windtunnel sandbox gc --dry-run
    """
    with client(context) as daemon:
        report = daemon.gc(dry_run=dry_run)
    if as_json:
        return print_json(report)
    would = "would drop" if dry_run else "dropped"
    for identity in report.checkpoints:
        typer.echo(f"{would} checkpoint {identity}")
    for left in report.leftovers:
        typer.echo(f"{would} {left}")
    if not dry_run:
        typer.echo(f"{size(report.bytes_freed)} freed")
    elif not (report.checkpoints or report.leftovers):
        typer.echo("nothing to drop")


def verify(
    context: typer.Context,
    source: Annotated[
        str, typer.Argument(metavar="[CHECKPOINT|NAME]", help="A checkpoint, or all of a sandbox.")
    ] = "",
    everything: Annotated[bool, typer.Option("--all", help="All checkpoints, as without a name.")] = False,
    as_json: AsJson = False,
) -> None:
    """Read checkpoints from the disk and check every byte. Exit status 3 when one is damaged.

    Example: windtunnel sandbox verify demo
    """
    if everything and source:
        raise UserError(f"sandbox verify: --all and {source!r} do not go together")
    with client(context) as daemon:
        report = daemon.verify(source)
    if as_json:
        print_json(report)
    else:
        for damage in report.damaged:
            of = f"of {damage.box}, turn {damage.turn}" if damage.box else "whose manifest cannot be read"
            typer.echo(f"{damage.checkpoint} {of}: DAMAGED: {'; '.join(damage.what)}")
            typer.echo(f"  whole before it: {damage.instead or 'none'}")
        typer.echo(
            f"{len(report.checkpoints)} checkpoints read, {len(report.damaged)} damaged; "
            f"{size(report.bytes_read)} in {report.seconds:.1f} s; files: {report.files}"
        )
    if report.damaged:
        raise typer.Exit(3)


def _report(report: RestoreReport, as_json: bool) -> None:
    if as_json:
        return print_json(report)
    typer.echo(f"{report.checkpoint} is back, turn {report.turn}, in {report.seconds * 1e3:.0f} ms")
    typer.echo(f"  back: {', '.join(report.restored)}")
    lacking(report.lacks)


def log(
    context: typer.Context,
    name: Name,
    turns: Annotated[
        bool, typer.Option("--turns", help="List the turns, also those that needed none.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the tree of checkpoints of a sandbox and of what it was forked from.

    Example: windtunnel sandbox log demo --turns
    """
    with client(context) as daemon:
        past = daemon.get(name).log()
        tips = {info.name: info.tip for info in daemon.boxes()}
    if as_json:
        print_json(past)
    elif turns:
        _show_turns(past)
    elif not past.checkpoints:
        typer.echo(f"sandbox {name} has no checkpoint yet")
    else:
        typer.echo("\n".join(tree(name, past, tips)))


def diff(
    context: typer.Context,
    name: Name,
    older: Annotated[str, typer.Argument(metavar="A", help="A checkpoint.")],
    newer: Annotated[
        str, typer.Argument(metavar="[B]", help="A later one; by default the state as it is now.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Show the files and processes that differ between two checkpoints.

    Example: windtunnel sandbox diff demo CHECKPOINT
    """
    changes = box(context, name).diff(older, newer)
    if as_json:
        return print_json(changes)
    for change in changes.files:
        added = f"  {size(change.size)}" if change.size else ""
        typer.echo(f"{CHANGES.get(change.change, 'm')} {printable(change.path)}{added}")
    for command in changes.started:
        typer.echo(f"started {printable(command)}")
    for command in changes.ended:
        typer.echo(f"ended {printable(command)}")
    if not (changes.files or changes.started or changes.ended):
        typer.echo("no difference")


def tree(name: str, past: Log, newest: Mapping[str, str]) -> list[str]:
    """The checkpoints as a tree, one a line; a chain without branches stays on one level, so that it can be
    read. ``newest``: the newest checkpoint of every sandbox of the host."""
    known = {point.id for point in past.checkpoints}
    children: dict[str, list[tuple[str, str]]] = {}
    for point in past.checkpoints:
        parent = point.parent if point.parent is not None and point.parent in known else ""
        tips = [owner for owner, tip in newest.items() if tip == point.id]
        children.setdefault(parent, []).append((point.id, _label(name, point, tips)))
    return [name, *_below(children, "", 1)]


def _below(children: Mapping[str, list[tuple[str, str]]], parent: str, depth: int) -> Iterator[str]:
    """The lines of all that comes after the checkpoint ``parent``."""
    branches = children.get(parent, [])
    while len(branches) == 1:
        ((parent, label),) = branches
        yield "  " * depth + label
        branches = children.get(parent, [])
        if len(branches) > 1:
            depth += 1
    for parent, label in branches:
        yield "  " * depth + label
        yield from _below(children, parent, depth + 1)


def _label(name: str, point: Manifest, tips: list[str]) -> str:
    parts = [part for part in (point.files, point.image) if part is not None and part.id == point.id]
    added = size(sum(part.bytes_new for part in parts))
    others = [tip for tip in tips if tip != name]
    notes = (
        (point.lacks, f"{point.wanted.word} was wanted, {len(point.lacks)} lacking"),
        (point.box != name, f"of {point.box}"),
        (point.label, printable(point.label)), (point.pinned, "pinned"), (name in tips, "← tip"),
        (others, f"← tip of {', '.join(others)}"),
    )  # fmt: skip
    first = (point.id, f"turn {point.turn}", point.turn_class.word, added, moment(point.created))
    return "  ".join((*first, *(text for applies, text in notes if applies)))


def _show_turns(past: Log) -> None:
    head = ("turn", "kept", "wanted", "checkpoint", "added", "took", "why")
    rows = [
        (
            str(turn.number), turn.turn_class.word, turn.wanted.word, turn.checkpoint or "–",
            size(turn.bytes_new), f"{turn.seconds * 1e3:,.0f} ms",
            "; ".join((*(f"lacks {lack}" for lack in turn.lacks), *turn.reasons)),
        )
        for turn in past.turns
    ]  # fmt: skip
    show_table(head, rows, right=("turn", "added", "took"))
