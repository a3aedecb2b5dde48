"""What measuring takes: arms in turn, quantiles, folders and processes that go, and the facts of a host."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import platform
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
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


def in_turn(arms: Mapping[str, Callable[[], T]], repeats: int) -> dict[str, list[T]]:
    """What each arm gave in each repeat. In every repeat the arms come in another order, so that what the
    host does meanwhile (heat, other work, a disk that fills) meets all of them alike."""
    results: dict[str, list[T]] = {name: [] for name in arms}
    order = list(arms)
    for _ in range(repeats):
        for name in order:
            results[name].append(arms[name]())
        order.append(order.pop(0))
    return results


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


@contextlib.contextmanager
def process_pool(workers: int | None = None, **options: Any) -> Iterator[ProcessPoolExecutor]:
    """A pool of ``workers`` processes (None: one a processor) that end with the block, however it ends."""
    pool = ProcessPoolExecutor(workers, **options)
    try:
        yield pool
    except BaseException:
        for process in multiprocessing.active_children():
            process.kill()  # SIGTERM is lost on one that is just being forked
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def on_all_processors(work: Callable[[A], T], jobs: Mapping[str, Sequence[A]]) -> dict[str, list[T]]:
    """What ``work`` gives of each job, name by name, in as many processes as there are processors."""
    with process_pool() as pool:
        futures = {name: [pool.submit(work, job) for job in each] for name, each in jobs.items()}
        return {name: [future.result() for future in each] for name, each in futures.items()}


def in_new_process(work: Callable[..., T], *arguments: object) -> T:
    """What ``work`` returns in a process that has imported nothing else."""
    with process_pool(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Within the block SIGTERM raises KeyboardInterrupt, as Ctrl-C does: the contexts of a section unwind,
    and no process, mount or control group of it stays. A second one does so again.

    Raises:
        SystemExit: a signal ended the block; its status is 128 and the signal's number.
    """
    number, inside = signal.SIGINT, True

    def interrupt(*_: object) -> None:
        nonlocal number
        number = signal.SIGTERM
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    os.register_at_fork(after_in_child=lambda: inside and signal.signal(signal.SIGTERM, signal.SIG_DFL))
    try:
        yield
    except KeyboardInterrupt:
        raise SystemExit(128 + number) from None
    finally:
        inside = False
        signal.signal(signal.SIGTERM, before)


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
    pairs = zip(over, under, strict=True)
    return [upper / lower for upper, lower in pairs if upper is not None and lower]


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
        listing = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return []
    return listing.stdout.split("\n")[:-1]
