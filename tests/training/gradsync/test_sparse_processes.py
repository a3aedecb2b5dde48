"""Sparse sums between processes over gloo: a recommender that trains alike to the bit, and lost peers."""

from __future__ import annotations

from pathlib import Path

from support.ranks import run_ranks

TRAIN = '''
import torch, torch.distributed as dist
from torch import nn
from windtunnel.training.gradsync.live import sparse
from windtunnel.training.gradsync.live.exchange import Peers
from windtunnel.training.gradsync.live.sparse import all_reduce, tried
from windtunnel.training.gradsync.live.units import units_of
from windtunnel.training.gradsync.model import CollectiveCost, Network
from windtunnel.training.gradsync.policy.sparse import SCHEMES

FIELDS, ROWS, WIDTH = 6, 4000, 8
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

class DeepFM(nn.Module):
    """Factorisation machine and a deep part over one table of all fields."""
    def __init__(self):
        super().__init__()
        self.table = nn.EmbeddingBag(FIELDS * ROWS, WIDTH, sparse=True, mode="sum")
        self.first = nn.Embedding(FIELDS * ROWS, 1, sparse=True)
        self.each = nn.Embedding(FIELDS * ROWS, WIDTH, sparse=True)
        self.deep = nn.Sequential(nn.Linear(FIELDS * WIDTH, 16), nn.ReLU(), nn.Linear(16, 1))
    def forward(self, ids):
        vectors = self.each(ids)
        pairs = (self.table(ids) ** 2).sum(1) - (vectors ** 2).sum((1, 2))
        return self.first(ids).sum(1)[:, 0] + pairs / 2 + self.deep(vectors.flatten(1))[:, 0]

def ordered(gradient):
    parts = [torch.empty(gradient.shape) for _ in range(world)]
    dist.all_gather(parts, gradient.coalesce().to_dense() if gradient.is_sparse else gradient)
    total = torch.zeros(gradient.shape)
    for one in parts:
        total += one
    # as it came: the optimizer's step for sparse gradients rounds otherwise than that for dense ones
    return total.to_sparse(1) if gradient.is_sparse else total

def train(reduce, steps=4):
    torch.manual_seed(0)
    model = DeepFM()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    draws = torch.Generator().manual_seed(7 + rank)
    losses = []
    for _ in range(steps):
        ids = (torch.rand(64, FIELDS, generator=draws) ** 6 * ROWS).long() + torch.arange(FIELDS) * ROWS
        clicks = (ids.sum(1) % 2).float()
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(model(ids), clicks)
        loss.backward()
        for one in model.parameters():
            one.grad = reduce(one.grad) if one.grad.is_sparse else ordered(one.grad)
        optimizer.step()
        losses.append(loss.item().hex())
    weights = torch.cat([one.detach().reshape(-1) for one in model.parameters()])
    return losses, weights.view(torch.int32)

losses, weights = train(ordered)
for scheme in ("zen", "auto", "allgather"):
    theirs, same = train(lambda one: all_reduce(one, scheme=scheme))
    assert theirs == losses and torch.equal(same, weights), scheme
for scheme in ("hierarchy", "dense"):
    theirs, same = train(lambda one: all_reduce(one, scheme=scheme))
    close = [float.fromhex(one) for one in theirs], [float.fromhex(one) for one in losses]
    torch.testing.assert_close(*map(torch.tensor, close), rtol=1e-4, atol=1e-6)
lines = CollectiveCost("flat", "alltoall", 0.0, 1e-12), CollectiveCost("flat", "allreduce", 0.0, 1e-12)
table = torch.eye(64)
found = [None] * world
links = Network(world, 1, lines)
sparsity = sparse.measure(Peers(), units_of(table))
dist.all_gather_object(found, tried(table, sparsity, links, enough=0.0))
assert found == found[:1] * world and list(found[0]) == list(SCHEMES)
assert all(one > 0 for one in found[0].values())
print(f"rank {rank}: {len(set(losses))} losses")
'''

LOST = """
import os, sys, time, torch, torch.distributed as dist
from windtunnel.base.errors import HostError
from windtunnel.training.gradsync.live.sparse import all_reduce

dist.init_process_group("gloo")
rank, how = dist.get_rank(), sys.argv[1]
mine = torch.eye(64)
assert torch.equal(all_reduce(mine), 3 * mine)
if rank == 1 and how == "gone":
    os._exit(0)
if rank == 1:  # silent: until the others are gone
    while not all(os.path.exists(sys.argv[2] + other) for other in "02"):
        time.sleep(0.05)
    os._exit(0)
try:
    all_reduce(mine, deadline=60 if how == "gone" else 0.5)
except HostError as error:
    print(f"rank {rank}: {error}", flush=True)
open(sys.argv[2] + str(rank), "w").close()
os._exit(0)
"""


def test_a_recommender_trains_as_with_dense_gradients(tmp_path: Path) -> None:
    """Losses and weights have the same bits as with a dense sum in the order of ranks; three ranks, where
    gloo's own order is another. What sums take is told alike by all ranks."""
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    done = run_ranks([script], 3)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")) == ["", *(f"rank {rank}: 4 losses" for rank in range(3))]


def test_a_lost_peer_is_an_error_on_all_others(tmp_path: Path) -> None:
    """At once where it is gone, by the deadline where it is silent."""
    script = tmp_path / "lost.py"
    script.write_text(LOST)
    for how, word in (("gone", "is gone, or gave up"), ("silent", "did not answer within 0.5 s")):
        done = run_ranks([script, how, str(tmp_path / how)], 3)
        assert done.returncode == 0, done.stderr
        for rank in (0, 2):
            assert f"rank {rank}: gradient exchange: of 3 ranks rank" in done.stdout
        assert word in done.stdout, done.stdout
