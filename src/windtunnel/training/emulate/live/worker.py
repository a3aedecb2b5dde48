"""The process in which ranks run: ``python -m windtunnel.training.emulate.live.worker``.

It loads the absent device and torch once, then forks one child a rank, two at a time, so that a rank starts
in milliseconds and shares the memory of everything imported. Requests come as JSON lines on standard input,
one a batch of ranks; a line of JSON goes back for every rank that ends. The script's own output goes to a log
file a rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windtunnel.base import atomic
from windtunnel.base.importing import uncollected
from windtunnel.linux.processes import descendants
from windtunnel.training.emulate.graph import NoteKind, Slice
from windtunnel.training.emulate.live import failure, native_library, progress
from windtunnel.training.emulate.program import Script

if TYPE_CHECKING:
    from windtunnel.training.emulate.live.mailbox import MailboxWait

# torch is imported in main(), after the absent device is loaded

BEGAN = time.time()
"""When the worker did, before any rank."""

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
OF_RANKS = (
    "chunks", "collector", "ending", "fused", "host", "kernels", "machine", "mailbox", "names",
    "observe", "saving", "substitutes", "surface", "values", "world",
)  # fmt: skip
"""What `_prepare` takes, beside this module."""
OPTIONAL = ("numpy.ma", "safetensors.torch", "torch.profiler._cupti_monitor", "triton")
"""What every rank would import, the first when it asks for what is unique in an array, the third when an
optimiser steps; some are there only beside some builds of torch."""


@dataclass(frozen=True)
class CaptureRequest:
    """Which ranks to run: see `session.Session`, which sends it. ``steps``, ``least``, ``further`` and
    ``to_end``: see `ending.Ending`; ``marked`` and ``settled``: `observe.Observer`. ``outline``: only the
    ranks' outlines are wanted. ``templates``: not all micro-batches are run, see `chunks`."""

    number: int
    ranks: list[int]
    world_size: int
    devices_per_host: int
    directory: str
    steps: int
    least: int
    marked: bool
    jobs: int
    timeout: float
    earlier: list[int]
    settled: tuple[int, int] | None
    further: bool
    to_end: bool
    outline: bool
    templates: bool


def main() -> None:
    device, program = pickle.loads(Path(sys.argv[1]).read_bytes())
    program = pickle.loads(program)
    # What outlives the process of a rank that started it becomes a child of this one, and ends with it.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
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
        _serve(request, program, device, native)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # whatever else ends now leaves nothing behind
        _reap()
        _answer(request, end=True)
    _end_all()


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
    for name in OF_RANKS:
        importlib.import_module(f"windtunnel.training.emulate.live.{name}")
    sys.modules["windtunnel.training.emulate.live.substitutes"].install_shortcuts()

    torch.set_num_threads(1)


def _serve(request: CaptureRequest, program: Any, device: Any, native: Any) -> None:
    """Run the ranks that are asked for, so many at once, and at once those that one of them waits for."""
    from windtunnel.training.emulate.live.chunks import AGAIN
    from windtunnel.training.emulate.live.mailbox import hanging

    read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    waiting = list(request.ranks)
    parent = os.getppid()
    running: dict[int, progress.Watch] = {}  # by process, in the order of their beginning
    blocked: dict[int, MailboxWait] = {}  # rank -> what it waits for
    hung: set[int] = set()
    started = set(request.earlier)

    plain = replace(request, templates=False)

    def start(rank: int, templates: bool = True) -> None:
        sys.stdout.flush()
        # Which ranks come before this one is a matter of what is asked for, not of what runs already.
        place = request.ranks.index(rank) if rank in request.ranks else 0
        earlier = frozenset([*request.earlier, *request.ranks[:place]])
        events = progress.Word()
        stack = failure.stack_file(Path(request.directory), rank)
        pid = os.fork()
        if pid == 0:
            native.wt_recorded(events.address)
            _run_rank(request if templates else plain, program, rank, earlier, write, device, native)
        loop = failure.loop_file(Path(request.directory), rank)
        running[pid] = progress.Watch(pid, rank, stack, events, request.timeout, loop)
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
            blocked.pop(ended.rank, None)
            os.close(ended.ended)
            code = os.waitstatus_to_exitcode(status)
            if code == AGAIN:
                start(ended.rank, templates=False)
                continue
            Path(request.directory, f"done-{ended.rank}").touch()
            now = time.monotonic()
            _answer(
                request, rank=ended.rank, status=code, hung=pid in hung, seconds=now - ended.began,
                quiet=now - ended.moved,
            )  # fmt: skip
            for watch in running.values():
                watch.begin_anew()
        if pid:
            continue
        if os.getppid() != parent:  # whoever asked is gone
            shutil.rmtree(request.directory, ignore_errors=True)
            _end_all()
        if running and len(blocked) == len(running) and (text := hanging(blocked)):
            atomic.replace(Path(request.directory, f"stuck-{min(blocked)}"), text)
        least = math.inf
        for pid, watch in running.items():
            if watch.rank in blocked:
                watch.begin_anew()  # that it waits is known, and for whom
                continue
            if watch.due and pid not in hung:
                watch.look(least)
                if watch.hangs:
                    hung.add(pid)
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


def _end_all() -> None:
    """The ranks and all that they started go, and this process with them."""
    for child in descendants(os.getpid()):
        progress.kill_tree(child)
    os.killpg(0, signal.SIGKILL)


