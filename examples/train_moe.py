"""Train a mixture-of-experts transformer with expert parallelism. Plain PyTorch, nothing else.

    torchrun --nproc-per-node 2 examples/train_moe.py --size debug --ep 2 --steps 20

The feed-forward part of each layer is many experts, of which a router gives each token the best few. The
ranks of an expert parallel group ("ep") hold different experts and send each other the tokens, by an
all-to-all there and one back. An expert takes a fixed number of tokens (its capacity); what is above that is
dropped, so all shapes are known beforehand. Experts are sharded by FSDP over the ranks that hold the same
ones ("edp"), everything else over all ranks.

Source: "GShard" (arXiv:2006.16668), section 2.2; "Switch Transformers" (arXiv:2101.03961), section 2.2, for
the loss that balances the load; dimensions of 8x7b from "Mixtral of Experts" (arXiv:2401.04088), of 64x240m
from "DeepSeekMoE" (arXiv:2401.06066) without its shared experts.
"""

import argparse
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler

from llama_model import Attention, Config, rotations
from text_data import TEXT, Bytes


@dataclass(frozen=True)
class MoEConfig(Config):
    experts: int = 8
    top_k: int = 2


SIZES = {
    "debug": MoEConfig(dim=64, layers=4, heads=4, kv_heads=2, ffn=128, vocab=256, experts=8),
    "8x1b": MoEConfig(dim=2048, layers=16, heads=32, kv_heads=8, ffn=8192, vocab=32_000),
    "8x7b": MoEConfig(dim=4096, layers=32, heads=32, kv_heads=8, ffn=14336, vocab=32_000),
    "64x240m": MoEConfig(
        dim=2048, layers=28, heads=16, kv_heads=16, ffn=1408, vocab=102_400, experts=64, top_k=6
    ),
}


