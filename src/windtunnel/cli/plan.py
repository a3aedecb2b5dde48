"""``windtunnel plan resilience``: what a failure rate will cost a job, and what to do about it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windtunnel.base.errors import UserError

if TYPE_CHECKING:
    from windtunnel.cluster.model import Cluster
    from windtunnel.training.goodput.advise import Advice, Question
    from windtunnel.training.goodput.twin.model import Costs

group = typer.Typer(
    no_args_is_help=True, help="What a cluster's failures will cost, and what to do about them."
)

MOST_FAILURES = 100_000


def register(app: typer.Typer) -> None:
    """Add the verb to ``app``."""
    app.add_typer(group, name="plan")


@group.callback()
def _plan() -> None:
    pass


@group.command("resilience")
def resilience(
    cluster: Annotated[str, typer.Option(help="A name of the catalogue such as h100-sxm:128x8, or a file.")],
    state_bytes: Annotated[
        str,
        typer.Option(metavar="BYTES", help="Parameters and optimizer state of the job: 1.1e12, '1.1 TB'."),
    ],
    mtbf: Annotated[
        str | None, typer.Option(metavar="TIME", help="Mean time between failures of the job: 3h, 600.")
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="Instead of --mtbf: llama3, spot:p3, spot:g4dn (with their published statistics), or a file"
            " of lines 'milliseconds,add|remove,host' or of SkyPilot (.json).",
        ),
    ] = None,
    step_time: Annotated[str, typer.Option(metavar="TIME", help="Of one step, without failures.")] = "10s",
    step_overhead: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Of it, what fewer hosts do not lengthen (optimizer ..); none."),
    ] = None,
    days: Annotated[float, typer.Option(min=0.01, max=3650, help="How far to look ahead.")] = 30.0,
    software: Annotated[
        float, typer.Option(min=0, max=1, help="Part of the failures that leaves the host alive.")
    ] = 0.13,
    leaf_share: Annotated[
        float, typer.Option(min=0, max=1, help="Part of the host failures that takes a whole leaf switch.")
    ] = 0.0,
    replace: Annotated[str, typer.Option(metavar="TIME", help="Until a lost host is replaced.")] = "10min",
    spares: Annotated[int, typer.Option(min=0, help="Hosts that wait idle.")] = 0,
    detect: Annotated[str, typer.Option(metavar="TIME", help="Until a loss is noticed.")] = "1s",
    start: Annotated[str, typer.Option(metavar="TIME", help="For a new process until it can train.")] = "60s",
    storage: Annotated[
        str, typer.Option(metavar="RATE", help="Bandwidth of the shared storage, for all hosts together.")
    ] = "20 GB/s",
    host_memory: Annotated[
        str, typer.Option(metavar="BYTES", help="Memory of a host that checkpoints may take.")
    ] = "1 TB",
    network_share: Annotated[
        float, typer.Option(min=0.001, max=1, help="Part of a host's NICs that replication may take.")
    ] = 0.25,
    stages: Annotated[
        int, typer.Option(min=0, help="Hosts of one pipeline; 0: the fewest that hold the state twice.")
    ] = 0,
    microbatches: Annotated[
        int, typer.Option(min=0, help="Of one step; 0: four for every stage of every pipeline.")
    ] = 0,
    layers: Annotated[int, typer.Option(min=1, max=1000, help="Of the model, for pipelines.")] = 96,
    costs: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Costs measured by 'windtunnel bench training.checkpoint'."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the failures.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON value.")] = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with plots.")] = None,
) -> None:
    """Recommend interval, copies, placement and the way to go on, with the reasons.

    All of it is emulated: a trace of failures is drawn, and each way to go on goes through it with the
    decisions of the policies that also run live.

    Example: windtunnel plan resilience --cluster h100-sxm:128x8 --state-bytes 1.1e12 --trace llama3
    """
    from dataclasses import replace as replaced

    import numpy as np

    from windtunnel.cli import shown_progress
    from windtunnel.cluster.load import load_cluster
    from windtunnel.traces.failures import Trace, load, poisson
    from windtunnel.training.goodput.advise import Question, advise
    from windtunnel.training.goodput.twin.model import Costs, Job

    what = load_cluster(cluster)
    state = quantity(state_bytes, "bytes", "--state-bytes")
    nic = what.host.nic_bandwidth * what.host.nics * what.host.nic.efficiency
    device_memory = what.host.devices * what.host.device.memory_bytes
    pipeline = stages or max(1, -(-int(2 * state) // int(device_memory)))
    if pipeline > what.hosts:
        raise UserError(
            f"plan: {what.hosts} hosts of {cluster} do not hold a state of {state_bytes} twice in device"
            f" memory, {pipeline} would; give more hosts or --stages"
        )
    replicas = what.hosts // pipeline
    job = Job(
        what.hosts,
        quantity(step_time, "seconds", "--step-time"),
        state,
        pipeline,
        microbatches or 4 * pipeline * replicas,
        max(layers, pipeline),
    )
    overhead = quantity(step_overhead, "seconds", "--step-overhead") if step_overhead else 0.0
    if not 0 <= overhead < job.step_time:
        raise UserError(f"plan: --step-overhead {step_overhead} is no part of --step-time {step_time}")
    job = replaced(job, overhead=overhead)
    if job.microbatches < replicas:
        raise UserError(
            f"plan: --microbatches {job.microbatches} is fewer than the {replicas} pipelines;"
            f" at least {replicas} are needed"
        )
    phases = Costs(
        detect=quantity(detect, "seconds", "--detect"),
        start=quantity(start, "seconds", "--start"),
        replace=quantity(replace, "seconds", "--replace"),
        memory_bandwidth=what.host.devices * what.host.pcie.bandwidth * what.host.pcie.efficiency,
        peer_bandwidth=nic * network_share,
        storage_bandwidth=quantity(storage, "bytes/s", "--storage"),
    )
    if costs is not None:
        phases = measured_costs(costs, phases)
    horizon = days * 86400
    leaf = what.topology.hosts_per_leaf if what.leaves else what.hosts
    domains = tuple(f"leaf {host // leaf}" for host in range(what.hosts))
    random = np.random.default_rng(seed)
    if mtbf is not None and trace is None:
        mean = quantity(mtbf, "seconds", "--mtbf")
        _bound(horizon / mean, f"--mtbf {mtbf}", days)
        drawn = poisson(
            what.hosts,
            mean,
            horizon,
            random,
            software=software,
            domain_size=leaf,
            domain_share=leaf_share,
        )
        told = Trace(drawn, horizon, replaced=False)
    elif trace is not None and mtbf is None:
        told = load(trace, what.hosts, horizon, random, per_host=what.host.devices, domain_size=leaf)
        _bound(len(told.losses), f"--trace {trace}", days)
        if not told.losses:
            raise UserError(f"plan: --trace {trace}: no host is lost in it; there is nothing to plan for")
        mean, software, leaf_share = told.mtbf, told.software, told.wide
    else:
        raise UserError("plan: one of --mtbf and --trace is needed, and not both")
    if told.replaced:  # hosts come when the trace says so
        phases = replaced(phases, replace=math.inf)
    question = Question(
        job,
        phases,
        mean,
        told.seconds,
        quantity(host_memory, "bytes", "--host-memory"),
        domains,
        software,
        spares,
        leaf_share,
        away=told.away if told.replaced else None,
    )
    with shown_progress("plan") as progress:
        advice = advise(question, told.changes, progress)
    if html is not None:
        from windtunnel.training.goodput.page import write_page

        write_page(html, cluster, question, advice)
    if as_json:
        typer.echo(json.dumps(plain(question, advice, len(told.losses))))
        return
    show(what, question, advice, len(told.losses), html)


def _bound(failures: float, option: str, days: float) -> None:
    if failures > MOST_FAILURES:
        raise UserError(
            f"plan: {option} over --days {days:g} gives {failures:.0f} failures;"
            f" at most {MOST_FAILURES} are taken"
        )


def quantity(text: str, unit: str, option: str) -> float:
    """``text`` in ``unit``, as users write quantities. Raises `UserError`."""
    from windtunnel.base.units import parse_quantity

    try:
        return parse_quantity(text, unit)
    except ValueError as error:
        raise UserError(f"plan: {option} {text!r} is no quantity; {error}") from None


def measured_costs(path: Path, given: Costs) -> Costs:
    """``given``, with what was measured in ``path`` instead. Raises `UserError`."""
    from dataclasses import asdict, replace

    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"plan: --costs {path} is no JSON file: {error}") from None
    known = asdict(given)
    if not isinstance(found, dict) or not set(found) <= set(known):
        raise UserError(f"plan: --costs {path} must be an object with fields among {', '.join(known)}")
    for name, value in found.items():
        if isinstance(value, bool) != isinstance(known[name], bool) or not isinstance(value, int | float):
            raise UserError(f"plan: --costs {path}: {name} is {value!r}; a number is accepted")
        if not value >= 0 or (name.endswith("bandwidth") and not 0 < value < math.inf):
            least = "above 0" if name.endswith("bandwidth") else "from 0 up"
            raise UserError(f"plan: --costs {path}: {name} is {value!r}; a number {least} is accepted")
    return replace(given, **found)


def plain(question: Question, advice: Advice, failures: int) -> dict[str, Any]:
    """The advice as values of JSON."""
    from dataclasses import asdict

    chosen = advice.chosen
    return {
        "origin": "emulated",
        "failures": failures,
        "copies": chosen.copies,
        "placement": chosen.placement.kind,
        "checkpoint_every": chosen.every,
        "storage_every": chosen.storage_every,
        "memory_per_host": chosen.memory,
        "scheme": advice.scheme,
        "reasons": advice.reasons,
        "job": asdict(question.job),
        # JSON knows no infinity: null says that hosts come when the trace says so
        "costs": {
            name: value if math.isfinite(value) else None for name, value in asdict(question.costs).items()
        },
        "schemes": [
            {
                "name": result.scheme,
                "goodput": result.goodput,
                "steps": result.steps,
                "redone": result.redone,
                "failures": result.failures,
                "from_storage": result.from_storage,
                "phases": dict(result.phases),
            }
            for result in advice.results
        ],
    }


def show(cluster: Cluster, question: Question, advice: Advice, failures: int, html: Path | None) -> None:
    """Print the advice."""
    from rich.console import Console
    from rich.table import Table

    from windtunnel.base.units import amount

    console = Console()
    job, costs = question.job, question.costs
    replicas = job.hosts // job.stages
    console.print(
        f"{cluster.name}: {job.hosts} hosts, {amount(job.state_bytes)} of state,"
        f" steps of {job.step_time:g} s, {replicas} pipelines of {job.stages} hosts"
    )
    after = f"after {costs.replace:g} s" if math.isfinite(costs.replace) else "when the trace says so"
    console.print(
        f"{failures} failures in {question.horizon / 86400:g} days (mean {question.mtbf / 3600:.3g} h,"
        f" {question.software:.0%} software); a host is replaced {after}; between hosts"
        f" {amount(costs.peer_bandwidth)}/s for checkpoints, to storage {amount(costs.storage_bandwidth)}/s",
        style="dim",
        highlight=False,
    )
    table = Table(
        title="Copies in memory: bytes of a host, checkpoint interval, recovery when two hosts are lost"
    )
    for name in ("copies", "memory", "fits", "every", "two lost", "fall to storage"):
        table.add_column(name, justify="right")
    for choice in advice.choices:
        mark = "→ " if choice is advice.chosen else ""
        steps = "step" if choice.every == 1 else f"{choice.every} steps"
        table.add_row(
            f"{mark}{choice.copies}",
            amount(choice.memory),
            "yes" if choice.fits else "no",
            steps,
            f"{choice.pair:.2%}",
            f"{choice.fallbacks:.3g} times",
        )
    console.print(table)
    results = Table(title=f"Ways to go on, {question.horizon / 86400:g} days (emulated)")
    results.add_column("")
    results.add_column("goodput", justify="right")
    groups = {
        "slower": ("slow",),
        "saving": ("checkpoint",),
        "redone": ("redo",),
        "waiting": ("wait",),
        "recovering": ("detect", "start", "regroup", "load", "join"),
    }
    for name in groups:
        results.add_column(name, justify="right")
    for result in sorted(advice.results, key=lambda result: -result.goodput):
        shares = [
            f"{sum(result.phases[phase] for phase in phases) / result.horizon:.2%}"
            for phases in groups.values()
        ]
        mark = "→ " if result.scheme == advice.scheme else ""
        results.add_row(f"{mark}{result.scheme}", f"{result.goodput:.2%}", *shares)
    console.print(results)
    console.print("Recommended", style="bold")
    for reason in advice.reasons:
        console.print(f"  • {reason}", highlight=False)
    if html is not None:
        console.print(f"Plots  {html}")
