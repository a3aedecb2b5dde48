"""From what a user says of a job, its cluster and their failures to the question that `advise` answers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from windtunnel.base.errors import UserError
from windtunnel.base.units import parse_quantity
from windtunnel.cluster.load import load_cluster
from windtunnel.cluster.model import Cluster
from windtunnel.traces.failures import Change, Trace, load, poisson
from windtunnel.training.goodput.advise import advise
from windtunnel.training.goodput.command import commands
from windtunnel.training.goodput.model import Advice, Question
from windtunnel.training.goodput.request import PlanRequest
from windtunnel.training.goodput.twin.model import JobModel, PhaseCosts, SimulationResult
from windtunnel.training.goodput.twin.restart import PeerMemory
from windtunnel.training.goodput.twin.simulate import simulate

MOST_FAILURES = 100_000


@dataclass(frozen=True)
class Plan:
    """What was asked, in numbers, and the advice. ``failures``: of the trace that was drawn or read.
    ``commands``: what to run, by scheme, the recommended one first."""

    cluster: Cluster
    question: Question
    advice: Advice
    failures: int
    commands: dict[str, str]


def plan(asked: PlanRequest, progress: Callable[[str, float], None] | None = None) -> Plan:
    """Draw or read the failures and compare all ways to go on through them; emulated throughout.

    Raises:
        UserError: an option is wrong, or the job does not fit the cluster.
    """
    cluster = load_cluster(asked.cluster)
    job, horizon = _job(asked, cluster), asked.days * 86400
    leaf = cluster.topology.hosts_per_leaf if cluster.leaves else cluster.hosts
    told, mean = _failures(asked, cluster, horizon, leaf)
    software, wide = (asked.software, asked.leaf_share) if asked.mtbf else (told.software, told.wide)
    costs = _costs(asked, cluster)
    if told.replaced:  # hosts come when the trace says so
        costs = replace(costs, replace=math.inf)
    question = Question(
        job,
        costs,
        mean,
        told.seconds,
        _quantity(asked.host_memory, "bytes", "host_memory"),
        tuple(f"leaf {host // leaf}" for host in range(cluster.hosts)),
        software,
        asked.spares,
        wide,
        _quantity(asked.storage_within, "seconds", "storage_within"),
        away=told.away if told.replaced else None,
    )
    advice = advise(question, told.changes, progress)
    lines = commands(advice, question, cluster.host.devices, asked.script, asked.persist)
    return Plan(cluster, question, advice, len(told.losses), lines)


def through(made: Plan, changes: Sequence[Change], measured: Mapping[str, float]) -> SimulationResult:
    """Checkpoints in peer memory as ``made`` advises them, through other failures of the same length of time.

    ``measured``: fields of `PhaseCosts` that are known better than in ``made``.
    """
    question, chosen = made.question, made.advice.chosen
    costs = PhaseCosts(**{**asdict(question.costs), **measured})
    scheme = PeerMemory(
        question.job, costs, chosen.placement, chosen.storage_every, question.spares or 0, chosen.every
    )
    return simulate(scheme, question.job, costs, changes, question.horizon)


def _job(asked: PlanRequest, cluster: Cluster) -> JobModel:
    state = _quantity(asked.state_bytes, "bytes", "state_bytes")
    device_memory = cluster.host.devices * cluster.host.device.memory_bytes
    stages = asked.stages or max(1, -(-int(2 * state) // int(device_memory)))
    if stages > cluster.hosts:
        raise UserError(
            f"plan: {cluster.hosts} hosts of {asked.cluster} do not hold a state of {asked.state_bytes} twice"
            f" in device memory, {stages} would; give more hosts or `stages`"
        )
    replicas = cluster.hosts // stages
    step_time = _quantity(asked.step_time, "seconds", "step_time")
    overhead = _quantity(asked.step_overhead, "seconds", "step_overhead") if asked.step_overhead else 0.0
    if not 0 <= overhead < step_time:
        raise UserError(
            f"plan: `step_overhead` {asked.step_overhead} is no part of `step_time` {asked.step_time}"
        )
    microbatches = asked.microbatches or 4 * stages * replicas
    if microbatches < replicas:
        raise UserError(
            f"plan: `microbatches` {microbatches} is fewer than the {replicas} pipelines;"
            f" at least {replicas} are needed"
        )
    layers = max(asked.layers, stages)
    return JobModel(cluster.hosts, step_time, state, stages, microbatches, layers, overhead)


def _costs(asked: PlanRequest, cluster: Cluster) -> PhaseCosts:
    host = cluster.host
    costs = PhaseCosts(
        detect=_quantity(asked.detect, "seconds", "detect"),
        start=_quantity(asked.start, "seconds", "start"),
        replace=_quantity(asked.replace, "seconds", "replace"),
        memory_bandwidth=host.devices * host.pcie.bandwidth * host.pcie.efficiency,
        peer_bandwidth=host.nic_bandwidth * host.nics * host.nic.efficiency * asked.network_share,
        storage_bandwidth=_quantity(asked.storage, "bytes/s", "storage"),
        storage_share=asked.storage_share,
        save_stall=_quantity(asked.save_stall, "seconds", "save_stall") if asked.save_stall else None,
    )
    return costs if asked.costs is None else measured_costs(asked.costs, costs)


def _failures(asked: PlanRequest, cluster: Cluster, horizon: float, leaf: int) -> tuple[Trace, float]:
    """The failures, and the mean seconds between them."""
    random = np.random.default_rng(asked.seed)
    if asked.mtbf is not None and asked.trace is None:
        mean = _quantity(asked.mtbf, "seconds", "mtbf")
        _bound(horizon / mean, f"`mtbf` {asked.mtbf}", asked.days)
        drawn = poisson(
            cluster.hosts, mean, horizon, random,
            software=asked.software, domain_size=leaf, domain_share=asked.leaf_share,
        )  # fmt: skip
        return Trace(drawn, horizon, replaced=False), mean
    if asked.trace is None or asked.mtbf is not None:
        raise UserError("plan: one of `mtbf` and `trace` is needed, and not both")
    told = load(asked.trace, cluster.hosts, horizon, random, per_host=cluster.host.devices, domain_size=leaf)
    _bound(len(told.losses), f"`trace` {asked.trace}", asked.days)
    if not told.losses:
        raise UserError(f"plan: `trace` {asked.trace}: no host is lost in it; there is nothing to plan for")
    return told, told.mtbf


def _bound(failures: float, given: str, days: float) -> None:
    if failures > MOST_FAILURES:
        raise UserError(
            f"plan: {given} over `days` {days:g} gives {failures:.0f} failures;"
            f" at most {MOST_FAILURES} are taken"
        )


def _quantity(text: str, unit: str, name: str) -> float:
    try:
        return parse_quantity(text, unit)
    except ValueError as error:
        raise UserError(f"plan: `{name}` {text!r} is no quantity; {error}") from None


def measured_costs(path: Path, given: PhaseCosts) -> PhaseCosts:
    """``given``, with what was measured in ``path`` instead. Raises `UserError`."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"plan: `costs` {path} is no JSON file: {error}") from None
    known = asdict(given)
    if not isinstance(found, dict) or not set(found) <= set(known):
        raise UserError(f"plan: `costs` {path} must be an object with fields among {', '.join(known)}")
    for name, value in found.items():
        if isinstance(value, bool) != isinstance(known[name], bool) or not isinstance(value, int | float):
            raise UserError(f"plan: `costs` {path}: {name} is {value!r}; a number is accepted")
        positive = name.endswith(("bandwidth", "share"))
        if not value >= 0 or (positive and not 0 < value < math.inf):
            least = "above 0" if positive else "from 0 up"
            raise UserError(f"plan: `costs` {path}: {name} is {value!r}; a number {least} is accepted")
    return replace(given, **found)
