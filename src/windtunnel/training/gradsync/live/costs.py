"""What codecs take here: medians of calls, on one thread, by size."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from windtunnel.training.gradsync.live.codecs import Codec, find
from windtunnel.training.gradsync.live.feedback import Feedback
from windtunnel.training.gradsync.model import CodecCost, CodecPoint

REPEATS, LARGE, FEW = 7, 1 << 20, 3
"""Calls of each, and how many there are of ``LARGE`` elements and more, whose times vary little."""


def measure(specs: Sequence[str], numels: Sequence[int], repeats: int = REPEATS) -> tuple[CodecCost, ...]:
    """Of each codec at each of ``numels``, ascending, on a GPU where there is one. Encoding is what a step
    takes: with the residual where the codec needs one.

    Raises:
        UserError: a spec is unknown.
    """
    on = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        costs = []
        for codec in map(find, specs):
            points = (_point(codec, n, on, repeats if n < LARGE else min(FEW, repeats)) for n in numels)
            costs.append(CodecCost(codec.spec, tuple(points), codec.summable, codec.lossless))
        return tuple(costs)
    finally:
        torch.set_num_threads(threads)


def _point(codec: Codec, numel: int, on: torch.device, repeats: int) -> CodecPoint:
    gradient = torch.randn(numel, generator=torch.Generator(on).manual_seed(numel), device=on)
    out, feedback = torch.zeros(numel, device=on), Feedback([{"": numel}])
    code = codec.encode(gradient, 0)
    return CodecPoint(
        numel,
        _seconds(lambda: feedback.encode(0, gradient, codec), on, repeats),
        _seconds(lambda: codec.decode(code, out), on, repeats),
        _seconds(lambda: codec.add(code, out), on, repeats),
        codec.nbytes(numel),
    )


def _seconds(call: Callable[[], object], on: torch.device, repeats: int) -> float:
    """The median of ``repeats`` calls, after one that compiles and fills caches."""
    taken = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        call()
        if on.type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
    return median(taken[1:])
