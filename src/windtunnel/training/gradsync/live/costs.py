"""What codecs take here: medians of calls, on one thread, by size."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch

from windtunnel.training.gradsync.live.codecs import Codec, find
from windtunnel.training.gradsync.live.feedback import Feedback
from windtunnel.training.gradsync.model import CodecCost, CodecPoint, Device

REPEATS, LARGE, FEW = 7, 1 << 20, 3
"""Calls of each, and how many there are of ``LARGE`` elements and more, whose times vary little."""


def measure(
    specs: Sequence[str], numels: Sequence[int], device: Device = "device", repeats: int = REPEATS
) -> tuple[CodecCost, ...]:
    """Of each codec at each of ``numels``, ascending. Encoding is what a step takes: with the residual where
    the codec needs one. ``device``: "device" is a GPU where there is one, else the processor, as "host" is.

    Raises:
        UserError: a spec is unknown.
    """
    on = torch.device("cuda" if device == "device" and torch.cuda.is_available() else "cpu")
    codecs = [find(spec) for spec in specs]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return tuple(
            CodecCost(
                codec.spec, device, tuple(
                    _point(codec, numel, on, repeats if numel < LARGE else min(FEW, repeats))
                    for numel in sorted(set(numels))
                ),
                codec.summable, codec.lossless,
            )
            for codec in codecs
        )  # fmt: skip
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
