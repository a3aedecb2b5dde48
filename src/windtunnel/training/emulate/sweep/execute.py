"""Emulates the points of a sweep that have not ended yet, one group after another or several at once.

Each point is written down as it ends: one JSON file in ``<home>/sweeps/<id>/points/``, which is there whole
or not at all, also after a power cut. So a sweep that was killed goes on with the points that have no file.
Points that failed are tried again by the next call: what was wrong may lie outside.

Points that look the same to the script make a group, so that one capture does for all. What a script sees of
a cluster is the kind and number of devices in a host and the size of the world. Points that differ only in
what lies between the hosts, or in prices, have the same execution graph; it is captured for the first of
them, and for the others only costed and replayed again.

On a Ray cluster the same code runs on hosts where windtunnel is installed. The script has to lie under the
same path on every one. Runs go to the store of the host that did them, unless ``WINDTUNNEL_HOME`` is a shared
folder or ``WINDTUNNEL_STORE`` a shared database; the outcomes come back one by one and are written here, so
that a kill of this process loses only what was in the air.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from windtunnel.base import atomic
from windtunnel.base.errors import ScriptError, UserError
from windtunnel.base.paths import home
from windtunnel.linux.hosts import ActorLost, RayCluster
from windtunnel.linux.system import end_with_parent
from windtunnel.training.emulate.emulation import Capturing, Progress, capture, no_progress
from windtunnel.training.emulate.policy.classes import Classes
from windtunnel.training.emulate.run import Fabrics, emulate, no_fabrics
from windtunnel.training.emulate.summary import Summary
from windtunnel.training.emulate.sweep.result import Row
from windtunnel.training.emulate.sweep.spec import Point, Sweep

Elsewhere = Callable[[Sequence[Point], Progress], Iterator[Row]]
"""Gives the outcome of each point as it is there; says meanwhile what it waits for."""
CAPTURE_JOBS = 2
"""Ranks captured at once by one point, as `windtunnel emulate` does."""


def run_sweep(
    sweep: Sweep, *, jobs: int = 1, resume: bool = True, pictures: bool = True,
    progress: Progress = no_progress, fabrics: Fabrics = no_fabrics, elsewhere: Elsewhere | None = None,
) -> tuple[Path, list[Row]]:  # fmt: skip
    """Emulate all points of ``sweep`` that are not done; returns its folder and the outcomes in order.

    ``jobs``: processes, each with one group of points. ``resume``: keep what an earlier call has done.
    ``pictures``: write the report of each run. ``fabrics``: as in `emulate`, a function that other processes
    can import. ``elsewhere``: emulates the points instead.

    Raises:
        UserError: the home folder cannot be written.
        ScriptError: a process ended unexpectedly; the points that ended before are kept.
    """
    folder = sweep_folder(home(), sweep.id)
    if not resume:
        forget_rows(folder)
    done = {index for index, row in read_rows(folder).items() if row["status"] == "done"}
    todo = groups(point for point in sweep.points if point.index not in done)
    tell = _Counting(sweep, folder, progress)
    if elsewhere is None and min(jobs, len(todo)) > 1:
        _emulate_in_processes(min(jobs, len(todo)), todo, folder, pictures, tell, fabrics)
    else:
        here = (emulate_group(group, CAPTURE_JOBS, pictures, tell.within, fabrics) for group in todo)
        every = [point for group in todo for point in group]
        for row in elsewhere(every, tell.within) if elsewhere else chain.from_iterable(here):
            write_row(folder, row)
            tell.count()
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
    jobs: int, todo: list[list[Point]], folder: Path, pictures: bool, tell: _Counting, fabrics: Fabrics
) -> None:
    capture_jobs = max(1, min(CAPTURE_JOBS, (os.cpu_count() or 1) // jobs))
    # Spawned, not forked: the parent has threads (of Rich, of NumPy's libraries) that a fork would break.
    # A pool whose parent was killed would wait for work for ever.
    with ProcessPoolExecutor(
        jobs, mp_context=multiprocessing.get_context("spawn"), initializer=end_with_parent
    ) as pool:
        waiting: set[Future[None]] = {
            pool.submit(_emulate_and_write, group, folder, capture_jobs, pictures, fabrics) for group in todo
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
                "go on, with fewer `jobs` where memory is short"
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _emulate_and_write(
    group: list[Point], folder: Path, capture_jobs: int, pictures: bool, fabrics: Fabrics
) -> None:
    for row in emulate_group(group, capture_jobs, pictures, fabrics=fabrics):
        write_row(folder, row)


def groups(points: Iterable[Point]) -> list[list[Point]]:
    """The points that share a capture, in the order of their first."""
    by_script: dict[Any, list[Point]] = {}
    for point in points:
        by_script.setdefault(point.capture_key, []).append(point)
    return list(by_script.values())


def emulate_group(
    points: list[Point],
    capture_jobs: int,
    pictures: bool,
    progress: Progress = no_progress,
    fabrics: Fabrics = no_fabrics,
) -> Iterator[Row]:
    """Emulate points that share a capture, each a run in the store; yields the outcome of each as it ends.

    A script that fails is an outcome too, with the sentence that says why.
    """
    once = _once()
    for point in points:
        options = replace(point.options, jobs=capture_jobs)
        try:
            done = emulate(
                point.script, (), point.cluster, options, pictures=pictures, progress=progress, take=once,
                fabrics=fabrics,
            )  # fmt: skip
        except (UserError, ScriptError) as error:
            yield head(point) | {"status": "failed", "error": _sentence(error)}
        else:
            yield head(point) | {"status": "done"} | _figures(done.summary)


def _once() -> Capturing:
    """Captures at the first call, and gives the same classes, or the same failure, at every later one."""
    outcomes: list[Classes | ScriptError] = []

    def take(*arguments: Any) -> Classes:
        if not outcomes:
            try:
                outcomes.append(capture(*arguments))
            except ScriptError as error:
                outcomes.append(error)
        if isinstance(outcomes[0], ScriptError):
            raise outcomes[0]
        return outcomes[0]

    return take


def head(point: Point) -> Row:
    """What is known of an outcome before the point is emulated."""
    return {
        "point": point.index, "cluster": point.cluster.name, "chosen": point.chosen,
        "args": list(point.script.arguments), "world_size": point.cluster.world_size,
    }  # fmt: skip


def _sentence(error: UserError | ScriptError) -> str:
    """What went wrong; of a failed script also the last line that it wrote, which mostly says why."""
    last = getattr(error, "details", "").strip().rpartition("\n")[2].strip()
    return str(error) if last in str(error) else f"{error}: {last}"


FIGURES = (
    "run_id", "directory", "iteration_time_s", "tokens_per_iteration", "tokens_per_second_per_device", "mfu",
    "peak_reserved_bytes", "fits", "wall_time_s",
)  # fmt: skip
"""Of a summary, which an outcome has as they are."""


def _figures(summary: Summary) -> Row:
    """The figures of a summary that points are compared by; of the ranks, the worst.

    ``cost_per_iteration`` is in the currency of the price; without one it is in device hours.
    """
    priced, tokens = summary.cost_per_iteration, summary.tokens_per_iteration
    cost = summary.world_size * summary.iteration_time_s / 3600 if priced is None else priced
    return {name: getattr(summary, name) for name in FIGURES} | {
        "memory_bytes": max(rank.memory_bytes for rank in summary.ranks),
        "headroom_bytes": min(rank.headroom_bytes for rank in summary.ranks),
        "cost_per_iteration": cost, "cost_per_million_tokens": cost / tokens * 1e6 if tokens else None,
        "cost_unit": "device-hours" if priced is None else "price",
    }  # fmt: skip


def sweep_folder(home: Path, sweep_id: str) -> Path:
    """The folder of a sweep, made if need be. Raises `UserError` where it cannot be made."""
    folder = home / "sweeps" / sweep_id
    try:
        (folder / "points").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: the folder of the sweep cannot be made ({error.strerror})") from error
    return folder


def write_row(folder: Path, row: Row) -> None:
    """Remember the outcome of the point ``row["point"]``."""
    path = folder / "points" / f"{row['point']:05d}.json"
    atomic.replace(path, json.dumps(row, indent=1) + "\n", durable=True)


def read_rows(folder: Path) -> dict[int, Row]:
    """The outcomes of all points that have ended, by point."""
    rows = [json.loads(path.read_text()) for path in sorted(folder.glob("points/*.json"))]
    return {row["point"]: row for row in rows}


def forget_rows(folder: Path) -> None:
    """Begin again: no point has ended."""
    for path in folder.glob("points/*.json"):
        path.unlink()


def emulate_on_ray(
    on: str, pictures: bool, fabrics: Fabrics, points: Sequence[Point], progress: Progress
) -> Iterator[Row]:
    """Emulate ``points`` on a Ray cluster, as `Elsewhere` does. ``on``: see `RayCluster`.

    Raises:
        UserError: Ray is not installed, or there is no such cluster.
        ScriptError: Ray lost a process; the points that ended before are kept.
    """
    with RayCluster(on) as cluster:
        progress("on Ray", 0.0)
        actors = [
            cluster.actor(_PointGroup, group, CAPTURE_JOBS, pictures, fabrics, cpus=1)
            for group in groups(points)
        ]
        running = {actor.call("next"): actor for actor in actors}
        while running:
            call = cluster.first(running)
            actor = running.pop(call)
            try:
                row: Row | None = call.result()
            except ActorLost as error:
                raise ScriptError(f"{error}; run the same command again to go on with the sweep") from None
            if row is None:
                actor.kill()
            else:
                running[actor.call("next")] = actor
                yield row


class _PointGroup:
    """What an actor does: the points of a group, whose outcomes are had one by one."""

    def __init__(self, *arguments: Any) -> None:
        points, capture_jobs, pictures, fabrics = arguments
        self._rows = emulate_group(points, capture_jobs, pictures, fabrics=fabrics)

    def next(self) -> Row | None:
        return next(self._rows, None)
