"""``windtunnel sandbox emulate``: hosts full of sandboxes, emulated from measured costs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from windtunnel.base import units
from windtunnel.base.errors import UserError
from windtunnel.cli.common import Json, choice, numbers, print_columns, print_json

if TYPE_CHECKING:
    from windtunnel.agents.sandbox.twin.questions import EmulationAnswers


def emulate(
    hosts: Annotated[int, typer.Option(min=1, max=1000, help="Number of hosts.")] = 4,
    cores: Annotated[int, typer.Option(min=1, max=1024, help="CPUs of each host.")] = 32,
    memory: Annotated[float, typer.Option(help="Memory of each host, in bytes.")] = 256e9,
    disk: Annotated[float, typer.Option(help="Disk bandwidth of a host, in bytes per second.")] = 1e9,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Concurrent checkpoints. Default: number of CPUs.")
    ] = None,
    density: Annotated[str, typer.Option(metavar="N,N,…", help="Sandboxes on each host.")] = "8,16,32,64,128",
    trace: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Traces to play. Default: generated ones.")
    ] = None,
    turns: Annotated[int, typer.Option(min=2, max=1000, help="Turns of a generated session.")] = 40,
    session_memory: Annotated[
        float, typer.Option(help="Median bytes of a session's services at its end.")
    ] = 256e6,
    run: Annotated[float, typer.Option(help="Median seconds of a command by itself.")] = 1.0,
    notice: Annotated[str, typer.Option(metavar="S,S,…", help="Seconds of notice.")] = "30,60,120",
    policy: Annotated[list[str] | None, typer.Option(help="Policies to compare; default: all.")] = None,
    costs: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="A profile by 'calibrate agents.sandbox'. Default: the user's own."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of sessions, starts and failures.")] = 0,
    as_json: Json = False,
) -> None:
    """Emulate hosts full of sandboxes: how many one bears, and what a notice saves.

    Every figure is emulated, from costs that were measured (see 'windtunnel calibrate agents.sandbox') and
    from the load of sessions; decisions and queues are those of live sandboxes.

    Example: windtunnel sandbox emulate --hosts 4 --density 16,64
    """
    from windtunnel.agents.sandbox.costs import load_costs
    from windtunnel.agents.sandbox.policy import POLICIES, PolicyName
    from windtunnel.agents.sandbox.traces import load
    from windtunnel.agents.sandbox.twin import SessionShape
    from windtunnel.agents.sandbox.twin.questions import EmulationSetting, answer
    from windtunnel.agents.sandbox.twin.world import EmulatedHost
    from windtunnel.base.plain import to_plain

    sizes = {"memory": memory, "disk": disk, "session_memory": session_memory, "run": run}
    for name, value in sizes.items():
        if not 0 < value < 1e18:
            raise UserError(f"`{name}` {value:g} is not accepted, accepted is a number above 0")
    profile = load_costs(costs)
    setting = EmulationSetting(
        machine=EmulatedHost(cores=cores, memory=memory, disk=disk, workers=workers),
        costs=profile.costs, hosts=hosts, seed=seed, turns=turns,
        traces=tuple(load(path) for path in trace or ()), shape=SessionShape(memory=session_memory, run=run),
    )  # fmt: skip
    answers = answer(
        setting, profile.origin,
        policies=cast("list[PolicyName]", [choice("policy", name, POLICIES) for name in policy or POLICIES]),
        numbers=sorted(set(numbers("density", density, int, 1, 2000))) or [1],
        notices=sorted(set(numbers("notice", notice, float, 0.001, 86400))),
        progress=lambda question: typer.echo(f"emulating: {question} …", err=True),
    )  # fmt: skip
    if as_json:
        print_json({"emulated": True, **to_plain(answers)}, indent=2)
    else:
        _show(answers)


def _show(answers: EmulationAnswers) -> None:
    shares = ", ".join(f"{name} {share:.0%}" for name, share in answers.classes.items())
    typer.echo(f"Emulated, not measured. {answers.setting}.")
    typer.echo(f"Turns: {shares}. {answers.assumed}.")
    typer.echo(f"Costs: {answers.origin}.")
    _table(
        "Density",
        ("policy", "sandboxes", "overhead", "gate p95", "p99", "hidden", "freeze", "CPU", "fits"),
        [
            (
                row.policy, str(row.density), f"{max(0.0, row.overhead):.2%}", units.seconds(row.gate_p95),
                units.seconds(row.gate_p99), f"{row.hidden:.1%}", units.seconds(row.freeze_p95),
                f"{row.cpu_busy:.0%}", "yes" if row.fits else "no",
            )
            for row in answers.densities
        ],
    )  # fmt: skip
    _table(
        "Where policies break: overhead above 1.9 %, or p95 of gate waits above 1 ms",
        ("policy", "bears", "breaks at", "searched up to", "memory holds"),
        [
            (row.policy, str(row.bears), str(row.breaks or "none found"), str(row.searched), str(row.fits))
            for row in answers.breaks
        ],
    )
    _table(
        "A host goes",
        ("policy", "notice", "turns lost", "work again", "whole"),
        [
            (
                row.policy, units.seconds(row.notice), f"{row.turns_lost:.2f}",
                units.seconds(row.seconds_lost), f"{row.saved:.0%}",
            )
            for row in answers.spots
        ],
    )  # fmt: skip


def _table(title: str, head: Sequence[str], rows: list[tuple[str, ...]]) -> None:
    typer.echo(f"\n{title} (emulated)")
    print_columns(head, rows, head[1:])
