"""The command line of train_llama.py: flags, defaults, and which of them go together."""

import argparse
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from llama_model import SIZES
from llama_parallel import SCHEDULES, stages_of_rank
from text_data import TEXT


def parse_arguments(description: str, world_size: int) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    # fmt: off
    add("--size", choices=SIZES, default="debug", help="model size (default: debug, with bytes as tokens)")
    add("--parallel", choices=["ddp", "fsdp", "none"], default="fsdp", help="of the data (default: fsdp)")
    add("--tp", type=int, default=1, help="tensor parallel ranks, with sequence parallel activations")
    add("--pp", type=int, default=1, help="pipeline parallel ranks")
    add("--cp", type=int, default=1, help="context parallel ranks")
    add("--schedule", choices=SCHEDULES, default="1f1b", help="of the pipeline (default: 1f1b)")
    add("--seq", type=int, help="sequence length (default: 256 for debug, else 8192)")
    add("--batch", type=int, help="sequences of one data parallel rank in one forward pass; a pipeline cuts "
        "them into --microbatches (default: 1, with a pipeline one for each microbatch)")
    add("--microbatches", type=int, help="of a pipeline (default: 2 x --pp, at most --batch)")
    add("--grad-accum", type=int, default=1, help="batches for each optimiser step")
    add("--ac", choices=["none", "selective", "full"], help="activation checkpointing: selective keeps "
        "attention outputs, reduce-scatter results and every second matrix product; full only layer inputs "
        "(default: selective; full for the zero-bubble schedules)")
    add("--compile", action="store_true", help="torch.compile each layer")
    add("--fp8", action="store_true", help="matrix products of the layers in float8, with a scale for each "
        "tensor and step, by torchao; with fsdp also the gathered weights")
    add("--loss-parallel", action=argparse.BooleanOptionalAction, default=True,
        help="with --tp, compute the loss on logits split over the vocabulary")
    add("--dtype", choices=["bf16", "fp32"], default="bf16", help="of computation; parameters are fp32")
    add("--fused", dest="adamw", action="store_const", const="fused", default="fused",
        help="AdamW in one kernel (default)")
    add("--foreach", dest="adamw", action="store_const", const="foreach", help="AdamW by operators on lists")
    add("--lr", type=float, help="learning rate (default: 3e-3 for debug, else 3e-4)")
    add("--clip", type=float, default=1.0, help="largest norm of the gradient, 0 for no limit (default: 1)")
    add("--steps", type=int, default=3, help="(default: 3)")
    add("--seed", type=int, default=0, help="of the initial weights")
    add("--data", type=Path, default=TEXT, help="a text file, read as bytes")
    # fmt: on
    args = parser.parse_args()

    for name in ("tp", "pp", "cp", "seq", "batch", "microbatches", "grad_accum", "steps"):
        value = getattr(args, name)
        if value is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    if not args.data.is_file():
        parser.error(f"--data {args.data}: there is no such file")
    debug = args.size == "debug"
    args.seq = args.seq or (256 if debug else 8192)
    args.lr = args.lr or (3e-3 if debug else 3e-4)
    if args.pp > 1:
        args.microbatches = args.microbatches or min(2 * args.pp, args.batch or 2 * args.pp)
    args.batch = args.batch or args.microbatches or 1
    args.microbatches = args.microbatches or 1
    # Selective checkpointing cannot split the backward pass into its two halves.
    args.split_backward = args.pp > 1 and args.schedule in ("zerobubble", "zbv")
    args.ac = args.ac or ("full" if args.split_backward else "selective")
    args.dp = world_size // (args.pp * args.cp * args.tp)
    for problem in problems(args, world_size):
        parser.error(problem)
    return args


def problems(args: argparse.Namespace, world_size: int) -> Iterator[str]:
    """What of the command line does not go together, a sentence each."""
    config = SIZES[args.size]
    if world_size % (args.pp * args.cp * args.tp):
        yield f"a world of {world_size} does not divide into --pp {args.pp} x --cp {args.cp} x --tp {args.tp}"
    if args.parallel == "none" and args.dp * args.cp > 1:
        yield f"--parallel none would let {args.dp * args.cp} copies of the model drift apart; use fsdp"
    # DDP knows nothing of split parameters, and cannot set up its buckets when several microbatches come back
    # before the next one goes forward.
    if args.fp8 and find_spec("torchao") is None:
        yield "--fp8 needs torchao, which is not installed: pip install torchao"
    if args.fp8 and args.dtype != "bf16":
        yield "--fp8 goes with --dtype bf16, in which everything else is computed"
    if args.fp8 and args.tp > 1:
        yield "--fp8 does not go with --tp: torchao has styles of its own for tensor parallel layers"
    if args.parallel == "ddp" and args.tp * args.pp > 1:
        yield "--parallel ddp does not go with --tp and --pp; use fsdp"
    if config.kv_heads % args.tp:
        yield f"--tp {args.tp} does not divide the {config.kv_heads} key heads of --size {args.size}"
    share = 2 * args.cp * args.tp if args.cp > 1 else args.tp  # context parallel ranks take two pieces each
    if args.seq % share:
        yield f"--seq {args.seq} is no multiple of {share}, as --cp {args.cp} and --tp {args.tp} need"

    if args.pp == 1:
        if args.microbatches > 1:
            yield "--microbatches needs a pipeline (--pp); without one use --grad-accum"
        return
    if args.batch % args.microbatches:
        yield f"--batch {args.batch} does not divide into --microbatches {args.microbatches}"
    if args.schedule not in ("1f1b", "gpipe") and args.microbatches % args.pp:
        yield f"--schedule {args.schedule} needs --microbatches that are a multiple of --pp {args.pp}"
    stages = args.pp * len(stages_of_rank(args.schedule, 0, args.pp))
    if stages > config.layers + 2:
        yield f"--size {args.size} has {config.layers} layers, too few for {stages} pipeline stages"
    if args.split_backward and args.ac == "selective":
        yield f"--ac selective does not go with --schedule {args.schedule}; use full or none"
