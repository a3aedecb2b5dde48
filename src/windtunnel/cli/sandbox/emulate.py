"""``windtunnel sandbox emulate``: hosts full of sandboxes, emulated from measured costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from windtunnel.base import units
from windtunnel.base.errors import UserError

if TYPE_CHECKING:
    from windtunnel.agents.sandbox.twin.answers import Answers

Number = TypeVar("Number", int, float)


def register(group: typer.Typer) -> None:
    """Add the command to the verb ``sandbox``."""
    group.command("emulate")(emulate)


def emulate(
    hosts: Annotated[int, typer.Option(min=1, max=1000, help="Hosts, all alike.")] = 4,
    cores: Annotated[int, typer.Option(min=1, max=1024, help="CPUs of a host.")] = 32,
    memory: Annotated[float, typer.Option(help="Bytes of memory of a host.")] = 256e9,
    disk: Annotated[float, typer.Option(help="Bytes a second of a host's disk.")] = 1e9,
    network: Annotated[float, typer.Option(help="Bytes a second of a host's network.")] = 1.25e9,
    workers: Annotated[int | None, typer.Option(min=1, help="Checkpoints at once; default: CPUs.")] = None,
    density: Annotated[str, typer.Option(metavar="N,N,…", help="Sandboxes on each host.")] = "8,16,32,64,128",
    trace: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Traces to play; default: generated ones.")
    ] = None,
    turns: Annotated[int, typer.Option(min=2, max=1000, help="Turns of a generated session.")] = 40,
    session_memory: Annotated[
        float, typer.Option(help="Bytes that a session's services hold at its end, median.")
    ] = 256e6,
    run: Annotated[float, typer.Option(help="Seconds of a command alone, median.")] = 1.0,
    notice: Annotated[str, typer.Option(metavar="S,S,…", help="Seconds of notice.")] = "30,60,120",
    forks: Annotated[
        int, typer.Option(min=1, max=10_000, help="Forks of one checkpoint, over all hosts.")
    ] = 40,
    policy: Annotated[list[str] | None, typer.Option(help="Policies to compare; default: all.")] = None,
    costs: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="A profile of 'calibrate agents.sandbox'; default: the user's own."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of sessions, starts and failures.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON value instead of tables.")] = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with plots.")] = None,
) -> None:
    """Emulate hosts full of sandboxes: how many one bears, what a notice saves, how fast forks run.

    Every figure is emulated, from costs that were measured (see 'windtunnel calibrate agents.sandbox') and
    from the load of sessions; decisions and queues are those of live sandboxes.

    Example: windtunnel sandbox emulate --hosts 4 --density 16,64 --html density.html
    """
    from dataclasses import asdict

    from windtunnel.agents.sandbox.costs import load_costs
    from windtunnel.agents.sandbox.traces.schema import load
    from windtunnel.agents.sandbox.twin.answers import answer
    from windtunnel.agents.sandbox.twin.hosts import ARMS, EmulatedHost
    from windtunnel.agents.sandbox.twin.loads import Shape
    from windtunnel.agents.sandbox.twin.page import write_page
    from windtunnel.agents.sandbox.twin.questions import Setting

    for name, value in (
        ("memory", memory),
        ("disk", disk),
        ("network", network),
        ("session-memory", session_memory),
        ("run", run),
    ):
        if not 0 < value < 1e18:
            raise UserError(f"sandbox emulate: {name} {value:g} is not accepted; use a positive number")
    names = policy or list(ARMS)
    for name in names:
        if name not in ARMS:
            raise UserError(f"sandbox emulate: policy {name!r} is not accepted; use {', '.join(ARMS)}")
    numbers = _numbers("density", density, int, 1, 2000)
    notices = _numbers("notice", notice, float, 0.001, 86400)
    profile = load_costs(costs)
    setting = Setting(
        machine=EmulatedHost(cores=cores, memory=memory, disk=disk, network=network, workers=workers),
        costs=profile.costs,
        hosts=hosts,
        seed=seed,
        turns=turns,
        traces=tuple(load(path) for path in trace or ()),
        shape=Shape(memory=session_memory, run=run),
    )
    found = answer(
        setting,
        profile.origin,
        policies=[ARMS[name] for name in names],
        numbers=numbers,
        notices=notices,
        forks=forks,
        progress=lambda question: typer.echo(f"emulating: {question} …", err=True),
    )
    if html is not None:
        write_page(html, found, f"Sandboxes on {hosts} hosts of {cores} cores")
    if as_json:
        typer.echo(json.dumps({"emulated": True, **asdict(found)}, indent=2))
    else:
        _show(found)
    if html is not None:
        typer.echo(f"page: {html}", err=True)


def _numbers(name: str, text: str, kind: type[Number], least: float, most: float) -> list[Number]:
    """Ascending, each once."""
    try:
        found = sorted({kind(part) for part in text.split(",")})
    except ValueError:
        found = []
    if not found or not all(least <= value <= most for value in found):
        raise UserError(
            f"sandbox emulate: {name} {text!r} is not accepted; use numbers from {least:g} to {most:g} "
            "with commas between"
        )
    return found


def _show(found: Answers) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console()

    def show(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
        table = Table(
            title=f"{title} (emulated)", box=SIMPLE_HEAD, title_justify="left", padding=(0, 1, 0, 0)
        )
        for place, column in enumerate(columns):
            table.add_column(column, justify="left" if place == 0 else "right", no_wrap=place == 0)
        for row in rows:
            table.add_row(*row)
        console.print(table)

    console.print(f"Emulated, not measured. {found.setting}.", highlight=False)
    shares = ", ".join(f"{name} {share:.0%}" for name, share in found.classes.items())
    console.print(f"Turns: {shares}. {found.assumed}.", highlight=False)
    console.print(f"Costs: {found.origin}.", highlight=False)
    show(
        "Density",
        ("policy", "sandboxes", "overhead", "gate p95", "p99", "hidden", "freeze", "CPU", "fits"),
        [
            (
                row.policy,
                str(row.density),
                f"{max(0.0, row.overhead):.2%}",
                *(units.seconds(value) for value in (row.gate_p95, row.gate_p99)),
                f"{row.hidden:.1%}",
                units.seconds(row.freeze_p95),
                f"{row.cpu_busy:.0%}",
                "yes" if row.fits else "no",
            )
            for row in found.densities
        ],
    )
    show(
        "Where policies break: overhead above 1.9 %, or p95 of gate waits above 1 ms",
        ("policy", "bears", "breaks at", "memory holds"),
        [
            (
                row.policy,
                str(row.bears),
                str(row.breaks) if row.breaks is not None else f"none up to {row.searched}",
                str(row.fits),
            )
            for row in found.breaks
        ],
    )
    show(
        "A host goes",
        ("policy", "notice", "turns lost", "work again", "whole"),
        [
            (
                row.policy,
                units.seconds(row.notice),
                f"{row.turns_lost:.2f}",
                units.seconds(row.seconds_lost),
                f"{row.saved:.0%}",
            )
            for row in found.spots
        ],
    )
    show(
        "Forks of one checkpoint",
        ("forks", "hosts", "lazy", "first", "median", "last"),
        [
            (
                str(row.forks),
                str(row.hosts),
                "yes" if row.lazy else "no",
                *(units.seconds(value) for value in (row.first, row.median, row.last)),
            )
            for row in found.fanouts
        ],
    )
    show(
        "The urgent queue: gate waits with it / without",
        ("policy", "sandboxes", "workers", "mean", "p95", "p99"),
        [
            (
                row.policy,
                str(row.density),
                str(row.workers),
                f"{units.seconds(row.mean)} / {units.seconds(row.mean_fifo)}",
                f"{units.seconds(row.p95)} / {units.seconds(row.p95_fifo)}",
                f"{units.seconds(row.p99)} / {units.seconds(row.p99_fifo)}",
            )
            for row in found.urgents
        ],
    )
    last = {row.policy: row for row in found.growths}
    show(
        "The store of one host at the end",
        ("policy", "checkpoints", "stored", "written"),
        [
            (row.policy, str(row.checkpoints), f"{row.stored / 1e6:.1f} MB", f"{row.written / 1e6:.1f} MB")
            for row in last.values()
        ],
    )
