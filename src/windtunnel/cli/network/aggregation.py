"""``windtunnel network aggregation``: gradients summed by a switch."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from windtunnel.cli import Group

group = typer.Typer(
    cls=Group, no_args_is_help=True, help="Gradients summed by a switch (SwitchML, ATP, ESA)."
)
Log = Annotated[Path | None, typer.Option(metavar="FILE", help="Log decisions there, for replay.")]


def register(app: typer.Typer) -> None:
    """Add the verb to ``app``."""
    app.add_typer(group, name="aggregation")


@group.command("serve")
def serve(
    server: Annotated[str, typer.Option(metavar="HOST:PORT", help="The parameter server behind it.")],
    bind: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where workers find it.")] = "0.0.0.0:7000",
    slots: Annotated[int, typer.Option(help="Sums of one packet that it holds at a time.")] = 512,
    policy: Annotated[str, typer.Option(help="switchml, atp, or esa.")] = "esa",
    jobs: Annotated[int, typer.Option(help="At most at a time; switchml gives each as many slots.")] = 4,
    results: Annotated[
        str, typer.Option(help="server: results come from there; direct: from here.")
    ] = "server",
    loss: Annotated[float, typer.Option(help="Throw away this share of all packets, for trials.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of what is thrown away.")] = 0,
    log: Log = None,
) -> None:
    """Be the switch: add fragments of gradients that workers send, until interrupted.

    Example: windtunnel network aggregation serve --bind 10.0.0.9:7000 --server 10.0.0.8:7001 --slots 512
    """
    from windtunnel.base.errors import UserError
    from windtunnel.network.aggregation.live.switch import Switch

    if results not in ("server", "direct"):
        raise UserError(f"network aggregation: --results {results!r} is unknown; accepted are server, direct")
    there = _address(server, "--server")
    with _bound(bind) as sock, _stopped() as stopped:
        switch = Switch(
            sock, there, slots=slots, policy=policy, jobs=jobs, direct=results == "direct", loss=loss,
            seed=seed, log=log,
        )  # fmt: skip
        typer.echo(f"Switch  {':'.join(map(str, sock.getsockname()))}, {slots} slots, {policy}")
        switch.serve(stopped)
        typer.echo(f"Stopped  {switch.report()}")


@group.command("server")
def server(
    switch: Annotated[str, typer.Option(metavar="HOST:PORT", help="The switch that it is behind.")],
    bind: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where the switch finds it.")
    ] = "0.0.0.0:7001",
    log: Log = None,
) -> None:
    """Be the parameter server: add what the switch does not, until interrupted.

    Example: windtunnel network aggregation server --bind 10.0.0.8:7001 --switch 10.0.0.9:7000
    """
    from windtunnel.network.aggregation.live.server import Server

    there = _address(switch, "--switch")
    with _bound(bind) as sock, _stopped() as stopped:
        found = Server(sock, there, log)
        typer.echo(f"Server  {':'.join(map(str, sock.getsockname()))}")
        found.serve(stopped)
        typer.echo(f"Stopped  {found.report()}")


def _address(told: str, option: str) -> tuple[str, int]:
    from windtunnel.network.aggregation.live.wire import address

    return address(told, f"network aggregation: {option}")


@contextmanager
def _bound(bind: str) -> Iterator[socket.socket]:
    from windtunnel.base.errors import UserError

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.bind(_address(bind, "--bind"))
        except OSError as error:
            raise UserError(
                f"network aggregation: --bind {bind} cannot be had ({error.strerror}), accepted is a free"
                " port of this host"
            ) from error
        yield sock


@contextmanager
def _stopped() -> Iterator[Callable[[], bool]]:
    """Whether an interrupt or the end was asked for."""
    asked: list[int] = []
    before = {
        number: signal.signal(number, lambda told, _: asked.append(told))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