def _run_rank(
    request: CaptureRequest, program: Any, rank: int, earlier: frozenset[int], pipe: int, device: Any,
    native: Any,
) -> None:  # fmt: skip
    """In the forked child: never returns."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    directory = Path(request.directory)
    log = open(directory / f"log-{rank}.txt", "w", buffering=1)  # noqa: SIM115 - lives as long as the process
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    faulthandler.enable(file=log)
    stack = open(failure.stack_file(directory, rank), "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
    code = 70
    try:
        own_file = program.path if isinstance(program, Script) else None
        observer, ending = _prepare(request, own_file, rank, earlier, pipe, device, native)
        code = _run_program(request, program, rank, observer, ending)
    except BaseException as error:
        failure.show(error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _prepare(
    request: CaptureRequest, script: Path | None, rank: int, earlier: frozenset[int], pipe: int, device: Any,
    native: Any,
) -> Any:  # fmt: skip
    """Pretend the world for this rank. Returns its observer, and its ending."""
    import torch

    from windtunnel.training.emulate.live import (
        chunks,
        collector,
        fused,
        host,
        kernels,
        machine,
        names,
        saving,
        substitutes,
        surface,
        values,
        world,
    )
    from windtunnel.training.emulate.live.ending import Ending
    from windtunnel.training.emulate.live.fused.attention import install_flex
    from windtunnel.training.emulate.live.mailbox import Mailbox
    from windtunnel.training.emulate.live.observe import Observer
    from windtunnel.training.emulate.live.progress import WaitingLoops

    # The fork made torch's pool of threads invalid. Whoever asks for it first makes another, which is safe
    # only while there is one thread: else those of autograd race, and one finds no pool and aborts.
    torch.set_num_threads(1)
    directory = Path(request.directory)
    local = rank % request.devices_per_host
    machine.launch(rank, request.world_size, request.devices_per_host)

    def tell(want: MailboxWait | None) -> None:
        os.write(pipe, json.dumps((rank, None if want is None else asdict(want))).encode() + b"\n")

    mailbox = Mailbox(directory, rank, earlier, tell)
    notes: list[str] = []
    the_world = world.WorldView(rank, request.world_size, mailbox, notes.append)

    def write(slice_: Slice) -> None:
        whole = replace(slice_, rank_answers=reads.answers, files=reads.files(script))
        written = whole.outline() if request.outline else whole
        data = pickle.dumps(written, protocol=pickle.HIGHEST_PROTOCOL)
        atomic.replace(directory / f"slice-{rank}.pkl", data)

    def leave() -> None:
        mailbox.close()
        sys.stdout.flush()
        os._exit(0)

    ending = Ending(request.steps, request.least, request.further, request.to_end, write, leave)

    if device.kind == "gpu":
        collector.settle_backwards(native)
        surface.install(native, device, request.devices_per_host)
        names.install_answers(native)
        values.install_untouched(native)
        machine.install(directory / f"programs-{rank}")
        native.wt_device(request.devices_per_host, device.capability[0] * 10 + device.capability[1], local)
        world.install(the_world, native, "cuda")
    else:
        host.install(native)
        world.install(the_world, native, "cpu")
    reads = machine.RankReads()
    loops = WaitingLoops(
        failure.loop_file(directory, rank), lambda: native.wt_row_count(0) + native.wt_row_count(1)
    )
    observer = Observer(
        native, the_world, device.name, ending.step, ending.marked, loops, request.settled, request.marked
    )
    ending.observer = observer
    ending.install()
    the_world.note = observer.note
    observer.install()
    chunks.Chunks(observer, mailbox, directory, request.templates and device.kind == "gpu").install()
    values.install_objects(the_world)
    values.install_values(the_world, native)
    if untried := native_library.untried():
        observer.note(untried)
    substitutes.install_compiler(observer)
    if device.kind == "gpu":
        substitutes.install_shapes(observer.note)
        names.install(observer.note)
        saving.install(native, functools.partial(observer.note, kind=NoteKind.APPROXIMATION), BEGAN)
        launches = kernels.Launches(native)
        kernels.install_operators(launches)
        kernels.install_triton(observer, launches)
        kernels.install_deepspeed(observer, launches)
        fused.install(observer, launches)
        install_flex(observer)
    reads.install()
    native.wt_record_on(1)
    return observer, ending


def _run_program(request: CaptureRequest, program: Any, rank: int, observer: Any, ending: Any) -> int:
    """Run the program to its steady step (which ends the process) or to its end. Returns an exit status."""
    directory = Path(request.directory)

    def overlooks(error: BaseException) -> bool:
        """The rank failed after its period, where nobody knows yet whether the script has an end."""
        if ending.skipping or (ending.following and failure.is_refusal(error)):
            ending.failed(failure.sentence(error))
        return bool(ending.following) and not request.to_end

    status = failure.status_of(program.run, directory, rank, request.outline, overlooks)
    if status != 0:
        return status or 0
    if len(observer.events()) == 0:
        failure.write_reason(directory, rank, "the script ended without any work on a device")
        return 3
    observer.program_ended()
    if not observer.steps:
        observer.note("the script ended without an optimiser step: all of it is reported as one step")
    elif len(observer.steps) == 1:
        observer.note(
            "the script ended after one step: its set-up is part of what is reported; let it run three"
        )
    ending.ended()
    return 0


if __name__ == "__main__":
    main()
