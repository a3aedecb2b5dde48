"""``windtunnel network multicast``: one rack to many, over passive splitters."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from windtunnel.base.errors import LessError, UserError
from windtunnel.cli import new_group
from windtunnel.cli.common import Json, LogFile, emit, numbers, quantity

group = new_group("From one rack to many over passive splitters (Shufflecast).")
Split = Annotated[int, typer.Option("--split", help="Outputs of each splitter (p).")]


@group.command("plan")
def plan(
    racks: Annotated[
        int, typer.Option(help="Number of racks, k * p^k: 8, 24, 64 with p = 2; 18, 81; 32, 192.")
    ],
    splitter: Split = 2,
    sources: Annotated[str, typer.Option("--from", help="Racks that send to all others, such as 0,3.")] = "0",
    size: Annotated[str, typer.Option(help="Bytes that each sends.")] = "1 GB",
    rate: Annotated[str, typer.Option(help="Rate of each port.")] = "100 Gb/s",
    hop: Annotated[str, typer.Option(help="Latency of a hop between racks.")] = "1 us",
    packet: Annotated[str, typer.Option(help="Packet size in bytes.")] = "9 kB",
    loss: Annotated[
        float, typer.Option(help="Packet loss at each receive port. Adds a packet-level emulation.")
    ] = 0,
    failed: Annotated[
        list[str] | None,
        typer.Option("--fail", metavar="RACK|FIBRE", help="A failed transmitter (3) or fibre (3-6)."),
    ] = None,
    parts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="YAML file with power, prices and losses of your parts."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Plan a multicast: relay racks, concurrent multicasts, and the time compared with an electrical network.

    Times are emulated. --json has every rack's rules.

    Example: windtunnel network multicast plan --racks 24 --split 2 --from 0,5 --size 10GB
    """
    from windtunnel.network.multicast import planning
    from windtunnel.network.multicast.twin import MulticastWorld

    _check_loss(loss)
    world = MulticastWorld(
        quantity("rate", rate, "bytes/s"), quantity("hop", hop, "seconds"),
        int(quantity("packet", packet, "bytes")), loss,
    )  # fmt: skip
    result = planning.plan(
        racks, splitter, numbers("sources", sources, int, 0), quantity("size", size, "bytes"),
        world, failed or (), planning.read_parts(parts) if parts else None,
    )  # fmt: skip
    emit(as_json, result, _lines(racks, splitter, result))


def _lines(racks: int, splitter: int, planned: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{racks} racks, splitters of {splitter}: {planned['columns']} columns,"
        f" {planned['relay_groups']} relay groups, {planned['hops']} hops"
    )
    for number, senders in enumerate(planned["rounds"], 1):
        yield f"round {number}           from {', '.join(map(str, senders))}"
    yield f"transmissions     {', '.join(map(str, planned['transmissions']))}"
    for name, result in planned["emulated"].items():
        more = f", {result['repairs']:,} repairs" if result["repairs"] else ""
        gigabytes = result["bytes_sent"] / 1e9
        yield f"{name:<27} {result['seconds'] * 1e3:>12,.3f} ms  {gigabytes:,.2f} GB sent{more}"
    for name, part in (planned["parts"] or {}).items():
        lost = f", split loss {part['split_loss_db']:.1f} dB" if "split_loss_db" in part else ""
        yield f"{name:<27} {part['watts']:,.1f} W, price {part['price']:,.0f}{lost}"


def _check_loss(loss: float) -> None:
    if not 0 <= loss < 1:
        raise UserError(f"`loss` {loss:g} is not accepted; accepted is a share from 0 to less than 1")


@group.command("send")
def send(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file to send.")],
    racks: Annotated[int, typer.Option(help="Number of emulated racks, k * p^k.")] = 8,
    splitter: Split = 2,
    source: Annotated[int, typer.Option("--from", help="The rack that sends.")] = 0,
    rate: Annotated[str, typer.Option(help="Rate of each port.")] = "100 Mb/s",
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Write received files to FOLDER/rack-N. Default: memory only."),
    ] = None,
    loss: Annotated[float, typer.Option(help="Share of packets that racks drop, for tests.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of dropped packets.")] = 0,
    deadline: Annotated[float, typer.Option(help="Time limit in seconds.")] = 600.0,
    log: LogFile = None,
    as_json: Json = False,
) -> None:
    """Send a file to all racks of a fabric made of processes, network namespaces and tc on this machine.

    Every rack holds what it got against a digest. A killed rack is reported, and the others get
    the file all the same. Needs root; nothing of it is left afterwards, whoever is killed.

    Example: windtunnel network multicast send weights.bin --racks 8 --split 2 --rate 100Mb/s --loss 0.05
    """
    from functools import partial

    from windtunnel.network.multicast.live.rack import serve
    from windtunnel.network.multicast.live.racks import Racks
    from windtunnel.network.multicast.live.send import send as run
    from windtunnel.network.multicast.policy.shuffle import shuffle_of

    _check_loss(loss)
    if not file.is_file():
        raise UserError(f"{file}: there is no such file, accepted is one to send")
    standing = Racks(shuffle_of(racks, splitter), quantity("rate", rate, "bytes/s"), partial(serve, parts={}))
    try:
        sent = run(standing, file, source, out=out, loss=loss, seed=seed, log=log, deadline=deadline)
    finally:
        standing.close()
    counts = {name: sent.total(name) for name in ("relayed", "asked", "answered", "refused")}
    result = {"bytes": sent.nbytes, "seconds": sent.seconds, "racks": sorted(sent.racks), "lost": sent.lost}
    lines = (
        f"{sent.nbytes:,} bytes to {len(sent.racks) - 1} racks in {sent.seconds * 1e3:,.0f} ms",
        ", ".join(f"{count:,} packets {name}" for name, count in counts.items()),
    )
    emit(as_json, result | counts, lines)
    if sent.lost:
        raise LessError(f"not all racks have it: {'; '.join(sent.lost.values())}")
