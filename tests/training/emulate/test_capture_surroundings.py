"""What a program finds around it: the default group, the launcher's variables, its host, its devices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from capturing import capture

from windtunnel.base.errors import ScriptError
from windtunnel.cluster.load import load_cluster
from windtunnel.training.emulate.graph import Slice
from windtunnel.training.emulate.policy.classes import slice_world
from windtunnel.training.emulate.policy.stitch import stitch

MESH = """
import os
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.out = nn.Linear(10, 32), nn.Linear(32, 5)

    def forward(self, x):
        return self.out(self.into(x).relu())

mesh = init_device_mesh("cuda", (int(os.environ["WORLD_SIZE"]),))
plan = {"into": ColwiseParallel(), "out": RowwiseParallel()}
model = parallelize_module(Toy().cuda(), mesh, plan)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.25, foreach=True)
for step in range(10):
    torch.manual_seed(step)
    model(torch.rand(20, 10, device="cuda")).sum().backward()
    optimizer.step()
if dist.is_initialized():
    dist.destroy_process_group()
"""
"""Tensor parallelism as PyTorch's tutorial has it: the mesh makes the default group."""


def run(program: str, folder: Path, ranks: list[int], cluster: str = "h100-sxm:2x2") -> list[Slice]:
    script = folder / "job.py"
    script.write_text(program)
    return capture(str(script), ranks=tuple(ranks), cluster=cluster, timeout=60.0)


def test_a_mesh_without_a_default_group_meets_the_emulated_one(tmp_path: Path) -> None:
    first, last = run(MESH, tmp_path, [0, 3])
    assert first.world_groups[0].ranks == last.world_groups[0].ranks == (0, 1, 2, 3)
    assert {(call.kind, call.backend) for call in first.collectives} >= {("all_reduce", "nccl")}


BARRIER = """
import os
import torch
import torch.distributed as dist

os.environ["TORCH_DIST_INIT_BARRIER"] = "1"
dist.init_process_group("nccl")
dist.all_reduce(torch.ones(4, device="cuda"), group=dist.new_group([0, 3]))
"""


def test_nobody_waits_in_the_store_for_ranks_that_do_not_run(tmp_path: Path) -> None:
    assert [call.kind for call in run(BARRIER, tmp_path, [3])[0].collectives] == ["all_reduce"]


THREADS = """
import threading
import torch
import torch.distributed as dist

asked, answered = threading.Event(), threading.Event()

def trace(frame, *_):
    if frame.f_code.co_filename.endswith("live/observe.py"):
        asked.set()
        answered.wait()

dist.init_process_group("nccl")
threading.settrace(trace)
other = threading.Thread(target=dist.all_reduce, args=(torch.ones(4, device="cuda"),))
other.start()
asked.wait()
torch.cuda.Event().record()
answered.set()
other.join()
"""


def test_a_thread_that_is_asked_for_its_line_keeps_nobody_waiting(tmp_path: Path) -> None:
    assert [call.kind for call in run(THREADS, tmp_path, [0])[0].collectives] == ["all_reduce"]


JOIN = """
import os
import sys
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

dist.init_process_group("nccl")
rank, local = dist.get_rank(), int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
layers = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).cuda()
model = nn.parallel.DistributedDataParallel(layers, device_ids=[local])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with Join([model], throw_on_early_termination=THROW):
    for _ in range(3 + rank % 2):
        model(torch.randn(4, 8, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.parametrize("throw", ["False", "True"])
def test_uneven_inputs_in_a_join_are_no_hang(tmp_path: Path, throw: str) -> None:
    slices = run(JOIN.replace("THROW", throw), tmp_path, [0, 1, 2, 3])
    by_rank = {slice_.rank: slice_ for slice_ in slices}
    stitch(slice_world(lambda ranks: [by_rank[rank] for rank in ranks], 4, "all"))
    assert {call.peer for call in slices[0].collectives if call.kind == "broadcast"} >= {3}  # its buffers
    assert any("Join: every rank is taken to have inputs left" in note.text for note in slices[0].notes)


LOSS = """
import os
import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("nccl")
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    loss = model(torch.randn(4, 8, device="cuda")).sum()
    loss.backward()
    optimizer.step()
    if dist.get_rank() == 0:
        WHAT
