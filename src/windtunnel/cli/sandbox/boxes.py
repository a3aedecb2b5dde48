"""Sandboxes, the files in them, and what is done with their checkpoints: `create` to `port`, `checkpoint` to
`diff`."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from windtunnel.agents.sandbox.model import (
    BoxInfo,
    CheckpointManifest,
    Diff,
    GcReport,
    Lack,
    RestoreReport,
    SandboxLimits,
    SandboxSpec,
    Saved,
)
from windtunnel.agents.sandbox.protocol import AnyHost, AnySandbox, SandboxHistory
from windtunnel.cli.common import Json, print_columns
from windtunnel.cli.options import takes
from windtunnel.cli.sandbox import (
    SOURCE,
    Name,
    TakesLess,
    box,
    calls,
    client,
    file_errors,
    moment,
    print_json,
    printable,
    size,
)

Inside = Annotated[str, typer.Argument(metavar="PATH", help="An absolute path inside the sandbox.")]
Names = Annotated[list[str], typer.Argument(metavar="NAME...", help="The sandboxes.")]
NewName = Annotated[str, typer.Argument(metavar="NAME", help="Lower-case letters, digits, '.', '_', '-'.")]


@takes(SandboxSpec, "spec")
@takes(SandboxLimits, "limits")
def create(
    context: typer.Context, name: NewName, spec: SandboxSpec, limits: SandboxLimits, as_json: Json = False
) -> None:
    """Make a sandbox and start it.

    Example: windtunnel sandbox create demo --memory 2G --network off
    """
    key_file = spec.proxy_key_file and os.path.abspath(spec.proxy_key_file)
    spec = replace(spec, image=_image(spec.image), limits=limits, proxy_key_file=key_file)
    with client(context) as daemon:
        info = daemon.create(spec).info()
    if as_json:
        return print_json(info)
    typer.echo(f"{name} runs; 'windtunnel sandbox exec {name} -- COMMAND' or 'shell {name}'")


@calls(AnyHost.boxes)
def list_all(sandboxes: list[BoxInfo]) -> None:
    """List the sandboxes; with --json also their processes.

    Example: windtunnel sandbox ls
    """
    if not sandboxes:
        return typer.echo("No sandboxes yet: start with `windtunnel sandbox create NAME`.")
    head = ("name", "status", "turns", "newest checkpoint", "image", "network", "created")
    rows = [
        (
            info.name, info.status, str(info.turns), info.tip or "–", info.image, info.network,
            moment(info.created),
        )
        for info in sandboxes
    ]  # fmt: skip
    print_columns(head, rows, right=("turns",))


def stop(context: typer.Context, names: Names) -> None:
    """Kill the processes of sandboxes. Files and checkpoints stay; `restore` brings them back.

    Example: windtunnel sandbox stop demo
    """
    with client(context) as daemon:
        # All are looked up before the first is stopped, so that a wrong name stops nothing.
        for sandbox in [daemon.get(name) for name in names]:
            sandbox.stop()
            typer.echo(f"stopped {sandbox.name}")


def remove(
    context: typer.Context,
    names: Names,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
) -> None:
    """Kill sandboxes and forget them, with all checkpoints that no other sandbox rests on.

    Example: windtunnel sandbox rm --yes demo
    """
    with client(context) as daemon:
        chosen = [daemon.get(name).name for name in names]
        if not yes:
            plural = "sandbox" if len(chosen) == 1 else "sandboxes"
            typer.confirm(f"Remove {plural} {', '.join(chosen)} with files and checkpoints?", abort=True)
        for name in chosen:
            daemon.remove(name)
            typer.echo(f"removed {name}")


def put(
    context: typer.Context,
    name: Name,
    source: Annotated[
        str, typer.Argument(metavar="FILE", help="A file or folder of this machine; '-': standard input.")
    ],
    path: Inside,
) -> None:
    """Write a file, or a folder with all that it holds, into a sandbox, with its mode. A PATH that ends with
    '/' is a folder for it.

    Example: windtunnel sandbox put demo notes.txt /workspace/
    """
    from windtunnel.agents.sandbox.client import put_path

    sandbox = box(context, name)
    if source == "-":
        return sandbox.put(path, sys.stdin.buffer)
    file = Path(os.path.expanduser(source))
    if path.endswith("/"):
        path += file.name
    with file_errors(f"sandbox put: {file}"):
        put_path(sandbox, file, path)


def get(
    context: typer.Context,
    name: Name,
    path: Inside,
    target: Annotated[
        str, typer.Argument(metavar="FILE", help="A file or folder of this machine; '-': standard output.")
    ] = "-",
) -> None:
    """Read a file of a sandbox, or a folder with all that it holds.

    Example: windtunnel sandbox get demo /workspace/notes.txt notes.txt
    """
    from windtunnel.agents.sandbox.client import get_path

    sandbox = box(context, name)
    if target == "-":
        sandbox.get_to(path, sys.stdout.buffer)
        sys.stdout.buffer.flush()
        return
    into = Path(os.path.expanduser(target))
    if os.path.isdir(into):
        into /= Path(path).name
    with file_errors(f"sandbox get: {into}"):
        get_path(sandbox, path, into)


@calls(AnySandbox.port)
def port(url: str) -> None:
    """Print the URL of this host that leads to a port of a sandbox. A restore leaves it as it is.

    Example: windtunnel sandbox port demo 8000
    """
    typer.echo(url)


def _image(text: str) -> str:
    """A path of this machine is made absolute, since the daemon has another directory; a name stays one."""
    if not text or text == "host" or text.startswith(("host+", "docker://")):
        return text
    path = os.path.expanduser(text)
    return os.path.abspath(path) if "/" in text or os.path.exists(path) else text


CHANGES = {"created": "+", "deleted": "-", "modified": "~", "renamed": ">"}


@calls(AnySandbox.checkpoint)
def checkpoint(manifest: CheckpointManifest) -> None:
    """Save the current state of a sandbox. An incomplete checkpoint is saved too.

    Exit status 3: it lacks something. With --allow-less a reply that is held for it goes out.

    Example: windtunnel sandbox checkpoint demo --label before-upgrade
    """
    frozen = f", frozen for {manifest.freeze_seconds * 1e3:.0f} ms" if manifest.freeze_seconds else ""
    typer.echo(f"{manifest.id}  {manifest.turn_class.word}{frozen}")
    typer.echo(f"  kept: {', '.join(manifest.restorable)}")
    _print_lacks(manifest.lacks)


NEWEST = typer.Argument(metavar="CHECKPOINT", help="A checkpoint. Default: the newest; see `log`.")


@calls(AnySandbox.restore, checkpoint=NEWEST)
def restore(report: RestoreReport) -> None:
    """Restore a checkpoint of a sandbox. Its running processes are killed.

    Exit status 3: something would not come back. What runs is left alone where that is known beforehand;
    where it turned out, the sandbox is stopped.

    Example: windtunnel sandbox restore demo
    """
    _print_report(report)


@calls(AnySandbox.rollback)
def rollback(report: RestoreReport) -> None:
    """Return to an earlier checkpoint. Later ones stay, as another branch of the tree.

    Exit status 3: as of `restore`.

    Example: windtunnel sandbox rollback demo CHECKPOINT
    """
    _print_report(report)


def _print_report(report: RestoreReport) -> None:
    typer.echo(f"{report.checkpoint} is back, turn {report.turn}, in {report.seconds * 1e3:.0f} ms")
    typer.echo(f"  back: {', '.join(report.restored)}")
    _print_lacks(report.lacks)


PREFIX = typer.Option(
    metavar="PREFIX", help="PREFIX of the names PREFIX-1, PREFIX-2, ...; a single fork is PREFIX."
)


@calls(AnyHost.fork, checkpoint=SOURCE, name=PREFIX)
def fork(infos: list[BoxInfo]) -> None:
    """Start new sandboxes from one checkpoint, each with its own identity.

    Exit status 3: something would lack; none is started then.

    Example: windtunnel sandbox fork demo --count 4
    """
    for info in infos:
        typer.echo(info.name)
        _print_lacks(info.lacks)


@calls(AnyHost.export, checkpoint=SOURCE)
def export(manifest: CheckpointManifest, url: str) -> None:
    """Write a checkpoint, complete in itself, so that another host can restore it.

    Exit status 3: the sandbox's state now cannot be kept whole; nothing is written then.

    Example: windtunnel sandbox export demo s3://bucket/demo
    """
    typer.echo(f"exported {manifest.id} to {url}")
    _print_lacks(manifest.lacks)


@calls(AnyHost.import_)
def import_(info: BoxInfo) -> None:
    """Make a sandbox from an exported checkpoint, and start it.

    Exit status 3: something would not come back; no sandbox is made then.

    Example: windtunnel sandbox import s3://bucket/demo demo-2
    """
    typer.echo(f"{info.name} runs")
    _print_lacks(info.lacks)


@calls(AnyHost.notice)
def notice(outcome: dict[str, Saved], as_json: bool, takes_less: TakesLess = False) -> None:
    """Checkpoint all running sandboxes before the machine is taken, cheapest first.

    Exit status 3: not all of every sandbox is kept.

    Example: windtunnel sandbox notice 120
    """
    from windtunnel.agents.sandbox.errors import IncompleteError

    if as_json:
        print_json(outcome)
    for name, saved in outcome.items() if not as_json else ():
        typer.echo(f"{name}: {saved.fault or saved.checkpoint}")
        _print_lacks(saved.lacks)
        if saved.fault or saved.whole:
            typer.echo(f"  whole: {saved.whole or saved.checkpoint}")
    less = [name for name, saved in outcome.items() if saved.fault or saved.less]
    if less and not takes_less:
        raise IncompleteError(
            f"sandbox notice: not all of {', '.join(less)} is kept; --allow-less accepts the checkpoints as "
            "they are"
        )


@calls(AnyHost.gc)
def gc(report: GcReport, dry_run: bool) -> None:
    """Remove unneeded checkpoints, and a crash's leftovers: mounts, cgroups, namespaces.

    Example: windtunnel sandbox gc --dry-run
    """
    would = "would drop" if dry_run else "dropped"
    for identity in report.checkpoints:
        typer.echo(f"{would} checkpoint {identity}")
    for left in report.leftovers:
        typer.echo(f"{would} {left}")
    if not dry_run:
        typer.echo(f"{size(report.bytes_freed)} freed")
    elif not (report.checkpoints or report.leftovers):
        typer.echo("nothing to drop")


@calls(AnySandbox.diff)
def diff(changes: Diff) -> None:
    """Show the files and processes that differ between two checkpoints.

    Example: windtunnel sandbox diff demo CHECKPOINT
    """
    for change in changes.files:
        added = f"  {size(change.size)}" if change.size else ""
        typer.echo(f"{CHANGES.get(change.change, 'm')} {printable(change.path)}{added}")
    for word, commands in (("started", changes.started), ("ended", changes.ended)):
        for command in commands:
            typer.echo(f"{word} {printable(command)}")
    if not (changes.files or changes.started or changes.ended):
        typer.echo("no difference")


def _print_lacks(lacks: tuple[Lack, ...]) -> None:
    for lack in lacks:
        typer.echo(f"  lacks {lack}")


Turns = Annotated[bool, typer.Option("--turns", help="List all turns, with or without a checkpoint.")]


@calls(AnySandbox.log)
def log(history: SandboxHistory, name: str, context: typer.Context, turns: Turns = False) -> None:
    """Show the checkpoints of a sandbox and of what it was forked from, with the parent of each.

    Example: windtunnel sandbox log demo --turns
    """
    if turns:
        return _print_turns(history)
    if not history.checkpoints:
        return typer.echo(f"sandbox {name} has no checkpoint yet")
    with client(context) as daemon:
        tips = {info.name: info.tip for info in daemon.boxes()}
    rows = []
    for point in history.checkpoints:
        parts = [part for part in (point.files, point.image) if part is not None and part.id == point.id]
        notes = (
            (point.lacks, f"{point.required.word} required, {len(point.lacks)} lacking"),
            (point.box != name, f"of {point.box}"),
            (point.label, printable(point.label)), (point.pinned, "pinned"),
            *((tip == point.id, f"tip of {owner}") for owner, tip in tips.items()),
        )  # fmt: skip
        rows.append(
            (
                point.id, point.parent or "–", str(point.turn), point.turn_class.word,
                size(sum(part.bytes_new for part in parts)), moment(point.created),
                ", ".join(text for applies, text in notes if applies),
            )
        )  # fmt: skip
    head = ("checkpoint", "parent", "turn", "class", "added", "created", "notes")
    print_columns(head, rows, right=("turn", "added"))


def _print_turns(history: SandboxHistory) -> None:
    head = ("turn", "class", "required", "checkpoint", "added", "took", "why")
    rows = [
        (
            str(turn.number), turn.turn_class.word, turn.required.word, turn.checkpoint or "–",
            size(turn.bytes_new), f"{turn.seconds * 1e3:,.0f} ms",
            printable("; ".join((*(f"lacks {lack}" for lack in turn.lacks), *turn.reasons))),
        )
        for turn in history.turns
    ]  # fmt: skip
    print_columns(head, rows, right=("turn", "added", "took"))
