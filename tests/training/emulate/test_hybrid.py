"""Live ranks in whole: their data against real runs to the bit, their memory, and how they fail."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from support import preloaded
from support.ranks import run_ranks
from windtunnel.base.errors import ScriptError, UserError
from windtunnel.cluster.load import load_cluster
from windtunnel.linux.processes import command_line, descendants
from windtunnel.training.emulate import hybrid
from windtunnel.training.emulate.emulation import EmulationResult, simulate
from windtunnel.training.emulate.hybrid import RECORD, check_live, run_live
from windtunnel.training.emulate.options import Options
from windtunnel.training.emulate.program import Script
from windtunnel.training.emulate.summary import HybridFacts

WORLD, STEPS = 4, 10
JOB = """
import hashlib, os, sys
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

kind, steps, *fault = sys.argv[1:]
dist.init_process_group("gloo")
rank = dist.get_rank()
if "as-first" in fault:  # every rank gives what rank 0 has to each collective: the uniform rule, for real
    names = "all_gather_into_tensor", "reduce_scatter_tensor", "all_gather_single", "reduce_scatter_single"
    for name in filter(lambda name: hasattr(dist, name), names):
        def same(output, input, *args, original=getattr(dist, name), **kwargs):
            input = input.clone()
            dist.broadcast(input, 0)
            return original(output, input, *args, **kwargs)
        setattr(dist, name, same)
torch.manual_seed(7)
model = torch.nn.Sequential(*[torch.nn.Linear(48, 48) for _ in range(3)])
if kind == "fsdp":
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
else:
    model = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for step in range(int(steps)):
    if fault and step == 5:
        if "raises" in fault: raise ValueError("no such row")
        if "exits" in fault: sys.exit(3)
        if "dies" in fault: os.kill(os.getpid(), 9)
        if "leaves" in fault: model = model.module
        if "waits" in fault:
            import threading
            threading.Event().wait()
    x = torch.arange(8.0 * 48).view(8, 48).sin() + step
    model(x).pow(2).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
local = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in local)).hexdigest()
if rank == 0:
    print("digest", digest, flush=True)
dist.barrier()
"""


@pytest.fixture(autouse=True, scope="module")
def quick_ranks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hybrid, "subprocess", preloaded.Subprocess(hybrid.MODULE))
        yield


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hybrid") / "job.py"
    path.write_text(JOB)
    return path


def emulated(job: Path, *words: str) -> EmulationResult:
    return simulate(Script(job, words), load_cluster(f"cpu:{WORLD}x1"), Options(live="0"))


@pytest.fixture(scope="module")
def ddp(job: Path) -> EmulationResult:
    return emulated(job, "ddp", str(STEPS))


@pytest.fixture(scope="module")
def facts(ddp: EmulationResult, tmp_path_factory: pytest.TempPathFactory) -> HybridFacts:
    return run_live(ddp, [0], tmp_path_factory.mktemp("run") / "live")


def digest(text: str) -> str:
    match = re.search(r"digest (\w+)", text)
    assert match, text
    return match[1]


def test_every_step_is_told_and_the_replay_is_in_those_after_the_third(facts: HybridFacts) -> None:
    (rank,) = facts.ranks
    assert [step.hybrid for step in rank.steps] == [False] * 3 + [True] * (STEPS - 3)
    assert facts.virtual_ranks == WORLD - 1
    for step in rank.steps[3:]:
        assert step.seconds == pytest.approx(step.own_s + step.waited_s)
        assert step.waited_s > 0
    assert rank.loss is not None
    assert rank.calls_per_step == 1


def test_parameters_are_those_of_a_real_run_in_which_all_hold_the_same_data(
    job: Path, facts: HybridFacts
) -> None:
    real = run_ranks([job, "ddp", str(STEPS)], WORLD)
    assert real.returncode == 0, real.stderr
    assert digest(Path(facts.ranks[0].log).read_text()) == digest(real.stdout)


def test_fsdp_shards_are_those_of_a_real_run_of_the_rule(job: Path, tmp_path: Path) -> None:
    facts = run_live(emulated(job, "fsdp", str(STEPS)), [0], tmp_path / "live")
    real = run_ranks([job, "fsdp", str(STEPS), "as-first"], WORLD)
    assert real.returncode == 0, real.stderr
    assert digest(Path(facts.ranks[0].log).read_text()) == digest(real.stdout)
    assert facts.ranks[0].steps[-1].hybrid


PIPELINE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
layer = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for step in range(6):
    if rank == 0:
        out = layer(torch.ones(16, 64))
        dist.send(out.detach(), 1)
        gradient = torch.empty(16, 64)
        dist.recv(gradient, 1)
        out.backward(gradient)
    else:
        given = torch.empty(16, 64)
        dist.recv(given, 0)
        given.requires_grad_()
        layer(given).square().mean().backward()
        dist.send(given.grad, 0)
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_stage_of_a_pipeline_meets_a_virtual_one(tmp_path: Path) -> None:
    (tmp_path / "pipeline.py").write_text(PIPELINE)
    result = simulate(Script(tmp_path / "pipeline.py"), load_cluster("cpu:2x1"), Options(live="1"))
    (rank,) = run_live(result, [1], tmp_path / "live").ranks
    assert [step.calls for step in rank.steps] == [2] * 6
    assert all(step.waited_s > 0 for step in rank.steps if step.hybrid)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("raises", r"job.py:\d+ in <module>: ValueError: no such row \(as live rank \d\)"),
        ("exits", r"the script called exit\(3\) \(as live rank \d\)"),
        ("dies", r"live rank \d was killed by signal 9"),
        ("leaves", r"live rank \d left the job in its step 6: it ended without all_reduce of 28224 bytes"),
    ],
)
def test_a_live_rank_that_fails_ends_the_run_with_its_own_error(
    ddp: EmulationResult, job: Path, tmp_path: Path, fault: str, says: str
) -> None:
    broken = replace(ddp, program=Script(job, ("ddp", str(STEPS), fault)))
    with pytest.raises(ScriptError, match=says):
        run_live(broken, [0, 3], tmp_path / "live")
    steps = json.loads((tmp_path / "live" / RECORD).read_text())
    assert max(map(len, steps.values())) >= 3, "what was recorded is kept"
    assert not [pid for pid in descendants(os.getpid()) if "live.hybrid" in command_line(pid)]


DATA = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
x = torch.arange(8.0) + 1
def say(name, *tensors):
    print(name, *[value for tensor in tensors for value in tensor.tolist()], flush=True)
for name in ("SUM", "MAX", "PRODUCT"):
    y = x.clone(); dist.all_reduce(y, getattr(dist.ReduceOp, name)); say(name, y[:2])
outs = [torch.empty(1) for _ in range(size)]; dist.all_gather(outs, x[:1]); say("all_gather", *outs)
y = torch.empty(2); dist.reduce_scatter_tensor(y, x); say("reduce_scatter", y)
y = torch.empty(8); dist.all_to_all_single(y, x); say("all_to_all", y)
y = x.clone(); dist.broadcast(y, 3); say("broadcast", y[:1])
if rank == 1:
    y = torch.ones(1); dist.recv(y, 0); say("recv", y)
elif rank == 0:
    dist.send(x[:1], 1)
parameter = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([parameter], lr=0.0)
for _ in range(4):
    parameter.sum().backward()
    optimizer.step()
    dist.all_reduce(parameter.grad)
"""


