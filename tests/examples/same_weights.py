"""Run train_llama.py with initial weights that depend on the parameter's name only, not on how it is cut up.

So the losses of every parallel layout can be held against those of one process.
"""

import sys
import zlib
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor, distribute_tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import llama_model
import train_llama


def fill(model: llama_model.Llama) -> None:
    head_dim = model.config.dim // model.config.heads
    model.freqs.copy_(
        llama_model.rotations(head_dim, model.seq, model.config.rope_theta, model.freqs.device)
    )
    for name, parameter in model.named_parameters():
        plain = name.replace("_checkpoint_wrapped_module.", "")
        generator = torch.Generator().manual_seed(zlib.crc32(plain.encode()))
        whole = torch.randn(parameter.shape, generator=generator) * 0.05 + ("norm" in name)
        if isinstance(parameter, DTensor):
            whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.copy_(whole)


llama_model.Llama.init_weights = fill
train_llama.main()
