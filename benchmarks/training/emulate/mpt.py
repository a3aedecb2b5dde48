"""MPT as MosaicML measured it for llm-foundry's table: a script that is emulated, for the published rows.

    windtunnel emulate --cluster h100-sxm:1x8 benchmarks/training/emulate/mpt.py --size 7b --batch 6

The models are those of its ``mpt-*.yaml`` without change: biases, learned positions (no ALiBi, as the table's
counts of parameters say), one embedding for tokens and head, LayerNorm in bfloat16, GELU. Settings are
Composer's: FSDP1 a block, its mixed precision ``DEFAULT`` (parameters gathered in bfloat16, gradients reduced
in float32, after every micro-batch), ``BACKWARD_POST``, autocast, AdamW one parameter after another, the norm
of gradients clipped. Its FlashAttention 2 is PyTorch's here, and its fused loss is PyTorch's plain one.
"""

from __future__ import annotations

import argparse
import functools
import os
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional as F


class Size(NamedTuple):
    """A model: ``width`` features, heads of 128."""

    layers: int
    width: int


SIZES = {
    "1b": Size(24, 2048), "3b": Size(32, 2560), "7b": Size(32, 4096), "13b": Size(40, 5120),
    "30b": Size(48, 7168), "70b": Size(80, 8192), "debug": Size(2, 256),
}  # fmt: skip
HEAD, VOCABULARY = 128, 50368
HALF = torch.bfloat16


class HalfLayerNorm(nn.LayerNorm):
    """LayerNorm in bfloat16, where autocast would take float32."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: [..., width]."""
        with torch.autocast("cuda", enabled=False):
            weight, bias = self.weight.to(HALF), self.bias.to(HALF)
            return F.layer_norm(x.to(HALF), self.normalized_shape, weight, bias, self.eps)


class Block(nn.Module):
    """Attention and the two products after it, each added to what came in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = HalfLayerNorm(width), HalfLayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """``x``: [batch, sequence, width]."""
        q, k, v = (
            part.unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in self.qkv(self.norm_1(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        y: torch.Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return y


class Model(nn.Module):
    """The decoder; its head is the embedding of the tokens."""

    def __init__(self, size: Size, sequence: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, size.width)
        self.positions = nn.Embedding(sequence, size.width)
        self.blocks = nn.ModuleList(Block(size.width) for _ in range(size.layers))
        self.norm = HalfLayerNorm(size.width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """``tokens``: [batch, sequence]. Returns logits [batch, sequence, vocabulary]."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


def fill(module: nn.Module) -> None:
    """Give the module's own parameters memory, and values."""
    module.to_empty(device=torch.device("cuda", torch.cuda.current_device()), recurse=False)
    if isinstance(module, nn.Linear | nn.Embedding | nn.LayerNorm):
        module.reset_parameters()


def main() -> None:
    """The training script."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="7b")
    parser.add_argument("--seq", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=1, help="sequences of a micro-batch and rank")
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--ac", choices=("none", "full"), default="none")
    parser.add_argument("--sharding", choices=("FULL_SHARD", "SHARD_GRAD_OP"), default="FULL_SHARD")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()

    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    with torch.device("meta"):
        bare = Model(SIZES[args.size], args.seq)
    model = FullyShardedDataParallel(
        bare,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=MixedPrecision(param_dtype=HALF, reduce_dtype=torch.float32, buffer_dtype=HALF),
        sharding_strategy=ShardingStrategy[args.sharding],
        backward_prefetch=BackwardPrefetch.BACKWARD_POST,
        limit_all_gathers=True,
        use_orig_params=True,
        param_init_fn=fill,
        device_id=torch.cuda.current_device(),
    )
    if args.ac == "full":
        wrap = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
        apply_activation_checkpointing(
            model, checkpoint_wrapper_fn=wrap, check_fn=lambda module: isinstance(module, Block)
        )
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.0, foreach=False
    )
    for _ in range(args.steps):
        for _ in range(args.accumulate):
            tokens = torch.randint(VOCABULARY, (args.batch, args.seq + 1), device="cuda")
            with torch.autocast("cuda", HALF):
                logits = model(tokens[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            (loss / args.accumulate).backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
