"""``windtunnel gradsync``: whether compressing gradients pays, which and how; then do it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from windtunnel.cli import SCRIPT, new_group
from windtunnel.cli.common import Arguments, Json, Script, print_json, print_table

if TYPE_CHECKING:
    from windtunnel.training.gradsync.model import GradientGroup
    from windtunnel.training.gradsync.run import Planned

group = new_group("Choose how gradients are compressed and synchronised.")
SHOWN = 12
"""Groups of a plan."""
Ranks = Annotated[int, typer.Option(min=1, help="Processes that train, on this host.")]


@group.command("profile", context_settings=SCRIPT)
def profile(
    script: Script,
    arguments: Arguments = None,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="File for the profile.")] = Path(
        "profile.json"
    ),
    ranks: Ranks = 2,
    codecs: Annotated[
        list[str] | None, typer.Option("--codec", help="A codec to measure, such as dragonn:0.01.")
    ] = None,
) -> None:
    """Measure a script's gradients, codecs and collectives with real processes. The script ends afterwards.

    Example: windtunnel gradsync profile --ranks 2 examples/train_resnet.py --steps 10
    """
    from windtunnel.training.gradsync.live.script import profile_script

    profile_script(script, arguments or (), ranks, out, codecs or ())
    typer.echo(f"Profile  {out}")


@group.command("apply", context_settings=SCRIPT)
def apply(
    plan: Annotated[Path, typer.Argument(metavar="PLAN", help="A file of a plan.")],
    script: Script,
    arguments: Arguments = None,
    ranks: Ranks = 2,
) -> None:
    """Run a script with a plan for its gradients.

    Example: windtunnel gradsync apply plan.json examples/train_resnet.py --steps 50
    """
    from windtunnel.training.gradsync.live.script import apply_to_script

    apply_to_script(script, arguments or (), ranks, plan)


@group.command("plan", context_settings=SCRIPT)
def plan(
    script: Annotated[
        str | None, typer.Argument(metavar="SCRIPT", help="A torchrun-style training script, emulated.")
    ] = None,
    arguments: Arguments = None,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", "-c", help="A name such as v100:8x8,nic=ethernet-25, or a file."),
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A measured profile instead of a script.")
    ] = None,
    codecs: Annotated[
        list[str] | None,
        typer.Option("--codec", help="A codec that may be used. Default: all that need no further steps."),
    ] = None,
    lossy: Annotated[
        bool, typer.Option("--lossy", help="Allow codecs that need more steps to the same loss.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the codecs' random numbers.")] = 0,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE", help="File for the plan.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Decide before the run which gradients to compress, with which codec, and in which groups.

    Example: windtunnel gradsync plan --cluster v100:8x8,nic=ethernet-25 examples/train_resnet.py
    """
    from windtunnel.base.importing import uncollected

    with uncollected():
        from windtunnel.cli import progress_bar
        from windtunnel.training.gradsync.files import check_place, write
        from windtunnel.training.gradsync.run import plan_run

    if out is not None:
        check_place(out)
    with progress_bar("gradsync plan") as progress:
        planned = plan_run(
            script, arguments or (), cluster=cluster, profile=profile, codecs=codecs or (), seed=seed,
            lossy=lossy, progress=progress,
        )  # fmt: skip
    if out is not None:
        write(out, planned.plan)
    if as_json:
        return print_json(planned.plain())
    _show(planned)


@group.command("explain")
def explain(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The id of a plan's run, or last.")] = "last",
    as_json: Json = False,
) -> None:
    """Explain why a plan gave each group of gradients its option.

    Example: windtunnel gradsync explain last
    """
    from windtunnel.training.gradsync.run import stored

    planned = stored(run)
    if as_json:
        return print_json(planned.plain())
    _headline(planned)
    for place, gradients in enumerate(planned.plan.groups):
        typer.echo(f"{place}. {gradients.option.words()}: {_names(gradients)}\n   {gradients.reason}")


def _headline(planned: Planned) -> None:
    from windtunnel.training.gradsync.run import verdict

    for line in (verdict(planned.plan), *planned.plan.notes):
        typer.echo(line)


def _names(gradients: GradientGroup) -> str:
    first, last = gradients.tensors[0], gradients.tensors[-1]
    return first if first == last else f"{first} … {last} ({len(gradients.tensors)})"


def _show(planned: Planned) -> None:
    """The plan in short, and what it was compared with."""
    from windtunnel.base.units import size

    plan = planned.plan
    _headline(planned)
    numels = {tensor.name: tensor.numel for tensor in planned.profile.tensors}
    print_table(
        ("gradients", ">elements", "option"),
        [
            (_names(one), f"{sum(numels[name] for name in one.tensors):,}", one.option.words())
            for one in plan.groups[:SHOWN]
        ],
        "Plan, in the order of backward",
        f"and {len(plan.groups) - SHOWN} more groups" if len(plan.groups) > SHOWN else "",
    )
    ours, *others = plan.forecasts
    best = sorted(others, key=lambda forecast: forecast.to_loss)[: SHOWN // 2]
    rows = [
        (
            one.choice, f"{one.seconds * 1e3:,.4g} ms", f"{one.steps:.3g}", f"{one.to_loss * 1e3:,.4g} ms",
            size(one.nbytes),
        )
        for one in dict.fromkeys([ours, *best, others[0]])
    ]  # fmt: skip
    rows.append(("bound: codecs that take no time", f"{plan.bound * 1e3:,.4g} ms", "", "", ""))
    head = ("choice", ">iteration", ">times the steps", ">to a loss", ">sent by a rank")
    print_table(head, rows, "Predicted")
    typer.echo(f"Why: windtunnel gradsync explain {planned.run}   Files: {planned.directory}")
