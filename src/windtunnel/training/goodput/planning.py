"""From what a user says of a job, its cluster and their failures to the question that `advise` answers, and
from the answer to the command line that follows it."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.base.errors import UserError
from windtunnel.base.units import amount
from windtunnel.cluster.load import load_cluster
from windtunnel.cluster.model import Cluster
from windtunnel.traces.failures import FailureTrace, load, poisson
from windtunnel.training.goodput.advise import advise
from windtunnel.training.goodput.model import Question, RecoveryAdvice
from windtunnel.training.goodput.request import ResilienceRequest
from windtunnel.training.goodput.twin.simulate import (
    MEMORY,
    STORAGE,
    TEMPLATES,
    WITH_SPARE,
    JobModel,
    PhaseCosts,
)
from windtunnel.training.pipelines.policy.planner import MICROBATCHES_A_STAGE

MOST_FAILURES = 100_000
LAYERS = 96
"""Of a model, for pipelines."""
START = 60.0
"""Seconds until a new process can train, unless they were measured."""
NETWORK_SHARE = 0.25
"""Of a host's NICs, for replication."""
LISTEN = "0.0.0.0:29400"


@dataclass(frozen=True)
class ResiliencePlan:
    """What was asked, in numbers, and the advice. ``failures``: of the trace that was drawn or read.
    ``commands``: what to run, by scheme, the recommended one first."""

    cluster: Cluster
    question: Question
    advice: RecoveryAdvice
    failures: int
    commands: dict[str, str]

    def plain(self) -> dict[str, Any]:
        """The advice as values of JSON."""
        advice = self.advice
        chosen = advice.chosen
        return {
            "origin": "emulated",
            "failures": self.failures,
            "copies": chosen.copies,
            "placement": chosen.placement.kind,
            "every": chosen.every,
            "persist_every": advice.intervals[advice.scheme],
            "memory_per_host": chosen.memory,
            "scheme": advice.scheme,
            "command": self.commands[advice.scheme],
            "commands": self.commands,
            "reasons": advice.reasons,
            "job": asdict(self.question.job),
            # JSON knows no infinity: null says that hosts come when the trace says so
            "costs": {
                name: None if value is None or math.isinf(value) else value
                for name, value in asdict(self.question.costs).items()
            },
            "schemes": [
                {
                    "name": result.scheme, "goodput": result.goodput, "steps": result.steps,
                    "redone": result.redone, "failures": result.failures,
                    "from_storage": result.from_storage, "phases": result.phases,
                }
                for result in advice.results
            ],
        }  # fmt: skip


def plan(
    plan_request: ResilienceRequest, progress: Callable[[str, float], None] | None = None
) -> ResiliencePlan:
    """Draw or read the failures and compare all ways to go on through them; emulated throughout.

    Raises:
        UserError: an option is wrong, or the job does not fit the cluster.
    """
    cluster = load_cluster(plan_request.cluster)
    job, horizon = _job(plan_request, cluster), plan_request.days * 86400
    leaf = cluster.topology.hosts_per_leaf if cluster.leaves else cluster.hosts
    trace, mean = _failures(plan_request, cluster, horizon, leaf)
    software, wide = (
        (plan_request.software, plan_request.leaf_share)
        if plan_request.mtbf
        else (trace.software, trace.wide)
    )
    costs = _costs(plan_request, cluster)
    if trace.replaced:  # hosts come when the trace says so
        costs = replace(costs, replace=math.inf)
    question = Question(
        job,
        costs,
        mean,
        trace.seconds,
        plan_request.host_memory,
        tuple(f"leaf {host // leaf}" for host in range(cluster.hosts)),
        software,
        plan_request.spares,
        wide,
        plan_request.storage_within,
        away=trace.away if trace.replaced else None,
    )
    advice = advise(question, trace.changes, progress)
    lines = commands(advice, question, cluster.host.devices, plan_request.script, plan_request.persist)
    return ResiliencePlan(cluster, question, advice, len(trace.losses), lines)


