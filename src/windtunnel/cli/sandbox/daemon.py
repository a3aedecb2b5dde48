"""``doctor``, ``setup``, ``serve`` and ``down``: the host and its daemon."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from windtunnel.base.errors import ScriptError, UserError
from windtunnel.cli.sandbox.common import AsJson, client, escape, home_of, needed, print_json, show, table


def doctor(context: typer.Context, as_json: AsJson = False) -> None:
    """Say what this host has, what that gives, and the exact command for what is missing.

    Also what a crash has left in the home: 'gc' removes it.

    Example: windtunnel sandbox doctor
    """
    from windtunnel.agents.sandbox.criu import doctor as examine
    from windtunnel.agents.sandbox.criu import ladder
    from windtunnel.agents.sandbox.place import Home
    from windtunnel.agents.sandbox.policy.kinds import LOST, NEVER
    from windtunnel.agents.sandbox.record import leftovers

    found = examine()
    left = leftovers(Home(home_of(context))) if "://" not in (context.obj or "") else []
    if as_json:
        kinds = {one.kind: one.why for one in LOST}
        return print_json({"facilities": found, "kinds": kinds, "never": NEVER, "leftovers": left})
    shown = table("", "facility", "found", "gives", "to have it")
    for one in found:
        mark = "[green]✓[/]" if one.present else "[red]✗[/]"
        remedy = one.remedy or ("" if one.present else "cannot be had here")
        shown.add_row(mark, one.name, escape(one.detail), escape(one.gives), escape(remedy))
    show(shown)
    typer.echo(ladder(found))
    typer.echo("\nof what processes hold, no checkpoint brings back:")
    for kind in LOST:
        typer.echo(f"  {kind.kind}: {kind.why}")
    typer.echo("\nand of no process:")
    for words in NEVER:
        typer.echo(f"  {words}")
    if left:
        typer.echo("\nleft by a crash ('windtunnel sandbox gc' removes it):")
        for line in left:
            typer.echo(f"  {line}")


def setup(
    prefix: Annotated[
        Path | None, typer.Option(help="Where CRIU is put; by default a folder of this account.")
    ] = None,
) -> None:
    """Build CRIU from its source, and check it by a real dump and restore.

    Example: windtunnel sandbox setup
    """
    from windtunnel.agents.sandbox.criu import setup as install
    from windtunnel.agents.sandbox.errors import CriuError

    try:
        made = install(prefix, progress=typer.echo)
    except CriuError as error:
        raise ScriptError(f"sandbox setup: {error}") from error
    typer.echo(f"CRIU {'.'.join(map(str, made.version))} works: {made.path}")


def serve(
    context: typer.Context,
    http: Annotated[
        str | None,
        typer.Option(
            metavar="[ADDRESS:]PORT", help="Also serve HTTP, with a token; the address is 127.0.0.1."
        ),
    ] = None,
    token: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File with the token; without it, WINDTUNNEL_SANDBOX_TOKEN."),
    ] = None,
    home: Annotated[Path | None, typer.Option(help="The folder that holds the sandboxes.")] = None,
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="Let --http be an address that other machines reach.")
    ] = False,
    print_unit: Annotated[
        bool, typer.Option("--print-unit", help="Print a unit for systemd that runs it so, and do nothing.")
    ] = False,
) -> None:
    """Run the daemon here until Ctrl-C. Sandboxes run on when it ends, and the next one takes them over.

    Example: windtunnel sandbox serve --http 8080 --token token.txt
    """
    needed("fastapi")
    needed("uvicorn")
    place = home.absolute() if home is not None else home_of(context)
    if print_unit:
        from windtunnel.agents.sandbox.daemon.unit import unit

        options = [] if http is None else ["--http", http]
        options += [] if token is None else ["--token", str(token.absolute())]
        options += ["--allow-remote"] if allow_remote else []
        return typer.echo(unit(place, options), nl=False)
    from windtunnel.agents.sandbox.daemon.server import end, run

    run(
        place,
        http=_listen(http),
        token=_token(token) if http is not None else "",
        allow_remote=allow_remote,
        ready=lambda where: typer.echo(
            f"serving on {where}" + (f"  ({where}/openapi.json)" if "://" in where else "")
        ),
    )
    typer.echo("the daemon has ended; sandboxes run on")
    end(0)


def down(context: typer.Context) -> None:
    """End the daemon. Sandboxes run on, and the next command starts a daemon that takes them over.

    Example: windtunnel sandbox down
    """
    from windtunnel.agents.sandbox.client.launch import answers

    home = home_of(context) if "://" not in (context.obj or "") else None
    if home is not None and not answers(home):
        typer.echo(f"no daemon of {home} runs")
        return
    with client(context, start=False) as daemon:
        running = sum(one.status == "running" for one in daemon.boxes())
        daemon.down()
    typer.echo(f"the daemon has ended; {running} running sandbox{'' if running == 1 else 'es'} run on")


def _listen(text: str | None) -> tuple[str, int] | None:
    if text is None:
        return None
    address, colon, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65535 or (colon and not address):
        raise UserError(f"sandbox serve: --http {text!r} is not accepted; write PORT or ADDRESS:PORT")
    return address or "127.0.0.1", int(port)


def _token(file: Path | None) -> str:
    if file is None:
        token = os.environ.get("WINDTUNNEL_SANDBOX_TOKEN", "")
    else:
        try:
            token = file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"sandbox serve: token file {file} cannot be read: {error}") from error
    if not token.isascii() or any(one.isspace() for one in token):
        raise UserError("sandbox serve: the token must be ASCII without spaces")
    return token
