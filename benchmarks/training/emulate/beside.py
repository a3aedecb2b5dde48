"""What a job on this machine costs beside its operators, for `truth`: sharding, and its own collectives.

Sharding a model with FSDP2 costs the host thread hooks around groups, and parameters as DTensors. Two equal
small transformers are trained, one of them sharded over the process group at hand. What a step of the sharded
one takes longer, less what its own operators take longer by themselves, is divided by the tensors that pass
through FSDP's operators. Times are those of the rank's own thread, so that waiting for peers does not count.
"""

from __future__ import annotations

import statistics
from time import thread_time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from windtunnel.training.emulate.calibrate.gloo import Row, calls_of, median_seconds
from windtunnel.training.emulate.calibrate.measure import measure_operators, on_threads
from windtunnel.training.emulate.calibrate.operators import OperatorRecorder
from windtunnel.training.emulate.calibrate.overhead import ROWS, WIDTH, small_model
from windtunnel.training.emulate.twin.costs.work import kind_of

COLD_BYTES = 16 << 20


def measure_calls(calls: list[tuple[str, int]], repeats: int = 25) -> list[Row]:
    """(kind, world, bytes, seconds) of each (kind, bytes) of ``calls`` among the ranks of the default group.

    To be called by all of them, which are otherwise busy as in the job: between two samples each walks
    through memory larger than its cache, so that buffers are as cold as a job's. Kinds unknown here are left
    out.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    other_work = torch.ones(COLD_BYTES // 4)
    rows: list[Row] = []
    for kind, nbytes in calls:
        call = dist.barrier if kind == "barrier" else calls_of(max(4 * world, nbytes), world, rank).get(kind)
        if call is not None:
            rows.append((kind, world, nbytes, median_seconds(call, repeats, lambda: other_work.add_(1.0))))
    return rows


class _LocalRecorder(OperatorRecorder):
    """Lets DTensors pass, whose operators come again on their local tensors."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented
        return super().__torch_dispatch__(func, types, args, kwargs)


def measure_sharding(threads: int = 1, repeats: int = 20) -> float:
    """Host seconds that FSDP2 adds for each tensor that is an argument of one of its operators.

    All ranks of the default process group (gloo) call this together.
    """
    with on_threads(threads):
        plain, _ = _beyond_operators(small_model(), threads, repeats)
        model = small_model()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        sharded, tensors = _beyond_operators(model, threads, repeats)
    return max(0.0, sharded - plain) / max(1, tensors)


def _beyond_operators(model: nn.Module, threads: int, repeats: int) -> tuple[float, int]:
    """Thread seconds of a step beyond its operators, and the tensors that are arguments of FSDP's."""
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    x = torch.rand(1, ROWS, WIDTH)

    def step() -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    seconds = []
    for repeat in range(repeats):
        begin = thread_time()
        step()
        if repeat > 2:
            seconds.append(thread_time() - begin)
    with _LocalRecorder() as recorder:
        step()
    ops = [
        op for op in recorder.operators
        if kind_of(op) != "view" and op.name.partition(".")[0] in ("aten", "fsdp")
    ]  # fmt: skip
    profile = measure_operators(ops, "cpu", threads, seconds=1.0)
    alone = sum(profile.exact(op) or 0.0 for op in ops)
    tensors = sum(len(op.tensors()) for op in ops if op.name.startswith("fsdp."))
    return statistics.median(seconds) - alone, tensors
