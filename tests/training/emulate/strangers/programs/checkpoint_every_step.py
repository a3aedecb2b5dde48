"""FSDP2 with a checkpoint in every step: all in a file, shards in the background, rotation, resuming."""

import argparse
import os
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F


class Model(nn.Module):
    def __init__(self, vocabulary, layers, width):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def number(path):
    return int(path.stem.split("-")[1])


def latest(folder):
    """The newest file, or None."""
    return max(folder.glob("step-*.pt"), key=number, default=None)


def load(path, model, optimizer):
    """Resume from a file. Returns the step that comes next."""
    saved = torch.load(path, map_location="cpu", weights_only=True)
    whole = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=saved["model"],
        optim_state_dict=saved["optimizer"],
        options=whole,
    )
    torch.set_rng_state(saved["rng"])
    torch.cuda.set_rng_state(saved["cuda_rng"])
    return saved["step"] + 1


def save(folder, model, optimizer, step, keep):
    """Everything in one file, by rank 0; the oldest goes."""
    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = {
        "model": get_model_state_dict(model, options=whole),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=whole),
        "rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state(),
        "step": step,
    }
    if dist.get_rank() == 0:
        torch.save(state, folder / f"step-{step}.pt")
        (folder / f"step-{step - keep}.pt").unlink(missing_ok=True)


def save_in_background(folder, model, optimizer, step, keep):
    """The shards of every rank. Returns the future to wait for."""
    weights, moments = get_state_dict(model, optimizer)
    shards = {"model": weights, "optimizer": moments, "step": step}
    if dist.get_rank() == 0:
        shutil.rmtree(folder / f"shards-{step - keep}", ignore_errors=True)
    return dcp.async_save(shards, checkpoint_id=folder / f"shards-{step}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    parser.add_argument("--keep", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()

    dist.init_process_group("cuda:nccl,cpu:gloo")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    args.folder.mkdir(parents=True, exist_ok=True)
    model = Model(4096, 2, 256).cuda()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    found = latest(args.folder)
    first = load(found, model, optimizer) if found else 0
    pending = None
    for step in range(first, first + args.steps):
        tokens = torch.randint(4096, (4, 257), device="cuda")
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        save(args.folder, model, optimizer, step, args.keep)
        if pending is not None:
            pending.result()
        pending = save_in_background(args.folder, model, optimizer, step, args.keep)
    pending.result()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
