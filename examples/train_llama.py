"""Train a Llama 3 decoder on a text file, with every usual kind of parallelism. Plain PyTorch, nothing else.

    torchrun --nproc-per-node 2 examples/train_llama.py --size debug --steps 20
    torchrun --nnodes 16 --nproc-per-node 8 ... examples/train_llama.py --size 8b --seq 8192 --batch 2

The mesh has the dimensions pipeline, data, context and tensor ("pp", "dp", "cp", "tp"); what --pp, --cp and
--tp leave of the world is data parallel. The model is built without memory on the meta device, cut up by
plain functions (tensor parallel, checkpointing, compile, FSDP or DDP: in this order), and then allocated.

Model: "The Llama 3 Herd of Models" (arXiv:2407.21783), table 3; the small sizes are those of Llama 3.2, with
input and output embeddings of their own. Parallelism: "TorchTitan" (arXiv:2410.06511).
"""

import argparse
import os
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from llama_model import SIZES, Config, Llama
from llama_parallel import (
    SCHEDULES,
    apply_checkpointing,
    apply_fsdp,
    apply_tensor_parallel,
    build_pipeline,
    clip_gradients,
    shard_sequence,
    stage_layers,
    stages_of_rank,
)

TEXT = Path(__file__).resolve().parent / "data" / "coriolanus.txt"


class Bytes(Dataset[tuple[Tensor, Tensor]]):
    """``count`` sequences of ``seq`` bytes of a text, each with the bytes that follow, over and over."""

    def __init__(self, path: Path, seq: int, count: int) -> None:
        self.data = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
        self.seq, self.count = seq, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        where = (index * self.seq + torch.arange(self.seq + 1)) % len(self.data)
        window = self.data[where].long()
        return window[:-1], window[1:]


