"""``log`` and ``diff``: the tree of checkpoints, and what differs between two of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape
from rich.tree import Tree

from windtunnel.cli.sandbox.common import AsJson, Name, box, moment, print_json, show, size, table

if TYPE_CHECKING:
    from windtunnel.agents.sandbox.client.wire import Log
    from windtunnel.agents.sandbox.model import Manifest

CLASSES = {"none": "dim", "shell": "cyan", "files": "blue", "full": "magenta"}
CHANGES = {
    "created": "[green]+[/]",
    "deleted": "[red]-[/]",
    "modified": "[yellow]~[/]",
    "renamed": "[yellow]>[/]",
}


def add_to(app: typer.Typer) -> None:
    app.command()(log)
    app.command()(diff)


def log(
    context: typer.Context,
    name: Name,
    turns: Annotated[
        bool, typer.Option("--turns", help="List the turns, also those that needed none.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show the tree of checkpoints of a sandbox and of what it was forked from."""
    found = box(context, name).log()
    if as_json:
        print_json(found)
    elif turns:
        _show_turns(found)
    elif not found.checkpoints:
        typer.echo(f"sandbox {name} has no checkpoint yet")
    else:
        show(tree(name, found))


def diff(
    context: typer.Context,
    name: Name,
    older: Annotated[str, typer.Argument(metavar="A", help="A checkpoint.")],
    newer: Annotated[
        str, typer.Argument(metavar="[B]", help="A later one; by default the state as it is now.")
    ] = "",
    as_json: AsJson = False,
) -> None:
    """Show the files and processes that differ between two checkpoints."""
    found = box(context, name).diff(older, newer)
    if as_json:
        print_json(found)
        return
    for change in found.files:
        mark = CHANGES.get(change.change, "[dim]m[/]")
        show(f"{mark} {escape(change.path)}" + (f"  [dim]{size(change.size)}[/]" if change.size else ""))
    for command in found.started:
        show(f"[green]started[/] {escape(command)}")
    for command in found.ended:
        show(f"[red]ended[/] {escape(command)}")
    if not (found.files or found.started or found.ended):
        typer.echo("no difference")


def tree(name: str, found: Log) -> Tree:
    """The checkpoints as a tree; a chain without branches stays on one level, so that it can be read."""
    known = {one.id for one in found.checkpoints}
    children: dict[str, list[Manifest]] = {}
    for one in found.checkpoints:
        parent = one.parent if one.parent is not None and one.parent in known else ""
        children.setdefault(parent, []).append(one)
    tips: dict[str, list[str]] = {}
    for owner, tip in found.tips.items():
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
    shown = table("turn", "class", "checkpoint", "added", "took", "why", right=("turn", "added", "took"))
    for one in found.turns:
        word = one.turn_class.word
        shown.add_row(
            str(one.number),
            f"[{CLASSES[word]}]{word}[/]",
            one.checkpoint or "–",
            size(one.bytes_new),
            f"{one.seconds * 1e3:,.0f} ms",
            escape("; ".join(one.reasons)),
        )
    show(shown)
