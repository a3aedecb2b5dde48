"""Train a Llama 3 decoder on islands that seldom talk: DiLoCo. Plain PyTorch, nothing else.

    torchrun --nproc-per-node 2 examples/train_diloco.py --steps 32
    windtunnel emulate --cluster h100-sxm:2x8 examples/train_diloco.py

Every rank is an island with the whole model, and trains it on its own text by AdamW. After each --sync steps
the islands add up how far they have come, in one all-reduce, and an outer optimiser (SGD with Nesterov's
momentum) moves the common weights by their mean, from which all go on.

Source: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models"
(arXiv:2311.08105), algorithm 1; learning rates and momentum of section 3.
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from llama_model import SIZES, Llama
from text_data import TEXT, Bytes


class Outer:
    """The common weights, and the optimiser that moves them."""

    def __init__(self, model: nn.Module, lr: float, momentum: float) -> None:
        self.local = list(model.parameters())
        self.common = [p.detach().clone() for p in self.local]
        self.optimizer = torch.optim.SGD(self.common, lr=lr, momentum=momentum, nesterov=True)

    @torch.no_grad()
    def step(self) -> None:
        """Move the common weights by the mean of what all islands have changed; let this one go on from
        there."""
        changes = torch.cat([(old - new).flatten() for old, new in zip(self.common, self.local, strict=True)])
        dist.all_reduce(changes)
        changes /= dist.get_world_size()
        for weight, change in zip(self.common, changes.split([p.numel() for p in self.common]), strict=True):
            weight.grad = change.view_as(weight)
        self.optimizer.step()
        for mine, weight in zip(self.local, self.common, strict=True):
            mine.copy_(weight)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--size", choices=SIZES, default="debug", help="model size (default: debug, with bytes as tokens)")
    add("--seq", type=int, help="sequence length (default: 256 for debug, else 2048)")
    add("--batch", type=int, default=1, help="sequences of an island in a step (default: 1)")
    add("--sync", type=int, default=8, help="steps between two of the outer optimiser (default: 8)")
    add("--lr", type=float, help="of the inner optimiser (default: 3e-3 for debug, else 4e-4)")
    add("--outer-lr", type=float, default=0.7, help="of the outer optimiser (default: 0.7)")
    add("--momentum", type=float, default=0.9, help="of the outer optimiser (default: 0.9)")
    add("--steps", type=int, default=32, help="of the inner optimiser (default: 32)")
    add("--seed", type=int, default=0, help="of the initial weights, which all islands have")
    add("--data", type=Path, default=TEXT, help="a text file, read as bytes")
    args = parser.parse_args()
    for name in ("batch", "sync", "steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, not {getattr(args, name)}")
    debug = args.size == "debug"
    args.seq = args.seq or (256 if debug else 2048)
    args.lr = args.lr or (3e-3 if debug else 4e-4)
    return args


def train(args: argparse.Namespace, device: torch.device) -> None:
    rank, world_size, config = dist.get_rank(), dist.get_world_size(), SIZES[args.size]
    torch.manual_seed(args.seed)
    with torch.device("meta"):
        model = Llama(config, args.seq, range(config.layers), True, True)
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights()
    inner = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    outer = Outer(model, args.outer_lr, args.momentum)
    if rank == 0:
        print(f"{args.size}: {sum(p.numel() for p in model.parameters()):,} parameters", flush=True)

    text = Bytes(args.data, args.seq, args.steps * args.batch * world_size)
    sampler = DistributedSampler(text, world_size, rank, shuffle=False)
    start = time.perf_counter()
    for step, batch in enumerate(DataLoader(text, args.batch, sampler=sampler), 1):
        tokens, targets = (tensor.to(device) for tensor in batch)
        with torch.autocast(device.type, torch.bfloat16):
            logits: Tensor = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        inner.zero_grad()
        loss.backward()
        inner.step()
        if step % args.sync == 0:
            outer.step()

        loss_value = loss.item()
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
    args = parse_arguments()
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
