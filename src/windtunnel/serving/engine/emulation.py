"""``windtunnel serve --trace``: a trace of requests through the engine's scheduler on a cluster that is not
there, as a run in the store and as tables.

A host of the cluster is one engine with its devices tensor parallel; several hosts are replicas, to which
the requests are dealt in turn.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from math import inf
from typing import Any

import numpy as np

from windtunnel.base.errors import UserError
from windtunnel.base.policyfile import Policy
from windtunnel.base.units import amount
from windtunnel.cluster.load import load_cluster
from windtunnel.cluster.model import Cluster
from windtunnel.serving.engine import profile
from windtunnel.serving.engine.model import InferenceRequest, Objective, Parallel, Serial, Stage, StepTime
from windtunnel.serving.engine.policies import ADMISSION, BRANCHING, choose_policies
from windtunnel.serving.engine.policy.scheduler import Log
from windtunnel.serving.engine.policy.step import StepLimits
from windtunnel.serving.engine.settings import NO_CACHE, ServeSettings
from windtunnel.serving.engine.twin import figures, models
from windtunnel.serving.engine.twin.world import Results, TwinPrefixes, serve
from windtunnel.serving.prefixcache.policy import POLICIES as PREFIX_POLICIES
from windtunnel.serving.prefixcache.policy.rules import RULES
from windtunnel.serving.prefixcache.policy.shapes import ModelShape
from windtunnel.serving.prefixcache.policy.tree import PrefixCache
from windtunnel.store import eventlog
from windtunnel.store.runs import Store
from windtunnel.traces import requests as traces
from windtunnel.traces.requests import Requests

CAPABILITY = "serving.engine"
BRANCHES = re.compile(r"share=(\d*\.?\d+),count=(\d+)(?:-(\d+))?,tokens=(\d*\.?\d+)")
PRECISE = 2000
"""Planned steps of a run whose decisions are logged, about, at most."""
KV_SHARE = 0.5
"""Of the KV memory that a prefix cache gets where nothing else is said."""


@dataclass(frozen=True)
class Emulated:
    """What came out: `figures.summarise`, what it is made of, and the run that keeps it. ``about``: facts in
    words."""

    run: str
    summary: Mapping[str, Any]
    about: Mapping[str, str]
    parts: tuple[Results, ...]
    times: figures.RequestTimes


def emulate(settings: ServeSettings) -> Emulated:
    """Emulate ``settings.trace``, and keep it as a run.

    Raises:
        UserError: something that was asked for is wrong.
    """
    rules = settings.cache_rules
    named, policies = choose_policies(settings.branching, settings.admission, rules or NO_CACHE)
    settings = replace(settings, branching=named[BRANCHING], admission=named[ADMISSION])
    if not 0 < settings.speed_up < inf:
        raise UserError(f"serve: `speed_up` {settings.speed_up:g} is not accepted; use a number above 0")
    trace = _trace(settings)
    place = _place(settings, cached=bool(trace.ids and rules))
    objective = Objective.of(settings.ttft, settings.tpot)
    inputs = {"command": "serve --trace", **asdict(settings), "trace": trace.source}
    run = Store.open().begin(CAPABILITY, inputs, settings.seed)
    log = eventlog.EventLog(run.directory / eventlog.NAME)
    with run.failing(), closing(log):
        served = _serve(settings, trace, place, objective, log.decision if settings.every else None, policies)
        times = figures.compute_times(served, objective)
        summary = figures.summarise(
            served, times, int(trace.prompt.sum()), place.limits.kv, place.cluster
        )  # fmt: skip
        about = {
            "trace": f"{trace.source}: {len(trace):,} requests in {trace.seconds:,.0f} s"
            + (f", {trace.left_out:,} without an answer left out" if trace.left_out else ""),
            "steps": place.about,
            "engine": f"{settings.branching}, {settings.admission}, {settings.rows} rows,"
            f" {settings.chunk} tokens"
            f" prefilled in a step, {place.limits.kv:,} tokens of KV",
            "prefix cache": f"{rules}, {amount(place.prefix_bytes)}"
            if place.prefix_bytes
            else "none" + ": the trace does not tell what prompts share" * bool(rules and not trace.ids),
            "promised": figures.describe_objective(objective),
        }
        run.finish({**summary, "about": about})
    return Emulated(run.id, summary, about, tuple(served), times)


def requests_of(trace: Requests, objective: Objective) -> list[InferenceRequest]:
    """As the scheduler knows them, numbered in their order. An answer is decoded in one; or half of it, then
    its branches, then the other half."""

    def stages(output: int, branches: tuple[int, ...]) -> tuple[Stage, ...]:
        if not branches:
            return (Serial(output),)
        half = max(1, output // 2)
        return Serial(max(1, output - half)), Parallel((0,) * len(branches), branches), Serial(half)

    columns = trace.arrival.tolist(), trace.prompt.tolist(), trace.output.tolist()
    parts = trace.branches or ((),) * len(trace)
    return [
        InferenceRequest(number, when, prompt, stages(output, part), objective)
        for number, (when, prompt, output, part) in enumerate(zip(*columns, parts, strict=True))
    ]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where it is served: one engine's limits and times; ``cluster``: None where it is known by its step
    times alone."""

    limits: StepLimits
    time: StepTime
    about: str
    shape: ModelShape
    prefix_bytes: int
    cluster: Cluster | None = None


