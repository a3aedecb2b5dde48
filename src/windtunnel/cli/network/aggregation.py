"""``windtunnel network aggregation``: gradients summed by a switch."""

from __future__ import annotations

import socket
from typing import Annotated

import typer

from windtunnel.base.errors import UserError
from windtunnel.cli import new_group
from windtunnel.cli.common import LogFile, choice, stop_event

group = new_group("Gradients summed by a switch (SwitchML, ATP, ESA).")


@group.command("serve")
def serve(
    server: Annotated[str, typer.Option(metavar="HOST:PORT", help="The parameter server behind it.")],
    bind: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address and port for workers.")
    ] = "0.0.0.0:7000",
    slots: Annotated[int, typer.Option(help="Slots for sums. Each holds one packet.")] = 512,
    policy: Annotated[str, typer.Option(help="Policy: switchml, atp, or esa.")] = "esa",
    jobs: Annotated[int, typer.Option(help="Most concurrent jobs. switchml divides the slots by it.")] = 4,
    results: Annotated[
        str, typer.Option(help="Sender of results: server (the parameter server), or direct (the switch).")
    ] = "server",
    loss: Annotated[float, typer.Option(help="Share of packets to drop, for tests.")] = 0.0,
    seed: Annotated[int, typer.Option(min=0, max=2**64 - 1, help="Seed of dropped packets.")] = 0,
    log: LogFile = None,
) -> None:
    """Run the switch: sum the gradient fragments that workers send, until interrupted.

    Example: windtunnel network aggregation serve --bind 10.0.0.9:7000 --server 10.0.0.8:7001 --slots 512
    """
    from windtunnel.network.aggregation.live.switch import Switch

    choice("results", results, ("server", "direct"))
    address, stop = _address(server, "--server"), stop_event()
    with _bind(bind) as sock:
        switch = Switch(
            sock, address, slots=slots, policy=policy, jobs=jobs, direct=results == "direct", loss=loss,
            seed=seed, log=log,
        )  # fmt: skip
        typer.echo(f"Switch  {':'.join(map(str, sock.getsockname()))}, {slots} slots, {policy}")
        switch.serve(stop.is_set)
        typer.echo(f"Stopped  {switch.report()}")


@group.command("server")
def serve_sums(
    switch: Annotated[str, typer.Option(metavar="HOST:PORT", help="Address and port of the switch.")],
    bind: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address and port for the switch.")
    ] = "0.0.0.0:7001",
    log: LogFile = None,
) -> None:
    """Run the parameter server: sum what the switch does not, until interrupted.

    Example: windtunnel network aggregation server --bind 10.0.0.8:7001 --switch 10.0.0.9:7000
    """
    from windtunnel.network.aggregation.live.server import ParameterServer

    address, stop = _address(switch, "--switch"), stop_event()
    with _bind(bind) as sock:
        server = ParameterServer(sock, address, log)
        typer.echo(f"Server  {':'.join(map(str, sock.getsockname()))}")
        server.serve(stop.is_set)
        typer.echo(f"Stopped  {server.report()}")


def _address(text: str, option: str) -> tuple[str, int]:
    from windtunnel.network.aggregation.live.wire import address

    return address(text, f"network aggregation: {option}")


def _bind(text: str) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        sock.bind(_address(text, "--bind"))
    except OSError as error:
        sock.close()
        raise UserError(
            f"network aggregation: --bind {text} cannot be had ({error.strerror}), accepted is a free port of"
            " this host"
        ) from error
    return sock
