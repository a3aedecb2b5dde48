"""What codecs take here: medians of calls, on one thread, by size."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor

from windtunnel.training.gradsync.live.codecs import Codec, find
from windtunnel.training.gradsync.live.feedback import Feedback
from windtunnel.training.gradsync.live.lowrank import LowRank, square
from windtunnel.training.gradsync.model import CodecCost, CodecPoint, Device

REPEATS = 7


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
                codec.spec, device, tuple(_point(codec, numel, on, repeats) for numel in sorted(set(numels))),
                codec.summable, codec.lossless, 2 if codec.rank else 1,
            )
            for codec in codecs
        )  # fmt: skip
    finally:
        torch.set_num_threads(threads)


def _point(codec: Codec, numel: int, on: torch.device, repeats: int) -> CodecPoint:
    gradient = torch.randn(numel, generator=torch.Generator(on).manual_seed(numel), device=on)
    out = torch.zeros(numel, device=on)
    feedback = Feedback([{"": numel}])
    if codec.rank:
        encode, decode = _two_sums(codec, gradient, feedback, out)
        add = 0.0  # sums are added up on the way
    else:
        code = codec.encode(gradient, 0)

        def encode() -> None:
            feedback.encode(0, gradient, codec, 0)

        def decode() -> None:
            codec.decode(code, out, 0)

        add = _seconds(lambda: codec.add(code, out, 0), on, repeats)
    return CodecPoint(
        numel, _seconds(encode, on, repeats), _seconds(decode, on, repeats), add, codec.nbytes(numel)
    )


def _two_sums(
    codec: Codec, gradient: Tensor, feedback: Feedback, out: Tensor
) -> tuple[Callable[[], None], Callable[[], None]]:
    low = LowRank(codec.rank, {"": square(gradient.numel())})
    first = low.first(gradient)
    second = low.second(gradient, first)

    def encode() -> None:
        corrected = feedback.corrected(0, gradient, codec)
        one = low.first(corrected)
        low.add(one, low.second(corrected, one), corrected, -1.0)

    def decode() -> None:
        low.add(first, second, out.zero_())

    return encode, decode


def _seconds(call: Callable[[], None], on: torch.device, repeats: int) -> float:
    """The median of ``repeats`` calls, after one that compiles and fills caches."""
    call()
    taken = []
    for _ in range(repeats):
        _wait(on)
        begin = time.perf_counter()
        call()
        _wait(on)
        taken.append(time.perf_counter() - begin)
    return median(taken)


def _wait(on: torch.device) -> None:
    if on.type == "cuda":
        torch.cuda.synchronize()