class AllToAll(torch.autograd.Function):
    """Row block i of the input goes to rank i of the group; the gradient takes the same way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return AllToAll.apply(grad, ctx.group), None


class Experts(nn.Module):
    """Feed-forward networks side by side: (experts, tokens, dim) to the same shape."""

    def __init__(self, config: MoEConfig, count: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(count, config.dim, config.ffn))
        self.w3 = nn.Parameter(torch.empty(count, config.dim, config.ffn))
        self.w2 = nn.Parameter(torch.empty(count, config.ffn, config.dim))

    def forward(self, x: Tensor) -> Tensor:
        return torch.bmm(F.silu(torch.bmm(x, self.w1)) * torch.bmm(x, self.w3), self.w2)


class MoE(nn.Module):
    """Router, dispatch to the experts of the group, and combination of what they return."""

    def __init__(self, config: MoEConfig, group: dist.ProcessGroup, capacity_factor: float) -> None:
        super().__init__()
        self.config, self.group, self.capacity_factor = config, group, capacity_factor
        self.router = nn.Linear(config.dim, config.experts, bias=False)
        self.experts = Experts(config, config.experts // group.size())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``x`` (batch, seq, dim) to the same shape, and the loss that balances the load."""
        experts, top_k, ep = self.config.experts, self.config.top_k, self.group.size()
        flat = x.flatten(0, 1)
        capacity = math.ceil(len(flat) * top_k / experts * self.capacity_factor)

        probabilities = self.router(flat).float().softmax(-1)
        weights, chosen = probabilities.topk(top_k)  # (tokens, top_k)
        weights = weights / weights.sum(-1, keepdim=True)
        hits = (chosen.flatten()[:, None] == torch.arange(experts, device=x.device)).int()
        balance = experts * (hits.float().mean(0) * probabilities.mean(0)).sum()

        # The place of each choice in its expert's queue; those past the capacity share a last, unused row.
        place = (hits.cumsum(0) * hits).sum(-1) - 1
        slot = torch.where(place < capacity, chosen.flatten() * capacity + place, experts * capacity)
        queues = flat.new_zeros(experts * capacity + 1, flat.shape[-1])
        queues = queues.index_copy(0, slot, flat.repeat_interleave(top_k, 0))[:-1]

        queues = self.exchange(queues).unflatten(0, (ep, experts // ep, capacity))
        queues = self.experts(queues.transpose(0, 1).flatten(1, 2))
        queues = queues.unflatten(1, (ep, capacity)).transpose(0, 1).flatten(0, 2)
        results = F.pad(self.exchange(queues), (0, 0, 0, 1))[slot].unflatten(0, (-1, top_k))
        return (results * weights[..., None].type_as(results)).sum(1).view_as(x), balance

    def exchange(self, x: Tensor) -> Tensor:
        return AllToAll.apply(x, self.group) if self.group.size() > 1 else x


class Block(nn.Module):
    def __init__(self, config: MoEConfig, group: dist.ProcessGroup, capacity_factor: float) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.attention = Attention(config)
        self.moe_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.moe = MoE(config, group, capacity_factor)

    def forward(self, x: Tensor, freqs: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.attention_norm(x), freqs)
        out, balance = self.moe(self.moe_norm(x))
        return x + out, balance


class Transformer(nn.Module):
    freqs: Tensor

    def __init__(self, config: MoEConfig, group: dist.ProcessGroup, args: argparse.Namespace) -> None:
        super().__init__()
        self.config, self.ac = config, args.ac
        self.embedding = nn.Embedding(config.vocab, config.dim)
        self.layers = nn.ModuleList(Block(config, group, args.capacity) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.output = nn.Linear(config.dim, config.vocab, bias=False)
        freqs = torch.empty(args.seq, config.dim // config.heads // 2, dtype=torch.complex64)
        self.register_buffer("freqs", freqs, persistent=False)

    def init_weights(self) -> None:
        head_dim = self.config.dim // self.config.heads
        self.freqs.copy_(rotations(head_dim, len(self.freqs), self.config.rope_theta, self.freqs.device))
        for name, parameter in self.named_parameters():
            if "norm" in name:
                nn.init.ones_(parameter)
            else:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (batch, seq, vocab) and the mean balance loss of the layers."""
        x, balance = self.embedding(tokens), torch.zeros((), device=tokens.device)
        for layer in self.layers:
            if self.ac == "full":
                x, b = checkpoint(layer, x, self.freqs, use_reentrant=False, preserve_rng_state=False)
            else:
                x, b = layer(x, self.freqs)
            balance = balance + b
        return self.output(self.norm(x)), balance / len(self.layers)


def parse_arguments(world_size: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    # fmt: off
    add("--size", choices=SIZES, default="debug", help="experts x their size (default: debug)")
    add("--ep", type=int, help="expert parallel ranks (default: as many as experts and ranks allow)")
    add("--capacity", type=float, default=1.25, help="of an expert, in fair shares of tokens (default: 1.25)")
    add("--ac", choices=["none", "full"], default="full", help="activation checkpointing (default: full)")
    add("--seq", type=int, help="sequence length (default: 256 for debug, else 4096)")
    add("--batch", type=int, default=1, help="sequences a rank (default: 1)")
    add("--dtype", choices=["bf16", "fp32"], default="bf16", help="of computation; parameters are fp32")
    add("--lr", type=float, help="learning rate (default: 3e-3 for debug, else 3e-4)")
    add("--clip", type=float, default=1.0, help="largest norm of the gradient (default: 1)")
    add("--steps", type=int, default=3, help="(default: 3)")
    add("--seed", type=int, default=0, help="of the initial weights")
    add("--data", type=Path, default=TEXT, help="a text file, read as bytes")
    # fmt: on
    args = parser.parse_args()
    experts, debug = SIZES[args.size].experts, args.size == "debug"
    for name in ("ep", "seq", "batch", "steps", "capacity"):
        value = getattr(args, name)
        if value is not None and value <= 0:
            parser.error(f"--{name} must be above 0, not {value}")
    args.seq = args.seq or (256 if debug else 4096)
    args.lr = args.lr or (3e-3 if debug else 3e-4)
    args.ep = args.ep or math.gcd(experts, world_size)
    if experts % args.ep:
        parser.error(f"--ep {args.ep} does not divide the {experts} experts of --size {args.size}")
    if world_size % args.ep:
        parser.error(f"--ep {args.ep} does not divide a world of {world_size}")
    if not args.data.is_file():
        parser.error(f"--data {args.data}: there is no such file")
    return args


def clip_gradients(shared: list[Tensor], experts: list[Tensor], limit: float, ep: dist.ProcessGroup) -> None:
    """Scale gradients to a norm of at most ``limit``; a rank of ``ep`` knows its own experts."""
    shared_norm, expert_norm = (
        nn.utils.get_total_norm([p.grad for p in parameters]).full_tensor()
        for parameters in (shared, experts)
    )
    square = expert_norm**2
    dist.all_reduce(square, group=ep)
    norm = (shared_norm**2 + square).sqrt()
    for parameters in (shared, experts):
        nn.utils.clip_grads_with_norm_(parameters, limit, norm)


def train(args: argparse.Namespace, device: torch.device) -> None:
    rank, world_size, config = dist.get_rank(), dist.get_world_size(), SIZES[args.size]
    mesh = init_device_mesh(device.type, (world_size // args.ep, args.ep), mesh_dim_names=("edp", "ep"))
    everyone = mesh["edp", "ep"]._flatten("dp")
    group = mesh["ep"].get_group()
    with torch.device("meta"):
        model = Transformer(config, group, args)

    dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in model.layers:
        # By columns, since there may be fewer experts here than ranks that share them.
        unit = fully_shard(
            block.moe.experts, mesh=mesh["edp"], mp_policy=policy, shard_placement_fn=lambda _: Shard(1)
        )
        # Their gradient is a sum over the tokens of all ranks, of which "edp" counts one in every --ep.
        unit.set_gradient_divide_factor(world_size)
        unit.set_force_sum_reduction_for_comms(True)  # gloo has no sum that also divides
        fully_shard(block, mesh=everyone, mp_policy=policy)
    fully_shard(model, mesh=everyone, mp_policy=policy)
    model.to_empty(device=device)
    torch.manual_seed(args.seed + rank)  # each rank fills its own shards
    with torch.no_grad():
        model.init_weights()

    experts = [p for name, p in model.named_parameters() if ".experts." in name]
    shared = [p for name, p in model.named_parameters() if ".experts." not in name]
    # Two groups, because one list operation cannot span two meshes.
    groups = [{"params": shared}, {"params": experts}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    dataset = Bytes(args.data, args.seq, args.steps * args.batch * world_size)
    sampler = DistributedSampler(dataset, world_size, rank, shuffle=False)
    if rank == 0:
        count = sum(p.numel() for p in model.parameters())
        print(f"{args.size}: {count:,} parameters here, --ep {args.ep}", flush=True)

    start = time.perf_counter()
    for step, batch in enumerate(DataLoader(dataset, batch_size=args.batch, sampler=sampler), 1):
        tokens, targets = (tensor.to(device) for tensor in batch)
        logits, balance = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(0, 1))
        (loss + 0.01 * balance).backward()
        clip_gradients(shared, experts, args.clip, group)
        optimizer.step()
        optimizer.zero_grad()

        mean = loss.detach()
        dist.all_reduce(mean)
        loss_value = mean.item() / world_size
        now = time.perf_counter()
        if rank == 0:
            rate = world_size * args.batch * args.seq / (now - start)
            memory = f"  {torch.cuda.max_memory_reserved() / 2**30:.2f} GiB" if device.type == "cuda" else ""
            print(f"step {step}  loss {loss_value:.4f}  {rate:,.0f} tokens/s{memory}", flush=True)
        start = now


def main() -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():  # what torchrun would set
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    args = parse_arguments(int(os.environ["WORLD_SIZE"]))
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl")
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    train(args, device)
    # Else a thread of gloo may still hold a tensor when the interpreter goes, which aborts the process.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
