"""The process in which ranks run: ``python -m windtunnel.training.emulate.live.worker``.

It loads the absent device and torch once, then forks one child a rank, two at a time, so that a rank starts
in milliseconds and shares the memory of everything imported. Requests come as JSON lines on standard input,
one a batch of ranks; a line of JSON goes back for every rank that ends. The script's own output goes to a log
file a rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import math
import os
import pickle
import select
import shutil
import signal
import sys
import time
from dataclasses import replace
from multiprocessing.sharedctypes import RawValue
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windtunnel.base import atomic
from windtunnel.base.importing import uncollected
from windtunnel.linux.processes import descendants
from windtunnel.linux.system import adopt_orphans
from windtunnel.training.emulate.live import native_library, progress
from windtunnel.training.emulate.live.failure import RankFiles
from windtunnel.training.emulate.live.session import CaptureRequest

if TYPE_CHECKING:
    from windtunnel.training.emulate.live.mailbox import MailboxWait

# torch is imported in main(), after the absent device is loaded

OPTIONAL = ("numpy.ma", "safetensors.torch", "torch.profiler._cupti_monitor", "triton")
"""What every rank would import, the first when it asks for what is unique in an array, the third when an
optimiser steps; some are there only beside some builds of torch."""


def main() -> None:
    began, job_file = time.time(), Path(sys.argv[1])
    device, program = pickle.loads(job_file.read_bytes())
    program = pickle.loads(program)
    adopt_orphans()  # what outlives the process of a rank that started it ends with this one
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with uncollected():
        native = native_library.load()
        _import_torch()
    if device.kind == "gpu":
        native.wt_device(1, device.capability[0] * 10 + device.capability[1], 0)
        native.wt_register_operators(native_library.operator_names())
    native.wt_register_collectives()
    gc.freeze()
    for line in sys.stdin:
        request = CaptureRequest(**json.loads(line))
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _serve(request, program, device, native, began, job_file.parent)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # whatever else ends now leaves nothing behind
        _reap()
        _answer(request, end=True)
    _end_all(job_file.parent)


def _answer(request: CaptureRequest, **content: Any) -> None:
    print(json.dumps({"request": request.number, **content}), flush=True)


def _import_torch() -> None:
    """Everything that a training script is likely to import, and what prepares it, so that forked ranks find
    it there."""
    import torch
    import torch._meta_registrations
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor.experimental
    import torch.distributed.tensor.parallel
    import torch.utils.checkpoint
    import torch.utils.data

    for name in OPTIONAL:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    from windtunnel.training.emulate.live import rank, substitutes

    del rank  # what ranks run is there now
    substitutes.install_shortcuts()
    torch.set_num_threads(1)


def _serve(
    request: CaptureRequest, program: Any, device: Any, native: Any, began: float, scratch: Path
) -> None:
    """Run the ranks that are asked for, so many at once, and at once those that one of them waits for."""
    from windtunnel.training.emulate.live.mailbox import hanging
    from windtunnel.training.emulate.live.rank import RankRun

    read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    waiting = list(request.ranks)
    parent = os.getppid()
    running: dict[int, progress.Watch] = {}  # by process, in the order of their beginning
    blocked: dict[int, MailboxWait] = {}  # rank -> what it waits for
    started = set(request.earlier)

    plain = replace(request, templates=False)

    def start(rank: int, templates: bool = True) -> None:
        sys.stdout.flush()
        # Which ranks come before this one is a matter of what is asked for, not of what runs already.
        place = request.ranks.index(rank) if rank in request.ranks else 0
        earlier = frozenset([*request.earlier, *request.ranks[:place]])
        events = RawValue(ctypes.c_int64)
        pid = os.fork()
        if pid == 0:
            native.wt_recorded(ctypes.addressof(events))
            wanted = request if templates else plain
            RankRun(wanted, program, rank, earlier, write, device, native, began).start()
        running[pid] = progress.Watch(pid, RankFiles(Path(request.directory), rank), events, request.timeout)
        started.add(rank)
        if rank in waiting:
            waiting.remove(rank)

    while waiting or running:
        while waiting and len(running) - len(blocked) < request.jobs:
            start(waiting[0])
        for rank, want in _wants(read):
            blocked.pop(rank, None)
            if want is not None:
                blocked[rank] = want
                if want.sender not in started:
                    start(want.sender)
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            ended = running.pop(pid)
            files = ended.files
            blocked.pop(files.rank, None)
            os.close(ended.ended)
            if files.again.exists():
                files.again.unlink()
                start(files.rank, templates=False)
                continue
            files.done.touch()
            now = time.monotonic()
            _answer(
                request, rank=files.rank, status=os.waitstatus_to_exitcode(status), hung=ended.hung,
                seconds=now - ended.began, quiet=now - ended.moved,
            )  # fmt: skip
            for watch in running.values():
                watch.begin_anew()
        if pid:
            continue
        if os.getppid() != parent:  # whoever asked is gone
            _end_all(scratch)
        if running and len(blocked) == len(running) and (text := hanging(blocked)):
            atomic.replace(RankFiles(Path(request.directory), min(blocked)).stuck, text)
        least = math.inf
        for watch in running.values():
            if watch.files.rank in blocked:
                watch.begin_anew()  # that it waits is known, and for whom
                continue
            if watch.due and not watch.hung:
                watch.look(least)
                if watch.hangs:
                    watch.end()
            least = min(least, watch.quiet)
        ends = [watch.ended for watch in running.values()]
        select.select([read, *ends], [], [], progress.SHORTEST)
    os.close(read)
    os.close(write)


def _wants(pipe: int) -> list[tuple[int, MailboxWait | None]]:
    """What ranks have told through the pipe since it was read last; a message is one line, written whole."""
    from windtunnel.training.emulate.live.mailbox import MailboxWait

    data = b""
    with contextlib.suppress(BlockingIOError):
        while part := os.read(pipe, 1 << 16):
            data += part
    lines = [json.loads(line) for line in data.splitlines()]
    return [(rank, None if want is None else MailboxWait(**want)) for rank, want in lines]


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _end_all(scratch: Path) -> None:
    """Whoever asked is gone: the ranks and all that they started go, their files, and this process."""
    for child in descendants(os.getpid()):
        progress.kill_tree(child)
    shutil.rmtree(scratch, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
