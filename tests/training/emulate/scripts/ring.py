"""PyTorch's own context parallelism: causal attention of a sequence that four ranks share.

``--compile``: the attention is a compiled region.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

BATCH, HEADS, LENGTH, WIDTH = 1, 4, 8192, 64


def attention(query, key, value):
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


if __name__ == "__main__":
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank())
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("cp",))
    attend = torch.compile(attention) if "--compile" in sys.argv else attention
    weight = torch.nn.Parameter(torch.ones(WIDTH, device="cuda", dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    for _ in range(3):
        shape = (BATCH, HEADS, LENGTH, WIDTH)
        given = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        with context_parallel(mesh, buffers=given, buffer_seq_dims=[2, 2, 2], no_restore_buffers=set(given)):
            attend(*(tensor * weight for tensor in given)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
