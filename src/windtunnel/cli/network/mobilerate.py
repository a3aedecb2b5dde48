"""``windtunnel network mobilerate``: who sends how fast over a mobile link."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from windtunnel.cli import new_group
from windtunnel.cli.common import Json, LogFile, choice, print_json, print_table, quantity

if TYPE_CHECKING:
    from windtunnel.network.mobilerate.outcome import MobileWorld

TRACE = "near-stationary, driving, lossy, a file of Mahimahi's format or CSV, or a folder of files."
group = new_group("Send over mobile links at the full rate with a short queue (SIRA-H).")
Policies = Annotated[
    str, typer.Option(metavar="A,B,…", help="Policy of the sender: sira-h, sira-h-literal or sira.")
]
Seconds = Annotated[float, typer.Option(min=1, max=3600, help="Seconds that each sender sends.")]
Delay = Annotated[str, typer.Option(help="Round-trip time without queueing.")]
Packets = Annotated[int, typer.Option(min=1, max=2**20, help="Queue length of the link, in packets.")]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of generated traces and losses.")]


@group.command("run")
def run(
    trace: Annotated[str, typer.Option(help=TRACE)] = "near-stationary",
    policy: Policies = "sira-h,cubic,bbr,vegas", seconds: Seconds = 60.0, delay: Delay = "40 ms",
    packets: Packets = 500, seed: Seed = 0, as_json: Json = False,
) -> None:  # fmt: skip
    """Emulate senders on mobile links: link use and queueing delay of each.

    Beside ours there are cubic, reno, bbr, vegas, sprout (a forecast) and oracle (it knows the trace).

    Example: windtunnel network mobilerate run --trace driving --policy sira-h,cubic,bbr,vegas --json
    """
    from windtunnel.network.mobilerate.twin import ARMS, emulate
    from windtunnel.traces.bandwidth import traces

    arms, world = [choice("policy", name, ARMS) for name in policy.split(",")], _world(delay, packets)
    rows = [
        {"trace": sampled.name, "policy": arm, **emulate(sampled, arm, seconds, seed, world=world).plain()}
        for sampled in traces(trace, seconds, seed)
        for arm in arms
    ]
    _show("emulated", rows, as_json, seconds, world)


@group.command("link")
def link(
    trace: Annotated[str, typer.Argument(metavar="TRACE", help=TRACE)],
    program: Annotated[
        list[str] | None, typer.Argument(metavar="[-- PROGRAM]", help="Program to run over the link.")
    ] = None,
    policy: Policies = "sira-h,cubic,reno,bbr", seconds: Seconds = 20.0, delay: Delay = "40 ms",
    packets: Packets = 500, seed: Seed = 0,
    server: Annotated[str, typer.Option(help="A program for the other side of the link.")] = "",
    log: LogFile = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Send real packets over a mobile link: a TUN relay between two networks of this machine. Needs root.

    Ours are datagrams over UDP; cubic, reno, bbr this kernel's TCP. A program finds its server on 10.77.0.2.

    Example: windtunnel network mobilerate link near-stationary --seconds 20 --policy sira-h,cubic,bbr --json
    """
    import shlex

    from windtunnel.network.mobilerate import live
    from windtunnel.traces.bandwidth import traces

    links, world = traces(trace, seconds, seed), _world(delay, packets)
    if program:
        status = live.through(links[0], program, server=shlex.split(server), world=world, seed=seed)
        raise typer.Exit(status if status >= 0 else 128 - status)
    arms, rows = {arm: live.lacking(arm) for arm in policy.split(",")}, list[dict[str, Any]]()
    for sampled, (arm, why) in ((sampled, arm) for sampled in links for arm in arms.items()):
        row: dict[str, Any] = {"trace": sampled.name, "policy": arm}
        if why is None:
            measured = live.measure(sampled, arm, seconds, world=world, seed=seed, log=log)
            row |= {"late_p95_s": max(measured.late), "thrown_away": measured.thrown_away}
            row |= measured.result.plain() if measured.result else {"left_out": "every try came late"}
        else:
            row["left_out"] = why
        rows.append(row)
    _show("measured", rows, as_json, seconds, world)


def _world(delay: str, packets: int) -> MobileWorld:
    from windtunnel.network.mobilerate.outcome import MobileWorld

    return MobileWorld(quantity("delay", delay, "seconds", zero=True), packets)


def _show(kind: str, rows: list[dict[str, Any]], as_json: bool, duration: float, world: MobileWorld) -> None:
    from windtunnel.base.units import NONE, seconds

    if as_json:
        settings = {"figures": kind, "seconds": duration, "delay_s": world.delay, "packets": world.packets}
        return print_json(settings | {"results": rows})
    cells = []
    for row in rows:
        figures = [NONE] * 5
        if "left_out" not in row:
            waits = [seconds(row[f"queue_{name}_s"]) for name in ("mean", "p95")]
            rate = f"{row['rate_bytes_per_s'] * 8e-6:.2f} Mb/s"
            figures = [rate, f"{row['use']:.1%}", *waits, str(row["dropped"])]
        thrown = f"{row['thrown_away']} thrown away" if row.get("thrown_away") else ""
        cells.append((row["trace"], row["policy"], *figures, row.get("left_out", thrown)))
    print_table(
        ("trace", "policy", "rate", "of the link", "mean wait", "p95", "dropped", ""), cells, rules=False,
        note=f"{kind} · {duration:g} s each, an RTT of {seconds(world.delay)}, a queue of {world.packets} "
        "packets",
    )  # fmt: skip
