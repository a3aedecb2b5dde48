"""A rank's process, forked from the worker's: the world is pretended for it, then it runs the program.

Imported by the worker after the absent device and torch, so that every rank finds all of this there.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import os
import pickle
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from windtunnel.base import atomic
from windtunnel.cluster.model import Device
from windtunnel.linux.system import end_with_parent
from windtunnel.training.emulate.graph import NoteKind, Slice
from windtunnel.training.emulate.live import (
    chunks,
    collector,
    failure,
    fused,
    host,
    kernels,
    machine,
    names,
    native_library,
    saving,
    substitutes,
    surface,
    values,
    world,
)
from windtunnel.training.emulate.live.ending import Ending
from windtunnel.training.emulate.live.failure import RankFiles
from windtunnel.training.emulate.live.fused.attention import install_flex
from windtunnel.training.emulate.live.mailbox import Mailbox, MailboxWait
from windtunnel.training.emulate.live.observe import Observer
from windtunnel.training.emulate.live.progress import WaitingLoops
from windtunnel.training.emulate.live.session import CaptureRequest
from windtunnel.training.emulate.program import Script


@dataclass(frozen=True)
class RankRun:
    """One run of a rank. ``earlier``: ranks that are captured before it. ``pipe``: to the worker, for what it
    waits for. ``began``: when the emulation did, in seconds since the epoch. ``at_end``: what is done when
    the rank is over."""

    request: CaptureRequest
    program: Any
    rank: int
    earlier: frozenset[int]
    pipe: int
    device: Device
    native: Any
    began: float
    at_end: list[Callable[[], None]] = field(default_factory=list)

    @functools.cached_property
    def files(self) -> RankFiles:
        return RankFiles(Path(self.request.directory), self.rank)

    def start(self) -> None:
        """In the forked child: never returns."""
        end_with_parent()
        log = open(self.files.log, "w", buffering=1)  # noqa: SIM115 - as the process
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        faulthandler.enable(file=log)
        stack = open(self.files.stack, "w")  # noqa: SIM115
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        code = 70
        try:
            code = self._run(self._prepare())
        except BaseException as error:
            failure.show(error)
        finally:
            self._end(code)

    def _end(self, code: int) -> None:
        for call in self.at_end:
            call()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

    def _prepare(self) -> Ending:
        """Pretend the world for this rank."""
        # The fork made torch's pool of threads invalid. Whoever asks for it first makes another, which is
        # safe only while there is one thread: else those of autograd race, and one finds no pool and aborts.
        torch.set_num_threads(1)
        request, rank, native, device = self.request, self.rank, self.native, self.device
        count, on_gpu, files = request.devices_per_host, device.kind == "gpu", self.files
        reads = machine.RankReads()
        machine.launch(rank, request.world_size, count)
        machine.play_part(rank, request.world_size, count, reads)

        def tell(want: MailboxWait | None) -> None:
            line = json.dumps((rank, None if want is None else asdict(want)))
            os.write(self.pipe, line.encode() + b"\n")

        mailbox = Mailbox(files, self.earlier, tell)
        view = world.WorldView(rank, request.world_size, mailbox, lambda *note: None)
        script = self.program.path if isinstance(self.program, Script) else None

        def write(slice_: Slice) -> None:
            whole = replace(slice_, rank_answers=reads.answers, files=reads.files(script))
            written = whole.outline() if request.outline else whole
            data = pickle.dumps(written, protocol=pickle.HIGHEST_PROTOCOL)
            atomic.replace(files.slice, data)

        def leave() -> None:
            files.done.touch()  # whoever waits for what this rank says goes on
            self._end(0)

        if on_gpu:
            collector.settle_backwards(native)
            surface.install(native, device, count)
            values.install_untouched(native)
            machine.install(device, count, files.directory / f"programs-{rank}")
            native.wt_device(count, device.capability[0] * 10 + device.capability[1], rank % count)
        else:
            host.install(native)
        world.install(view, native, "cuda" if on_gpu else "cpu")
        loops = WaitingLoops(files.loop, lambda: native.wt_row_count(0) + native.wt_row_count(1))
        observer = Observer(native, view, device.name, loops, request.settled, request.marked)
        ending = Ending(request, observer, write, leave)
        ending.install()
        view.note = observer.note
        observer.install()
        chunks.Chunks(observer, mailbox, request.templates and on_gpu).install()
        values.install_objects(view)
        values.install_values(view, native)
        if untried := native_library.untried():
            observer.note(untried)
        substitutes.install_compiler(observer)
        if on_gpu:
            substitutes.install_shapes(observer.note)
            substitutes.install_finite(observer)
            names.install(observer.note)
            note = functools.partial(observer.note, kind=NoteKind.APPROXIMATION)
            self.at_end.append(saving.install(native, note, self.began).leave)
            kernels.install_operators(observer)
            kernels.install_triton(observer)
            kernels.install_deepspeed(observer)
            fused.install(observer)
            install_flex(observer)
        reads.install()
        native.wt_record_on(1)
        return ending

    def _run(self, ending: Ending) -> int:
        """Run the program to its steady step (which ends the process) or to its end. Returns an exit
        status."""

        def overlooks(error: BaseException) -> bool:
            """The rank failed after its period, where nobody knows yet whether the script has an end."""
            if ending.skipping or (ending.following and failure.is_refusal(error)):
                ending.failed(failure.sentence(error))
            return ending.following and not self.request.to_end

        status = failure.status_of(self.program.run, self.files, overlooks)
        if status != 0:
            return status or 0
        observer = ending.observer
        if len(observer.events()) == 0:
            self.files.reason.write_text("the script ended without any work on a device")
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
