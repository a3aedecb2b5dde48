"""A script that fails on each rank in another way, or calls there what cannot be emulated."""

import os
import sys
import time

import torch
import torch.distributed as dist
from cases import run
from torch import nn

RANK, LOCAL = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])


def case_raises():
    raise ValueError("no such luck\nwith a second line")


def case_exit_3():
    sys.exit(3)


def case_exit_72():
    sys.exit(72)


def case_exit_75():
    sys.exit(75)


def case_exit_0():
    sys.exit(0)


def case_os_exit_0():
    os._exit(0)


def case_endless():
    if "PID_FILE" in os.environ:
        with open(os.environ["PID_FILE"], "w") as file:
            file.write(f"{os.getpid()}\n")
    while True:
        time.sleep(0.01)


def case_wrong_device_of_a_tensor():
    torch.zeros(1, device="cuda:9")


def case_wrong_world_size():
    dist.init_process_group("nccl", world_size=3, rank=0)


def case_killed():
    os.kill(os.getpid(), 9)


def case_crash():
    import ctypes

    ctypes.string_at(0)


def case_syntax():
    exec(compile("x = = 1", "broken.py", "exec"))


def square():
    return torch.randn(8, 8, device="cuda")


def case_nonzero():
    return square().nonzero()


def case_unique():
    return torch.unique(square())


def case_repeat_interleave():
    x = square()
    return torch.repeat_interleave(x, torch.randint_like(x[0], 3, dtype=torch.int64), dim=0)


def case_cuda_graph():
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        return square() + 1


def case_cpu_offload():
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    dist.init_process_group("nccl")
    return fully_shard(nn.Linear(8, 8), offload_policy=CPUOffloadPolicy())


def case_first_fsdp_offload():
    from torch.distributed.fsdp import CPUOffload

    return CPUOffload(offload_params=True)


def case_symmetric_memory():
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    dist.init_process_group("nccl")
    enable_symm_mem_for_group(dist.group.WORLD.group_name)


def case_rpc():
    from torch.distributed import rpc

    rpc.init_rpc("worker0", rank=0, world_size=2)


def case_sparse():
    return torch.ones(4, 4, device="cuda").to_sparse()


def case_triton():
    import triton

    return triton.testing.do_bench(lambda: torch.ones(4, device="cuda").sum())


if __name__ == "__main__":
    if sys.argv[1:]:
        globals()[sys.argv[1]]()
    run(globals(), ["by-rank"])
