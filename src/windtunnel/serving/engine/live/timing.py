"""How long steps of a model take here: points of a grid, measured, and the step model that fits them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product

import numpy as np
import torch

from windtunnel.calibration.fit import least_squares
from windtunnel.serving.engine.live.executor import Executor
from windtunnel.serving.engine.live.executor import Sequence as Stream
from windtunnel.serving.engine.model import StepTime

CONTEXTS = (16, 512)
Point = tuple[tuple[int, int, int, int], float]
"""Rows, KV tokens that they read, prefilled tokens and their context, as of `StepTime.of`; and seconds."""


def step_time(executor: Executor, rows: int, chunk: int) -> StepTime:
    """Of decoding up to ``rows`` rows and prefilling up to ``chunk`` tokens, from few points."""
    counts = [4**power for power in range(16) if 4**power <= rows]
    return fit(measure(executor, counts, CONTEXTS, (1, max(1, chunk // 4), chunk)))[0]


def measure(
    executor: Executor, rows: Sequence[int], contexts: Sequence[int], chunks: Sequence[int],
    *, repeats: int = 3, apart: int = 0, progress: Callable[[float], None] = lambda share: None,
) -> list[Point]:  # fmt: skip
    """Steps that decode each of ``rows`` and that prefill each of ``chunks``, behind each of ``contexts``;
    the fastest of ``repeats`` counts. The rows share one prefix. With up to ``apart`` tokens in all each has
    one of its own, too, and the largest chunk is prefilled beside them."""
    points: list[Point] = []
    most = (executor.limit or 1 << 30) - 2 * repeats - 1
    keeps = executor.support.prefixes
    grid = list(product(sorted({min(one, most // 2) for one in contexts})[: None if keeps else 1], rows))
    for place, (context, count) in enumerate(grid):
        progress(place / len(grid))
        trunk = _filled(executor, context)
        begin = context if keeps else 0
        streams, held = executor.fork(trunk, count), [trunk]
        decode = partial(executor.decode, streams, [0] * count)
        points.append(((count, context + count, 0, 0), _fastest(executor, [decode] * repeats)))
        beside: list[Stream] = []
        if count > 1 and count * context <= apart:
            beside = [_filled(executor, context) for _ in range(count)]
            decode = partial(executor.decode, beside, [0] * count)
            points.append(((count, count * context, 0, 0), _fastest(executor, [decode] * repeats)))
        for tokens in sorted({min(one, most // 2) for one in chunks}):
            if place and grid[place - 1][0] == context and not (beside and tokens >= max(chunks)):
                continue  # prefilled alone once behind each context
            fresh = [executor.fork(trunk, 1)[0] if begin else executor.new() for _ in range(repeats)]
            spent = _fastest(executor, [partial(_step, executor, one, tokens, beside) for one in fresh])
            points.append(((len(beside), len(beside) * context, tokens, begin + tokens), spent))
            held += fresh
        for one in (*streams, *beside, *held):
            executor.free(one)
    return points


def fit(points: Sequence[Point]) -> tuple[StepTime, float]:
    """The step model, and how far the points are from it: the mean of their relative differences."""
    columns = np.array([(1, n, k, p, p * context) for (n, k, p, context), _ in points], float).T
    seconds = np.array([spent for _, spent in points])
    found = StepTime(*least_squares(list(columns), seconds))
    told = np.array([found.of(*point) for point, _ in points])
    return found, float(np.mean(np.abs(told - seconds) / seconds))


def _filled(executor: Executor, tokens: int) -> Stream:
    stream = executor.new()
    executor.prefill(stream, [0] * tokens)
    return stream


def _step(executor: Executor, fresh: Stream, tokens: int, rows: Sequence[Stream]) -> None:
    executor.prefill(fresh, [0] * tokens)
    if rows:
        executor.decode(rows, [0] * len(rows))


def _fastest(executor: Executor, actions: Iterable[Callable[[], object]]) -> float:
    found = []
    for action in actions:
        began = time.perf_counter()
        action()
        if executor.device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return min(found)
