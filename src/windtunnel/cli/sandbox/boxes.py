"""``create``, ``ls``, ``ps``, ``stop``, ``rm``, and ``put`` and ``get``: sandboxes and the files in them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from windtunnel.base.errors import UserError
from windtunnel.cli.sandbox.common import (
    AsJson,
    Name,
    amount,
    box,
    bytes_of,
    client,
    moment,
    pairs,
    print_json,
    show_table,
    size,
    told_of_file,
)

Inside = Annotated[str, typer.Argument(metavar="PATH", help="An absolute path inside the sandbox.")]
Names = Annotated[list[str], typer.Argument(metavar="NAME...", help="The sandboxes.")]


def create(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Lower-case letters, digits, '.', '_', '-'.")],
    image: Annotated[
        str,
        typer.Option(
            help="'host' (this machine's own programs; 'host+PACKAGE,/FOLDER': more of them), a directory, a "
            "tarball, an OCI layout, or 'docker://NAME' of a registry (by skopeo)."
        ),
    ] = "host",
    network: Annotated[
        str,
        typer.Option(
            metavar="off|host|proxy|egress[:HOST,*.HOST]",
            help="off: loopback alone. host: this host and nothing behind it. proxy: the model API alone. "
            "egress: public hosts, or those listed, by an HTTP proxy that logs.",
        ),
    ] = "off",
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Such as 512M or 2G, or 'none'.")] = "2G",
    cpus: Annotated[str, typer.Option(metavar="N", help="Such as 1.5, or 'none'.")] = "none",
    pids: Annotated[str, typer.Option(metavar="N", help="Processes and threads, or 'none'.")] = "512",
    disk: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Beyond the image: such as 20G, or 'none'. 'auto': 10G, less in a small pool, and none "
            "where a limit cannot be held.",
        ),
    ] = "auto",
    env: Annotated[
        list[str] | None, typer.Option("--env", metavar="KEY=VALUE", help="Environment of its shells.")
    ] = None,
    service: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=COMMAND", help="Started with it, and again by a restore that lost it."),
    ] = None,
    workdir: Annotated[str, typer.Option(help="Where its shells start.")] = "/workspace",
    proxy_upstream: Annotated[
        str, typer.Option("--upstream", metavar="URL", help="The model API behind --network proxy.")
    ] = "",
    allow_less: Annotated[
        bool, typer.Option("--allow-less", help="Of this sandbox, that something lacks is never an error.")
    ] = False,
    key_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Holds that API's key, which the daemon adds; mode 600."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a sandbox and start it.

    Example: windtunnel sandbox create demo --memory 2G --network off
    """
    from windtunnel.agents.sandbox.model import Limits, SandboxSpec

    spec = SandboxSpec(
        name=name,
        image=_image(image),
        network=network,
        limits=Limits(
            memory=amount(memory, "--memory", "such as 512M or 2G", bytes_of),
            cpus=amount(cpus, "--cpus", "such as 1.5", float),
            pids=amount(pids, "--pids", "such as 512", int),
            disk=0 if disk == "auto" else amount(disk, "--disk", "such as 512M or 20G", bytes_of),
        ),
        environment=pairs(env or [], "--env"),
        services=pairs(service or [], "--service"),
        workdir=workdir,
        proxy_upstream=proxy_upstream,
        allow_less=allow_less,
        proxy_key_file="" if key_file is None else str(key_file.absolute()),
    )
    with client(context) as daemon:
        info = daemon.create(spec).info()
    if as_json:
        return print_json(info)
    typer.echo(f"{info.name} runs; 'windtunnel sandbox exec {info.name} -- COMMAND' or 'shell {info.name}'")


def list_all(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(metavar="[NAME", help="The sandbox to look into.")] = None,
    path: Annotated[str, typer.Argument(metavar="PATH]", help="A folder of it.")] = "/",
    as_json: AsJson = False,
) -> None:
    """List the sandboxes; or, with a name, the files in a folder of that sandbox.

    Example: windtunnel sandbox ls demo /workspace
    """
    if name is not None:
        return _list_files(context, name, path, as_json)
    with client(context) as daemon:
        sandboxes = daemon.boxes()
    if as_json:
        return print_json(sandboxes)
    if not sandboxes:
        return typer.echo("No sandboxes yet: start with `windtunnel sandbox create NAME`.")
    head = ("name", "status", "turns", "newest checkpoint", "image", "network", "made")
    rows = [
        (
            info.name, info.status, str(info.turns), info.tip or "–", info.image, info.network,
            moment(info.created),
        )
        for info in sandboxes
    ]  # fmt: skip
    show_table(head, rows, right=("turns",))


