"""Emulates the points of a sweep that have not ended yet, one group after another or several at once.

Each point is written down as it ends (`windtunnel.training.emulate.sweep.folder`), so that a kill loses at
most what was in the air. Points that failed are tried again by the next call: what was wrong may lie outside.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

from windtunnel.base.errors import ScriptError
from windtunnel.base.paths import home
from windtunnel.training.emulate.emulation import Progress, no_progress
from windtunnel.training.emulate.sweep.folder import Row, forget_rows, read_rows, sweep_folder, write_row
from windtunnel.training.emulate.sweep.group import emulate_group, groups
from windtunnel.training.emulate.sweep.plan import Point, Sweep

CAPTURE_JOBS = 2
"""Ranks captured at once by one point, as `windtunnel emulate` does."""


def run_sweep(
    sweep: Sweep, *, jobs: int = 1, ray: str | None = None, resume: bool = True, pictures: bool = True,
    progress: Progress = no_progress,
) -> tuple[Path, list[Row]]:  # fmt: skip
    """Emulate all points of ``sweep`` that are not done; returns its folder and the outcomes in order.

    ``jobs``: processes, each with one group of points. ``ray``: the address of a Ray cluster to use instead.
    ``resume``: keep what an earlier call has done. ``pictures``: write the report of each run.

    Raises:
        UserError: Ray is not installed or not at that address, or the home folder cannot be written.
        ScriptError: a process ended unexpectedly; the points that ended before are kept.
    """
    folder = sweep_folder(home(), sweep.id)
    if not resume:
        forget_rows(folder)
    done = {index for index, row in read_rows(folder).items() if row["status"] == "done"}
    todo = groups(point for point in sweep.points if point.index not in done)
    tell = _Counting(sweep, folder, progress)
    if ray is not None:
        from windtunnel.training.emulate.sweep.on_ray import emulate_on_ray

        emulate_on_ray(ray, todo, folder, CAPTURE_JOBS, pictures, tell.count)
    elif jobs == 1 or len(todo) < 2:
        for group in todo:
            for row in emulate_group(group, CAPTURE_JOBS, pictures, tell.within):
                write_row(folder, row)
                tell.count()
    else:
        _emulate_in_processes(min(jobs, len(todo)), todo, folder, pictures, tell)
    rows = read_rows(folder)
    return folder, [rows[point.index] for point in sweep.points]


class _Counting:
    """Progress over all points: the files say how many have ended, whichever process wrote them."""

    def __init__(self, sweep: Sweep, folder: Path, progress: Progress) -> None:
        self.folder, self.total, self.progress = folder, len(sweep.points), progress
        self.ended = 0
        self.count()

    def count(self) -> None:
        self.ended = sum(1 for _ in self.folder.glob("points/*.json"))
        self.within("")

    def within(self, what: str, fraction: float = 0.0) -> None:
        of = f"{self.ended} of {self.total} points"
        self.progress(f"{of}, {what}" if what else of, self.ended / self.total)


def _emulate_in_processes(
    jobs: int, todo: list[list[Point]], folder: Path, pictures: bool, tell: _Counting
) -> None:
    capture_jobs = max(1, min(CAPTURE_JOBS, (os.cpu_count() or 1) // jobs))
    # Spawned, not forked: the parent has threads (of Rich, of NumPy's libraries) that a fork would break.
    with ProcessPoolExecutor(
        jobs, mp_context=multiprocessing.get_context("spawn"), initializer=_end_with_parent
    ) as pool:
        waiting: set[Future[None]] = {
            pool.submit(_emulate_and_write, group, folder, capture_jobs, pictures) for group in todo
        }
        try:
            while waiting:
                ended, waiting = wait(waiting, timeout=1.0, return_when=FIRST_COMPLETED)
                for future in ended:
                    future.result()
                tell.count()
        except BrokenProcessPool:
            raise ScriptError(
                "a process of the sweep ended unexpectedly (out of memory?); run the same command again to "
                "go on, with fewer --jobs where memory is short"
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _emulate_and_write(group: list[Point], folder: Path, capture_jobs: int, pictures: bool) -> None:
    for row in emulate_group(group, capture_jobs, pictures):
        write_row(folder, row)


def _end_with_parent() -> None:
    """End this process with its parent: a pool whose parent was killed would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
