"""A collective that rank 0 joins alone: on a real cluster the job would hang."""

import os

import torch
import torch.distributed as dist

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")
x = torch.ones(8, device="cuda")
if dist.get_rank() == 0:
    dist.all_reduce(x)
x.sum()
