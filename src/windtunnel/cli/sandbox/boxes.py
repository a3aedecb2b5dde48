"""``create``, ``ls``, ``ps``, ``stop`` and ``rm``: the life of sandboxes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from windtunnel.base.errors import UserError
from windtunnel.cli.sandbox.common import (
    AsJson,
    Name,
    box,
    bytes_of,
    client,
    moment,
    number_of,
    pairs,
    print_json,
    show,
    size,
    table,
)

STYLES = {"running": "green", "stopped": "yellow", "dead": "red"}
Names = Annotated[list[str], typer.Argument(metavar="NAME...", help="The sandboxes.")]


def add_to(app: typer.Typer) -> None:
    app.command()(create)
    app.command("ls")(list_all)
    app.command()(ps)
    app.command()(stop)
    app.command("rm")(remove)


def create(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="Lower-case letters, digits, '.', '_', '-'.")],
    image: Annotated[
        str,
        typer.Option(help="'host' (this machine's own programs), a directory, a tarball or an OCI layout."),
    ] = "host",
    network: Annotated[
        str, typer.Option(help="off: loopback alone. host: through this host. proxy: the model API alone.")
    ] = "off",
    memory: Annotated[str, typer.Option(metavar="SIZE", help="Such as 512M or 2G, or 'none'.")] = "2G",
    cpus: Annotated[str, typer.Option(metavar="N", help="Such as 1.5, or 'none'.")] = "none",
    pids: Annotated[str, typer.Option(metavar="N", help="Processes and threads, or 'none'.")] = "512",
    disk: Annotated[str, typer.Option(metavar="SIZE", help="Such as 10G, or 'none'.")] = "none",
    env: Annotated[
        list[str] | None, typer.Option("--env", metavar="KEY=VALUE", help="Environment of its shells.")
    ] = None,
    service: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=COMMAND", help="Started with it, and again by a restore that lost it."),
    ] = None,
    workdir: Annotated[str, typer.Option(help="Where its shells start.")] = "/workspace",
    upstream: Annotated[str, typer.Option(metavar="URL", help="The model API behind --network proxy.")] = "",
    as_json: AsJson = False,
) -> None:
    """Make a sandbox and start it."""
    from windtunnel.agents.sandbox.live.place import checked_name
    from windtunnel.agents.sandbox.model import Limits, SandboxSpec

    if network not in ("off", "host", "proxy"):
        raise UserError(f"sandbox create: --network {network!r} is not accepted; use off, host or proxy")
    if (network == "proxy") != bool(upstream):
        raise UserError("sandbox create: --network proxy and --upstream URL go together")
    pid_limit = number_of(pids, "--pids", int, "of at least 1")
    spec = SandboxSpec(
        name=checked_name(name),
        image=_image(image),
        network=network,  # type: ignore[arg-type]
        limits=Limits(
            memory=_bytes(memory, "--memory"),
            cpus=number_of(cpus, "--cpus", float, "above 0"),
            pids=None if pid_limit is None else int(pid_limit),
            disk=_bytes(disk, "--disk"),
        ),
        environment=pairs(env or [], "--env"),
        services=pairs(service or [], "--service"),
        workdir=workdir,
        proxy_upstream=upstream,
    )
    with client(context) as daemon:
        info = daemon.create(spec).info()
    if as_json:
        print_json(info)
        return
    typer.echo(f"{info.name} runs; 'windtunnel sandbox exec {info.name} -- COMMAND' or 'shell {info.name}'")


def list_all(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(metavar="[NAME", help="The sandbox to look into.")] = None,
    path: Annotated[str, typer.Argument(metavar="PATH]", help="A folder of it.")] = "/",
    as_json: AsJson = False,
) -> None:
    """List the sandboxes; or, with a name, the files in a folder of that sandbox."""
    if name is not None:
        _list_files(context, name, path, as_json)
        return
    with client(context) as daemon:
        found = daemon.boxes()
    if as_json:
        print_json(found)
        return
    if not found:
        typer.echo("No sandboxes yet: start with `windtunnel sandbox create NAME`.")
        return
    shown = table(
        "name", "status", "turns", "newest checkpoint", "image", "network", "made", right=("turns",)
    )
    for one in found:
        status = f"[{STYLES.get(one.status, 'white')}]{one.status}[/]"
        image, tip = escape(one.image), one.tip or "–"
        shown.add_row(one.name, status, str(one.turns), tip, image, one.network, moment(one.created))
    show(shown)


def ps(context: typer.Context, name: Name, as_json: AsJson = False) -> None:
    """List the processes of a sandbox."""
    info = box(context, name).info()
    if as_json:
        print_json({"pid": info.pid, "processes": info.processes})
        return
    if info.status != "running":
        typer.echo(f"sandbox {name} is {info.status}")
        return
    for command in info.processes:
        typer.echo(command)


def stop(context: typer.Context, names: Names) -> None:
    """Kill the processes of sandboxes. Files and checkpoints stay; `restore` brings them back."""
    with client(context) as daemon:
        # All are looked up before the first is stopped, so that a wrong name stops nothing.
        for found in [daemon.get(name) for name in names]:
            found.stop()
            typer.echo(f"stopped {found.name}")


def remove(
    context: typer.Context,
    names: Names,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Kill sandboxes and forget them, with all checkpoints that no other sandbox rests on."""
    with client(context) as daemon:
        chosen = [daemon.get(name).name for name in names]
        if not yes:
            plural = "sandbox" if len(chosen) == 1 else "sandboxes"
            typer.confirm(f"Remove {plural} {', '.join(chosen)} with files and checkpoints?", abort=True)
        for name in chosen:
            daemon.remove(name)
            typer.echo(f"removed {name}")


def _list_files(context: typer.Context, name: str, path: str, as_json: bool) -> None:
    found = box(context, name).listdir(path)
    if as_json:
        print_json(found)
        return
    shown = table("name", "kind", "size", "mode", "modified", right=("size",))
    for one in found:
        when = moment(one.modified) if one.modified else ""
        shown_name = escape(one.name + (f" → {one.target}" if one.target else ""))
        shown.add_row(shown_name, one.kind, size(one.size), f"{one.mode & 0o7777:04o}", when)
    show(shown)


def _bytes(text: str, option: str) -> int | None:
    return None if text.lower() == "none" else bytes_of(text, option)


def _image(text: str) -> str:
    """A path of this machine is made absolute, since the daemon has another directory; a name stays one."""
    path = Path(text).expanduser()
    return str(path.absolute()) if text != "host" and ("/" in text or path.exists()) else text
