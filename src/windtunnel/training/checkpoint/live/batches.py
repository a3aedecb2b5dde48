"""What a data loader's workers draw at random depends on the batch alone: not on which worker has it, nor on
how many the worker had before.

A batch's indices go to the fetcher with a seed of their own (`Numbered`). In a worker the global generators
are seeded with it before the samples are read; in the trainer's own process they are put back afterwards, so
that what the model draws (dropout) is not touched.

The fetchers take such indices as soon as this module is imported, which a worker that was spawned does when
it gets its first one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import get_worker_info
from torch.utils.data._utils import fetch as fetchers

from windtunnel.training.checkpoint.live import objects


@dataclass(frozen=True)
class Numbered:
    """The indices of one batch (or of one sample, where the loader makes no batches) and its seed."""

    indices: Any
    seed: int


def streams() -> dict[str, Any]:
    """The states of the generators that a loader may draw from in this process."""
    return {name: state for name, state in objects.generators().items() if name != "cuda"}


def put_streams(states: dict[str, Any]) -> None:
    """The inverse of `streams`."""
    objects.put_generators(states, None)


def _seeded(plain: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def fetch(self: Any, indices: Any) -> Any:
        if not isinstance(indices, Numbered):
            return plain(self, indices)
        here = streams() if get_worker_info() is None else None
        torch.default_generator.manual_seed(indices.seed)
        random.seed(indices.seed)
        np.random.seed(indices.seed % (1 << 32))
        try:
            return plain(self, indices.indices)
        finally:
            if here is not None:
                put_streams(here)

    return fetch


for _fetcher in (fetchers._MapDatasetFetcher, fetchers._IterableDatasetFetcher):
    _fetcher.fetch = _seeded(_fetcher.fetch)  # type: ignore[method-assign]
