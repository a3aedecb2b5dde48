"""``windtunnel network run``: a file of several jobs in, what each loses to the others out, kept as a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.base import atomic
from windtunnel.base.errors import UserError
from windtunnel.cluster.draw import picture
from windtunnel.cluster.fabric import Fabric, placements
from windtunnel.cluster.load import load_cluster
from windtunnel.cluster.model import TORI, Cluster, GroupPlacement
from windtunnel.network.aggregation.policy import RULES
from windtunnel.network.aggregation.policy.fixed import VALUES
from windtunnel.network.aggregation.twin.fabric import PACKET, alternatives
from windtunnel.network.dag import sources
from windtunnel.network.dag.sources import CollectiveCall, TrainingStep, lower
from windtunnel.network.scenario.page import write_page
from windtunnel.network.scenario.spec import ScenarioJobSpec, read_spec
from windtunnel.network.scenario.together import (
    SCHEDULES,
    SHARINGS,
    JobTimes,
    LinkUse,
    ScenarioTenant,
    together,
)
from windtunnel.store.runs import Store
from windtunnel.training.emulate.emulation import CAPABILITY as EMULATE
from windtunnel.training.emulate.emulation import Progress, no_progress
from windtunnel.training.emulate.exports import JOB
from windtunnel.training.emulate.graph import DTYPE_BYTES, Alternative, Collective, Group
from windtunnel.training.emulate.run import emulate
from windtunnel.training.emulate.twin.costs.collectives import call_cost
from windtunnel.training.emulate.twin.costs.profile import find_profile

CAPABILITY = "network.run"
MOST_TASKS = 1_000_000
ALONE = 10
"""Iterations of a job by itself, at most: they are all the same soon."""
LINKS = 12
"""Kinds of links that are used most, in the result."""
Plain = dict[str, Any]


@dataclass(frozen=True)
class _PlacedJob:
    """A job of the file: its ``step`` on ``ranks``; ``run``: the run that it is of."""

    name: str
    spec: ScenarioJobSpec
    step: TrainingStep
    ranks: tuple[int, ...]
    run: str = ""


def run(
    file: Path, sharing: str = "fifo", schedule: str = "fair", aggregation: str = "none",
    progress: Progress = no_progress,
) -> Plain:  # fmt: skip
    """Run the scenario in ``file``; the result as values of JSON. The run's folder has it as summary.json,
    and report.html.

    Raises:
        UserError: an option, the file, or a job is wrong, or the jobs do not fit.
        ScriptError: a job's script failed.
    """
    for option, value, accepted in (
        ("sharing", sharing, SHARINGS), ("schedule", schedule, SCHEDULES),
        ("aggregation", aggregation, ("none", *RULES)),
    ):  # fmt: skip
        if value not in accepted:
            raise UserError(f"`{option}`: {value!r} is unknown, accepted are {', '.join(accepted)}")
    spec = read_spec(file)
    cluster = load_cluster(spec.cluster)
    inputs = {
        "scenario": str(file), "cluster": cluster.name, "sharing": sharing, "schedule": schedule,
        "aggregation": aggregation, "placement": spec.placement, "iterations": spec.iterations,
    }  # fmt: skip
    run_record = Store.open().begin(CAPABILITY, inputs, spec.seed)
    with run_record.failing():
        steps = {
            name: _step(job, f"{file}: jobs.{name}", file.parent, cluster) for name, job in spec.jobs.items()
        }
        sizes = [step.ranks if step else spec.jobs[name].devices or 0 for name, (step, _) in steps.items()]
        try:
            places = placements(cluster, sizes, spec.placement)
        except UserError as error:
            raise UserError(f"{file}: {error}") from None
        jobs: list[_PlacedJob] = []
        for (name, job), (step, of), ranks in zip(spec.jobs.items(), steps.values(), places, strict=True):
            if step is None:
                progress(f"emulate {name}", len(jobs) / len(steps))
                step, of = _emulated(job, f"{file}: jobs.{name}", file.parent, cluster, ranks)
            jobs.append(_PlacedJob(name, job, step, ranks, of))
        progress("lower", 0.0)
        fabric = Fabric(cluster, spec.seed)
        rates = {fabric.name(link): rate for link, rate in enumerate(fabric.rates)}
        apart = [_lowered(job, Prices(fabric, job.ranks, (aggregation, 0))) for job in jobs]
        adding = [sum(_sums(job, cluster) for job in jobs if job is not other) for other in jobs]
        prices = [Prices(fabric, job.ranks, (aggregation, n)) for job, n in zip(jobs, adding, strict=True)]
        tenants = [_lowered(job, own) for job, own in zip(jobs, prices, strict=True)]
        progress("alone", 0.0)
        alone = [together([tenant], rates, min(spec.iterations, ALONE))[0][0] for tenant in apart]
        _check_size(file, tenants, alone, spec.iterations)
        draws = np.random.default_rng(spec.seed).random(len(jobs))
        begins = [float(draw * np.median(ran.seconds)) for draw, ran in zip(draws, alone, strict=True)]
        progress("together", 0.0)
        ran, uses = together(
            tenants, rates, spec.iterations, sharing=sharing, schedule=schedule, begins=begins
        )
        result: Plain = {
            "run_id": run_record.id, "directory": str(run_record.directory), **inputs, "seed": spec.seed,
            "hosts": cluster.hosts, "devices": cluster.world_size,
            "jobs": [
                _summary_of(*job, cluster) for job in zip(jobs, prices, tenants, alone, ran, strict=True)
            ],
            "links": _links(uses),
            "figures": "emulated; sending is fluid: no packets, queues or losses",
        }  # fmt: skip
        write_page(run_record.directory / "report.html", result, ran, picture(cluster))
        atomic.replace(run_record.directory / "summary.json", json.dumps(result, indent=1) + "\n")
    run_record.finish(result)
    return result


def _step(
    job: ScenarioJobSpec, field: str, folder: Path, cluster: Cluster
) -> tuple[TrainingStep | None, str]:
    """The step of a job of the file, and the run that it is of; None where it is yet to be emulated."""
    of = ""
    if job.script is not None:
        return None, of
    if job.training is not None:
        training = job.training
        step = sources.data_parallel(job.devices or 1, training.layers, training.bytes, training.seconds)
    elif job.mapreduce is not None:
        step = sources.mapreduce(job.devices or 1, job.mapreduce.bytes, job.mapreduce.seconds)
    elif job.chakra is not None:
        step = sources.of_chakra(folder / job.chakra, cluster.host.device)
    else:
        store = Store.open()
        emulate_run = store.newest(EMULATE, lambda _: True) if job.run == "last" else store.get(str(job.run))
        if emulate_run is None or emulate_run.capability != EMULATE:
            what = (
                "there is none" if emulate_run is None else f"{emulate_run.id} is of {emulate_run.capability}"
            )
            raise UserError(f"{field}: run is {job.run!r}, {what}; accepted is a run of `windtunnel emulate`")
        step, of = sources.of_file(emulate_run.directory / "graph" / JOB), emulate_run.id
    if job.devices is not None and job.devices != step.ranks:
        raise UserError(
            f"{field}: devices is {job.devices}, accepted is {step.ranks}, which the {job.kind} has"
        )
    return step, of


def _emulated(
    job: ScenarioJobSpec, field: str, folder: Path, cluster: Cluster, ranks: Sequence[int]
) -> tuple[TrainingStep, str]:
    """The step of a script, emulated now on what it has of the cluster."""
    part = _part(cluster, ranks)
    if job.script is None or part is None:
        raise UserError(
            f"{field}: devices is {job.devices}, accepted for a script are as many on each host, and no"
            " torus: there, emulate it by itself and give its run"
        )
    emulated = emulate(folder / job.script, [str(argument) for argument in job.args], part)
    file = emulated.directory / "graph" / JOB
    if not file.exists():
        raise UserError(
            f"{field}: {job.script} tells all ranks apart, accepted are jobs with classes of ranks"
        )
    return sources.of_file(file), emulated.summary.run_id


def _part(cluster: Cluster, ranks: Sequence[int]) -> Cluster | None:
    """What a job on ``ranks`` has of the cluster, as one of its own; None on a torus, or where it has not as
    many devices of each host."""
    host, hosts = cluster.host, len({cluster.host_of(rank) for rank in ranks})
    each = len(ranks) // hosts
    if each * hosts != len(ranks) or cluster.topology.kind in TORI:
        return None
    nics = max(1, host.nics * each // host.devices)
    name = f"{cluster.name} ({hosts}x{each} of it)"
    return replace(cluster, hosts=hosts, host=replace(host, devices=each, nics=nics), name=name)


class Prices:
    """What calls of a job on ``ranks`` take alone, as `windtunnel emulate` prices it, and put on links. With
    ``switches`` (policy, neighbours) all_reduces between hosts go by switches that add where that is cheaper:
    then every NIC sends its part of the sum once, as int32, and gets everybody's."""

    def __init__(self, fabric: Fabric, ranks: Sequence[int], switches: tuple[str, int] = ("none", 0)) -> None:
        self.fabric, cluster = fabric, fabric.cluster
        part = _part(cluster, ranks)
        self.cluster, self.ranks = (part, range(len(ranks))) if part else (cluster, ranks)
        self.profile = find_profile(cluster.host.device.name)
        self.ways = alternatives(self.cluster, *switches)
        self.added: set[CollectiveCall] = set()
        """Those that switches add up."""

    def seconds(self, call: CollectiveCall) -> float:
        """Of its slowest group."""
        shapes: dict[GroupPlacement, tuple[int, ...]] = {}
        for group in (tuple(self.ranks[rank] for rank in group) for group in call.groups):
            shapes.setdefault(self.cluster.placement(group), group)
        return max(self._group(call, group, self.ways) for group in shapes.values())

    def _group(self, call: CollectiveCall, group: tuple[int, ...], ways: Sequence[Alternative]) -> float:
        sent, got = call.nbytes, call.nbytes
        if call.kind == "gather":
            sent /= len(group)
        if call.kind == "scatter":
            got /= len(group)
        own = Collective(call.kind, 0, int(sent), int(got), call.dtype, backend=call.backend)
        return call_cost(own, Group("", group), self.cluster, self.profile, ways).seconds

    def loads(self, call: CollectiveCall, link_loads: dict[int, float]) -> dict[int, float]:
        """What ``call`` puts on links for each of its bytes, where a ring puts ``link_loads``."""
        group = tuple(self.ranks[rank] for rank in call.groups[0])
        if not self.ways or self._group(call, group, self.ways) >= self._group(call, group, ()):
            return link_loads
        self.added.add(call)
        wire = PACKET / VALUES / DTYPE_BYTES[call.dtype] / (2 * (len(group) - 1) / len(group))
        inside = ("device", "lanes")
        return {
            link: times * (1.0 if self.fabric.name(link).startswith(inside) else wire)
            for link, times in link_loads.items()
        }


