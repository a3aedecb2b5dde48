"""``windtunnel network multicast``: one rack to many, over passive splitters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from windtunnel.cli import Group

group = typer.Typer(
    cls=Group, no_args_is_help=True, help="From one rack to many over passive splitters (Shufflecast)."
)
Split = Annotated[int, typer.Option("--split", help="Outputs of each splitter, p.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print everything as one JSON value.")]


def register(app: typer.Typer) -> None:
    """Add the verb to ``app``."""
    app.add_typer(group, name="multicast")


def _quantity(text: str, unit: str, option: str) -> float:
    from windtunnel.base.errors import UserError
    from windtunnel.base.units import parse_quantity

    try:
        return parse_quantity(text, unit)
    except ValueError as error:
        raise UserError(f"{option}: {text!r} is not understood, {error}") from None


@group.callback()
def _multicast() -> None:
    pass


@group.command("plan")
def plan(
    racks: Annotated[int, typer.Option(help="k * p^k of them: 8, 24, 64 with p = 2; 18, 81; 32, 192.")],
    splitter: Split = 2,
    sources: Annotated[str, typer.Option("--from", help="Racks that send to all others, such as 0,3.")] = "0",
    size: Annotated[str, typer.Option(help="What each sends.")] = "1 GB",
    rate: Annotated[str, typer.Option(help="Of every port.")] = "100 Gb/s",
    hop: Annotated[str, typer.Option(help="From a rack to the next.")] = "1 us",
    packet: Annotated[str, typer.Option(help="Bytes of a packet.")] = "9 kB",
    loss: Annotated[
        float, typer.Option(help="Packets lost at each receive port: packet by packet, too.")
    ] = 0,
    failed: Annotated[
        list[str] | None,
        typer.Option(
            "--fail", metavar="RACK|FIBRE", help="A transmitter (3) or a fibre (3-6) that has failed."
        ),
    ] = None,
    parts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Watts, prices, losses of your parts (YAML).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Who relays what, which multicasts go at once, and how long it takes beside an electrical network.

    Times are emulated. --json has every rack's rules.

    Example: windtunnel network multicast plan --racks 24 --split 2 --from 0,5 --size 10GB
    """
    from windtunnel.base.errors import UserError
    from windtunnel.network.multicast import planning
    from windtunnel.network.multicast.twin import World

    if not all(word.strip().isdecimal() for word in sources.split(",")):
        raise UserError(f"--from: {sources!r} is not understood, accepted are racks such as 0,3")
    if not 0 <= loss < 1:
        raise UserError(f"--loss: {loss} is not accepted, accepted is 0 to less than 1")
    world = World(
        _quantity(rate, "bytes/s", "--rate"), _quantity(hop, "seconds", "--hop"),
        int(_quantity(packet, "bytes", "--packet")), loss,
    )  # fmt: skip
    made = planning.plan(
        racks, splitter, [int(word) for word in sources.split(",")], _quantity(size, "bytes", "--size"),
        world, failed or (), planning.read_parts(parts) if parts else None,
    )  # fmt: skip
    if as_json:
        typer.echo(json.dumps(made))
        return
    typer.echo(
        f"{racks} racks, splitters of {splitter}: {made['columns']} columns, {made['relay_groups']} relay"
        f" groups, {made['hops']} hops"
    )
    for number, one in enumerate(made["rounds"], 1):
        typer.echo(f"round {number}           from {', '.join(map(str, one))}")
    typer.echo(f"transmissions     {', '.join(map(str, made['transmissions']))}")
    for name, one in made["emulated"].items():
        more = f", {one['repairs']:,} repairs" if one["repairs"] else ""
        typer.echo(
            f"{name:<27} {one['seconds'] * 1e3:>12,.3f} ms  {one['bytes_sent'] / 1e9:,.2f} GB sent{more}"
        )
    for name, one in (made["parts"] or {}).items():
        lost = f", split loss {one['split_loss_db']:.1f} dB" if "split_loss_db" in one else ""
        typer.echo(f"{name:<27} {one['watts']:,.1f} W, price {one['price']:,.0f}{lost}")


@group.command("send")
def send(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What every rack is to get.")],
    racks: Annotated[int, typer.Option(help="Racks that are made on this machine, k * p^k.")] = 8,
    splitter: Split = 2,
    source: Annotated[int, typer.Option("--from", help="The rack that has it.")] = 0,
    rate: Annotated[str, typer.Option(help="Of every port.")] = "100 Mb/s",
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Into FOLDER/rack-N; memory by default.")
    ] = None,
    loss: Annotated[float, typer.Option(help="Racks throw away this share of what comes, for trials.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of what is thrown away.")] = 0,
    deadline: Annotated[float, typer.Option(help="Seconds until it is given up.")] = 600.0,
    log: Annotated[Path | None, typer.Option(metavar="FILE", help="Log decisions there, for replay.")] = None,
    as_json: AsJson = False,
) -> None:
    """Send a file to all racks of a fabric made of processes, network namespaces and tc on this machine.

    Every rack holds what it got against a digest. A rack that is killed meanwhile is told, and the others get
    the file all the same. Needs root; nothing of it is left afterwards, whoever is killed.

    Example: windtunnel network multicast send weights.bin --racks 8 --split 2 --rate 100Mb/s --loss 0.05
    """
    from functools import partial

    from windtunnel.base.errors import LessError, UserError
    from windtunnel.network.multicast.live.rack import serve
    from windtunnel.network.multicast.live.racks import Racks
    from windtunnel.network.multicast.live.send import send as run
    from windtunnel.network.multicast.policy.shuffle import shuffle_of

    if not 0 <= loss < 1:
        raise UserError(f"--loss: {loss} is not accepted, accepted is 0 to less than 1")
    if not file.is_file():
        raise UserError(f"{file}: there is no such file, accepted is one to send")
    standing = Racks(
        shuffle_of(racks, splitter), _quantity(rate, "bytes/s", "--rate"), partial(serve, parts={})
    )
    try:
        found = run(standing, file, source, out=out, loss=loss, seed=seed, log=log, deadline=deadline)
    finally:
        standing.close()
    counted = ("relayed", "asked", "answered", "refused")
    told = {"bytes": found.nbytes, "seconds": found.seconds, "racks": sorted(found.racks), "lost": found.lost}
    told |= {name: found.total(name) for name in counted}
    if as_json:
        typer.echo(json.dumps(told))
    else:
        typer.echo(f"{found.nbytes:,} bytes to {len(found.racks) - 1} racks in {found.seconds * 1e3:,.0f} ms")
        typer.echo(", ".join(f"{told[name]:,} packets {name}" for name in counted))
    if found.lost:
        raise LessError(f"not all racks have it: {'; '.join(found.lost.values())}")
