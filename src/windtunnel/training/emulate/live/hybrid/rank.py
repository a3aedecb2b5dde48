"""A live rank: ``python -m windtunnel.training.emulate.live.hybrid.rank DIRECTORY RANK DESCRIPTOR``.

It runs the program as it is, with real tensors, and tells the coordinator at the other end of the descriptor
what it calls, when a step has ended and how it ended itself. What else is to be known lies in
``DIRECTORY/live.json``. The storages of the first two steps are followed, which takes time; then the rank
runs free.
"""

from __future__ import annotations

import faulthandler
import json
import os
import pdb
import signal
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.autograd.graph
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
import torch.utils.checkpoint
import torch.utils.data
from torch.utils._python_dispatch import _get_current_dispatch_mode

from windtunnel.linux.system import end_with_parent
from windtunnel.training.emulate.live import failure, machine, values, world
from windtunnel.training.emulate.live.failure import RankFiles
from windtunnel.training.emulate.live.host import HeldBytes
from windtunnel.training.emulate.live.hybrid.group import HybridGroup, LiveWorld
from windtunnel.training.emulate.live.hybrid.link import Clock, CoordinatorLink, cpu_seconds, cuda_seconds
from windtunnel.training.emulate.live.mailbox import Mailbox, MailboxWait
from windtunnel.training.emulate.live.patches import replaces_backward
from windtunnel.training.emulate.program import PROGRAM, follow_steps, run_packed

FOLLOWED = 2
"""Steps in which tensor memory is counted."""


@dataclass(frozen=True)
class LiveRankRequest:
    """What ``live.json`` holds. ``captured``: ranks that were, and said something. ``attach``: the step
    before which the first live rank stops."""

    world_size: int
    devices_per_host: int
    live: list[int]
    captured: list[int]
    rule: str
    device: str
    attach: int


Figures = tuple[float, float, int, float | None]
"""The rank's own time, windtunnel's CPU seconds, and calls: since the start. And the loss."""


class Steps:
    """Tells the coordinator of each step that ends: the clock, and what was found in it."""

    def __init__(self, link: CoordinatorLink, memory: HeldBytes | None, attach: int) -> None:
        self.link, self.memory, self.attach = link, memory, attach
        self.mode = memory.follow() if memory is not None else None
        self.ended = 0
        self.loss: float | None = None

    def install(self) -> None:
        self.calls = follow_steps(self._figures, self._end, self.link.clock)

        @replaces_backward
        def run_and_settle(run: Any, tensors: Any, *args: Any, **kwargs: Any) -> Any:
            outermost = torch._C._current_autograd_node() is None
            if outermost and len(tensors) == 1 and tensors[0].numel() == 1:
                self.loss = tensors[0].item()
            result = run(tensors, *args, **kwargs)
            if outermost:
                self.link.settle()
            return result

    def _figures(self) -> Figures:
        clock = self.link.clock
        if self.memory is not None and not self.ended and self.calls.last is None:
            self.memory.take_peak()  # the first step's own is no steady one
        return clock.own, clock.spent, self.link.calls, self.loss

    def _end(self, figures: Figures) -> None:
        self.ended += 1
        peak = 0
        if self.memory is not None and self.ended >= FOLLOWED:
            peak = self.memory.peak
            # else one of the program's modes lies upon it
            if self.mode is not None and _get_current_dispatch_mode() is self.mode:
                self.mode.__exit__(None, None, None)
        elif self.memory is None:
            peak = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        self.link.tell("step", *figures, peak)
        if self.ended + 1 == self.attach:
            stopped = failure.own_frame(sys._getframe())
            pdb.Pdb(skip=["windtunnel.*", "torch.*", "contextlib"]).set_trace(stopped)


def main() -> None:
    end_with_parent()
    directory, rank = Path(sys.argv[1]), int(sys.argv[2])
    request = LiveRankRequest(**json.loads((directory / "live.json").read_text()))
    files = RankFiles(directory, rank)
    stack = open(files.stack, "w")  # noqa: SIM115 - lives as long as the process
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    connection = Connection(int(sys.argv[3]))
    on_host = request.device == "cpu"
    clock = Clock(cpu_seconds if on_host else cuda_seconds)
    link = CoordinatorLink(connection, clock)
    _join(request, files, link)
    attach = request.attach if rank == request.live[0] else 0
    observed = Steps(link, HeldBytes() if on_host else None, attach)
    observed.install()
    code = failure.status_of(lambda: run_packed(directory / PROGRAM), files) or 0
    with clock:
        link.tell("end", code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # gloo's destructors can wait for each other


def _join(request: LiveRankRequest, files: RankFiles, link: CoordinatorLink) -> None:
    """Make the world of which this is a rank."""
    rank = files.rank
    machine.launch(rank, request.world_size, request.devices_per_host)

    def nobody(want: MailboxWait | None) -> None:
        """What was not said in the capture is never said."""
        if want is not None:
            RankFiles(files.directory, want.sender).done.touch()

    mailbox = Mailbox(files, frozenset(request.captured) - {rank}, nobody)
    view = world.WorldView(rank, request.world_size, mailbox, lambda *note: None)
    live = LiveWorld(frozenset(request.live), request.rule, link, files.directory)
    native = SimpleNamespace(wt_batch=lambda count: None)
    world.install(
        view, native, request.device, lambda place, size: HybridGroup(live, place, size), HybridGroup
    )
    values.install_objects(view)


if __name__ == "__main__":
    main()
