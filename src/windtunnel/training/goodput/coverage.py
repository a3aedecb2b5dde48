"""How many failures of a job memory does not cover, so that it falls back to storage, for a given placement.

Losses count as simultaneous from the first until the host is replaced and its copies are made again, the
*window*. Hosts that fail one by one are fatal when the last of a copy set falls within the windows of the
others; how likely that is among the losses of one window is counted by `policy.probability`. With horizon /
window windows side by side a set of m hosts is counted once in m times, since others lie across a border.
What takes a whole domain is fatal if all copies of a shard are in it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from windtunnel.training.checkpoint.model import Placement
from windtunnel.training.checkpoint.policy.interval import Failures
from windtunnel.training.checkpoint.policy.placement import Kind, place, survives
from windtunnel.training.checkpoint.policy.probability import fatal_alike
from windtunnel.training.goodput.model import Question
from windtunnel.training.goodput.twin.restart import regroup_time


def placed(hosts: int, copies: int, domains: Sequence[str]) -> Placement:
    """Across failure domains where there are several; else in groups, mixed where they do not divide."""
    kind: Kind = "group" if hosts % copies == 0 else "mixed"
    if len(set(domains)) > 1 and copies > 1:
        kind = "domains"
    return place(hosts, copies, kind, domains if kind == "domains" else ())


def memory_falls(question: Question, placement: Placement, every: int) -> float:
    """Falls to storage that are to be expected within the horizon, with checkpoints in the memory of peers
    every so many steps."""
    job, costs, copies = question.job, question.costs, placement.copies
    if copies == 1:
        return question.hardware
    window = costs.detect + _away(question) + costs.start + regroup_time(costs, job.hosts)
    window += every * job.step_time + job.state_bytes / job.hosts / costs.peer_bandwidth
    fatal = fatal_alike(placement, _chance(question, window))
    members = _members(question)
    # a domain is struck by way of one of its hosts: the larger, the oftener
    struck = sum(len(inside) for inside in members if not survives(placement, inside))
    wide = question.hardware * question.domain_share * struck / job.hosts
    return min(question.hardware, copies * question.horizon / window * fatal + wide)


def template_falls(question: Question) -> float:
    """The same for pipelines, where every layer is in each of them. That those which are left take other
    hosts in meanwhile is not counted: there are rather fewer falls."""
    job, costs = question.job, question.costs
    pipelines = job.hosts // job.stages
    if pipelines == 1:
        return question.horizon / question.mtbf
    window = costs.detect + _away(question) + regroup_time(costs, job.hosts)
    window += job.state_bytes / job.stages / costs.peer_bandwidth
    layers = _chance(question, window) ** pipelines  # all holders of the layers of one stage
    fatal = -math.expm1(job.stages * math.log1p(-layers)) if layers < 1 else 1.0
    whole = (pipelines - 1) * job.stages  # more hosts in a row than that hold all of some layer
    struck = sum(len(inside) for inside in _members(question) if len(inside) > whole)
    wide = question.hardware * question.domain_share * struck / job.hosts
    return min(question.hardware, pipelines * question.horizon / window * fatal + wide)


def failures(question: Question, falls: float, recovery: float) -> Failures:
    """What the failures cost where ``falls`` of them are not covered; ``recovery``: beside the wait for a
    host and the new process group, seconds of one that is."""
    job, costs = question.job, question.costs
    begin = costs.detect + costs.start + regroup_time(costs, job.hosts)
    begin += _away(question) * (1.0 - question.software)
    uncovered = min(1.0, falls * question.mtbf / question.horizon)
    return Failures(
        question.mtbf, uncovered, begin + recovery, begin + job.state_bytes / costs.storage_bandwidth
    )


def _away(question: Question) -> float:
    """Seconds until a host stands in for a lost one."""
    if question.spares:
        return 0.0
    return question.costs.replace if question.away is None else question.away


def _chance(question: Question, window: float) -> float:
    """That a host is lost within ``window``, alone."""
    alone = question.hardware * (1.0 - question.domain_share)
    return -math.expm1(-alone / question.horizon / question.job.hosts * window)


def _members(question: Question) -> list[list[int]]:
    members: defaultdict[str, list[int]] = defaultdict(list)
    for host, domain in enumerate(question.domains):
        members[domain].append(host)
    return list(members.values())
