"""Train a deep learning recommendation model: tables split over the ranks, MLPs on every rank. Plain PyTorch.

    torchrun --nproc-per-node 2 examples/train_dlrm.py --size debug --steps 20

Each rank has its own samples and a share of the embedding tables. One all-to-all takes the indices of every
sample to the ranks that hold the tables; there the rows are summed; a second all-to-all brings the sums back
(and in the backward pass the gradients to the tables). The tables of a rank are one matrix, updated by SGD
within the backward pass, so that no gradient of their size ever exists. The MLPs are data parallel (DDP).

Source: Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems"
(arXiv:1906.00091); table sizes of large from MLPerf Training v1.0 (Criteo 1TB, at most 40 million rows).
"""

import argparse
import os
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

DENSE = 13  # dense features of a sample, as Criteo has


@dataclass(frozen=True)
class Config:
    rows: tuple[int, ...]  # of each table
    dim: int  # of an embedding
    pooling: int  # indices of a sample in each table
    bottom: tuple[int, ...]
    top: tuple[int, ...]


M40 = 40_000_000
# fmt: off
CRITEO_ROWS = (
    M40, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, M40, 3067956, 405282, 10, 2209, 11938, 155, 4, 976, 14,
    M40, M40, M40, 590152, 12973, 108, 36,
)
# fmt: on
SIZES = {
    "debug": Config(
        rows=(1000, 10, 300, 2000, 5, 700, 50, 1500), dim=16, pooling=2, bottom=(32,), top=(64, 32)
    ),
    "small": Config(rows=(100_000,) * 26, dim=64, pooling=4, bottom=(512, 256), top=(512, 256)),
    "large": Config(
        rows=CRITEO_ROWS,
        dim=128,
        pooling=20,
        bottom=(512, 256),
        top=(1024, 1024, 512, 256),
    ),
}


class Clicks(Dataset[tuple[Tensor, Tensor, Tensor]]):
    """Made-up samples: dense features, popular rows more often than others, a click that depends on both."""

    def __init__(self, config: Config, count: int, seed: int) -> None:
        self.rows, self.pooling = torch.tensor(config.rows), config.pooling
        self.count, self.seed = count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        dense = torch.randn(DENSE, generator=generator)
        skewed = torch.rand(len(self.rows), self.pooling, generator=generator, dtype=torch.float64) ** 4
        indices = (skewed * self.rows[:, None]).long()
        score = dense[:4].sum() + (indices[0] % 2).float().sum() - 1
        return dense, indices, (score > 0).float()


def split_tables(rows: tuple[int, ...], ranks: int) -> list[list[int]]:
    """Tables of each rank: the largest first, each to the rank with the fewest rows so far."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for table in sorted(range(len(rows)), key=lambda t: -rows[t]):
        # a rank without any table counts as the emptiest, so that none is left without
        min(shares, key=lambda share: (sum(rows[t] for t in share), len(share))).append(table)
    return shares


class AllToAll(torch.autograd.Function):
    """Pieces of a flat tensor to all ranks and from all ranks; the gradient takes the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, send: list[int], receive: list[int]) -> Tensor:
        ctx.splits = receive, send
        out = x.new_empty(sum(receive))
        dist.all_to_all_single(out, x.contiguous(), receive, send)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return AllToAll.apply(grad, *ctx.splits), None, None


class PooledRows(torch.autograd.Function):
    """Sums of rows of ``weight``; its backward pass is a step of SGD on these rows."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, indices: Tensor, lr: float) -> Tensor:
        ctx.weight, ctx.lr = weight, lr
        ctx.save_for_backward(indices)
        return F.embedding_bag(indices, weight, mode="sum")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        (indices,) = ctx.saved_tensors
        each = grad.repeat_interleave(indices.shape[1], 0)
        ctx.weight.data.index_add_(0, indices.flatten(), each, alpha=-ctx.lr)
        return None, None, None


class Tables(nn.Module):
    """All embedding tables, of which this rank holds some."""

    def __init__(self, config: Config, lr: float, seed: int, device: torch.device) -> None:
        super().__init__()
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.shares = split_tables(config.rows, self.ranks)
        order = torch.tensor([table for share in self.shares for table in share])
        self.register_buffer("by_owner", order.to(device), persistent=False)
        self.register_buffer("by_number", order.argsort().to(device), persistent=False)
        mine = [config.rows[table] for table in self.shares[self.rank]]
        self.dim, self.pooling = config.dim, config.pooling
        # The loss is a mean over the samples of one rank, and the model's over all of them.
        self.lr = lr / self.ranks
        starts = torch.tensor([0, *mine]).cumsum(0)[:-1]
        self.register_buffer("starts", starts.to(device), persistent=False)
        self.weight = nn.Parameter(torch.empty(sum(mine), config.dim, device=device))
        for table, part in zip(self.shares[self.rank], self.weight.detach().split(mine), strict=True):
            torch.manual_seed(seed + table)  # a table starts the same on whichever rank it is
            nn.init.uniform_(part, -(len(part) ** -0.5), len(part) ** -0.5)

    def forward(self, indices: Tensor) -> Tensor:
        """``indices`` (batch, tables, pooling) of this rank's samples to their sums (batch, tables, dim)."""
        batch = len(indices)
        counts, mine = [len(share) for share in self.shares], len(self.shares[self.rank])
        sent = indices.transpose(0, 1)[self.by_owner].flatten()
        got = AllToAll.apply(
            sent,
            [count * batch * self.pooling for count in counts],
            [mine * batch * self.pooling] * self.ranks,
        )
        rows = got.view(self.ranks, mine, batch, self.pooling) + self.starts[:, None, None]
        sums = PooledRows.apply(self.weight, rows.flatten(0, 2), self.lr)
        back = AllToAll.apply(
            sums.flatten(),
            [mine * batch * self.dim] * self.ranks,
            [count * batch * self.dim for count in counts],
        )
        return back.view(-1, batch, self.dim)[self.by_number].transpose(0, 1)


def mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        nn.init.xavier_normal_(layers[-2].weight)
    return nn.Sequential(*layers[:-1])


class Interaction(nn.Module):
    """The part that every rank has: MLPs, and products of every two embeddings of a sample."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        vectors = len(config.rows) + 1
        self.bottom = mlp(DENSE, *config.bottom, config.dim)
        self.top = mlp(config.dim + vectors * (vectors - 1) // 2, *config.top, 1)
        self.register_buffer("pairs", torch.tril_indices(vectors, vectors, -1), persistent=False)

    def forward(self, dense: Tensor, embeddings: Tensor) -> Tensor:
        """Logits (batch,) from dense features (batch, 13) and embeddings (batch, tables, dim)."""
        x = self.bottom(dense).relu()
        vectors = torch.cat([x[:, None], embeddings.type_as(x)], 1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))[:, self.pairs[0], self.pairs[1]]
        return self.top(torch.cat([x, products], 1)).squeeze(1)


def parse_arguments(world_size: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--size", choices=SIZES, default="debug", help="model size (default: debug)")
    add("--batch", type=int, help="samples a rank (default: 128 for debug, else 2048)")
    add("--dtype", choices=["bf16", "fp32"], default="bf16", help="of the MLPs' computation (default: bf16)")
    add("--lr", type=float, default=0.5, help="learning rate of SGD (default: 0.5)")
    add("--steps", type=int, default=3, help="(default: 3)")
    add("--seed", type=int, default=0, help="of the initial weights and the data")
    args = parser.parse_args()
    args.batch = args.batch or (128 if args.size == "debug" else 2048)
    if args.batch < 1 or args.steps < 1:
        parser.error("--batch and --steps must be at least 1")
    tables = len(SIZES[args.size].rows)
    if world_size > tables:
        parser.error(f"a world of {world_size} is more than the {tables} tables of --size {args.size}")
    return args


def train(args: argparse.Namespace, device: torch.device) -> None:
    rank, world_size, config = dist.get_rank(), dist.get_world_size(), SIZES[args.size]
    tables = Tables(config, args.lr, args.seed, device)
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(
        Interaction(config).to(device), device_ids=[device.index] if device.type == "cuda" else None
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    if rank == 0:
        count = tables.weight.numel() + sum(p.numel() for p in model.parameters())
        print(f"{args.size}: {count:,} parameters here, tables {tables.shares[0]}", flush=True)

    # Samples are made from their number: rank r of w takes the numbers r, r + w, r + 2w…
    clicks = Clicks(config, args.steps * args.batch * world_size, args.seed)
    batches = DataLoader(clicks, args.batch, sampler=range(rank, len(clicks), world_size))
    start = time.perf_counter()
    for step, batch in enumerate(batches, 1):
        dense, indices, labels = (tensor.to(device) for tensor in batch)
        with torch.autocast(device.type, torch.bfloat16, enabled=args.dtype == "bf16"):
            logits = model(dense, tables(indices))
        loss = F.binary_cross_entropy_with_logits(logits.float(), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        mean = loss.detach()
        dist.all_reduce(mean)
        loss_value = mean.item() / world_size
        now = time.perf_counter()
        if rank == 0:
            rate = world_size * args.batch / (now - start)
            memory = f"  {torch.cuda.max_memory_reserved() / 2**30:.2f} GiB" if device.type == "cuda" else ""
            print(f"step {step}  loss {loss_value:.4f}  {rate:,.0f} samples/s{memory}", flush=True)
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
