"""A plan that runs is made anew where its iterations no longer take what was predicted.

The times of all ranks are compared with the forecast; where these differ for long enough, network and codecs
are measured again with all ranks, and the job, as it was profiled, gets a plan for these. When backward makes
its gradients is not measured again: what is left of the difference is put down to it. The rules are the
policy's.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import mean
from typing import TYPE_CHECKING

import torch.distributed as dist

from windtunnel.base.errors import UserError
from windtunnel.store.eventlog import decided
from windtunnel.training.gradsync.files import steps
from windtunnel.training.gradsync.live.exchange import Peers
from windtunnel.training.gradsync.live.profile import codec_costs, network
from windtunnel.training.gradsync.model import CodecCost, Plan, Profile
from windtunnel.training.gradsync.policy import PATIENCE, Drift, Keep, Observation, Renewed, Wanted, decide
from windtunnel.training.gradsync.policy.plan import price
from windtunnel.training.gradsync.policy.sparse import carried

if TYPE_CHECKING:
    from windtunnel.training.gradsync.live.hook import Handle

LATEST = 32
"""Iterations that are compared."""
LARGE, REPEATS = 1 << 22, 3
"""Elements of the largest gradients that codecs are timed on again, and calls of each."""


def check(handle: Handle) -> Keep:
    """As `Handle.check`."""
    job, group = handle.profile, handle.ddp.process_group
    if job is None:
        raise UserError(
            "gradsync check: the plan's profile is needed; give it to apply(ddp, plan, profile=…)"
        )
    ranks = Peers(group, handle.deadline).gather(
        (list(handle.seconds)[-LATEST:], handle.since, handle.pause, handle.micro)
    )
    _, since, pause, micro = ranks[0]
    # the steps of all ranks end together; the slowest rank's time is the iteration's
    count = min(len(seconds) for seconds, *_ in ranks)
    latest = (seconds[len(seconds) - count :] for seconds, *_ in ranks)
    measured = tuple(max(times) for times in zip(*latest, strict=True))
    # what is predicted is one backward and its synchronisation; those before it only compute
    more = (micro - 1) * (job.forward + sum(tensor.backward for tensor in job.tensors) + job.after)
    drift = Drift(handle.plan.forecasts[0].seconds + more, measured, since, pause)
    first = _decided(handle, drift)
    assert isinstance(first, Keep)
    if first.keep:
        return first
    links = network(handle.ddp, job.network.hosts, handle.deadline)
    now = replace(job, network=carried(job, links), codecs=codecs(job))
    made = None
    if dist.get_rank(group) == 0:
        wanted = Wanted(now, handle.codecs, handle.plan.seed, steps(), handle.plan.lossy)
        made = _decided(handle, wanted)
    handle.profile, made = Peers(group, handle.deadline).gather((now, made))[0]
    assert isinstance(made, Plan)
    expected = price(handle.plan, handle.profile)
    answer = _decided(handle, Renewed(handle.plan, made, expected, mean(measured[-PATIENCE:]) - more, pause))
    assert isinstance(answer, Keep)
    if not answer.keep:
        handle.replace(made)
    elif made.digest() == handle.plan.digest():
        handle.plan = made  # which has the forecasts of now
    handle.forget()
    handle.pause = answer.pause
    return answer


def codecs(job: Profile) -> tuple[CodecCost, ...]:
    """What the profile's codecs take now."""
    numels = {min(point.numel, LARGE) for codec in job.codecs for point in codec.points}
    return codec_costs([codec.codec for codec in job.codecs], sorted(numels), REPEATS)


def _decided(handle: Handle, observation: Observation) -> Plan | Keep:
    decision = decide(observation)
    if handle.event is not None and dist.get_rank(handle.ddp.process_group) == 0:
        handle.event("decision", **decided("training.gradsync", "search", observation, decision))
    return decision
