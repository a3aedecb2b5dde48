"""Gradient synchronisation on clusters that are not there.

`profile_of` makes the profile of an emulated job: its gradients as its backward makes them, the cluster's
collectives, and codecs as the cluster's devices would run them. The plan that is made on it is priced by the
timeline that made it.

Collectives: lines through the times of the emulator's model. Codecs: bytes that their kernels move, and calls
of kernels, all of it inference from what the algorithms must read and write; a calibrated profile replaces
it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from windtunnel.base.errors import UserError
from windtunnel.calibration.fit import least_squares
from windtunnel.cluster.model import Cluster
from windtunnel.training.emulate.emulation import EmulationResult
from windtunnel.training.emulate.gradients import backward_of, collective_times
from windtunnel.training.gradsync.formats import CodeFormat, format_of, steps
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
from windtunnel.training.gradsync.policy import Decision, Observation

__all__ = ["codecs_of", "cost", "network_of", "profile_of"]

KINDS: dict[Kind, str] = {
    "allreduce": "all_reduce", "reduce_scatter": "reduce_scatter", "allgather": "all_gather",
    "alltoall": "all_to_all",
}  # fmt: skip
SIZES = tuple(1 << shift for shift in range(12, 28, 2))

CALL = 6e-6
"""Seconds of a kernel's launch, as NCCL's and PyTorch's small kernels take on V100 to H100."""
HOST_CALL = 20e-6
NUMELS = (1 << 8, 1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 28)


@dataclass(frozen=True)
class Kernels:
    """``encode``, ``decode``, ``add``: bytes moved for each element. ``calls``: kernels launched to encode
    (half as many to decode)."""

    encode: float
    decode: float
    add: float
    calls: int


def kernels_of(code_format: CodeFormat) -> Kernels:
    """What a codec of that family must read and write."""
    match code_format.spec:
        case "fp16" | "bf16":
            return Kernels(6, 6, 10, 1)
        case "int8":
            return Kernels(13, 5, 9, 2)
        case "sign":
            return Kernels(12, 4.2, 8.2, 3)
    # the hash (DRAGONN, section 2) reads everything once, and once more for the residual
    code_bytes = 8 * code_format.ratio
    return Kernels(4 * 2 + 4 + code_bytes, 4 + 3 * code_bytes, 3 * code_bytes, 5)


def network_of(cluster: Cluster) -> JobNetwork:
    """All collectives that an option may use.

    Raises:
        UserError: the cluster has one rank.
    """
    if cluster.world_size == 1:
        raise UserError(f"cluster {cluster.name}: it has one rank; two or more synchronise gradients")
    places = cluster.devices_per_host
    members: dict[Scope, list[int]] = {
        "flat": [*range(cluster.world_size)],
        "inside": [*range(places)],
        "between": [*range(0, cluster.world_size, places)],
    }
    sizes, collective_costs = np.array(SIZES, float), []
    for scope, ranks in members.items():
        for kind, name in KINDS.items() if len(ranks) > 1 else ():
            times = collective_times(cluster, name, ranks, SIZES, alike=scope == "between")
            line = least_squares([np.ones_like(sizes), sizes], np.array(times))
            collective_costs.append(CollectiveFit(scope, kind, *line))
    return JobNetwork(cluster.hosts, places, tuple(collective_costs))


def codecs_of(cluster: Cluster) -> tuple[CodecCost, ...]:
    """Those in the table of steps to a loss, on the devices of the cluster."""
    device = cluster.host.device
    rate = device.memory_bandwidth * 0.8
    call = CALL if device.kind == "gpu" else HOST_CALL

    def point(code_format: CodeFormat, numel: int) -> CodecPoint:
        kernels = kernels_of(code_format)
        return CodecPoint(
            numel, kernels.calls * call + numel * kernels.encode / rate,
            max(1, kernels.calls // 2) * call + numel * kernels.decode / rate,
            numel * kernels.add / rate, code_format.nbytes(numel),
        )  # fmt: skip

    return tuple(
        CodecCost(
            code_format.spec, tuple(point(code_format, numel) for numel in NUMELS), code_format.summable
        )
        for code_format in map(format_of, steps())
    )


def cost(observation: Observation, decision: Decision) -> dict[str, float]:
    """``seconds`` of an iteration with a plan, those ``to_loss``, and ``bytes`` that a rank sends."""
    ours = decision.forecasts[0]
    return {"seconds": ours.seconds, "to_loss": ours.to_loss, "bytes": float(ours.nbytes)}


def profile_of(result: EmulationResult) -> SyncProfile:
    """Of the job and the cluster of an emulation.

    Raises:
        UserError: the job makes no gradients, or its cluster has one rank.
    """
    backward, cluster = backward_of(result), result.cluster
    # a plan knows them as the module in DDP does
    outside = re.findall(r"^.*?\bmodule\.|^", backward.gradients[0].name)[0]
    return SyncProfile(
        tensors=tuple(
            GradientTensor(gradient.name.removeprefix(outside), gradient.numel, gradient.seconds)
            for gradient in backward.gradients
        ),
        codecs=codecs_of(cluster),
        network=network_of(cluster),
        forward=backward.before,
        after=backward.after,
        emulated=f"{result.program.name} on {cluster.name}",
    )
