"""How fast batches come, and what the processes that make them take; needs neither torch nor Ray."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import psutil


@dataclass(frozen=True)
class Pace:
    """Rows/s, rows a CPU-second, and bytes of memory that the processes have for themselves."""

    rate: float
    thrift: float
    memory: float


def paced(batches: Iterator[int], rows: int, epochs: int) -> Pace:
    """Of this process and those beneath it. ``batches``: rows of each, as they come; ``rows`` of each of the
    ``epochs``. The first epoch is left out: what was read ahead while processes started would count as fast.

    Raises:
        RuntimeError: other than these rows came.
    """
    seen = 0
    begin, cpu = time.perf_counter(), _cpu()
    for count in batches:
        seen += count
        if seen == rows:
            begin, cpu = time.perf_counter(), _cpu()
        if seen >= epochs * rows:
            break
    seconds, memory = time.perf_counter() - begin, _memory()
    # of those that are there now: what an earlier arm left may end meanwhile
    spent = sum(used - cpu.get(process, 0.0) for process, used in _cpu().items())
    if next(batches, None) is not None or seen != epochs * rows:
        raise RuntimeError(f"{seen} rows came, not {epochs * rows}")
    counted = (epochs - 1) * rows
    return Pace(counted / seconds, counted / spent, memory)


def _tree() -> list[psutil.Process]:
    own = psutil.Process()
    return [own, *own.children(recursive=True)]


def _cpu() -> dict[int, float]:
    return {one.pid: sum(one.cpu_times()[:2]) for one in _tree()}


def _memory() -> float:
    return float(sum(one.memory_full_info().uss for one in _tree()))
