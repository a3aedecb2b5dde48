"""The kinds of parallelism of train_llama.py, each a plain function that changes a plain model.

Source: "TorchTitan" (arXiv:2410.06511), sections 2.1 and 2.2.
"""

import argparse
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

from llama_model import Attention, Llama

LossFunction = Callable[[Tensor, Tensor], Tensor]

SCHEDULES = {
    "1f1b": Schedule1F1B,
    "gpipe": ScheduleGPipe,
    "interleaved1f1b": ScheduleInterleaved1F1B,
    "zerobubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


def apply_tensor_parallel(model: Llama, mesh: DeviceMesh, loss_parallel: bool) -> None:
    """Split matrices over ``mesh``, and what is between them along the sequence."""
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(
            input_layouts=Shard(1),
            output_layouts=Shard(-1) if loss_parallel else Replicate(),
            use_local_output=not loss_parallel,
        ),
    }
    parallelize_module(model, mesh, {k: v for k, v in plan.items() if getattr(model, k) is not None})
    for block in model.layers.values():
        block_plan = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
            ),
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w3": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, block_plan)


def apply_float8(model: Llama, sharded: bool) -> None:
    """Let torchao compute the layers' matrix products in float8, a scale for each tensor at each step. With
    ``sharded`` parameters FSDP gathers them in float8 too. The output layer stays as it is."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig(enable_fsdp_float8_all_gather=sharded)
    convert_to_float8_training(model.layers, config=config)


def scale_weights(parts: Iterable[nn.Module]) -> None:
    """After an optimiser step: the scales of all float8 weights, by one all-reduce."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    for part in parts:
        precompute_float8_dynamic_scale_for_fsdp(part)


KEPT = {
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}


def selective_contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of the forward pass and of its repetition, that agree on what is kept."""
    products: Counter[bool] = Counter()

    def policy(
        ctx: SelectiveCheckpointContext, op: object, *args: object, **kwargs: object
    ) -> CheckpointPolicy:
        if op is torch.ops.aten.mm.default:
            products[ctx.is_recompute] += 1
            if products[ctx.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def apply_checkpointing(model: Llama, mode: str) -> None:
    """Recompute each layer in the backward pass: all of it ("full") or what is cheap ("selective")."""
    if mode == "none":
        return
    extra = {"context_fn": selective_contexts} if mode == "selective" else {}
    for name, block in model.layers.items():
        # no dropout, so nothing random to be repeated
        model.layers[name] = checkpoint_wrapper(block, preserve_rng_state=False, **extra)


def apply_fsdp(model: Llama, mesh: DeviceMesh, dtype: torch.dtype, pipelined: bool) -> None:
    """Shard parameters, gradients and optimiser state over ``mesh``, each layer by itself."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    last = len(model.layers) - 1
    for i, block in enumerate(model.layers.values()):
        # A pipeline would gather again for every microbatch; the last layer would be gathered again at once.
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=not pipelined and i < last)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=not pipelined)


def stages_of_rank(schedule: str, rank: int, ranks: int) -> list[int]:
    """Pipeline stages of a rank: one, two a full pipeline apart, or two that form a V."""
    if schedule == "zbv":
        return [rank, 2 * ranks - 1 - rank]
    return [rank, rank + ranks] if schedule in ("interleaved1f1b", "zerobubble") else [rank]


def stage_layers(layers: int, stage: int, stages: int) -> tuple[range, bool, bool]:
    """Layers of a stage, is it the first, is it the last. Embedding and output count as a layer each."""
    base, extra = divmod(layers + 2, stages)
    start = stage * base + min(stage, extra)
    end = start + base + (stage < extra)
    return range(max(start - 1, 0), min(end - 1, layers)), stage == 0, stage == stages - 1


class Pipeline:
    """The stages of this rank and the schedule that runs them."""

    def __init__(self, stages: list[PipelineStage], args: argparse.Namespace, loss: LossFunction) -> None:
        self.has_first = any(stage.is_first for stage in stages)
        self.has_last = any(stage.is_last for stage in stages)
        # The schedules for one stage a rank take that stage, the others a list.
        one_or_all = stages[0] if args.schedule in ("1f1b", "gpipe") else stages
        self.schedule = SCHEDULES[args.schedule](one_or_all, args.microbatches, loss_fn=loss)

    def step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Forward and backward of a batch; returns its mean loss on the rank of the last stage, else 0."""
        inputs = [tokens] if self.has_first else []
        losses: list[Tensor] = []
        last = {"target": targets, "losses": losses} if self.has_last else {}
        self.schedule.step(*inputs, **last, return_outputs=False)
        return torch.stack(losses).detach().mean() if losses else torch.zeros((), device=tokens.device)


def build_pipeline(
    parts: list[nn.Module],
    indices: list[int],
    mesh: DeviceMesh,
    device: torch.device,
    args: argparse.Namespace,
    loss: LossFunction,
) -> Pipeline:
    """``parts`` as the stages ``indices`` of the pipeline over ``mesh``."""
    count, group = len(indices) * mesh.size(), mesh.get_group()
    stages = [PipelineStage(p, i, count, device, group=group) for p, i in zip(parts, indices, strict=True)]
    return Pipeline(stages, args, loss)


def gathered_attention(q: Tensor, k: Tensor, v: Tensor, mesh: DeviceMesh) -> Tensor:
    """Causal attention of this rank's part of the sequence to the keys and values of all."""
    k, v = (all_gather_tensor_autograd(t.contiguous(), 2, mesh.get_group()) for t in (k, v))
    mine, all_ = q.shape[2], k.shape[2]
    mask = torch.ones(mine, all_, dtype=torch.bool, device=q.device).tril(mesh.get_local_rank() * mine)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


@contextmanager
def shard_sequence(
    mesh: DeviceMesh, tokens: Tensor, targets: Tensor, parts: Iterable[nn.Module]
) -> Iterator[None]:
    """Within it, tokens, targets and rotations are this rank's part of the sequence; attention knows."""
    freqs = [buffer for part in parts for name, buffer in part.named_buffers() if name.endswith("freqs")]
    buffers, dims = [tokens, targets, *freqs], [1, 1] + [0] * len(freqs)
    if tokens.is_cuda:
        with context_parallel(
            mesh, buffers=buffers, buffer_seq_dims=dims, no_restore_buffers={tokens, targets}
        ):
            yield
        return
    # PyTorch's ring attention has CUDA kernels only.
    whole = [buffer.clone() for buffer in freqs]
    for buffer, dim in zip(buffers, dims, strict=True):
        shard = buffer.chunk(mesh.size(), dim)[mesh.get_local_rank()].clone()
        buffer.resize_(shard.shape).copy_(shard)
    for module in (m for part in parts for m in part.modules() if isinstance(m, Attention)):
        module.attend = partial(gathered_attention, mesh=mesh)
    yield
    for buffer, original in zip(freqs, whole, strict=True):
        buffer.resize_(original.shape).copy_(original)


def clip_gradients(parameters: list[Tensor], limit: float, pp_mesh: DeviceMesh | None) -> None:
    """Scale gradients so that their norm over all ranks, the pipeline's too, is at most ``limit``."""
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if pp_mesh is not None:
        norm = norm**2
        dist.all_reduce(norm, group=pp_mesh.get_group())
        norm = norm.sqrt()
    nn.utils.clip_grads_with_norm_(parameters, limit, norm)
