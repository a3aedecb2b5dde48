"""What makes a run repeatable to the bit: random numbers, and which samples a step sees.

A continuation after a failure is bit-identical only where nothing depends on how often the process was
started or on which rank does what: random numbers are drawn for (run, step, microbatch), never from where a
generator happened to stand, and the samples of a step are a function of the step alone. Equal bits also need
equal shapes of the microbatches and the same build on the same kind of processor. (The states of the global
generators, for programs that draw from those, are in a checkpoint.)
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
import torch


def seed_for(run_seed: int, *position: int) -> int:
    """A seed (63 bit) of its own for each position in a run, such as (step, microbatch)."""
    text = "/".join(map(str, (run_seed, *position))).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def seed_generators(seed: int) -> None:
    """As ``torch.manual_seed``, for the processor and CUDA devices in use. torch itself takes a stack trace
    for each kind of device that is not in use, each time: longer than a small layer's forward."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def samples(run_seed: int, count: int, begin: int, size: int) -> list[int]:
    """The indices of ``size`` samples from number ``begin`` on, of an endless row: one permutation of
    ``count`` samples for each epoch. A block may hold the end of one epoch and the start of the next; every
    sample is used exactly once in each.

    Raises:
        ValueError: there are no samples, or the block is empty.
    """
    if count < 1 or size < 1:
        raise ValueError(f"samples={count}, size={size}: both must be at least 1")
    indices: list[int] = []
    while len(indices) < size:
        epoch, at = divmod(begin + len(indices), count)
        indices += _epoch(run_seed, count, epoch)[at : at + size - len(indices)].tolist()
    return indices


@lru_cache(maxsize=4)
def _epoch(run_seed: int, count: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([run_seed, epoch]).permutation(count)