def parse_arguments(world_size: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--size", choices=SIZES, default="debug", help="model size (default: debug, bytes as tokens)")
    add(
        "--parallel", choices=["ddp", "fsdp", "none"], default="fsdp", help="data parallelism (default: fsdp)"
    )
    add("--tp", type=int, default=1, help="tensor parallel ranks, with sequence parallel activations")
    add("--pp", type=int, default=1, help="pipeline parallel ranks")
    add("--cp", type=int, default=1, help="context parallel ranks")
    add("--schedule", choices=SCHEDULES, default="1f1b", help="pipeline schedule (default: 1f1b)")
    add("--seq", type=int, help="sequence length (default: 256 for debug, else 8192)")
    add("--batch", type=int, help="sequences of one data parallel rank in one forward pass, which a pipeline "
        "cuts into --microbatches (default: 1, with a pipeline one sequence a microbatch)")  # fmt: skip
    add("--microbatches", type=int, help="microbatches of a pipeline (default: 2 x --pp, at most --batch)")
    add("--grad-accum", type=int, default=1, help="batches for each optimiser step")
    add("--ac", choices=["none", "selective", "full"], default="selective",
        help="activation checkpointing: selective keeps attention outputs, reduce-scatter results and every "
        "second matrix product; full keeps the input of each layer (default: selective)")  # fmt: skip
    add("--compile", action="store_true", help="torch.compile each layer")
    add("--loss-parallel", action=argparse.BooleanOptionalAction, default=True,
        help="with --tp, compute the loss on logits split over the vocabulary")  # fmt: skip
    add("--dtype", choices=["bf16", "fp32"], default="bf16", help="of computation; parameters are fp32")
    add(
        "--fused",
        dest="adamw",
        action="store_const",
        const="fused",
        default="fused",
        help="AdamW in one kernel",
    )
    add("--foreach", dest="adamw", action="store_const", const="foreach", help="AdamW by operators on lists")
    add("--lr", type=float, help="learning rate (default: 3e-3 for debug, else 3e-4)")
    add("--clip", type=float, default=1.0, help="largest norm of the gradient, 0 for no limit (default: 1)")
    add("--steps", type=int, default=3)
    add("--seed", type=int, default=0)
    add("--data", type=Path, default=TEXT, help="a text file")
    args = parser.parse_args()

    for name in ("tp", "pp", "cp", "grad_accum", "steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    config, debug = SIZES[args.size], args.size == "debug"
    args.seq = args.seq or (256 if debug else 8192)
    args.lr = args.lr or (3e-3 if debug else 3e-4)
    if args.pp == 1:
        args.batch, args.microbatches = args.batch or 1, args.microbatches or 1
        if args.microbatches > 1:
            parser.error("--microbatches needs --pp; without a pipeline use --grad-accum")
    else:
        args.microbatches = args.microbatches or min(2 * args.pp, args.batch or 2 * args.pp)
        args.batch = args.batch or args.microbatches
    if args.batch % args.microbatches:
        parser.error(f"--batch {args.batch} does not divide into --microbatches {args.microbatches}")
    if args.pp > 1 and args.microbatches % args.pp and args.schedule not in ("1f1b", "gpipe"):
        parser.error(f"--schedule {args.schedule} needs --microbatches that --pp {args.pp} divides")
    stages = args.pp * len(stages_of_rank(args.schedule, 0, args.pp))
    if args.pp > 1 and stages > config.layers + 2:
        parser.error(f"--size {args.size} has {config.layers} layers: too few for {stages} pipeline stages")

    model_ranks = args.pp * args.cp * args.tp
    if world_size % model_ranks:
        parser.error(
            f"a world of {world_size} does not divide into --pp {args.pp} x --cp {args.cp} x --tp {args.tp}"
        )
    args.dp = world_size // model_ranks
    if args.parallel == "none" and args.dp * args.cp > 1:
        parser.error(
            f"--parallel none leaves {args.dp * args.cp} copies of the model unsynchronised; use fsdp or ddp"
        )
    if args.parallel == "ddp" and args.tp > 1:
        parser.error("--parallel ddp does not go with --tp; use fsdp")
    if args.parallel == "ddp" and args.pp > 1 and args.schedule in ("zbv", "zerobubble"):
        parser.error(f"--parallel ddp does not go with --schedule {args.schedule}; use fsdp")
    if config.kv_heads % args.tp or config.ffn % args.tp:
        parser.error(f"--tp {args.tp} does not divide the {config.kv_heads} key heads of --size {args.size}")
    if args.seq % (2 * args.cp * args.tp if args.cp > 1 else args.tp):
        parser.error(f"--seq {args.seq} does not divide over --cp {args.cp} x --tp {args.tp}")
    return args


def build_mesh(device: torch.device, args: argparse.Namespace) -> DeviceMesh:
    sizes = {"pp": args.pp, "dp": args.dp, "cp": args.cp, "tp": args.tp}
    kept = {name: size for name, size in sizes.items() if size > 1 or name == "dp"}
    mesh = init_device_mesh(device.type, tuple(kept.values()), mesh_dim_names=tuple(kept))
    if args.cp > 1:  # the ranks of "dp" and "cp" hold different tokens and the same weights
        mesh["dp", "cp"]._flatten("dp_cp")
    return mesh


def build_model(
    config: Config, args: argparse.Namespace, mesh: DeviceMesh, device: torch.device
) -> list[nn.Module]:
    """The parts of the model that this rank holds: one, or one for each of its pipeline stages."""
    parts: list[nn.Module] = []
    pp_rank = mesh["pp"].get_local_rank() if args.pp > 1 else 0
    stages = stages_of_rank(args.schedule, pp_rank, args.pp) if args.pp > 1 else [0]
    for stage in stages:
        layers, is_first, is_last = stage_layers(config.layers, stage, args.pp * len(stages))
        with torch.device("meta"):
            model = Llama(config, args.seq, layers, is_first, is_last)
        if args.tp > 1:
            apply_tensor_parallel(model, mesh["tp"], args.loss_parallel)
        apply_checkpointing(model, args.ac)
        if args.compile:
            for block in model.layers.values():
                block.compile()
        data_mesh = mesh["dp_cp"] if args.cp > 1 else mesh["dp"]
        if args.parallel == "fsdp":
            dtype = torch.bfloat16 if args.dtype == "bf16" else torch.float32
            apply_fsdp(model, data_mesh, dtype, pipelined=args.pp > 1)
        model.to_empty(device=device)
        with torch.no_grad():
            model.init_weights()
        model.train()
        if args.parallel == "ddp":
            ids = [device.index] if device.type == "cuda" else None
            parts.append(DistributedDataParallel(model, device_ids=ids, process_group=data_mesh.get_group()))
        else:
            parts.append(model)
    return parts


def main() -> None:
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29500")
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    args = parse_arguments(world_size)
    config = SIZES[args.size]

    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    mesh = build_mesh(device, args)
    torch.manual_seed(args.seed + (mesh["pp"].get_local_rank() if args.pp > 1 else 0))

    parts = build_model(config, args, mesh, device)
    parameters = [p for part in parts for p in part.parameters()]
    optimizer = torch.optim.AdamW(
        parameters, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, **{args.adamw: True}
    )
    dataset = Bytes(args.data, args.seq, args.steps * args.grad_accum * args.batch * args.dp)
    sampler = DistributedSampler(dataset, args.dp, mesh["dp"].get_local_rank(), shuffle=False)
    batches = iter(DataLoader(dataset, batch_size=args.batch, sampler=sampler))

    def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(0, 1)) / args.grad_accum

    def autocast() -> AbstractContextManager[None]:
        # FSDP casts by itself: the gathered parameters, and so the gather, are already in bf16.
        wanted = args.parallel != "fsdp" and args.dtype == "bf16"
        return torch.autocast(device.type, torch.bfloat16) if wanted else nullcontext()

    pipeline = build_pipeline(parts, mesh, device, args, loss_of) if args.pp > 1 else None
    has_loss = pipeline is None or any(stage.is_last for stage in pipeline.stages)
    speaks = has_loss and all(
        mesh[name].get_local_rank() == 0 for name in mesh.mesh_dim_names if name != "pp"
    )
    tokens_per_step = args.dp * args.grad_accum * args.batch * args.seq
    if rank == 0:
        count, shape = sum(p.numel() for p in parameters), mesh.shape
        print(f"{args.size}: {count:,} parameters on rank 0, mesh {mesh.mesh_dim_names} {shape}", flush=True)

    for step in range(1, args.steps + 1):
        start = time.perf_counter()
        optimizer.zero_grad()
        total = torch.zeros((), device=device)
        for micro in range(args.grad_accum):
            tokens, targets = (tensor.to(device) for tensor in next(batches))
            last = micro == args.grad_accum - 1
            # FSDP reduces after every batch, which keeps its gradients sharded; DDP once, after the last.
            quiet = args.parallel == "ddp" and pipeline is None and not last
            with (
                parts[0].no_sync() if quiet else nullcontext(),
                loss_parallel() if args.tp > 1 and args.loss_parallel else nullcontext(),
                shard_sequence(mesh["cp"], tokens, targets, parts) if args.cp > 1 else nullcontext(),
            ):
                if pipeline is not None:
                    with autocast():
                        total += pipeline.step(tokens, targets)
                else:
                    with autocast():
                        loss = loss_of(parts[0](tokens), targets)
                    loss.backward()
                    total += loss.detach().full_tensor() if isinstance(loss, DTensor) else loss.detach()
        if args.clip:
            clip_gradients(parameters, args.clip, mesh["pp"] if args.pp > 1 else None)
        optimizer.step()

        if has_loss:  # the mean over the ranks that saw other tokens
            data_mesh = mesh["dp_cp"] if args.cp > 1 else mesh["dp"]
            dist.all_reduce(total, group=data_mesh.get_group())
            total /= data_mesh.size()
        loss_value = total.item()
        seconds = time.perf_counter() - start
        if speaks:
            memory = f"  {torch.cuda.max_memory_reserved() / 2**30:.2f} GiB" if device.type == "cuda" else ""
            print(
                f"step {step}  loss {loss_value:.4f}  {tokens_per_step / seconds:,.0f} tokens/s{memory}",
                flush=True,
            )

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
