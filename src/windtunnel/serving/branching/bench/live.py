"""The same policies on the real engine: a small model with random weights on this host's CPU.

How long its steps take is measured first, and the promised pace and the load follow from that: the load is
what the twin says that ``taper`` can just serve with such steps. Then the policies serve the same requests
one after another, several times; a request counts if it got what it was promised on the clock.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from windtunnel import serving
from windtunnel.bench.measure import in_turn
from windtunnel.bench.rows import Row
from windtunnel.serving.branching.bench.workload import LIMITS, Workload, goodput, kept
from windtunnel.serving.engine.model import Request, StepTime

MODEL = "small-attention"
ROWS, CHUNK = 64, 64
ARMS = ("off", "eager", "taper")
WORK = Workload(
    branches=(3, 8), tokens=24, prompt=40, cached=0, serial=48, intro=6, outro=12, burst=0.8, wave=10.0
)  # fmt: skip
SECONDS, WARM = 25.0, 5.0
"""Of arrivals; those after the first `WARM` count."""


def live_rows(quick: bool) -> Iterator[Row]:
    """Requests kept a second, by policy, and the ratios of runs that followed one another."""
    executor, times = serving.loaded(MODEL, ROWS, CHUNK)
    pace = 1.5 * times.of(ROWS // 4, 64 * ROWS // 4)
    work = replace(WORK, tpot=pace, ttft=40 * pace)
    limits = replace(LIMITS, rows=ROWS, chunk=CHUNK)
    rate = goodput(work, "taper", 1, limits, times, low=0.1, high=20.0, halvings=6) or 0.5
    requests = [one for one in work.requests(1, rate) if one.arrival < SECONDS]
    arms = {name: partial(_kept, executor, times, requests, name) for name in ARMS}
    found = in_turn(arms, 1 if quick else 4)
    about = f"{MODEL}, {rate:.2f} requests/s, {1e3 * pace:.0f} ms a token promised"
    for name, shares in found.items():
        yield Row(
            "live", f"{name}: requests that got what was promised", "", measured=median(shares),
            note=f"{about}; {min(shares):.1%} to {max(shares):.1%} in {len(shares)} runs",
        )  # fmt: skip
    for name in ("off", "eager"):
        ratios = [one / max(other, 1e-3) for one, other in zip(found["taper"], found[name], strict=True)]
        yield Row(
            "live", f"taper over {name}", "x", measured=median(ratios), target="> 1 x",
            met=median(ratios) > 1,
            note=f"{min(ratios):.2f} to {max(ratios):.2f}",
        )  # fmt: skip


def _kept(executor: Any, times: StepTime, requests: list[Request], policy: str) -> float:
    """The share of the requests that got what they were promised, served now."""
    engine = serving.live_engine(
        executor, times, rows=ROWS, kv=1 << 30, chunk=CHUNK, branching=policy, admission="wait"
    )
    random = np.random.default_rng(5)
    jobs = [serving.job(one, lambda: int(random.integers(3, 250))) for one in requests]
    first, last = np.full(len(jobs), np.inf), np.full(len(jobs), np.inf)
    tokens = np.zeros(len(jobs), int)
    begin, coming = time.monotonic(), 0
    while engine.busy or coming < len(jobs):
        while coming < len(jobs) and begin + jobs[coming].arrival <= time.monotonic():
            engine.add(replace(jobs[coming], arrival=begin + jobs[coming].arrival))
            coming += 1
        report = engine.step()
        if report is None:
            time.sleep(max(0.0, begin + jobs[coming].arrival - time.monotonic()))
            continue
        now = time.monotonic() - begin
        for number, _, _ in report.tokens:
            first[number] = min(first[number], now)
            last[number] = now
            tokens[number] += 1
    arrivals = np.array([one.arrival for one in requests])
    good = kept(requests[0].objective, arrivals, first, last, tokens - 1)
    return float(good[arrivals >= WARM].mean())
