"""A training script as it stands, profiled, or with a plan applied, under torchrun:

    torchrun --nproc-per-node 4 -m windtunnel.training.gradsync.live.script profile profile.json 1 "" train.py
    torchrun --nproc-per-node 4 -m windtunnel.training.gradsync.live.script apply plan.json train.py

``windtunnel gradsync profile`` and ``apply`` call it so. The model is the first that the script wraps in
DistributedDataParallel. To be profiled it trains some steps without synchronisation, is measured in its next
forward, and ends there with status 0, also where it takes that for a failure: nothing that it would save is
of use.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler
from torch.nn.parallel import DistributedDataParallel

from windtunnel.base.errors import UserError, WindtunnelError
from windtunnel.training.gradsync.files import read, write
from windtunnel.training.gradsync.live.exchange import DEADLINE
from windtunnel.training.gradsync.live.hook import apply
from windtunnel.training.gradsync.live.profile import CODECS, STEPS, BackwardTimes, measured
from windtunnel.training.gradsync.model import SyncPlan, SyncProfile

Begin = Callable[[DistributedDataParallel], object]
_plain = DistributedDataParallel.__init__


def profiled(
    ddp: DistributedDataParallel, file: Path, hosts: int, codecs: Sequence[str], profiles: list[SyncProfile]
) -> None:
    """Time the steps of the script's model, then measure all else, into ``found`` and by rank 0 into
    ``file``, and end the script."""
    times = BackwardTimes(ddp)
    begun, steps = ddp._pre_forward, 0

    def forward(*arguments: Any, **named: Any) -> Any:
        nonlocal steps
        ddp.require_backward_grad_sync = False
        if torch.is_grad_enabled():
            times.begin()
            steps += 1
        if steps == STEPS + 3 and not profiles:
            profiles.append(measured(ddp, times, codecs, hosts, DEADLINE))
            if dist.get_rank() == 0:
                write(file, profiles[0])
        if profiles:
            raise SystemExit(0)
        return begun(*arguments, **named)

    # no hook: `replicate` of PyTorch, by which torchtitan wraps its model, calls this and not forward
    ddp._pre_forward = forward  # type: ignore[method-assign]


def run(program: Sequence[str], begin: Begin) -> None:
    """The script with its arguments, in this process.

    Raises:
        UserError: it wraps no model.
    """
    wrapped = False

    def initialise(self: DistributedDataParallel, *arguments: Any, **named: Any) -> None:
        nonlocal wrapped
        _plain(self, *arguments, **named)
        if not wrapped:
            wrapped = True
            begin(self)

    DistributedDataParallel.__init__ = initialise  # type: ignore[method-assign]
    sys.argv = [*program]
    sys.path[0] = str(Path(program[0]).resolve().parent)
    runpy.run_path(program[0], run_name="__main__")
    if not wrapped:
        raise UserError(f"{program[0]}: it wraps no model in DistributedDataParallel")


def main(arguments: Sequence[str]) -> None:
    """As the module says."""
    match arguments:
        case ["profile", file, hosts, codecs, *program]:
            names = codecs.split(",") if codecs else CODECS
            profiles: list[SyncProfile] = []
            try:
                run(program, lambda ddp: profiled(ddp, Path(file), int(hosts), names, profiles))
            except (Exception, SystemExit):
                if not profiles:
                    raise
            if not profiles:
                raise UserError(f"{program[0]}: it ended before {STEPS + 3} steps, which a profile takes")
        case ["apply", file, *program]:
            plan = read(Path(file), SyncPlan)
            run(program, lambda ddp: apply(ddp, plan))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except WindtunnelError as error:
        if "TORCHELASTIC_ERROR_FILE" in os.environ:  # who started the ranks tells it, once
            ErrorHandler().record_exception(error)
        else:
            print(f"windtunnel: {error}", file=sys.stderr, flush=True)
        sys.exit(error.status)
