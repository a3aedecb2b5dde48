"""How long the planner takes; that its plans are optimal is a test's matter."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence

from benchmarks.harness.rows import Row, figure

LAYERS, STAGES = 96, 32
TARGET = 1.0  # seconds
SEED = 23
_ALONE = """
import json, sys, time
asked = json.load(sys.stdin)
from windtunnel.training.pipelines.model import LayerProfile
from windtunnel.training.pipelines.policy.planner import plan
took = []
for times in asked["profiles"]:
    profile = [LayerProfile(str(i), t * 1e-6 / 3, t * 2e-6 / 3) for i, t in enumerate(times)]
    start = time.perf_counter()
    plan(profile, asked["stages"], 1.0)
    took.append(time.perf_counter() - start)
print(json.dumps(took))
"""


def planner_rows(quick: bool) -> Iterator[Row]:
    """Rows of the section."""
    draw = random.Random(SEED)
    large = [random_layers(draw, LAYERS) for _ in range(2 if quick else 5)]
    yield from _seconds(large)


def random_layers(draw: random.Random, count: int) -> list[int]:
    """Microseconds of layers: even, or with a heavy tail, or blocks between a light and a heavy end."""
    kind = draw.randrange(3)
    if kind == 0:
        return [draw.randint(500, 10_000) for _ in range(count)]
    if kind == 1:
        return [max(1, round(1000 * draw.lognormvariate(0.0, 1.0))) for _ in range(count)]
    block = draw.randint(2_000, 6_000)
    return [draw.randint(50, 500), *[block] * (count - 2), draw.randint(1_000, 20_000)]


def _seconds(profiles: Sequence[Sequence[int]]) -> Iterator[Row]:
    first, *again = _alone([profiles[0], *profiles])
    for name, seconds, note in (
        ("first call of a process", first, "after the planner's import"),
        ("further calls", max(again), f"the slowest of {len(again)} profiles"),
    ):
        yield figure(
            f"{LAYERS} x {STAGES}, {name}", "s", seconds, f"≤ {TARGET:g} s",
            note=f"{note}; {os.cpu_count()} cores",
        )  # fmt: skip


def _alone(profiles: Sequence[Sequence[int]]) -> list[float]:
    """Seconds of a call for each profile, one after another in a new process."""
    asked = json.dumps({"profiles": [list(times) for times in profiles], "stages": STAGES})
    done = subprocess.run(
        [sys.executable, "-c", _ALONE], input=asked, capture_output=True, text=True, timeout=300, check=True
    )
    return [float(seconds) for seconds in json.loads(done.stdout)]
