"""A training script as it stands, profiled, or with a plan applied, under torchrun:

    torchrun --nproc-per-node 4 -m windtunnel.training.gradsync.live.script profile profile.json "" train.py
    torchrun --nproc-per-node 4 -m windtunnel.training.gradsync.live.script apply plan.json train.py

``windtunnel gradsync profile`` and ``apply`` call it so. The model is the first that the script wraps in
DistributedDataParallel. To be profiled it trains some steps without synchronisation, is measured in its next
forward, and ends there with status 0, also where it takes that for a failure: nothing that it would save is
of use.

The ranks are started as torchrun does (`profile_script`, `apply_to_script`), without what that says of
itself. Ctrl-C, and a rank that fails, end all of them before the call returns. What goes wrong in our own
part of a rank comes back through the file that torchrun has for it, so that it is told once and not by every
rank.
"""

from __future__ import annotations

import logging
import os
import runpy
import sys
import tempfile
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler
from torch.nn.parallel import DistributedDataParallel

from windtunnel.base.errors import HostError, ScriptError, UserError, WindtunnelError
from windtunnel.training.gradsync.files import check_place, read, write
from windtunnel.training.gradsync.formats import steps
from windtunnel.training.gradsync.live.codecs import find
from windtunnel.training.gradsync.live.exchange import DEADLINE
from windtunnel.training.gradsync.live.hook import apply
from windtunnel.training.gradsync.live.profile import STEPS, BackwardTimes, measured
from windtunnel.training.gradsync.model import SyncPlan, SyncProfile

Begin = Callable[[DistributedDataParallel], object]
GRACE = 5
"""Seconds that ranks have to end when they are told to."""
_plain = DistributedDataParallel.__init__


def profiled(
    ddp: DistributedDataParallel, file: Path, codecs: Sequence[str], profiles: list[SyncProfile]
) -> None:
    """Time the steps of the script's model, then measure all else, into ``profiles`` and by rank 0 into
    ``file``, and end the script."""
    times = BackwardTimes(ddp)
    begun, forwards = ddp._pre_forward, 0

    def forward(*arguments: Any, **named: Any) -> Any:
        nonlocal forwards
        ddp.require_backward_grad_sync = False
        if torch.is_grad_enabled():
            times.begin()
            forwards += 1
        if forwards == STEPS + 3 and not profiles:
            profile = measured(ddp, times, codecs, 1, DEADLINE)
            if dist.get_rank() == 0:
                write(file, profile)  # before there is one: what a script ends with is an error until then
            profiles.append(profile)
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
        case ["profile", file, codecs, *program]:
            names = codecs.split(",") if codecs else ()
            profiles: list[SyncProfile] = []
            try:
                run(program, lambda ddp: profiled(ddp, Path(file), names, profiles))
            except (Exception, SystemExit):
                if not profiles:
                    raise
            if not profiles:
                raise UserError(f"{program[0]}: it ended before {STEPS + 3} steps, which a profile takes")
        case ["apply", file, *program]:
            plan = read(Path(file), SyncPlan)
            run(program, lambda ddp: apply(ddp, plan))


def profile_script(
    script: str, arguments: Sequence[str], ranks: int, out: Path, codecs: Sequence[str]
) -> None:
    """Measure what the gradients of a script take between so many ranks, into ``out``; no ``codecs`` are the
    usual ones.

    Raises:
        UserError: a wrong script, codec or place, which is told before any rank begins.
        ScriptError: the script failed.
    """
    for name in codecs:
        find(name)
        if name not in steps():
            raise UserError(
                f"`codecs` {name}: how many steps training needs with it is not measured, no plan uses it; "
                f"accepted are {', '.join(sorted(steps()))}"
            )
    check_place(out)
    _launch(ranks, script, "profile", str(out), ",".join(codecs), script, *arguments)


def apply_to_script(script: str, arguments: Sequence[str], ranks: int, plan: Path) -> None:
    """Train with a plan.

    Raises:
        UserError, ScriptError: as in `profile_script`.
    """
    content = read(plan, SyncPlan)
    if content.world != ranks:
        raise UserError(f"plan {plan}: it is for {content.world} ranks; `ranks` {content.world} is accepted")
    _launch(ranks, script, "apply", str(plan), script, *arguments)


def _launch(ranks: int, script: str, *arguments: str) -> None:
    """Run this module with ``arguments`` as each rank, to the end."""
    if not Path(script).is_file():
        raise UserError(f"script {script!r} does not exist")
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", "1" if ranks > 1 else str(os.cpu_count()))
    disabled = logging.root.manager.disable
    with tempfile.TemporaryDirectory(prefix="windtunnel-gradsync-") as folder:
        config = LaunchConfig(
            1, 1, ranks, DefaultLogsSpecs(folder), uuid.uuid4().hex, rdzv_backend="c10d",
            rdzv_endpoint="localhost:0", max_restarts=0, shutdown_timeout=GRACE,
            signals_to_handle="SIGTERM,SIGHUP,SIGQUIT",
        )  # fmt: skip
        logging.disable(logging.CRITICAL)
        try:
            elastic_launch(config, sys.executable)(
                "-m", "windtunnel.training.gradsync.live.script", *arguments
            )
        except ChildFailedError as error:
            failure = error.get_first_failure()[1]
            message = failure.error_file_data["message"]
            if isinstance(message, dict):
                kind = UserError if failure.exitcode == UserError.status else HostError
                raise kind(message["message"].partition(": ")[2]) from None
            raise ScriptError(
                f"the script failed (status {failure.exitcode}); what it said is above"
            ) from None
        except SignalException as error:
            sys.exit(128 + error.sigval)
        finally:
            logging.disable(disabled)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except WindtunnelError as error:
        if "TORCHELASTIC_ERROR_FILE" in os.environ:  # who started the ranks tells it, once
            ErrorHandler().record_exception(error)
        else:
            print(f"windtunnel: {error}", file=sys.stderr, flush=True)
        sys.exit(error.status)
