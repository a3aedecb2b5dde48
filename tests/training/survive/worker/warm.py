"""What the server of the worlds imports once, before it forks."""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TORCH_CPP_LOG_LEVEL"] = "FATAL"

import torch
import torch.distributed
import torch.distributed.device_mesh
import torch.distributed.fsdp
import torch.nn.parallel  # noqa: F401

torch.set_num_threads(1)
