"""MPT as MosaicML measured it for llm-foundry's table: a script that is emulated, for the published rows.

    windtunnel emulate --cluster h100-sxm:1x8 benchmarks/training/emulate/mpt.py --size 7b --batch 6

The models and settings are those of llm-foundry at 5e85bd6 (the commit of its table) and Composer 0.17, read
from their code: ``mpt-*.yaml``, so biases, learned positions, one embedding for tokens and head, LayerNorm in
bfloat16, GELU, ``attn_impl: triton``; FSDP1 for each block, embedding and the last norm, ``BACKWARD_POST``,
gradients reduced after every micro-batch; autocast; the fused loss; two metrics that compute the loss of
every micro-batch again (``use_train_metrics``); DecoupledAdamW, which takes one parameter after another and
reads its step back from the device; the norm of gradients clipped. ``DEFAULT`` mixed precision reduces
gradients in float32, ``PURE`` in bfloat16. Kernels that PyTorch has not (the attention in Triton, the loss)
are operators of their own here, with their shapes.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._library.custom_ops import CustomOpDef
from torch.distributed import fsdp
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as recompute
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.nn import functional as F


class Size(NamedTuple):
    """A model: ``width`` features, ``heads`` heads."""

    layers: int
    width: int
    heads: int


SIZES = {
    "125m": Size(12, 768, 12), "350m": Size(24, 1024, 16), "760m": Size(24, 1536, 12),
    "1b": Size(24, 2048, 16), "3b": Size(32, 2560, 20), "7b": Size(32, 4096, 32), "13b": Size(40, 5120, 40),
    "30b": Size(48, 7168, 56), "70b": Size(80, 8192, 64), "debug": Size(2, 256, 2),
}  # fmt: skip
VOCABULARY = 50368
HALF = torch.bfloat16


def operator(name: str, schema: str, shapes: Callable[..., Any]) -> CustomOpDef:
    """An operator of flash-attn 1.0.9, whose kernel is not here, by the shapes that it returns."""

    def absent(*args: Any) -> None:
        raise NotImplementedError("this program is only emulated")

    custom = torch.library.custom_op(f"flash_attn::{name}", absent, mutates_args=(), schema=schema)
    custom.register_fake(shapes)
    return custom


# Attention of [batch, sequence, heads, dimension]; losses of logits [tokens, vocabulary].
attend = operator(
    "_triton_attention_forward",
    "(Tensor q, Tensor k, Tensor v, bool causal) -> (Tensor, Tensor)",
    lambda q, k, v, causal: (torch.empty_like(q), q.new_empty(q.shape[:3], dtype=torch.float32)),
)
attend_backward = operator(
    "_triton_attention_backward",
    "(Tensor d, Tensor q, Tensor k, Tensor v, Tensor o, Tensor s, bool causal) -> (Tensor, Tensor, Tensor)",
    lambda d, q, k, v, o, s, causal: (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)),
)
losses_of = operator(
    "xentropy_forward",
    "(Tensor logits, Tensor labels) -> (Tensor, Tensor)",
    lambda logits, labels: tuple(torch.empty_like(labels, dtype=torch.float32) for _ in range(2)),
)
losses_backward = operator(
    "xentropy_backward",
    "(Tensor d, Tensor logits, Tensor sums, Tensor labels) -> Tensor",
    lambda d, logits, sums, labels: torch.empty_like(logits),
)


attend.register_autograd(
    lambda ctx, d, _: (*attend_backward(d.contiguous(), *ctx.saved_tensors, True), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:3], *output),
)
losses_of.register_autograd(
    lambda ctx, d, _: (losses_backward(d.contiguous(), *ctx.saved_tensors), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0], output[1], inputs[1]),
)


class HalfLayerNorm(nn.LayerNorm):
    """LayerNorm in bfloat16, where autocast would take float32."""

    def forward(self, x: Tensor) -> Tensor:
        """``x``: [..., width]."""
        with torch.autocast("cuda", enabled=False):
            weight, bias = self.weight.to(HALF), self.bias.to(HALF)
            return F.layer_norm(x.to(HALF), self.normalized_shape, weight, bias, self.eps)


class SharedEmbedding(nn.Embedding):
    """The embedding of the tokens, and the head."""

    def forward(self, x: Tensor, head: bool = False) -> Tensor:
        """``x``: tokens [batch, sequence], or, for the head, [batch, sequence, width]."""
        return F.linear(x, self.weight) if head else super().forward(x)


class Block(nn.Module):
    """Attention and the two products after it, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = HalfLayerNorm(width), HalfLayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``x``: [batch, sequence, width]."""
        parts = (part.unflatten(-1, (self.heads, -1)) for part in self.qkv(self.norm_1(x)).chunk(3, -1))
        x = x + self.out(attend(*parts, True)[0].flatten(2))
        y: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return y


class Model(nn.Module):
    """The decoder; its head is the embedding of the tokens."""

    def __init__(self, size: Size, sequence: int) -> None:
        super().__init__()
        self.tokens = SharedEmbedding(VOCABULARY, size.width)
        self.positions = nn.Embedding(sequence, size.width)
        self.blocks = nn.ModuleList(Block(size.width, size.heads) for _ in range(size.layers))
        self.norm = HalfLayerNorm(size.width)

    def forward(self, tokens: Tensor) -> Tensor:
        """``tokens``: [batch, sequence]. Returns logits [batch, sequence, vocabulary]."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.tokens(self.norm(x), head=True)
        return logits


