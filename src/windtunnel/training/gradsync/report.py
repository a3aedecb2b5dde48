"""Plans on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from windtunnel.base.units import size
from windtunnel.training.gradsync.run import Planned, verdict

SHOWN = 12


def show(made: Planned) -> None:
    """The verdict, the plan's groups in short, and what it was compared with."""
    console, plan = Console(), made.plan
    console.print(f"[bold]{verdict(plan)}[/]", highlight=False)
    for note in plan.notes:
        console.print(note, highlight=False)
    numels = {one.name: one.numel for one in made.profile.tensors}
    groups = Table(
        "gradients", "elements", "option", title="Plan, in the order of backward", title_justify="left"
    )
    for group in plan.groups[:SHOWN]:
        first, last = group.tensors[0], group.tensors[-1]
        names = first if len(group.tensors) == 1 else f"{first} … {last} ({len(group.tensors)})"
        elements = sum(numels[name] for name in group.tensors)
        groups.add_row(names, f"{elements:,}", group.option.words())
    console.print(groups)
    if len(plan.groups) > SHOWN:
        console.print(f"and {len(plan.groups) - SHOWN} more groups", style="dim")
    forecasts = Table("choice", "iteration", "sent by a rank", title="Predicted", title_justify="left")
    others = plan.forecasts[1:]
    buckets = [one for one in others if one.choice.endswith("DDP's buckets")]
    best = sorted(others, key=lambda one: one.seconds)[: SHOWN // 2]
    for one in dict.fromkeys([plan.forecasts[0], *best, *buckets[:1]]):
        forecasts.add_row(one.choice, f"{one.seconds * 1e3:,.4g} ms", size(one.nbytes))
    forecasts.add_row("bound: codecs that take no time", f"{plan.bound * 1e3:,.4g} ms", "")
    console.print(forecasts)
    console.print(
        f"Why: [bold]windtunnel gradsync explain {made.run}[/]   Files: {made.directory}",
        soft_wrap=True, highlight=False,
    )  # fmt: skip


def explained(made: Planned) -> None:
    """Each group with its reason."""
    console = Console()
    console.print(f"[bold]{verdict(made.plan)}[/]", highlight=False)
    for note in made.plan.notes:
        console.print(note, highlight=False)
    for place, group in enumerate(made.plan.groups):
        names = ", ".join(group.tensors[:3]) + (
            f" and {len(group.tensors) - 3} more" * (len(group.tensors) > 3)
        )
        console.print(f"[bold]{place}. {group.option.words()}[/]: {names}", highlight=False)
        console.print(f"   {group.reason}", style="dim", highlight=False)
