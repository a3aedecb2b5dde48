"""How many requests come in each second: files of whole numbers with blanks between them.

The load of a stream of tweets is handed on in this form (``workload.txt`` of InfAdapter, EuroMLSys 2023, and
INFaaS's experiments): 633 thousand seconds, no header. It has no licence, so none of it lies here.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from windtunnel.base.errors import UserError


def read_counts(path: Path) -> NDArray[np.int64]:
    """Requests of each second; shape (seconds,).

    Raises:
        UserError: the file cannot be read, is empty, or holds something that is no count.
    """
    try:
        data = path.read_bytes()
    except OSError as fault:
        raise UserError(f"{path}: the trace cannot be read: {fault.strerror}") from fault
    if wrong := re.search(rb"[^\s\d]|\d{10}", data):
        words = data[: wrong.end()].split()
        raise UserError(
            f"{path}: word {len(words)}: {words[-1][:40].decode(errors='replace')!r} is not accepted; a trace"
            " of rates has a whole number of requests, of nine digits at most, for each second"
        )
    words = data.split()
    if not words:
        raise UserError(f"{path}: the file is empty; a trace of rates has a number for each second")
    return np.array(words, dtype=np.int64)


def arrivals(counts: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    """Times of requests, seconds: Poisson within each second of mean ``counts``; shape (requests,)."""
    drawn = rng.poisson(counts)
    return np.sort(np.repeat(np.arange(len(counts)), drawn) + rng.random(int(drawn.sum())))
