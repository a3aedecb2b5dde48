"""Train a Llama 3 decoder on a text file, with every usual kind of parallelism. Plain PyTorch but for --fp8.

    torchrun --nproc-per-node 2 examples/train_llama.py --size debug --steps 20
    torchrun --nnodes 16 --nproc-per-node 8 ... examples/train_llama.py --size 8b --seq 8192 --batch 2
    windtunnel train --hosts 4 --inject kill:host=2,step=7 examples/train_llama.py --steps 20

The mesh has the dimensions pipeline, data, context and tensor ("pp", "dp", "cp", "tp"); what --pp, --cp and
--tp leave of the world is data parallel. The model is built without memory on the meta device, cut up by
plain functions (float8, tensor parallel, checkpointing, compile, FSDP or DDP: in this order), and allocated.
The third way keeps a checkpoint of every step in the memory of other hosts, and goes on after failures.

Model: "The Llama 3 Herd of Models" (arXiv:2407.21783), table 3; the small sizes are those of Llama 3.2, with
input and output embeddings of their own. Parallelism: "TorchTitan" (arXiv:2410.06511).
"""

import argparse
import os
import time
import warnings
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from llama_arguments import parse_arguments
from llama_model import SIZES, Llama
from llama_parallel import (
    apply_checkpointing,
    apply_float8,
    apply_fsdp,
    apply_tensor_parallel,
    build_pipeline,
    clip_gradients,
    scale_weights,
    shard_sequence,
    stage_layers,
    stages_of_rank,
)
from text_data import Bytes


def build_part(
    stage: int,
    stages: int,
    args: argparse.Namespace,
    mesh: DeviceMesh,
    data_mesh: DeviceMesh,
    device: torch.device,
) -> nn.Module:
    """The layers of one pipeline stage (all of them, without a pipeline) as this rank holds them."""
    config = SIZES[args.size]
    layers, is_first, is_last = stage_layers(config.layers, stage, stages)
    with torch.device("meta"):
        model = Llama(config, args.seq, layers, is_first, is_last)
    if args.fp8:
        apply_float8(model, sharded=args.parallel == "fsdp")
    if args.tp > 1:
        apply_tensor_parallel(model, mesh["tp"], args.loss_parallel)
    apply_checkpointing(model, args.ac)
    if args.compile:
        for block in model.layers.values():
            block.compile()
    if args.parallel == "fsdp":
        dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
        apply_fsdp(model, data_mesh, dtype, pipelined=stages > 1)
    elif args.dtype == "bf16":  # FSDP needs no autocast: the parameters that it gathers are bf16 already
        model.forward = torch.autocast(device.type, torch.bfloat16)(model.forward)
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights()
    if args.parallel == "ddp":
        ids = [device.index] if device.type == "cuda" else None
        # Not the buffers: with context parallelism each rank has its own part of the rotations.
        group = data_mesh.get_group()
        return DistributedDataParallel(model, device_ids=ids, process_group=group, broadcast_buffers=False)
    return model