def fill(module: nn.Module) -> None:
    """Give the module's own parameters memory, and values."""
    module.to_empty(device=torch.device("cuda", torch.cuda.current_device()), recurse=False)
    if isinstance(module, nn.Linear | nn.Embedding | nn.LayerNorm):
        module.reset_parameters()


class DecoupledAdamW(torch.optim.Optimizer):
    """Composer's, without weight decay."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, {"lr": 1e-4})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step."""
        parameters = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        for p in parameters:
            state = self.state[p]
            if not state:
                state["step"] = torch.zeros((), device=p.device)
                state["mean"], state["square"] = torch.zeros_like(p), torch.zeros_like(p)
            state["step"] += 1
        for p in parameters:
            state = self.state[p]
            step = state["step"].item()
            mean = state["mean"].mul_(0.9).add_(p.grad, alpha=0.1)
            square = state["square"].mul_(0.95).addcmul_(p.grad, p.grad, value=0.05)
            root = (square.sqrt() / math.sqrt(1 - 0.95**step)).add_(1e-8)
            p.addcdiv_(mean, root, value=-1e-4 / (1 - 0.9**step))


class LossMetric:
    """Composer's LanguageCrossEntropy, with how torchmetrics gathers what all ranks have."""

    def __init__(self) -> None:
        self.loss, self.items = torch.zeros((), device="cuda"), torch.zeros((), device="cuda")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Compute the loss of a micro-batch again."""
        with torch.no_grad(), torch.autocast("cuda", HALF):
            self.loss += F.cross_entropy(logits, labels, reduction="sum")
            self.items += (labels != -100).sum()

    def compute(self) -> Tensor:
        """The mean over all ranks. Of a list that is gathered NCCL's process group copies each out."""
        sums = []
        for state in (self.loss, self.items):
            dist.barrier()
            gathered = [torch.zeros_like(state) for _ in range(dist.get_world_size())]
            flat = state.new_empty(len(gathered))
            dist.all_gather_into_tensor(flat, state)
            for target, source in zip(gathered, flat.unbind(), strict=True):
                target.copy_(source)
            sums.append(torch.stack(gathered).sum())
        return sums[0] / sums[1]


def main() -> None:
    """The training script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="7b")
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=1, help="sequences of a micro-batch and rank")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--ac", choices=("none", "full"), default="none")
    parser.add_argument("--mixed", choices=("DEFAULT", "PURE"), default="DEFAULT")
    parser.add_argument("--sharding", choices=("FULL_SHARD", "SHARD_GRAD_OP"), default="FULL_SHARD")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()

    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    with torch.device("meta"):
        bare = Model(SIZES[args.size], args.seq)
    reduced = torch.float32 if args.mixed == "DEFAULT" else HALF
    model = fsdp.FullyShardedDataParallel(
        bare,
        auto_wrap_policy=CustomPolicy(lambda m: isinstance(m, Block | nn.Embedding) or m is bare.norm),
        mixed_precision=fsdp.MixedPrecision(param_dtype=HALF, reduce_dtype=reduced, buffer_dtype=HALF),
        sharding_strategy=fsdp.ShardingStrategy[args.sharding],
        backward_prefetch=fsdp.BackwardPrefetch.BACKWARD_POST,
        limit_all_gathers=True,
        use_orig_params=True,
        param_init_fn=fill,
        device_id=torch.cuda.current_device(),
    )
    if args.ac == "full":
        plain = recompute.CheckpointImpl.NO_REENTRANT
        wrap = functools.partial(recompute.checkpoint_wrapper, checkpoint_impl=plain)
        recompute.apply_activation_checkpointing(model, wrap, lambda module: isinstance(module, Block))
    optimizer = DecoupledAdamW(model.parameters())
    metrics = [LossMetric(), LossMetric()]
    for _ in range(args.steps):
        for _ in range(args.accumulate):
            tokens = torch.randint(VOCABULARY, (args.batch, args.seq), device="cuda")
            labels = torch.roll(tokens, -1, 1).flatten()
            with torch.autocast("cuda", HALF):
                logits = model(tokens).flatten(0, 1)
                loss = losses_of(logits, labels)[0].sum() / (labels != -100).sum()
            (loss / args.accumulate).backward()
            for metric in metrics:
                metric.update(logits, labels)
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.detach().cpu()
        for metric in metrics:
            metric.compute()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
