"""Train an example for each of several command lines, from initial weights that know nothing of the layout.

    layouts.py train_llama "--pp 2" "--tp 2 --dtype fp32"  # as every rank

A parameter starts from its name alone, however it is cut up, so the losses of every layout can be held
against those of one process. One start of PyTorch serves all command lines, since it takes longer than they.
"""

import importlib
import os
import sys
import zlib
from pathlib import Path
from types import ModuleType

import torch
import torch._dynamo  # FSDP and the optimisers import it when first used, which takes seconds in each process
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import llama_model
import train_moe


def start(name: str, shape: tuple[int, ...]) -> Tensor:
    plain = name.replace("_checkpoint_wrapped_module.", "")
    generator = torch.Generator().manual_seed(zlib.crc32(plain.encode()))
    return torch.randn(shape, generator=generator) * 0.05 + ("norm" in name)


def fill(model: nn.Module) -> None:
    head_dim, theta = model.config.dim // model.config.heads, model.config.rope_theta
    model.freqs.copy_(llama_model.rotations(head_dim, len(model.freqs), theta, model.freqs.device))
    for name, parameter in model.named_parameters():
        if ".experts." in name:  # those of this rank, out of all
            here, ep = parameter.shape[0], model.config.experts // parameter.shape[0]
            first = dist.get_rank() % ep * here
            whole = start(name, (here * ep, *parameter.shape[1:]))[first : first + here]
        else:
            whole = start(name, parameter.shape)
        if isinstance(parameter, DTensor):
            whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.copy_(whole)


def main() -> None:
    script, *layouts = sys.argv[1:]
    llama_model.Llama.init_weights = train_moe.Transformer.init_weights = fill
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "0")
    example = importlib.import_module(script)
    for layout in layouts:
        # Each in its own process, since DTensor remembers the groups of an earlier mesh that looks the same.
        child = os.fork()
        if child == 0:
            train(example, layout)
            sys.exit()
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0:
            sys.exit(f"failed: {layout}")


def train(example: ModuleType, layout: str) -> None:
    store, rank, world_size = next(dist.rendezvous("env://"))
    own = dist.PrefixStore(layout, store)
    initialise = dist.init_process_group
    dist.init_process_group = lambda backend: initialise(backend, store=own, rank=rank, world_size=world_size)
    if rank == 0:
        print(f"layout {layout}", flush=True)
    sys.argv = [example.__name__, *layout.split()]
    example.main()


if __name__ == "__main__":
    main()
