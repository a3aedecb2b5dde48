"""Rows of the engine's bench: see the package."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from pathlib import Path

import numpy as np
import torch

from windtunnel.bench.measure import conditions, quantile
from windtunnel.bench.rows import Row
from windtunnel.cluster.load import load_cluster
from windtunnel.serving.engine import profile
from windtunnel.serving.engine.emulate import requests_of
from windtunnel.serving.engine.live import named, timing
from windtunnel.serving.engine.live.executor import Executor
from windtunnel.serving.engine.live.loop import Engine, Job
from windtunnel.serving.engine.model import Objective, StepTime
from windtunnel.serving.engine.policy.step import Limits
from windtunnel.serving.engine.twin import figures, models
from windtunnel.serving.engine.twin.world import serve
from windtunnel.traces.requests import Requests, load

MILLION, QUICK = 1_000_000, 50_000
RATE = 5.5  # requests a second of Azure's conversation trace
MODEL = "small-attention"
ROWS, CHUNK = 64, 64
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
    given = load(trace).repeated(count) if trace is not None else like_azure(count, np.random.default_rng(0))
    model, cluster = models.model_like("qwen3-32b"), load_cluster("h100-sxm:1x2")
    kv = models.kv_tokens(model, cluster)
    step, _ = models.step_time(model, cluster, 256, 512, kv)
    for times in (1.0,) if quick else (0.5, 1.0):
        requests = requests_of(given.faster(times), Objective(ttft=1.0, tpot=0.05))
        began = time.process_time()
        done = serve(requests, Limits(256, kv), step)
        spent = time.process_time() - began
        rows = sum(running for _, _, running, _ in done.looks) / len(done.looks)
        yield Row(
            "speed", f"{count:,} requests, {times * RATE:.3g} a second", "s of one core", measured=spent,
            target="a million in 5 min", met=spent / count * MILLION <= 300,
            note=f"{given.source}; {done.taken:,} steps, of which {done.planned:,} were planned; {rows:.0f}"
            f" requests running on average; {done.refused.mean():.1%} refused",
        )  # fmt: skip


def live_rows(quick: bool) -> Iterator[Row]:
    """The live engine and the twin, on the same requests; and what deciding takes of a step."""
    torch.set_num_threads(1)
    executor = named.load(MODEL)
    waves = [(rows, 16, 0) for rows in (1, 4, 16, ROWS)] + [(rows, 128, 0) for rows in (1, 4, 16)]
    step, error = profile.fit(*timing.measure(executor, waves, CHUNK, repeats=3 if quick else 5))
    yield Row("live", "step model, mean error of its fit", "", measured=error, note=conditions())
    for load_of in (0.5,) if quick else (0.3, 0.6):
        yield from _side_by_side(executor, step, load_of, 30 if quick else 60)
    yield _overhead(executor, step, 20 if quick else 60)


def _side_by_side(executor: Executor, step: StepTime, busy: float, count: int) -> Iterator[Row]:
    random = np.random.default_rng(7)
    prompt, output = random.integers(32, 192, count), random.integers(12, 48, count)
    # what a request takes of the engine when eight are decoded together
    each = float(np.mean(prompt)) * step.token + float(np.mean(output)) * (step.base + 8 * step.row) / 8
    arrival = np.cumsum(random.exponential(each / busy, count))
    trace = Requests(arrival - arrival[0], prompt, output, "")
    engine = Engine(executor, step, rows=ROWS, kv=1 << 30, chunk=CHUNK, admission="wait")
    begin = time.monotonic() + 0.05
    coming = [
        Job(one.id, begin + one.arrival, tuple([7] * one.prompt), (int(output[one.id]),), objective=PROMISED)
        for one in requests_of(trace, PROMISED)
    ]
    first, end = np.full(count, np.nan), np.full(count, np.nan)
    while coming or engine.busy:
        now = time.monotonic()
        while coming and coming[0].arrival <= now:
            engine.add(coming.pop(0))
        report = engine.step()
        if report is None:
            time.sleep(max(0.0, min(0.05, coming[0].arrival - time.monotonic())) if coming else 0.0)
            continue
        now = time.monotonic() - begin
        for number, _, _ in report.tokens:
            first[number] = min(now, first[number]) if first[number] == first[number] else now
        end[report.finished] = now
    emulated = serve(requests_of(trace, PROMISED), engine.limits, step)
    measured = replace(emulated, first=first, end=end, tokens=output, refused=np.zeros(count, bool))
    both = [figures.times([one], PROMISED) for one in (measured, emulated)]
    where = f"at {busy:.0%} load"
    for name in ("ttft", "tpot", "total"):
        for share in (0.5, 0.95):
            live, twin = (quantile(getattr(one, name).tolist(), share) for one in both)
            yield Row("live", f"{where}: {name} p{share * 100:.0f}", "s", measured=live, emulated=twin)
    spans = [float(np.nanmax(one.end)) for one in (measured, emulated)]
    live, twin = (float(one.met.sum()) / span for one, span in zip(both, spans, strict=True))
    off = abs(twin - live) / live if live else inf
    yield Row(
        "live", f"{where}: goodput", "requests/s", measured=live, emulated=twin, target="within 10 %",
        met=off <= 0.1, note=f"{count} requests, {figures.promised(PROMISED)}",
    )  # fmt: skip


def _overhead(executor: Executor, step: StepTime, steps: int) -> Row:
    engine = Engine(executor, step, rows=ROWS, kv=1 << 30, chunk=512, admission="wait")
    for number in range(ROWS):
        engine.add(Job(number, time.monotonic(), (7,) * 8, (steps + 20,), objective=PROMISED))
    while engine.scheduler.running < ROWS:
        engine.step()
    engine.step()
    before = engine.seconds, engine.deciding
    for _ in range(steps):
        engine.step()
    share = (engine.deciding - before[1]) / (engine.seconds - before[0])
    for number in range(ROWS):
        engine.cancel(number)
    return Row(
        "live", f"deciding, of a step with {ROWS} rows", "", measured=share, target="≤ 2 %",
        met=share <= 0.02, note=f"{MODEL}, {(engine.seconds - before[0]) / steps * 1e3:.3g} ms a step",
    )  # fmt: skip
