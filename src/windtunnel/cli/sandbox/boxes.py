"""``create``, ``ls``, ``stop``, ``rm``, ``put``, ``get`` and ``port``: sandboxes and the files in them."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from windtunnel.agents.sandbox.model import BoxInfo, SandboxLimits, SandboxSpec
from windtunnel.agents.sandbox.protocol import AnyHost, AnySandbox
from windtunnel.cli.common import Json, print_columns
from windtunnel.cli.options import takes
from windtunnel.cli.sandbox.common import (
    Name,
    box,
    calls,
    client,
    file_errors,
    moment,
    print_json,
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