def _check_size(
    file: Path, tenants: Sequence[ScenarioTenant], alone: Sequence[JobTimes], iterations: int
) -> None:
    slowest = max(float(np.median(ran.seconds)) for ran in alone)
    tasks = [
        len(tenant.lowered.job.tasks) * iterations * slowest / max(float(np.median(ran.seconds)), 1e-9)
        for tenant, ran in zip(tenants, alone, strict=True)
    ]
    if sum(tasks) > MOST_TASKS:
        most = tenants[int(np.argmax(tasks))].lowered.job.name
        raise UserError(
            f"{file}: {iterations} iterations of the slowest job are {sum(tasks):.3g} tasks of all, accepted"
            f" are {MOST_TASKS:,}: give fewer iterations, or leave out {most}"
        )


def _lowered(job: _PlacedJob, prices: Prices) -> ScenarioTenant:
    low = lower(job.name, job.step, prices.fabric, job.ranks, prices.seconds, prices.loads)
    return ScenarioTenant(low, job.spec.weight, job.spec.flows)


def _sums(job: _PlacedJob, cluster: Cluster) -> bool:
    """Whether a job has sums between hosts, for which it wants slots of switches."""
    return any(
        call.kind == "all_reduce" and len({cluster.host_of(job.ranks[rank]) for rank in call.groups[0]}) > 1
        for call in job.step.calls
    )


