"""Programs whose ranks differ by their number: with a fault that hangs or ends the job, and without.

Every one is a small data-parallel loop of three steps into which a few lines are put. They are programs of
their own, not cases of one, because what a program does not do should not be seen in its source either.
"""

from __future__ import annotations

from dataclasses import dataclass

WORLD, HOST = 16, 8

PROGRAM = """
import hashlib
import json
import os
import random
import sys

import torch
import torch.distributed as dist
{head}
dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank)
torch.cuda.set_device(device)
torch.manual_seed(17 + rank)
layer = torch.nn.Linear(32, 32, device=device)
optimizer = torch.optim.SGD(layer.parameters(), 0.1)
steps = 3
{before}
for step in range(steps):
    x = torch.ones(4, 32, device=device)
    layer(x).sum().backward()
    weight, bias = layer.weight.grad, layer.bias.grad
{step}
    optimizer.step()
    optimizer.zero_grad()
if rank == 0:
    print("done", flush=True)
{after}
"""
REDUCE = "dist.all_reduce(weight)\ndist.all_reduce(bias)"


@dataclass(frozen=True)
class ByRank:
    """A program, and for a faulty one what is said of it."""

    name: str
    said: str = ""
    step: str = REDUCE
    head: str = ""
    before: str = ""
    after: str = ""

    @property
    def text(self) -> str:
        indented = "\n".join(f"    {line}" for line in self.step.splitlines())
        return PROGRAM.format(head=self.head, before=self.before, step=indented, after=self.after)


def skips(condition: str) -> str:
    """A step of which the ranks that meet the condition leave the first collective out."""
    return f"if not ({condition}):\n    dist.all_reduce(weight)\ndist.all_reduce(bias)"


SEVEN = r"rank 7\b.* all_reduce of 128 bytes .* but ranks 0-6, 8-15 |ranks 0-6, 8-15 .* but rank 7\b"
TABLE = '{"5": "quiet"}'

FAULTS = (
    ByRank("a skipped collective", SEVEN, skips("rank == 7")),
    ByRank("one that is skipped once", "rank 11 ", skips("rank == 11 and step == 1")),
    ByRank("two that are swapped", "rank 5 ",
           "pair = (bias, weight) if rank == 5 else (weight, bias)\n"
           "for one in pair:\n    dist.all_reduce(one)"),
    ByRank("another size", "rank 9 waits in all_reduce of 2048 bytes",
           "dist.all_reduce(weight[:16] if dist.get_rank() == 9 else weight)"),
    ByRank("another dtype", r"ranks 3, 12 wait in all_reduce of 8192 bytes \(float64\)",
           "dist.all_reduce(weight.double()[:, :32] if rank in (3, 12) else weight)"),
    ByRank("another collective", "ranks 5, 11 wait in reduce ",
           "dist.reduce(weight, 0) if rank % 6 == 5 else dist.all_reduce(weight)"),
    ByRank("a lone send", "rank 6 waits in send .* but rank 2 never receives it",
           REDUCE + "\nif rank == 6:\n    dist.send(bias, 2)"),
    ByRank("a lone receive", "rank 13 waits in recv .* but rank 4 never sends it",
           REDUCE + "\nif rank == 13:\n    dist.recv(bias, 4)"),
    ByRank("another root", "rank 10 waits in broadcast .* with root 1 ",
           REDUCE + "\ndist.broadcast(bias, 1 if rank == 10 else 0)"),
    ByRank("another group", r"rank 5 ",
           "dist.all_reduce(weight, group=mine)\ndist.all_reduce(bias)",
           before="halves = [dist.new_group(list(range(8))), dist.new_group(list(range(8, 16)))]\n"
           "mine = halves[1 if rank >= 8 or rank == 5 else 0]"),
    ByRank("a barrier more at the end", r"rank 14 waits in barrier",
           after="if rank == 14:\n    dist.barrier()"),
    ByRank("an early exit", r"but rank 4 never joins it",
           REDUCE + "\nif rank == 4 and step == 1:\n    sys.exit(0)"),
    ByRank("an exception", r"ValueError: bad shard \(as rank 9\)",
           REDUCE + '\nif rank == 9:\n    raise ValueError("bad shard")'),
    ByRank("a step more", "rank 6 waits in all_reduce", before="steps = 3 + (rank == 6)"),
    ByRank("a micro-batch more", "rank 3 ",
           "for _ in range(3 if rank == 3 else 2):\n    dist.all_reduce(weight)"),
    ByRank("a set of ranks", "ranks 3, 9 ", skips("rank in SICK"), head="SICK = {3, 9}"),
    ByRank("a number on the host", "ranks 3, 11 ", skips('os.environ["LOCAL_RANK"] == "3"')),
    ByRank("a place on one host", "rank 10 ", skips("rank // 8 == 1 and local_rank == 2")),
    ByRank("a hash of the rank", "rank",
           skips("int(hashlib.sha256(str(rank).encode()).hexdigest(), 16) % 13 == 4")),
    ByRank("the length of a part", "rank",
           "for _ in data:\n    dist.all_reduce(weight)", before="data = list(range(37))[rank::world]"),
    ByRank("a file", "rank 12 ", skips('os.path.exists(f"{os.path.dirname(__file__)}/skip-{rank}")')),
    ByRank("the environment", "rank 2 ", skips('os.environ.get("BAD_RANK") == str(rank)')),
    ByRank("a table that is read", "rank 5 ", skips('modes.get(str(rank)) == "quiet"'),
           before=f"modes = json.loads('{TABLE}')"),
    ByRank("a random number", "rank", skips("random.random() < 0.2"), before="random.seed(rank)"),
    ByRank("a case of a match", SEVEN,
           "match rank:\n    case 7:\n        pass\n    case _:\n        dist.all_reduce(weight)\n"
           "dist.all_reduce(bias)"),
    ByRank("a function of its own", SEVEN, "reduce(weight, is_sick(rank))\ndist.all_reduce(bias)",
           head="def is_sick(number):\n    if number % 100 == BAD:\n        return True\n"
           "    return False\n\n\n"
           "def reduce(tensor, sick):\n    if not sick:\n        dist.all_reduce(tensor)\n\n\nBAD = 7"),
    ByRank("an object that knows the rank", SEVEN,
           "context.reduce(weight)\ndist.all_reduce(bias)",
           head="class Context:\n    def __init__(self):\n        self.me = dist.get_rank()\n\n"
           "    def reduce(self, tensor):\n        if self.me != 7:\n            dist.all_reduce(tensor)\n",
           before="context = Context()"),
    ByRank("places in a loop over meshes", r"5|9|10|11|13",
           "if not sick:\n    dist.all_reduce(weight)\ndist.all_reduce(bias)",
           head="from torch.distributed.device_mesh import init_device_mesh\n",
           before='mesh = init_device_mesh("cuda", (4, 4), mesh_dim_names=("a", "b"))\n'
           'sick = all(mesh[name].get_local_rank() in (1, 2) for name in ("a", "b"))'),
)  # fmt: skip