def ps(context: typer.Context, name: Name, as_json: AsJson = False) -> None:
    """List the processes of a sandbox.

    Example: windtunnel sandbox ps demo
    """
    info = box(context, name).info()
    if as_json:
        return print_json({"pid": info.pid, "processes": info.processes})
    if info.status != "running":
        return typer.echo(f"sandbox {name} is {info.status}")
    for command in info.processes:
        typer.echo(command)


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
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
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
    mode: Annotated[
        str | None, typer.Option(metavar="OCTAL", help="Such as 755; by default that of FILE.")
    ] = None,
) -> None:
    """Write a file, or a folder with all that it holds, into a sandbox. In a PATH that ends with '/' it keeps
    its name.

    Example: windtunnel sandbox put demo notes.txt /workspace/
    """
    sandbox = box(context, name)
    if source == "-":
        sandbox.put(path, sys.stdin.buffer, _mode(mode, 0o644))
        return
    file = Path(os.path.expanduser(source))
    if path.endswith("/"):
        path += file.name
    if os.path.isdir(file):
        from windtunnel.agents.sandbox.folders import put_folder

        if mode is not None:
            raise UserError("sandbox put: --mode is for a file; those of a folder keep theirs")
        return put_folder(sandbox, file, path)
    with told_of_file(f"sandbox put: {file}", "a regular file is needed"), file.open("rb") as data:
        sandbox.put(path, data, _mode(mode, os.fstat(data.fileno()).st_mode & 0o777))


def get(
    context: typer.Context,
    name: Name,
    path: Inside,
    target: Annotated[
        str, typer.Argument(metavar="[FILE]", help="A file or folder of this machine; '-': standard output.")
    ] = "-",
) -> None:
    """Read a file of a sandbox, or a folder with all that it holds.

    Example: windtunnel sandbox get demo /workspace/notes.txt notes.txt
    """
    sandbox = box(context, name)
    from windtunnel.agents.sandbox.folders import get_folder, is_folder

    if target != "-" and is_folder(sandbox, path):
        into = Path(os.path.expanduser(target))
        return get_folder(sandbox, path, into / Path(path).name if os.path.isdir(into) else into)
    if target == "-":
        sandbox.get_to(path, sys.stdout.buffer)
        sys.stdout.buffer.flush()
        return
    from windtunnel.base import atomic

    file = Path(os.path.expanduser(target))
    if os.path.isdir(file):
        file = file / Path(path).name
    # a file that came only in part must not be taken for the whole one
    with told_of_file(f"sandbox get: {file}"), atomic.replacing(file) as part, part.open("wb") as out:
        sandbox.get_to(path, out)


def port(
    context: typer.Context,
    name: Name,
    number: Annotated[int, typer.Argument(metavar="PORT", help="A TCP port that is listened on inside.")],
) -> None:
    """Print the URL of this host that leads to a port of a sandbox. A restore leaves it as it is.

    Example: windtunnel sandbox port demo 8000
    """
    typer.echo(box(context, name).port(number))


def _list_files(context: typer.Context, name: str, path: str, as_json: bool) -> None:
    entries = box(context, name).listdir(path)
    if as_json:
        return print_json(entries)
    rows = [
        (
            entry.name + (f" → {entry.target}" if entry.target else ""), entry.kind, size(entry.size),
            f"{entry.mode & 0o7777:04o}", moment(entry.modified) if entry.modified else "",
        )
        for entry in entries
    ]  # fmt: skip
    show_table(("name", "kind", "size", "mode", "modified"), rows, right=("size",))


def _image(text: str) -> str:
    """A path of this machine is made absolute, since the daemon has another directory; a name stays one."""
    if not text or text == "host" or text.startswith(("host+", "docker://")):
        return text
    path = os.path.expanduser(text)
    return os.path.abspath(path) if "/" in text or os.path.exists(path) else text


def _mode(text: str | None, default: int) -> int:
    if text is None:
        return default
    try:
        mode = int(text, 8)
    except ValueError:
        mode = -1
    if not 0 <= mode <= 0o7777:
        raise UserError(f"sandbox put: --mode {text!r} is not accepted; use octal digits such as 644 or 755")
    return mode
