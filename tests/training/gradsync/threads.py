"""Ranks that are threads of this process: what they exchange goes through queues."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TypeVar

import torch
from torch import Tensor

from windtunnel.training.gradsync.live.exchange import Peers

T = TypeVar("T")


class Threads(Peers):
    """One of ``size`` ranks; ``lines[source, to]`` carries messages."""

    def __init__(self, rank: int, size: int, lines: dict[tuple[int, int], SimpleQueue[Tensor]]) -> None:
        self.rank, self.size, self._lines = rank, size, lines
        self.sent, self.received, self.device = 0, 0, torch.device("cpu")

    def _move(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        for to, message in sends:
            self.sent += message.numel() * message.element_size()
            if message.numel():
                self._lines[self.rank, to].put(message.clone())
        for source, into in receives:
            if into.numel():
                came = self._lines[source, self.rank].get(timeout=60)
                assert came.shape == into.shape and came.dtype == into.dtype
                into.copy_(came)
                self.received += into.numel() * into.element_size()

    def all_reduce(self, tensor: Tensor) -> None:
        same = self.swap([tensor.reshape(-1).view(torch.uint8)] * self.size)
        total = torch.stack([part.view(tensor.dtype) for part in same]).sum(0)
        tensor.copy_(total.reshape(tensor.shape))


def on_ranks(size: int, work: Callable[[Threads], T]) -> list[T | Exception]:
    """What ``work(peers)`` returns or raises on each rank."""
    lines: dict[tuple[int, int], SimpleQueue[Tensor]] = {
        (source, to): SimpleQueue() for source in range(size) for to in range(size)
    }
    results: list[T | Exception] = [ValueError("it did not end")] * size

    def run(rank: int) -> None:
        try:
            results[rank] = work(Threads(rank, size, lines))
        except Exception as error:
            results[rank] = error

    torch.set_num_threads(1)  # else each of the threads would start a pool of its own
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    return results