def _trace(settings: ServeSettings) -> Requests:
    if settings.trace is None:
        raise UserError("serve: `trace` is needed, a file of requests")
    trace = traces.load(settings.trace)
    if settings.branches:
        fields = BRANCHES.fullmatch(settings.branches)
        if fields is None:
            raise UserError(
                f"serve: `branches` {settings.branches!r} is not accepted; use share=…,count=…,tokens=…"
            )
        share, low, high, tokens = fields.groups()
        count = int(low), int(high or low)
        random = np.random.default_rng(settings.seed)
        trace = traces.branched(trace, float(share), count, float(tokens), random)
    return trace.faster(settings.speed_up)


def _place(settings: ServeSettings, cached: bool) -> _Place:
    if bool(settings.step_time) == bool(settings.on and settings.model_like) or (
        settings.step_time and settings.on
    ):
        raise UserError(
            "serve: `trace` needs `on` CLUSTER with `model_like` NAME, or `step_time` instead of both"
        )
    limits = StepLimits(
        settings.rows, 0, settings.chunk, settings.queue, 0, settings.admission, settings.branching
    )  # fmt: skip
    if settings.step_time:
        fitted = profile.step_time(settings.step_time)
        kv = settings.kv // (fitted.token_bytes or 1) or profile.KV
        return _Place(replace(limits, kv=kv), fitted.time, fitted.about, ModelShape(0, 0, 0.0), 0)
    model, cluster = models.model_like(settings.model_like), load_cluster(settings.on)
    width, fits = max(1, model.shape.kv), models.kv_tokens(model, cluster)
    room = settings.kv // width or fits
    if room > fits:
        raise UserError(
            f"serve: `kv`: {room:,} tokens of {model.name} do not fit into a host of {cluster.name}; it"
            f" has room for {fits:,}"
        )
    prefix_bytes = (settings.prefix_bytes or int(room * KV_SHARE) * width) if cached else 0
    if not settings.kv:
        room -= prefix_bytes // width
    if room < 1:
        raise UserError(f"serve: `prefix_bytes`: nothing is left of {fits:,} tokens of KV; use less")
    time, error = models.step_time(model, cluster, settings.rows, settings.chunk, fits)
    about = (
        f"{model.name} on {cluster.name}, by roofline (the plane through it is {error:.0%} off on average)"
    )
    limits = replace(limits, kv=room, state=model.state_tokens())
    return _Place(limits, time, about, model.shape, prefix_bytes, cluster)


def _serve(
    settings: ServeSettings, trace: Requests, place: _Place, objective: Objective, log: Log | None,
    policies: Mapping[str, Policy],
) -> list[Results]:  # fmt: skip
    requests = requests_of(trace, objective)
    every = max(1, settings.every, -(-4 * len(requests) // PRECISE))
    symbols = dict(enumerate(trace.ids))
    served = []
    hosts = place.cluster.hosts if place.cluster is not None else 1
    for host in range(min(hosts, len(requests))):
        prefixes = None
        if place.prefix_bytes:
            cache = PrefixCache(
                place.shape, place.prefix_bytes, RULES[settings.cache_rules], unit=trace.unit,
                decide=PREFIX_POLICIES[settings.cache_rules],
            )  # fmt: skip
            prefixes = TwinPrefixes(cache, symbols)
        served.append(serve(
            requests[host::hosts], place.limits, place.time, prefixes=prefixes,
            log=log if host == 0 else None, every=every, own=policies,
        ))  # fmt: skip
    return served