def train(args: argparse.Namespace, device: torch.device, job: Any = None) -> None:
    sizes = {"pp": args.pp, "dp": args.dp, "cp": args.cp, "tp": args.tp}
    kept = {name: size for name, size in sizes.items() if size > 1 or name == "dp"}
    mesh = init_device_mesh(device.type, tuple(kept.values()), mesh_dim_names=tuple(kept))
    # The ranks of "dp" and "cp" hold the same weights and see other tokens.
    data_mesh = mesh["dp", "cp"]._flatten("dp_cp") if args.cp > 1 else mesh["dp"]
    pp_mesh = mesh["pp"] if args.pp > 1 else None
    pp_rank = pp_mesh.get_local_rank() if pp_mesh else 0
    torch.manual_seed(args.seed + dist.get_rank())  # each fills its own shards; DDP copies rank 0
    warnings.filterwarnings("ignore", "DTensor random operators")  # which the line above makes do without

    stages = stages_of_rank(args.schedule, pp_rank, args.pp) if pp_mesh else [0]
    parts = [build_part(s, args.pp * len(stages), args, mesh, data_mesh, device) for s in stages]
    parameters = [p for part in parts for p in part.parameters()]
    choice = {args.adamw: True}
    optimizer = torch.optim.AdamW(parameters, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, **choice)

    dataset = Bytes(args.data, args.seq, args.steps * args.grad_accum * args.batch * args.dp)
    sampler = DistributedSampler(dataset, args.dp, mesh["dp"].get_local_rank(), shuffle=False)
    if job:  # under `windtunnel train`: a loader that says where it is in its epoch
        from torchdata.stateful_dataloader import StatefulDataLoader

        loader = StatefulDataLoader(dataset, batch_size=args.batch, sampler=sampler)
    else:
        loader = DataLoader(dataset, batch_size=args.batch, sampler=sampler)

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(0, 1)) / args.grad_accum

    pipeline = build_pipeline(parts, stages, pp_mesh, device, args, loss_of) if pp_mesh else None
    has_loss = pipeline is None or pipeline.has_last
    speaks = has_loss and all(
        mesh[name].get_local_rank() == 0 for name in mesh.mesh_dim_names if name != "pp"
    )
    if speaks:
        count = sum(p.numel() for p in parameters)
        print(f"{args.size}: {count:,} parameters here, mesh {kept}", flush=True)

    first = 1
    if job:  # under `windtunnel train`; called again after a failure
        from windtunnel.training.checkpoint import PeerCheckpointer

        checkpointer = PeerCheckpointer(job)
        state = {"optimizer": optimizer, "loader": loader}
        state |= {f"stage {s}": part for s, part in zip(stages, parts, strict=True)}
        first = max(1, checkpointer.restore(state))

    batches = iter(loader)
    for step in range(first, args.steps + 1):
        start = time.perf_counter()
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for micro in range(args.grad_accum):
            tokens, targets = (tensor.to(device) for tensor in next(batches))
            # FSDP reduces after every batch, which keeps its gradients sharded; DDP once, after the last.
            quiet = args.parallel == "ddp" and micro < args.grad_accum - 1
            with (
                parts[0].no_sync() if quiet else nullcontext(),
                loss_parallel() if args.tp > 1 and args.loss_parallel else nullcontext(),
                shard_sequence(mesh["cp"], tokens, targets, parts) if args.cp > 1 else nullcontext(),
            ):
                if pipeline is not None:
                    loss = pipeline.step(tokens, targets)
                else:
                    loss = loss_of(parts[0](tokens), targets)
                    loss.backward()
            total += loss.detach().full_tensor() if isinstance(loss, DTensor) else loss.detach()
        if args.clip:
            clip_gradients(parameters, args.clip, pp_mesh)
        optimizer.step()
        if args.fp8 and args.parallel == "fsdp":
            scale_weights(parts)

        if has_loss:
            dist.all_reduce(total, group=data_mesh.get_group())
        loss_value = total.item() / data_mesh.size()
        rate = args.dp * args.grad_accum * args.batch * args.seq / (time.perf_counter() - start)
        if speaks:
            memory = f"  {torch.cuda.max_memory_reserved() / 2**30:.2f} GiB" if device.type == "cuda" else ""
            print(f"step {step}  loss {loss_value:.4f}  {rate:,.0f} tokens/s{memory}", flush=True)
        if job:
            checkpointer.step(step, state)
            job.step(step, loss=loss_value)


def pick_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def main() -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():  # what torchrun would set
        os.environ.setdefault(name, value)
    if "WINDTUNNEL_AGENT" in os.environ:
        from windtunnel.training.elastic import run

        run(lambda job: train(parse_arguments(__doc__, job.world), pick_device(), job))
        return
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    args = parse_arguments(__doc__, int(os.environ["WORLD_SIZE"]))
    device = pick_device()
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train(args, device)
    # Else a thread of gloo may still hold a tensor when the interpreter goes, which aborts the process.
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
