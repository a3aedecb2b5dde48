"""``doctor``, ``setup``, ``serve`` and ``down``: the host and its daemon."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from windtunnel.base.errors import ScriptError, UserError
from windtunnel.cli.common import Json, quantity
from windtunnel.cli.sandbox import client, print_json


def doctor(context: typer.Context, as_json: Json = False) -> None:
    """Check this host for what sandboxes need, with the command for each missing part.

    Example: windtunnel sandbox doctor
    """
    from windtunnel.agents.sandbox.criu.doctor import doctor as examine
    from windtunnel.agents.sandbox.criu.doctor import ladder
    from windtunnel.agents.sandbox.policy.standing import LOST, NEVER

    facilities = examine()
    if as_json:
        words = {each.kind: each.why for each in LOST}
        return print_json({"facilities": facilities, "kinds": words, "never": NEVER})
    for each in facilities:
        typer.echo(f"{'✓' if each.present else '✗'} {each.name}: {each.detail}; gives {each.gives}")
        if each.remedy or not each.present:
            typer.echo(f"    to have it: {each.remedy or 'cannot be had here'}")
    typer.echo(ladder(facilities))
    kinds = [f"{lost.kind}: {lost.why}" for lost in LOST]
    typer.echo("\n  ".join(("\nno checkpoint brings back:", *kinds)))
    typer.echo("\n  ".join(("\nand of no process:", *NEVER)))


def setup(
    context: typer.Context,
    pool_size: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Size of the pool file for all sandboxes, allocated at once. Default: 32G, or a quarter of "
            "the free disk if that is less.",
        ),
    ] = "",
) -> None:
    """Build CRIU from its source, check it by a real dump and restore, and make the pool of the home.

    Example: windtunnel sandbox setup
    """
    from windtunnel.agents.sandbox.criu.program import setup as install
    from windtunnel.agents.sandbox.errors import CriuError
    from windtunnel.agents.sandbox.files import btrfs
    from windtunnel.agents.sandbox.place import Home

    try:
        program = install(typer.echo)
    except CriuError as error:
        raise ScriptError(f"sandbox setup: {error}") from error
    typer.echo(f"CRIU {'.'.join(map(str, program.version))} works: {program.path}")
    folder = Home(context.obj.need_home()).pool
    folder.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if btrfs.is_btrfs(folder.parent) or not (missing := btrfs.usable(folder)):
        where = "the btrfs that it lies on"
        if not btrfs.is_btrfs(folder.parent):
            requested = int(quantity("pool_size", pool_size, "bytes of memory")) if pool_size else None
            size = btrfs.make_pool(folder, requested)
            where = f"{btrfs.image_of(folder)}, {size >> 20} MiB"
        typer.echo(f"the files of sandboxes are snapshots on {where}")
    else:
        typer.echo(f"the files of sandboxes will be copied, not snapshotted: {missing}")


def serve(
    context: typer.Context,
    tcp: Annotated[
        str | None,
        typer.Option(
            metavar="[ADDRESS:]PORT", help="Also for --url tcp://…, with a token; the address is 127.0.0.1."
        ),
    ] = None,
    http: Annotated[
        str | None,
        typer.Option(metavar="[ADDRESS:]PORT", help="Serve HTTP on this address too, with a token."),
    ] = None,
    token: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File with the token; without it, WINDTUNNEL_SANDBOX_TOKEN."),
    ] = None,
) -> None:
    """Run the daemon until Ctrl-C. Sandboxes keep running, and the next daemon takes them over.

    Example: windtunnel sandbox serve --tcp 8080 --token token.txt
    """
    from windtunnel.agents.sandbox.daemon import keys_of
    from windtunnel.agents.sandbox.daemon.server import end, run

    run(
        context.obj.need_home(), keys=keys_of(_token(token), context.obj.tls) if tcp or http else None,
        tcp=tcp, http=http, ready=lambda where: typer.echo(f"serving on {where}"),
    )  # fmt: skip
    typer.echo("the daemon has ended; sandboxes run on")
    end(0)


def down(context: typer.Context) -> None:
    """Stop the daemon. Sandboxes keep running, and the next command starts a daemon for them.

    Example: windtunnel sandbox down
    """
    from windtunnel.agents.sandbox.daemon import answers

    with client(context, start=False) as daemon:
        home = daemon.place.home
        if home is not None and not answers(home):
            return typer.echo(f"no daemon of {home} runs")
        running = sum(info.status == "running" for info in daemon.boxes())
        daemon.down()
    typer.echo(f"the daemon has ended; {running} running sandbox{'' if running == 1 else 'es'} run on")


def mcp(context: typer.Context) -> None:
    """Serve sandboxes to an agent by the Model Context Protocol, on standard input and output.

    Example: windtunnel sandbox mcp
    """
    from windtunnel.agents.sandbox.adapters.mcp import serve as serve_tools

    with client(context) as daemon:
        serve_tools(daemon)


def _token(file: Path | None) -> str:
    if file is None:
        return os.environ.get("WINDTUNNEL_SANDBOX_TOKEN", "")
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"sandbox serve: token file {file} cannot be read: {error}") from error
