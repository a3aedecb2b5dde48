"""What measuring takes: arms in turn, quantiles, folders that go, and what the figures were measured on."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import psutil

A = TypeVar("A")
T = TypeVar("T")


def quantile(values: Sequence[float], share: float) -> float:
    """The least value that at least ``share`` of the values do not exceed; nan for none."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def median(values: Iterable[float | None]) -> float | None:
    """Of those that are known; None for none."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def in_turn(arms: Mapping[str, Callable[[], T]], repeats: int) -> dict[str, list[T]]:
    """What each arm gave in each repeat. In every repeat the arms come in another order, so that what the
    host does meanwhile (heat, other work, a disk that fills) meets all of them alike."""
    found: dict[str, list[T]] = {name: [] for name in arms}
    order = list(arms)
    for _ in range(repeats):
        for name in order:
            found[name].append(arms[name]())
        order.append(order.pop(0))
    return found


def side_by_side(
    jobs: Iterable[Callable[[], T]], workers: int, give_up: Callable[[], None] = lambda: None
) -> list[T]:
    """Results of ``jobs`` in their order, ``workers`` at a time. The first failure (or Ctrl-C) ends those not
    begun; ``give_up`` tells those that run."""
    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(job) for job in jobs]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            give_up()
            raise
        return [future.result() for future in futures]


def on_all_processors(work: Callable[[A], T], jobs: Mapping[str, Sequence[A]]) -> dict[str, list[T]]:
    """What ``work`` gives of each job, name by name, in as many processes as there are processors."""
    with ProcessPoolExecutor() as pool:
        futures = {name: [pool.submit(work, job) for job in each] for name, each in jobs.items()}
        return {name: [future.result() for future in each] for name, each in futures.items()}


def in_new_process(work: Callable[..., T], *arguments: object) -> T:
    """What ``work`` returns in a process that has imported nothing else."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def most_resident() -> int:
    """Bytes that this process ever had in memory; getrusage remembers what the one that started it had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


@contextlib.contextmanager
def scratch(beneath: Path | None = None) -> Iterator[Path]:
    """A folder (``beneath`` another, else where temporary files lie), removed at the end with all in it."""
    folder = Path(tempfile.mkdtemp(prefix="windtunnel-bench-", dir=beneath)).resolve()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def ratios(over: Iterable[float | None], under: Iterable[float | None]) -> list[float]:
    """The one over the other, repeat by repeat, where both are known."""
    return [one / other for one, other in zip(over, under, strict=True) if one is not None and other]


def seconds_of(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """How long it takes, by that clock."""
    begin = clock()
    work()
    return clock() - begin


def host_facts() -> dict[str, Any]:
    """What figures of this host depend on."""
    from windtunnel.cluster.catalogue import processor_name
    from windtunnel.store.database import versions

    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()), "processor": processor_name(),
        "cpus": os.cpu_count(), "memory_bytes": psutil.virtual_memory().total, "gpus": _gpus(),
        "kernel": platform.release(), "load_average": os.getloadavg()[0], "versions": versions(),
    }  # fmt: skip


def _gpus() -> list[str]:
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return []
    return told.stdout.split("\n")[:-1]
