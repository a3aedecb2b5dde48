"""Faults that depend on the number of the rank are found without running every rank; look-alikes pass.

Every program is a small data-parallel loop of three steps into which a few lines are put. They are programs
of their own, not cases of one, because what a program does not do should not be seen in its source either.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from windtunnel.base.errors import ScriptError
from windtunnel.training.emulate.run import Run, emulate

WORLD = 16
PROGRAM = """
import hashlib, json, os, random, sys
import torch
import torch.distributed as dist
{head}
dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
local_rank = int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank)
torch.cuda.set_device(device)
layer = torch.nn.Linear(32, 32, device=device)
optimizer = torch.optim.SGD(layer.parameters(), 0.1)
{before}
for step in range(3):
    x = torch.ones(4, 32, device=device)
    layer(x).sum().backward()
    weight, bias = layer.weight.grad, layer.bias.grad
{step}
    optimizer.step()
    optimizer.zero_grad()
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

    @property
    def text(self) -> str:
        indented = "\n".join(f"    {line}" for line in self.step.splitlines())
        return PROGRAM.format(head=self.head, before=self.before, step=indented)


def skips(condition: str) -> str:
    """A step of which the ranks that meet the condition leave the first collective out."""
    return f"if not ({condition}):\n    dist.all_reduce(weight)\ndist.all_reduce(bias)"


SEVEN = r"rank 7\b.* all_reduce of 128 bytes .* but ranks 0-6, 8-15 |ranks 0-6, 8-15 .* but rank 7\b"
FAULTS = (
    ByRank("skipped once", "rank 11 ", skips("rank == 11 and step == 1")),
    ByRank("a lone send", "rank 6 waits in send .* but rank 2 never receives it",
           REDUCE + "\nif rank == 6:\n    dist.send(bias, 2)"),
    ByRank("an exception", r"ValueError: bad shard \(as rank 9\)",
           REDUCE + '\nif rank == 9:\n    raise ValueError("bad shard")'),
    ByRank("an early exit", r"but rank 4 never joins it",
           REDUCE + "\nif rank == 4 and step == 1:\n    sys.exit(0)"),
    ByRank("a place on one host", "rank 10 ", skips("rank // 8 == 1 and local_rank == 2")),
    ByRank("a launcher's number", "rank 5 ", skips('os.environ["SLURM_PROCID"] == "5"')),
    ByRank("a hash of the rank", "rank",
           skips("int(hashlib.sha256(str(rank).encode()).hexdigest(), 16) % 13 == 4")),
    ByRank("a file", "rank 12 ", skips('os.path.exists(f"{os.path.dirname(__file__)}/skip-{rank}")')),
    ByRank("a case of a match", SEVEN,
           "match rank:\n    case 7:\n        pass\n    case _:\n        dist.all_reduce(weight)\n"
           "dist.all_reduce(bias)"),
    ByRank("a function and an object that knows the rank", SEVEN,
           "context.reduce(weight)\ndist.all_reduce(bias)",
           head="def is_sick(number):\n    return number % 100 == BAD\n\n\nBAD = 7\n"
           "class Context:\n    def __init__(self):\n        self.me = dist.get_rank()\n\n"
           "    def reduce(self, tensor):\n"
           "        if not is_sick(self.me):\n            dist.all_reduce(tensor)\n",
           before="context = Context()"),
    ByRank("places in a loop over meshes", r"5|9|10|11|13", skips("sick"),
           head="from torch.distributed.device_mesh import init_device_mesh\n",
           before='mesh = init_device_mesh("cuda", (4, 4), mesh_dim_names=("a", "b"))\n'
           'sick = all(mesh[name].get_local_rank() in (1, 2) for name in ("a", "b"))'),
)  # fmt: skip

HEALTHY = (
    ByRank("rank 0 tells and saves, all wait",
           step=REDUCE + "\nif rank == 0:\n    print(dict(layer.state_dict()))\ndist.barrier()"),
    ByRank("a ring", step=REDUCE + "\nhanded = torch.empty_like(bias)\n"
           "works = dist.batch_isend_irecv([dist.P2POp(dist.isend, bias, (rank + 1) % world),"
           " dist.P2POp(dist.irecv, handed, (rank - 1) % world)])\nfor work in works:\n    work.wait()"),
    ByRank("leaders of the hosts", before="leaders = dist.new_group([0, 8])",
           step=REDUCE + "\nif rank % 8 == 0:\n    dist.all_reduce(bias, group=leaders)"),
    ByRank("only the root gathers",
           step=REDUCE + "\nparts = [torch.empty_like(bias) for _ in range(world)] if rank == 0 else None\n"
           "dist.gather(bias, parts, dst=0)"),
    ByRank("what one of them calls is not emulated", before="if rank == 5:\n    layer.weight.to_sparse()"),
    ByRank("a random order and a rate from a table",
           before="random.seed(rank)\norder = random.sample(range(9), 9)\n"
           "rates = json.loads('[0.1, 0.2]')\nrate = rates[rank % 2]"),
)  # fmt: skip


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path / "home"))


def run(program: ByRank, folder: Path) -> Run:
    (folder / "skip-12").touch()
    script = folder / "train.py"
    script.write_text(program.text)
    return emulate(script, cluster=f"h100-sxm:{WORLD // 8}x8", pictures=False)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda program: program.name)
def test_a_fault_of_some_ranks_is_found(fault: ByRank, tmp_path: Path) -> None:
    with pytest.raises(ScriptError) as caught:
        run(fault, tmp_path)
    message = str(caught.value)
    assert re.search(fault.said, message), message
    assert "train.py:" in message


@pytest.mark.parametrize("program", HEALTHY, ids=lambda program: program.name)
def test_ranks_that_differ_without_harm_pass(program: ByRank, tmp_path: Path) -> None:
    summary = run(program, tmp_path).summary
    ranks = (*summary.captured_ranks, *summary.checked_ranks, *summary.assumed_ranks)
    assert sorted(ranks) == list(range(WORLD)) and summary.iteration_time_s > 0
