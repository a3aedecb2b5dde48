"""Plans on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from windtunnel.base.units import size
from windtunnel.training.gradsync.run import Planned, verdict

SHOWN = 12


def show(planned: Planned, *, reasons: bool = False) -> None:
    """The verdict; then each group with its reason, or the plan in short and what it was compared with."""
    console, plan = Console(highlight=False), planned.plan
    console.print(f"[bold]{escape(verdict(plan))}[/]", *map(escape, plan.notes), sep="\n")
    numels = {tensor.name: tensor.numel for tensor in planned.profile.tensors}
    groups = Table(
        "gradients", "elements", "option", title="Plan, in the order of backward", title_justify="left"
    )
    for place, group in enumerate(plan.groups if reasons else plan.groups[:SHOWN]):
        first, last = group.tensors[0], group.tensors[-1]
        names = escape(first if first == last else f"{first} … {last} ({len(group.tensors)})")
        if reasons:
            console.print(f"[bold]{place}. {group.option.words()}[/]: {names}")
            console.print(f"   {escape(group.reason)}", style="dim")
        groups.add_row(names, f"{sum(numels[name] for name in group.tensors):,}", group.option.words())
    if reasons:
        return
    console.print(groups)
    if len(plan.groups) > SHOWN:
        console.print(f"and {len(plan.groups) - SHOWN} more groups", style="dim")
    columns = ("choice", "iteration", "times the steps", "to a loss", "sent by a rank")
    forecasts = Table(*columns, title="Predicted", title_justify="left")
    ours, *others = plan.forecasts
    best = sorted(others, key=lambda forecast: forecast.to_loss)[: SHOWN // 2]
    buckets = [forecast for forecast in others if forecast.choice.endswith("DDP's buckets")]
    for fromkey in dict.fromkeys([ours, *best, *buckets[:1]]):
        seconds, to_loss = (f"{number * 1e3:,.4g} ms" for number in (fromkey.seconds, fromkey.to_loss))
        forecasts.add_row(fromkey.choice, seconds, f"{fromkey.steps:.3g}", to_loss, size(fromkey.nbytes))
    forecasts.add_row("bound: codecs that take no time", f"{plan.bound * 1e3:,.4g} ms", "", "", "")
    console.print(forecasts)
    why = f"Why: [bold]windtunnel gradsync explain {planned.run}[/]   Files: {escape(str(planned.directory))}"
    console.print(why, soft_wrap=True)