def _job(plan_request: ResilienceRequest, cluster: Cluster) -> JobModel:
    state = plan_request.state_bytes
    device_memory = cluster.host.devices * cluster.host.device.memory_bytes
    stages = plan_request.stages or max(1, -(-int(2 * state) // int(device_memory)))
    if stages > cluster.hosts:
        raise UserError(
            f"plan: {cluster.hosts} hosts of {plan_request.cluster} do not hold a state of {amount(state)}"
            f" twice in device memory, {stages} would; give more hosts or `stages`"
        )
    microbatches = MICROBATCHES_A_STAGE * stages * (cluster.hosts // stages)
    layers = max(LAYERS, stages)
    return JobModel(cluster.hosts, plan_request.step_time, state, stages, microbatches, layers)


def _costs(plan_request: ResilienceRequest, cluster: Cluster) -> PhaseCosts:
    host = cluster.host
    costs = PhaseCosts(
        start=START,
        replace=plan_request.replace,
        memory_bandwidth=host.devices * host.pcie.bandwidth * host.pcie.efficiency,
        peer_bandwidth=host.nic_bandwidth * host.nics * host.nic.efficiency * NETWORK_SHARE,
        storage_bandwidth=plan_request.storage,
        storage_share=plan_request.storage_share,
        save_stall=plan_request.save_stall,
    )
    return costs if plan_request.costs is None else measured_costs(plan_request.costs, costs)


def _failures(
    plan_request: ResilienceRequest, cluster: Cluster, horizon: float, leaf: int
) -> tuple[FailureTrace, float]:
    """The failures, and the mean seconds between them."""
    random = np.random.default_rng(plan_request.seed)
    if plan_request.mtbf is not None and plan_request.trace is None:
        mean = plan_request.mtbf
        _bound(horizon / mean, f"`mtbf` {mean:g} s", plan_request.days)
        drawn = poisson(
            cluster.hosts, mean, horizon, random,
            software=plan_request.software, domain_size=leaf, domain_share=plan_request.leaf_share,
        )  # fmt: skip
        return FailureTrace(drawn, horizon, replaced=False), mean
    if plan_request.trace is None or plan_request.mtbf is not None:
        raise UserError("plan: one of `mtbf` and `trace` is needed, and not both")
    trace = load(
        plan_request.trace, cluster.hosts, horizon, random, per_host=cluster.host.devices, domain_size=leaf
    )
    _bound(len(trace.losses), f"`trace` {plan_request.trace}", plan_request.days)
    if not trace.losses:
        raise UserError(
            f"plan: `trace` {plan_request.trace}: no host is lost in it; there is nothing to plan for"
        )
    return trace, trace.mtbf


def _bound(failures: float, option: str, days: float) -> None:
    if failures > MOST_FAILURES:
        raise UserError(
            f"plan: {option} over `days` {days:g} gives {failures:.0f} failures;"
            f" at most {MOST_FAILURES} are taken"
        )


def measured_costs(path: Path, costs: PhaseCosts) -> PhaseCosts:
    """``costs``, with what was measured in ``path`` instead. Raises `UserError`."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"plan: `costs` {path} is no JSON file: {error}") from None
    fields = asdict(costs)
    if not isinstance(content, dict) or not set(content) <= set(fields):
        raise UserError(f"plan: `costs` {path} must be an object with fields among {', '.join(fields)}")
    for name, value in content.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise UserError(f"plan: `costs` {path}: {name} is {value!r}; a number is accepted")
        accepted, good = "from 0 up", value >= 0
        if name.endswith("bandwidth"):
            accepted, good = "above 0", 0 < value < math.inf
        elif name.endswith("share"):
            accepted, good = "above 0 and up to 1", 0 < value <= 1
        if not good:
            raise UserError(f"plan: `costs` {path}: {name} is {value!r}; a number {accepted} is accepted")
    return replace(costs, **content)


def commands(
    advice: RecoveryAdvice, question: Question, per_host: int, script: str, persist: str
) -> dict[str, str]:
    """``windtunnel train ..`` for each scheme that was emulated, the recommended one first.

    Hosts come by ``windtunnel host``, with ``--domain`` where copies are placed across domains. ``per_host``:
    ranks of a host. ``persist``: URL of the storage.
    """
    chosen, spares = advice.chosen, question.spares or 0
    base = ["windtunnel", "train", "--external-hosts", "--listen", LISTEN]
    base += ["--hosts", str(question.job.hosts), "--per-host", str(per_host)]
    copies = ["--copies", str(chosen.copies), "--placement", chosen.placement.kind]
    schemes = {
        STORAGE: (spares, ["--on-loss", "restart", "--copies", "1"]),
        MEMORY: (spares, copies),
        WITH_SPARE: (1, copies),
        TEMPLATES: (0, ["--on-loss", "shrink", "--min-hosts", str(advice.smallest)]),
    }
    lines = {}
    for name in sorted((result.scheme for result in advice.results), key=lambda name: name != advice.scheme):
        (waiting, own), to_storage = schemes[name], str(advice.intervals[name])
        words = [*base, *(["--spares", str(waiting)] if waiting else []), *own]
        if name == TEMPLATES:  # layers are written by the program itself, a PipelineTrainer
            words += [script, "--checkpoint", persist, "--checkpoint-every", to_storage]
        else:
            every = to_storage if name == STORAGE else str(chosen.every)
            words += ["--every", every, "--persist", persist, "--persist-every", to_storage, script]
        lines[name] = shlex.join(words)
    return lines
