"""How long steps of a model take here: few points, measured, and the step model that fits them."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from math import inf

import numpy as np
import torch

from windtunnel.calibration.fit import least_squares
from windtunnel.serving.engine.live.executor import Executor
from windtunnel.serving.engine.model import StepTime

CONTEXTS = (16, 512)


def step_time(executor: Executor, rows: int, chunk: int, repeats: int = 3) -> StepTime:
    """Of decoding up to ``rows`` rows and prefilling up to ``chunk`` tokens; the fastest of ``repeats``
    counts."""
    points: list[tuple[tuple[float, ...], float]] = []
    most = (executor.limit or 1 << 30) - repeats - 1
    for context in CONTEXTS if executor.support.prefixes else CONTEXTS[:1]:
        trunk = executor.new()
        executor.prefill(trunk, [0] * min(context, most // 2))
        count = 1
        while count <= rows:
            streams = executor.fork(trunk, count)
            spent = min(
                _seconds(executor, partial(executor.decode, streams, [0] * count)) for _ in range(repeats)
            )
            points.append(((1, count, trunk.depth + count, 0, 0), spent))
            for one in streams:
                executor.free(one)
            count *= 4
        for tokens in sorted({min(one, most // 2) for one in (1, max(1, chunk // 4), chunk)}):
            spent, begin = inf, trunk.depth if executor.support.prefixes else 0
            for _ in range(repeats):
                stream = executor.fork(trunk, 1)[0] if begin else executor.new()
                spent = min(spent, _seconds(executor, partial(executor.prefill, stream, [0] * tokens)))
                executor.free(stream)
            points.append(((1, 0, 0, tokens, tokens * (begin + tokens)), spent))
        executor.free(trunk)
    columns = [np.array(one, float) for one in zip(*(point for point, _ in points), strict=True)]
    return StepTime(*least_squares(columns, np.array([spent for _, spent in points])))


def _seconds(executor: Executor, action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    if executor.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began
