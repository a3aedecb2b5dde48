"""How long the planner takes; that its plans are optimal is a test's matter."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from benchmarks.harness.measure import in_new_process, seconds_of
from benchmarks.harness.rows import Row, figure
from windtunnel.training.pipelines.model import LayerProfile
from windtunnel.training.pipelines.policy.planner import plan

LAYERS, STAGES = 96, 32
SEED = 23


def planner_rows(quick: bool) -> Iterator[Row]:
    draw = random.Random(SEED)
    profiles = [random_layers(draw, LAYERS) for _ in range(2 if quick else 5)]
    first, *again = in_new_process(_seconds, [profiles[0], *profiles])
    for name, seconds, note in (
        ("first call of a process", first, "after the planner's import"),
        ("further calls", max(again), f"the slowest of {len(again)} profiles"),
    ):
        yield figure(f"{LAYERS} x {STAGES}, {name}", "s", seconds, "≤ 1 s", note=note)


def random_layers(draw: random.Random, count: int) -> list[int]:
    """Microseconds of layers: even, or with a heavy tail, or blocks between a light and a heavy end."""
    kind = draw.randrange(3)
    if kind == 0:
        return [draw.randint(500, 10_000) for _ in range(count)]
    if kind == 1:
        return [max(1, round(1000 * draw.lognormvariate(0.0, 1.0))) for _ in range(count)]
    block = draw.randint(2_000, 6_000)
    return [draw.randint(50, 500), *[block] * (count - 2), draw.randint(1_000, 20_000)]


def _seconds(profiles: Sequence[Sequence[int]]) -> list[float]:
    """Seconds of a call for each profile, one after another in this process."""
    seconds = []
    for times in profiles:
        profile = [LayerProfile(str(i), t * 1e-6 / 3, t * 2e-6 / 3) for i, t in enumerate(times)]
        seconds.append(seconds_of(lambda profile=profile: plan(profile, STAGES, 1.0)))  # type: ignore[misc]
    return seconds