"""


@pytest.mark.parametrize(
    ("what", "warnings"),
    [("print(loss.item())", 0), ("print(loss.detach().cpu())", 0), ("loss.mul(2)", 1)],
)
def test_what_rank_0_alone_prints_is_no_warning(tmp_path: Path, what: str, warnings: int) -> None:
    slices = run(LOSS.replace("WHAT", what), tmp_path, [0, 1, 2, 3])
    by_rank = {slice_.rank: slice_ for slice_ in slices}
    classes = slice_world(lambda ranks: [by_rank[rank] for rank in ranks], 4, "all")
    assert len(classes.classes) == 2
    assert len(classes.notes) == warnings


STEP = """
import torch
x = torch.ones(4, 4, device="cuda" if torch.cuda.is_available() else "cpu")
x @ x
"""


def say(program: str, folder: Path, rank: int, cluster: str = "h100-sxm:2x2") -> Any:
    """What a rank's program, which leaves it in ``said``, says. ``folder`` has what it imports."""
    result = folder / "said.json"
    ending = f"import json\nwith open({str(result)!r}, 'w') as file:\n    json.dump(said, file)\n"
    run(f"{program}\n{ending}{STEP}", folder, [rank], cluster)
    return json.loads(result.read_text())


def test_all_launchers_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", "9")  # of the shell that the emulation is started from
    monkeypatch.setenv("SLURM_STEP_NODELIST", "login7")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "1")
    said = say("import os\nsaid = dict(os.environ)", tmp_path, 3)
    for names, number in (
        ("RANK SLURM_PROCID OMPI_COMM_WORLD_RANK PMI_RANK PMIX_RANK", 3),
        ("LOCAL_RANK SLURM_LOCALID OMPI_COMM_WORLD_LOCAL_RANK GROUP_RANK SLURM_NODEID", 1),
        ("WORLD_SIZE SLURM_NTASKS SLURM_STEP_NUM_TASKS OMPI_COMM_WORLD_SIZE PMI_SIZE", 4),
        (
            "LOCAL_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_SIZE SLURM_NNODES SLURM_JOB_NUM_NODES",
            2,
        ),
    ):
        assert {said[name] for name in names.split()} == {str(number)}
    assert {said[f"SLURM_{of}NODELIST"] for of in ("", "JOB_", "STEP_")} == {"host[0-1]"}
    assert (said["SLURMD_NODENAME"], said["SLURM_TASKS_PER_NODE"]) == ("host1", "2(x2)")


HOSTS = """
import os, platform, socket
name = socket.gethostname()
said = [name, platform.node(), os.uname().nodename, socket.getfqdn(), socket.gethostbyname(name)]
said.append(socket.getaddrinfo("host0", 80, type=socket.SOCK_STREAM)[0][4][0])
"""


SPAWNING = """
import sys
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

def work(device, host, size):
    rank = host * torch.cuda.device_count() + device
    dist.init_process_group("nccl", init_method="tcp://127.0.0.1:29501", rank=rank, world_size=size)
    torch.cuda.set_device(device)
    model = DistributedDataParallel(torch.nn.Linear(8, 8, device="cuda"), device_ids=[device])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        model(torch.ones(2, 8, device="cuda")).sum().backward()
        optimizer.step()

if __name__ == "__main__":
    count = torch.cuda.device_count() + int(sys.argv[1])
    if sys.argv[2] == "join":
        mp.spawn(work, args=(0, count), nprocs=count)
    else:
        started = mp.start_processes(work, args=(0, count), nprocs=count, join=False)
        while not started.join():
            pass
"""
"""A program that starts its ranks itself, as PyTorch's examples for one host do."""


@pytest.mark.parametrize("how", ("join", "later"))
def test_a_program_that_starts_its_ranks_itself_is_each_of_them(tmp_path: Path, how: str) -> None:
    script = tmp_path / "job.py"
    script.write_text(SPAWNING)
    slices = capture(str(script), "0", how, ranks=(0, 1), cluster="h100-sxm:1x2")
    assert [slice_.rank for slice_ in slices] == [0, 1]
    assert [[*slice_.rank_answers.values()] for slice_ in slices] == [[[0]], [[1]]], "it is told its rank"
    assert all(slice_.collectives and len(slice_.steps) >= 2 for slice_ in slices)


def test_more_processes_than_a_host_has_devices_are_refused(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(SPAWNING)
    with pytest.raises(ScriptError, match=r"spawn of 3 processes .* a host of this cluster has 2 devices"):
        capture(str(script), "1", "join", cluster="h100-sxm:1x2")


def test_data_parallel_on_the_one_device_of_a_rank(tmp_path: Path) -> None:
    program = """
import torch
model = torch.nn.DataParallel(torch.nn.Linear(8, 8)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
"""
    (slice_,) = run(program, tmp_path, [0], "h100-sxm:1x1")
    assert len(slice_.steps) >= 2
    with pytest.raises(ScriptError, match="a rank drives one device"):
        run(program, tmp_path, [0], "h100-sxm:1x2")


def test_ddp_over_gloo_alone_is_captured(tmp_path: Path) -> None:
    """Its logger asks the network devices of a gloo group, which PyTorch reads without a check."""
    program = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 8).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    model(torch.ones(2, 8, device="cuda")).sum().backward()
    optimizer.step()
