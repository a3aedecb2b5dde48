"""What cannot be emulated: each rank tries another case."""

import os

import torch
import torch.distributed as dist
from cases import run
from torch import nn

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
x = torch.randn(8, 8, device="cuda")


def case_nonzero():
    return x.nonzero()


def case_unique():
    return torch.unique(x)


def case_repeat_interleave():
    return torch.repeat_interleave(x, torch.randint_like(x[0], 3, dtype=torch.int64), dim=0)


def case_cuda_graph():
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        return x + 1


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
    run(globals(), ["by-rank"])
