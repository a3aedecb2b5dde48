"""Runs a training script as it is, one rank of a real job, and notes its steps' times or memory.

    torchrun ... -m benchmarks.training.emulate.tracked MODE FOLDER SCRIPT [ARGS...]

PyTorch's global optimiser hook marks the end of each step: the script is not changed. MODE ``time`` notes the
seconds between the ends of consecutive steps, ``memory`` the greatest number of bytes that all storages held
within each step (counted by the same rule as in a capture on the CPU), ``cuda`` on a GPU the seconds, the
greatest allocated and the greatest reserved bytes of each step. Each rank writes ``FOLDER/RANK.json``.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

# What these keep for themselves from their import on is no part of the job.
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
import torch.utils.checkpoint
import torch.utils.data
from torch.optim.optimizer import register_optimizer_step_post_hook

from windtunnel.training.emulate.live.host import HeldBytes


def main() -> None:
    """The program: see the module."""
    mode, folder, script, *arguments = sys.argv[1:]
    figures: list[float | tuple[float, int, int]] = []
    first: list[Any] = []  # with several optimisers the first one that steps marks the step, as in a capture
    storages = HeldBytes()
    begin = perf_counter()

    def stepped(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal begin
        if not first:
            first.append(optimizer)
        if first[0] is not optimizer:
            return
        if mode == "cuda":
            torch.cuda.synchronize()
        now = perf_counter()
        if mode == "memory":
            figures.append(float(storages.take_peak()))
        elif mode == "time":
            figures.append(now - begin)
        else:
            figures.append((now - begin, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()))
            torch.cuda.reset_peak_memory_stats()
        begin = now

    register_optimizer_step_post_hook(stepped)
    if mode == "memory":
        storages.follow()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))
    # Taking gloo down can deadlock: the group's destructor joins a thread that may want the interpreter's
    # lock to release a tensor. So the groups live as long as the process, which ends without destructors.
    dist.destroy_process_group = lambda group=None: None
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        Path(folder, f"{os.environ.get('RANK', '0')}.json").write_text(json.dumps(figures))
    if dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
