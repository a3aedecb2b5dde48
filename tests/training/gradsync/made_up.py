"""Profiles whose figures are made up, for tests of what is decided on them."""

from __future__ import annotations

from collections.abc import Sequence

from windtunnel.training.gradsync.model import (
    CodecCost,
    CodecPoint,
    CollectiveFit,
    GradientTensor,
    JobNetwork,
    Kind,
    Scope,
    SyncProfile,
)

KINDS: tuple[Kind, ...] = ("allreduce", "reduce_scatter", "allgather", "alltoall")


def network(hosts: int, ranks_per_host: int, bandwidth: float, latency: float = 1e-5) -> JobNetwork:
    """``bandwidth``: bytes/s of a host's link, shared by its ranks; inside a host 40 times as much."""

    def costs(scope: Scope, members: int, rate: float) -> list[CollectiveFit]:
        fits = []
        for kind in KINDS if members > 1 else ():
            passes = 2 if kind == "allreduce" else 1
            fixed = passes * (members - 1) * latency
            fits.append(CollectiveFit(scope, kind, fixed, passes * (members - 1) / members / rate))
        return fits

    flat = bandwidth / ranks_per_host if hosts > 1 else 40 * bandwidth
    return JobNetwork(
        hosts, ranks_per_host,
        (
            *costs("flat", hosts * ranks_per_host, flat),
            *costs("inside", ranks_per_host, 40 * bandwidth),
            *costs("between", hosts, bandwidth / ranks_per_host),
        ),
    )  # fmt: skip


def codec(
    name: str, ratio: float, per_element: float, *, summable: bool = False, fixed: float = 2e-5,
) -> CodecCost:  # fmt: skip
    """``ratio``: bytes of the code over those of the gradient."""
    points = tuple(
        CodecPoint(
            numel, fixed + numel * per_element, fixed + numel * per_element / 2, numel * per_element / 5,
            max(4, int(4 * numel * ratio)),
        )
        for numel in (1024, 1 << 16, 1 << 20, 1 << 24)
    )  # fmt: skip
    return CodecCost(name, points, summable)


CODECS = (
    codec("fp16", 0.5, 1e-11, summable=True),
    codec("int8", 0.25, 3e-11),
    codec("dragonn:0.01", 0.02, 2e-10),
)


STEPS = {"fp16": 1.0, "int8": 1.02, "dragonn:0.01": 2.0}
"""To a loss, over those without a codec."""


def profile(
    sizes: Sequence[int], bandwidth: float, hosts: int = 8, ranks_per_host: int = 1,
    codecs: Sequence[CodecCost] = CODECS, per_element: float = 1e-9,
) -> SyncProfile:  # fmt: skip
    """``per_element``: seconds of backward."""
    tensors = tuple(GradientTensor(f"p{i}", size, 1e-5 + size * per_element) for i, size in enumerate(sizes))
    forward = sum(tensor.backward for tensor in tensors) / 2
    return SyncProfile(
        tensors, tuple(codecs), network(hosts, ranks_per_host, bandwidth), forward, emulated="made up"
    )
