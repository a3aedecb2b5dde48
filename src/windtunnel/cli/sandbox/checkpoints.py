"""What is done with checkpoints: `checkpoint` to `import`, `notice`, `gc`, `verify`, `log` and `diff`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from windtunnel.base.errors import UserError
from windtunnel.cli.sandbox.common import (
    AllowLess,
    AsJson,
    Name,
    box,
    client,
    escape,
    lacking,
    less_as_json,
    local_url,
    moment,
    print_json,
    show,
    size,
    table,
)

if TYPE_CHECKING:
    from rich.tree import Tree

    from windtunnel.agents.sandbox.model import Manifest, RestoreReport
    from windtunnel.agents.sandbox.protocol import Log

Checkpoint = Annotated[
    str, typer.Argument(metavar="CHECKPOINT", help="An id, or the beginning of one; see `log`.")
]

CLASSES = {"none": "dim", "shell": "cyan", "files": "blue", "full": "magenta"}
CHANGES = {
    "created": "[green]+[/]",
    "deleted": "[red]-[/]",
    "modified": "[yellow]~[/]",
    "renamed": "[yellow]>[/]",
}


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
        made = box(context, name).checkpoint(label, full=full, allow_less=allow_less)
    if as_json:
        return print_json(made)
    frozen = f", frozen for {made.freeze_seconds * 1e3:.0f} ms" if made.freeze_seconds else ""
    typer.echo(f"{made.id}  {made.turn_class.word}{frozen}")
    typer.echo(f"  kept: {', '.join(made.kept)}")
    lacking(made.lacks)


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
    _told(report, as_json)


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
    _told(report, as_json)


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
        made = daemon.fork(source, count, names=names, allow_less=allow_less)
        found = [one.info() for one in made]
    if as_json:
        return print_json(found)
    for info in found:
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
        made = daemon.export(source, local_url(url), allow_less=allow_less)
    typer.echo(f"exported {made.id} to {url}")
    lacking(made.lacks)


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
        made = daemon.import_(local_url(url), name, key_file=key, allow_less=allow_less)
        info = made.info()
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
    for one in report.checkpoints:
        typer.echo(f"{would} checkpoint {one}")
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
        for one in report.damaged:
            of = f"of {one.box}, turn {one.turn}" if one.box else "whose manifest cannot be read"
            typer.echo(f"{one.checkpoint} {of}: DAMAGED: {'; '.join(one.what)}")
            typer.echo(f"  whole before it: {one.instead or 'none'}")
        typer.echo(
            f"{len(report.checkpoints)} checkpoints read, {len(report.damaged)} damaged; "
            f"{size(report.bytes_read)} in {report.seconds:.1f} s; files: {report.files}"
        )
    if report.damaged:
        raise typer.Exit(3)


def _told(report: RestoreReport, as_json: bool) -> None:
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
        found = daemon.get(name).log()
        tips = {one.name: one.tip for one in daemon.boxes()}
    if as_json:
        print_json(found)
    elif turns:
        _show_turns(found)
    elif not found.checkpoints:
        typer.echo(f"sandbox {name} has no checkpoint yet")
    else:
        show(tree(name, found, tips))


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
    found = box(context, name).diff(older, newer)
    if as_json:
        return print_json(found)
    for change in found.files:
        mark = CHANGES.get(change.change, "[dim]m[/]")
        show(f"{mark} {escape(change.path)}" + (f"  [dim]{size(change.size)}[/]" if change.size else ""))
    for command in found.started:
        show(f"[green]started[/] {escape(command)}")
    for command in found.ended:
        show(f"[red]ended[/] {escape(command)}")
    if not (found.files or found.started or found.ended):
        typer.echo("no difference")


def tree(name: str, found: Log, newest: Mapping[str, str]) -> Tree:
    """The checkpoints as a tree; a chain without branches stays on one level, so that it can be read.
    ``newest``: the newest checkpoint of every sandbox of the host."""
    from rich.tree import Tree

    known = {one.id for one in found.checkpoints}
    children: dict[str, list[Manifest]] = {}
    for one in found.checkpoints:
        parent = one.parent if one.parent is not None and one.parent in known else ""
        children.setdefault(parent, []).append(one)
    tips: dict[str, list[str]] = {}
    for owner, tip in newest.items():
        tips.setdefault(tip, []).append(owner)
    root = Tree(f"[bold]{escape(name)}[/]", guide_style="dim")

    def add(node: Tree, parent: str) -> None:
        """Below ``node``, all that comes after the checkpoint ``parent``."""
        while len(only := children.get(parent, [])) == 1:
            last = node.add(_label(name, only[0], tips.get(only[0].id, [])))
            parent = only[0].id
            if len(children.get(parent, [])) > 1:
                node = last
        for branch in only:
            add(node.add(_label(name, branch, tips.get(branch.id, []))), branch.id)

    add(root, "")
    return root


def _label(name: str, one: Manifest, tips: list[str]) -> str:
    word = one.turn_class.word
    added = sum(part.bytes_new for part in (one.files, one.image) if part is not None and part.id == one.id)
    text = f"{one.id}  turn {one.turn}  [{CLASSES[word]}]{word}[/]  {size(added)}  {moment(one.created)}"
    if one.lacks:
        text += f"  [red]{one.wanted.word} was wanted, {len(one.lacks)} lacking[/]"
    if one.box != name:
        text += f"  [dim]of {escape(one.box)}[/]"
    if one.label:
        text += f"  [bold]{escape(one.label)}[/]"
    if one.pinned:
        text += "  [yellow]pinned[/]"
    if name in tips:
        text += "  [green]← tip[/]"
    others = [tip for tip in tips if tip != name]
    if others:
        text += f"  [green]← tip of {escape(', '.join(others))}[/]"
    return text


def _show_turns(found: Log) -> None:
    columns = ("turn", "kept", "wanted", "checkpoint", "added", "took", "why")
    shown = table(*columns, right=("turn", "added", "took"))
    for one in found.turns:
        kept, wanted = one.turn_class.word, one.wanted.word
        lacks = [f"lacks {lack}" for lack in one.lacks]
        shown.add_row(
            str(one.number),
            f"[{CLASSES[kept]}]{kept}[/]",
            f"[{'red' if lacks else CLASSES[wanted]}]{wanted}[/]",
            one.checkpoint or "–",
            size(one.bytes_new),
            f"{one.seconds * 1e3:,.0f} ms",
            escape("; ".join((*lacks, *one.reasons))),
        )
    show(shown)
