"""What makes a run repeatable to the bit: threads, random numbers, and which samples a step sees.

A continuation after a failure is bit-identical only where nothing depends on how often the process was
started or on which rank does what: random numbers are drawn for (run, step, microbatch), never from where a
generator happened to stand, and the samples of a step are a function of the step alone. Equal bits also need
equal shapes of the microbatches and the same build on the same kind of processor.
"""

from __future__ import annotations

import hashlib
import os
import random
from typing import Any

import numpy as np
import torch


def fix(threads: int = 1) -> None:
    """Take ``threads`` threads for every operator and only algorithms that give the same bits each time.

    Sums are split by thread, so another number of threads gives other bits. Where an operator has no such
    algorithm torch warns.
    """
    torch.set_num_threads(threads)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS asks for
    torch.use_deterministic_algorithms(True, warn_only=True)


def seed_for(run_seed: int, step: int, microbatch: int = 0) -> int:
    """A seed (63 bit) of its own for each microbatch of each step of each run."""
    text = f"{run_seed}/{step}/{microbatch}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def generator_for(
    run_seed: int, step: int, microbatch: int = 0, device: torch.device | str = "cpu"
) -> torch.Generator:
    """A generator that stands at the beginning of the microbatch's own sequence."""
    return torch.Generator(device).manual_seed(seed_for(run_seed, step, microbatch))


def samples(run_seed: int, count: int, batch: int, step: int) -> list[int]:
    """The indices of the samples of ``step`` (from 0): one permutation of ``count`` samples for each epoch,
    cut into blocks of ``batch``. What is left of an epoch goes into its last step's successor: every sample
    is used exactly once in each epoch, and all steps have ``batch`` samples.

    Raises:
        ValueError: there are no samples, or the batch is empty.
    """
    if count < 1 or batch < 1:
        raise ValueError(f"samples={count}, batch={batch}: both must be at least 1")
    found: list[int] = []
    at, end = step * batch, (step + 1) * batch
    while at < end:
        epoch, within = divmod(at, count)
        order = np.random.default_rng([run_seed, epoch]).permutation(count)
        found += order[within : within + end - at].tolist()
        at = epoch * count + min(count, within + end - at)
    return found


def share(indices: list[int], parts: list[int], part: int) -> list[int]:
    """The contiguous block of ``part`` where ``indices`` are dealt out in blocks of ``parts`` samples; the
    parts together are the step's samples, however they are cut.

    Raises:
        ValueError: the parts do not add up to the number of samples.
    """
    if sum(parts) != len(indices):
        raise ValueError(f"parts of {sum(parts)} samples do not make up {len(indices)}")
    begin = sum(parts[:part])
    return indices[begin : begin + parts[part]]


def capture() -> dict[str, Any]:
    """The states of the random generators of torch (CPU and CUDA), NumPy and Python, as tensors and plain
    values that a checkpoint can hold."""
    name, keys, at, has_gauss, gauss = np.random.get_state(legacy=True)
    version, numbers, following = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [name, torch.from_numpy(np.asarray(keys).copy()), int(at), int(has_gauss), float(gauss)],
        "python": [version, list(numbers), following],
    }


def restore(state: dict[str, Any]) -> None:
    """The inverse of `capture`. Generators of devices that are not there any more are left out."""
    torch.set_rng_state(state["torch"])
    for index, of_device in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(of_device, index)
    name, keys, at, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), at, has_gauss, gauss))
    version, numbers, following = state["python"]
    random.setstate((version, tuple(numbers), following))
