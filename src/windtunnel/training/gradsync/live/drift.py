"""A plan that runs is made anew where its iterations no longer take what was predicted.

The times of all ranks are compared with the forecast; where these differ for long enough, the network is
measured again with all ranks, and the job, as it was profiled, gets a plan for it. The rules are the
policy's.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import mean
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from windtunnel.base.errors import UserError
from windtunnel.store.eventlog import decided
from windtunnel.training.gradsync.live.profile import network
from windtunnel.training.gradsync.model import Plan
from windtunnel.training.gradsync.policy import PATIENCE, Drift, Keep, Observation, Renewed, Wanted, decide

if TYPE_CHECKING:
    from windtunnel.training.gradsync.live.hook import Handle

LATEST = 32
"""Iterations that are compared."""


def check(handle: Handle) -> Keep:
    """As `Handle.check`."""
    job = handle.profile
    if job is None:
        raise UserError(
            "gradsync check: the plan's profile is needed; give it to apply(ddp, plan, profile=…)"
        )
    group = handle.ddp.process_group
    told: list[Any] = [None] * dist.get_world_size(group)
    mine = (list(handle.seconds)[-LATEST:], handle.since, handle.pause, handle.micro)
    dist.all_gather_object(told, mine, group=group)
    _, since, pause, micro = told[0]
    # the steps of all ranks end together; the slowest rank's time is the iteration's
    count = min(len(one[0]) for one in told)
    measured = tuple(
        max(times) for times in zip(*(one[0][len(one[0]) - count :] for one in told), strict=True)
    )
    # what is predicted is one backward and its synchronisation; those before it only compute
    more = (micro - 1) * (job.forward + sum(one.backward for one in job.tensors) + job.after)
    drift = Drift(handle.plan.forecasts[0].seconds + more, measured, since, pause)
    seen = decide(drift)
    assert isinstance(seen, Keep)
    _tell(handle, drift, seen)
    if seen.keep:
        return seen
    handle.profile = replace(job, network=network(handle.ddp, job.network.hosts, handle.deadline))
    made, last = _made(handle), mean(measured[-PATIENCE:]) - more
    renewed = Renewed(handle.plan, made, last, pause)
    answer = decide(renewed)
    assert isinstance(answer, Keep)
    _tell(handle, renewed, answer)
    if answer.keep:
        if made.digest() == handle.plan.digest():
            handle.plan = made  # which has the forecasts of now
        handle.forget()
    else:
        handle.replace(made)
    handle.pause = answer.pause
    return answer


def _made(handle: Handle) -> Plan:
    """A plan for the profile, made by the first rank, for all."""
    group = handle.ddp.process_group
    assert handle.profile is not None
    shared: list[Any] = [None]
    if dist.get_rank(group) == 0:
        wanted = Wanted(handle.profile, handle.codecs, handle.plan.seed)
        shared = [decide(wanted)]
        _tell(handle, wanted, shared[0])
    dist.broadcast_object_list(shared, dist.get_global_rank(group, 0), group=group)
    plan = shared[0]
    assert isinstance(plan, Plan)
    return plan


def _tell(handle: Handle, observation: Observation, decision: Plan | Keep) -> None:
    if handle.event is not None and dist.get_rank(handle.ddp.process_group) == 0:
        handle.event("decision", **decided("training.gradsync", "search", observation, decision))
