"""The emulated world of a job that loses hosts: days of failures on thousands of them, four ways to go on.

`cost` says what a decision of such a job (elastic, checkpoint, pipelines) costs by the twin's model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from windtunnel.training.checkpoint import policy as checkpoint
from windtunnel.training.checkpoint.model import RestorePlan
from windtunnel.training.elastic.policy import rules as elastic
from windtunnel.training.goodput.twin.restart import regroup_time
from windtunnel.training.goodput.twin.simulate import PhaseCosts
from windtunnel.training.pipelines import policy as pipelines
from windtunnel.training.pipelines.model import Reconfiguration, Transfer
from windtunnel.training.pipelines.policy.compose import step_seconds

Observation = elastic.Observation | checkpoint.Observation | pipelines.Observation
Decision = elastic.Decision | checkpoint.Decision | pipelines.Decision

__all__ = ["cost"]


def cost(observation: Observation, decision: Decision) -> dict[str, float]:
    """Seconds until the job goes on, and what else there is to pay; {} where nothing is.

    ``seconds``: until processes run in their group, hosts have come, a state is loaded, or layers are copied.
    ``idle_hosts``: that are there and do not train. ``missing_hosts``: fewer than the job began with.
    ``bytes``: read or copied. ``steps``: back from the newest that anybody holds. ``step_seconds``: of the
    new layout, in the unit of its profile. What is not known from the decision is as in `PhaseCosts`.
    """
    costs = PhaseCosts()
    match observation, decision:
        case elastic.Change(), elastic.Form():
            new = set(decision.places).difference(observation.places) or observation.broken
            start = costs.start if decision.restart_all or new else 0.0
            there = [host for host in observation.places if host is not None] + [*observation.spares]
            return {
                "seconds": start + regroup_time(costs, len(decision.places)),
                "idle_hosts": float(len(there) - len(decision.places)),
                "missing_hosts": float(observation.target - len(decision.places)),
            }
        case elastic.Change(), elastic.Wait():
            there = [host for host in observation.places if host is not None]
            return {"seconds": costs.replace, "idle_hosts": float(len(there) + len(observation.spares))}
        case checkpoint.Inventory(), RestorePlan():
            return _load(observation, decision, costs)
        case pipelines.HostsChanged(), Reconfiguration() if decision.layout.pipelines:
            return {
                "seconds": copy_seconds(decision.transfers, costs.peer_bandwidth),
                "bytes": sum((copy.nbytes for copy in decision.transfers), 0.0),
                "step_seconds": step_seconds(observation.templates, decision.layout),
            }
    return {}


def copy_seconds(copies: Iterable[Transfer], bandwidth: float) -> float:
    """Seconds until the busiest host has sent or received its layers, with ``bandwidth`` bytes/s."""
    load: defaultdict[tuple[str, int], float] = defaultdict(float)
    for copy in copies:
        load["out", copy.source] += copy.nbytes
        load["in", copy.target] += copy.nbytes
    return max(load.values(), default=0.0) / bandwidth


def _load(now: checkpoint.Inventory, plan: RestorePlan, costs: PhaseCosts) -> dict[str, float]:
    """Hosts read at the same time, each what lies with it; storage is one for all."""
    steps = [copy.shard.step for copy in now.copies] + [stored_step.step for stored_step in now.stored]
    load: defaultdict[int | None, int] = defaultdict(int)
    for first, *_ in plan.sources:
        load[first.place] += first.shard.nbytes
    stored = load.pop(None, 0)
    seconds = max(max(load.values(), default=0) / costs.peer_bandwidth, stored / costs.storage_bandwidth)
    back = max(steps, default=-1) - (-1 if plan.step is None else plan.step)
    return {"seconds": seconds, "bytes": float(sum(load.values()) + stored), "steps": float(back)}