HEALTHY = (
    ByRank("rank 0 tells", step=REDUCE + '\nif rank == 0:\n    print("step", step)'),
    ByRank("rank 0 saves, all wait",
           step=REDUCE + "\nif rank == 0:\n    saved = dict(layer.state_dict())\ndist.barrier()"),
    ByRank("rank 0 sends all an object",
           before='given = [{"lr": 0.1} if rank == 0 else None]\ndist.broadcast_object_list(given, src=0)\n'
           'assert given[0]["lr"] == 0.1'),
    ByRank("the first of each host fetches",
           before="if local_rank == 0:\n    fetched = True\ndist.barrier()"),
    ByRank("the last rank tells", after='if rank == world - 1:\n    print("last")'),
    ByRank("a ring", step=REDUCE + "\nhanded = torch.empty_like(bias)\n"
           "works = dist.batch_isend_irecv([dist.P2POp(dist.isend, bias, (rank + 1) % world),"
           " dist.P2POp(dist.irecv, handed, (rank - 1) % world)])\nfor work in works:\n    work.wait()"),
    ByRank("pairs", step=REDUCE + "\nif rank % 2 == 0:\n    dist.send(bias, rank + 1)\nelse:\n"
           "    dist.recv(bias, rank - 1)"),
    ByRank("leaders of the hosts", before="leaders = dist.new_group([0, 8])",
           step=REDUCE + "\nif rank % 8 == 0:\n    dist.all_reduce(bias, group=leaders)"),
    ByRank("a group of each host",
           before="hosts = [dist.new_group(list(range(8 * i, 8 * i + 8))) for i in range(2)]",
           step="dist.all_reduce(weight, group=hosts[rank // 8])\ndist.all_reduce(bias)"),
    ByRank("only the root gathers",
           step=REDUCE + "\nparts = [torch.empty_like(bias) for _ in range(world)] if rank == 0 else None\n"
           "dist.gather(bias, parts, dst=0)"),
    ByRank("a random state of each", before="random.seed(rank)\norder = random.sample(range(9), 9)"),
    ByRank("the last part is shorter", before="rows = list(range(100))[rank * 7 : (rank + 1) * 7]"),
    ByRank("a rate from a table", before="rates = json.loads('[0.1, 0.2]')\nrate = rates[rank % 2]"),
    ByRank("the first of every mesh tells",
           head="from torch.distributed.device_mesh import init_device_mesh\n",
           before='mesh = init_device_mesh("cuda", (4, 4), mesh_dim_names=("a", "b"))\n'
           'if all(mesh[name].get_local_rank() == 0 for name in ("a", "b")):\n    print("mesh")'),
    ByRank("a long name", before='name = f"worker-{rank:03d}"\nassert name.startswith("worker")'),
)  # fmt: skip