def _summary_of(
    job: _PlacedJob, prices: Prices, tenant: ScenarioTenant, alone: JobTimes, ran: JobTimes, cluster: Cluster
) -> Plain:
    own, step = float(np.median(alone.seconds)), job.step
    beside = np.array(ran.seconds)
    sums = sum(call.kind == "all_reduce" for call in step.calls)
    plain: Plain = {
        "name": job.name, "kind": job.spec.kind, "program": step.name, "run": job.run or None,
        "devices": step.ranks, "hosts": len({cluster.host_of(rank) for rank in job.ranks}),
        "weight": job.spec.weight, "tasks": len(tenant.lowered.job.tasks), "iterations": len(beside),
        "alone_s": own, "together_s": float(np.median(beside)),
        "together_p95_s": float(np.quantile(beside, 0.95)),
        "slowdown": float(np.median(beside)) / own, "path_s": ran.path, "alone_path_s": alone.path,
        "lost_s": ran.lost, "emulated_s": step.seconds, "emulated_on": step.cluster or None,
        "lowering_error": own / step.seconds - 1.0 if step.seconds and not prices.ways else None,
        "added_by_switches": f"{len(prices.added)} of {sums} kinds of all_reduce" if prices.ways else None,
    }  # fmt: skip
    return plain


def _links(uses: Sequence[LinkUse]) -> list[Plain]:
    """The busiest links of each kind that more than one call is on, or the busiest of all."""
    best: dict[str, tuple[LinkUse, int]] = {}
    for entry in uses:
        kind = entry.name.rpartition(" ")[0]
        old = best.get(kind)
        count = entry.count + (old[1] if old else 0)
        busier = old is None or sum(entry.by.values()) > sum(old[0].by.values())
        best[kind] = (entry if busier or old is None else old[0], count)
    rows = [
        {"kind": kind, "busiest": use.name, "used": count, "use": sum(use.by.values()), "by": use.by}
        for kind, (use, count) in best.items()
    ]
    return sorted(rows, key=lambda row: -float(row["use"]))[:LINKS]  # type: ignore[arg-type]