@pytest.mark.parametrize(
    ("rule", "wanted"),
    [
        ("uniform", ["SUM 4.0 8.0", "MAX 1.0 2.0", "PRODUCT 1.0 16.0", "all_gather 1.0 1.0 1.0 1.0",
                     "reduce_scatter 12.0 16.0", "all_to_all 3.0 4.0 3.0 4.0 3.0 4.0 3.0 4.0",
                     "broadcast 1.0", "recv 0.0"]),
        ("zeros", ["SUM 1.0 2.0", "MAX 1.0 2.0", "PRODUCT 0.0 0.0", "all_gather 0.0 1.0 0.0 0.0",
                   "reduce_scatter 3.0 4.0", "all_to_all 0.0 0.0 3.0 4.0 0.0 0.0 0.0 0.0",
                   "broadcast 0.0", "recv 0.0"]),
    ],
)  # fmt: skip
def test_virtual_ranks_hold_data_by_the_rule(tmp_path: Path, rule: str, wanted: list[str]) -> None:
    (tmp_path / "data.py").write_text(DATA)
    result = simulate(
        Script(tmp_path / "data.py"),
        load_cluster(f"cpu:{WORLD}x1"),
        Options(live="1", data=rule),
    )
    facts = run_live(result, [1], tmp_path / "live")
    lines = Path(facts.ranks[0].log).read_text().splitlines()
    assert [line for line in lines if line.split()[0] in {line.split()[0] for line in wanted}] == wanted


COALESCED = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
parameter = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([parameter], lr=0.0)
for _ in range(5):
    parameter.sum().backward()
    with dist._coalescing_manager():
        x, y = torch.ones(3), torch.ones(4)
        dist.all_reduce(x)
        dist.all_reduce(y)
    optimizer.step()
print("sums", *x.tolist(), *y.tolist())
"""


@pytest.mark.parametrize("live", ["1", "0,1"])
def test_calls_in_one_go_are_summed_whoever_is_live(tmp_path: Path, live: str) -> None:
    (tmp_path / "coalesced.py").write_text(COALESCED)
    result = simulate(Script(tmp_path / "coalesced.py"), load_cluster("cpu:2x1"), Options(live=live))
    facts = run_live(result, [int(rank) for rank in live.split(",")], tmp_path / "live")
    assert "sums" + 7 * " 2.0" in Path(facts.ranks[0].log).read_text()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (Options(live="9"), "`live`: '9' lies outside the world of ranks 0 to 3"),
        (Options(attach=3), "`attach` stops a live rank, and `live` names none"),
    ],
)
def test_options_are_refused_early(options: Options, says: str) -> None:
    with pytest.raises(UserError, match=re.escape(says)):
        check_live(options, load_cluster("cpu:4x1"))
