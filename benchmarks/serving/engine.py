"""The engine's twin beside the live engine, and how fast the twin is."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from benchmarks.harness.measure import quantile
from benchmarks.harness.rows import Row, figure
from windtunnel.cluster.load import load_cluster
from windtunnel.serving.engine import calibrate, profile
from windtunnel.serving.engine.emulation import requests_of
from windtunnel.serving.engine.live import families
from windtunnel.serving.engine.live.executor import Executor
from windtunnel.serving.engine.live.loop import EngineJob, Over, ServingEngine, Token
from windtunnel.serving.engine.model import Objective
from windtunnel.serving.engine.policy import fill_time
from windtunnel.serving.engine.policy.step import StepLimits
from windtunnel.serving.engine.twin import figures, models
from windtunnel.serving.engine.twin.world import serve
from windtunnel.traces.requests import Requests, load

MILLION, QUICK = 1_000_000, 50_000
RATE = 5.5  # requests a second of Azure's conversation trace
MODELS = ("small-attention", "tiny-hybrid")
LOADS = (0.3, 0.6)
ROWS, CHUNK = 64, 64
WAVES = (*((rows, 16, 0) for rows in (1, 2, 4, 8)), *((rows, 128, 0) for rows in (1, 2, 4)))
TURNS = 10
T = TypeVar("T")
PROMISED = Objective(ttft=1.0, tpot=0.15)


def like_azure(count: int, random: np.random.Generator) -> Requests:
    """Requests as many a second as in Azure's conversation trace, with lengths of about its means (1,155 and
    211 tokens); synthetic."""
    arrival = np.cumsum(random.exponential(1 / RATE, count))
    prompt = np.clip(random.lognormal(6.7, 0.8, count), 2, 14_000).astype(np.int64)
    output = np.clip(random.lognormal(4.9, 0.95, count), 1, 1000).astype(np.int64)
    return Requests(arrival - arrival[0], prompt, output, "lengths and rate like Azure's, synthetic")


def speed_rows(quick: bool, trace: Path | None) -> Iterator[Row]:
    """How long a million requests take in the twin, on one core."""
    count = QUICK if quick else MILLION
    workload = (
        load(trace).repeated(count) if trace is not None else like_azure(count, np.random.default_rng(0))
    )
    model, cluster = models.model_like("qwen3-32b"), load_cluster("h100-sxm:1x2")
    kv = models.kv_tokens(model, cluster)
    step, _ = models.step_time(model, cluster, 256, 512, kv)
    requests = requests_of(workload.faster(0.5), Objective(ttft=1.0, tpot=0.05))
    began = time.process_time()
    done = serve(requests, StepLimits(256, kv), step)
    spent = time.process_time() - began
    yield figure(
        f"{count:,} requests, {RATE / 2:g} a second", "s of one core", spent, "a million in 5 min",
        passed=spent / count * MILLION <= 300, note=f"{workload.source}; {done.steps:,} steps, of which"
        f" {done.planned:,} were planned; {done.refused.mean():.1%} refused",
    )  # fmt: skip


class _Clock:
    """Seconds of this process on a core, but for what it was ``apart`` for, and those in which it waited for
    requests: who shares the host does not take part."""

    def __init__(self) -> None:
        self.waited = 0.0

    def __call__(self) -> float:
        return time.process_time() + self.waited

    def apart(self, work: Callable[[], T]) -> T:
        began = self()
        try:
            return work()
        finally:
            self.waited -= self() - began


def live_rows(quick: bool) -> Iterator[Row]:
    """The live engine and the twin, on the same requests."""
    torch.set_num_threads(1)
    for model in MODELS:
        executor = families.load(model)
        for load_of in LOADS:
            yield from _side_by_side(model, executor, load_of, 30 if quick else 60)


def _side_by_side(model: str, executor: Executor, busy: float, count: int) -> Iterator[Row]:
    """The step model is of steps in between, `TURNS` times: how fast a host is changes by the second."""
    clock, random = _Clock(), np.random.default_rng(7)

    def waves() -> tuple[list[profile.Point], list[float]]:
        return clock.apart(partial(calibrate.measure, executor, WAVES, CHUNK, repeats=1, clock=clock))

    step, _ = profile.fit(*waves())
    prompt, output = random.integers(32, 192, count), random.integers(12, 48, count)
    # what a request takes of the engine when four are decoded together
    each = fill_time(step, 0, int(np.mean(prompt)), CHUNK) + float(np.mean(output)) * step.of(4, 500) / 4
    arrival = np.cumsum(random.exponential(each / busy, count))
    trace = Requests(arrival - arrival[0], prompt, output, "")
    engine = ServingEngine(executor, step, rows=ROWS, kv=1 << 30, chunk=CHUNK, admission="wait", clock=clock)
    begin = clock()
    coming = [
        EngineJob(
            request.id,
            begin + request.arrival,
            tuple([7] * request.prompt),
            (int(output[request.id]),),
            objective=PROMISED,
        )
        for request in requests_of(trace, PROMISED)
    ]
    first, end = np.full(count, np.nan), np.full(count, np.nan)
    turns: list[list[float]] = []
    while coming or engine.busy:
        if np.isfinite(end).sum() * TURNS >= (len(turns) + 0.5) * count:
            points, seconds = waves()
            turns.append(seconds)
        now = clock()
        while coming and coming[0].arrival <= now:
            engine.add(coming.pop(0))
        if not engine.busy:
            clock.waited += max(0.0, coming[0].arrival - clock())
            continue
        events = engine.step()
        now = clock() - begin
        for event in events:
            if isinstance(event, Token):
                first[event.job] = np.fmin(now, first[event.job])
            elif isinstance(event, Over):
                end[event.job] = now
    step, _ = profile.fit(points, np.mean(turns, 0).tolist())
    emulated = serve(requests_of(trace, PROMISED), engine.limits, step)
    measured = replace(emulated, first=first, end=end, tokens=output, refused=np.zeros(count, bool))
    both = [figures.compute_times([served], PROMISED) for served in (measured, emulated)]
    where = f"{model} at {busy:.0%} load"
    for name in ("ttft", "tpot"):
        live, twin = (quantile(getattr(times, name).tolist(), 0.5) for times in both)
        yield figure(f"{where}: {name} p50", "s", live, "within 15 %", emulated=twin)
    spans = [float(np.nanmax(served.end)) for served in (measured, emulated)]
    live, twin = (float(times.attained.sum()) / span for times, span in zip(both, spans, strict=True))
    note = f"{count} requests, {figures.describe_objective(PROMISED)}; seconds of the engine's core"
    yield figure(f"{where}: goodput", "requests/s", live, "within 10 %", emulated=twin, note=note)