"""
    (slice_,) = run(program, tmp_path, [0], "h100-sxm:1x2")
    assert len(slice_.steps) >= 2


def test_ranks_are_on_hosts_of_their_own_name(tmp_path: Path) -> None:
    assert say(HOSTS, tmp_path, 3) == ["host1"] * 4 + ["127.0.0.1"] * 2
    assert say(HOSTS, tmp_path, 1, "cpu:2x1")[:4] == ["host1"] * 4


SMI = """
import subprocess
said = []
for words in ("-L", "--query-gpu=index,name,memory.total,power.draw --format=csv,noheader",
              "--query-gpu=memory.total,count --format=csv,nounits --id=1", "", "-q",
              "--query-gpu=name --id=2"):
    done = subprocess.run(f"nvidia-smi {words}", shell=True, capture_output=True, text=True)
    said.append([done.returncode, *(done.stdout + done.stderr).splitlines()])
"""


def test_nvidia_smi_knows_the_emulated_devices(tmp_path: Path) -> None:
    device = load_cluster("h100-sxm:2x2").host.device
    name, memory = device.torch_name, int(device.memory_bytes) >> 20
    listed, asked, counted, plain, more, beyond = say(SMI, tmp_path, 3)
    assert listed == [0, f"GPU 0: {name}", f"GPU 1: {name}"]
    assert asked == [0, *(f"{index}, {name}, {memory} MiB, [N/A]" for index in (0, 1))]
    assert counted == [0, "memory.total [MiB], count", f"{memory}, 2"]
    assert beyond == [6, "No devices were found"]
    assert plain == [0, *(f"GPU {index}: {name} ({memory} MiB)" for index in (0, 1))]
    assert (
        more[0] == 1 and more[1].startswith("windtunnel: nvidia-smi -q cannot be emulated") and len(more) == 2
    )


def test_pytorch_shows_what_it_was_built_with(tmp_path: Path) -> None:
    shown = "import torch\nsaid = torch.__config__.show().splitlines()"
    lines = say(shown, tmp_path, 0)
    assert any("CUDA Runtime 13.0" in line for line in lines)


PYNVML = """
class NVMLError(Exception): pass
def nvmlInit(): raise NVMLError("no driver")
nvmlShutdown = nvmlDeviceGetCount = nvmlDeviceGetHandleByIndex = nvmlDeviceGetName = nvmlInit
nvmlDeviceGetMemoryInfo = nvmlDeviceGetPowerUsage = nvmlInit
"""
NVML = """
import pynvml
pynvml.nvmlInit()
handle = pynvml.nvmlDeviceGetHandleByIndex(1)
total = pynvml.nvmlDeviceGetMemoryInfo(handle).total
said = [pynvml.nvmlDeviceGetCount(), pynvml.nvmlDeviceGetName(handle), total]
pynvml.nvmlShutdown()
"""


def test_nvml_knows_the_emulated_devices(tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text(PYNVML)
    device = load_cluster("h100-sxm:2x2").host.device
    assert say(NVML, tmp_path, 0) == [2, device.torch_name, int(device.memory_bytes)]
    with pytest.raises(ScriptError, match=r"job\.py:4 .*pynvml\.nvmlDeviceGetPowerUsage cannot be emulated"):
        say("import pynvml\npynvml.nvmlInit()\n\nsaid = pynvml.nvmlDeviceGetPowerUsage(0)", tmp_path, 0)


@pytest.mark.parametrize(
    ("program", "package"),
    [
        ("from flash_attn.ops.triton import rotary", "flash_attn.ops"),
        ("from transformer_engine.pytorch import Sequential", "transformer_engine.pytorch.Sequential"),
        ("raise ImportError('the package for FlashAttention2 is not there')", "flash_attn"),
    ],
)
def test_a_package_of_kernels_that_is_not_there_is_one_sentence(
    tmp_path: Path, program: str, package: str
) -> None:
    with pytest.raises(ScriptError) as caught:
        run(f"try:\n    import {package}\nexcept ImportError:\n    pass\n{program}", tmp_path, [0])
    said = (
        f"job.py:5 in <module>: {package} cannot be emulated because its kernels are not known; use PyTorch"
    )
    assert str(caught.value).startswith(said)
    assert "Traceback" not in caught.value.details
