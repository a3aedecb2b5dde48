"""How long the planner takes; that its plans are optimal is a test's matter."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
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
    plan(profile, asked["stages"], 1, 1.0)
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
    with tempfile.TemporaryDirectory(prefix="windtunnel-bench-") as folder:
        cold = _alone(profiles[:1], folder)[0]
        first, *again = _alone([profiles[0], *profiles], folder)
    cores = os.cpu_count()
    for name, seconds, note in (
        ("first call of a process, nothing compiled", cold, "import of Numba and compilation, once for good"),
        ("first call of a process", first, "import of Numba, compiled code from its cache"),
        ("further calls", max(again), f"the slowest of {len(again)} profiles"),
    ):
        yield figure(
            f"{LAYERS} x {STAGES}, {name}", "s", seconds, f"≤ {TARGET:g} s", note=f"{note}; {cores} cores"
        )


def _alone(profiles: Sequence[Sequence[int]], folder: str) -> list[float]:
    """Seconds of a call for each profile, one after another in a new process."""
    asked = json.dumps({"profiles": [list(times) for times in profiles], "stages": STAGES})
    environment = {**os.environ, "NUMBA_CACHE_DIR": folder}
    done = subprocess.run(
        [sys.executable, "-c", _ALONE], input=asked, env=environment, capture_output=True, text=True,
        timeout=300, check=True,
    )  # fmt: skip
    return [float(seconds) for seconds in json.loads(done.stdout)]
