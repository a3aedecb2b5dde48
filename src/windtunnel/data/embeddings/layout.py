"""Where the rows of a table with two cuts lie, as arithmetic on ranks.

Rows are striped: of table number k, rank r belongs to stripe r + k, so that the hottest rows of several
tables have different devices. A cold row lies on device ``stripe % world``, a warm one on the devices
``stripe % devices`` of all hosts, a hot one on all. So a row's cold device is one of its warm ones: a row
that moves to another tier moves from or to few devices. On a device rows lie by rank: hot, warm, cold ones.

Only operators are used, so ranks may be NumPy arrays or tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from windtunnel.data.embeddings.model import Replicas

Ranks = TypeVar("Ranks")


@dataclass(frozen=True)
class RowLayout:
    """Table ``number`` of ``rows``, its first ``hot`` on every device, those before ``warm`` in every one of
    ``hosts`` of ``devices`` each."""

    number: int
    rows: int
    hot: int
    warm: int
    hosts: int
    devices: int

    @property
    def world(self) -> int:
        return self.hosts * self.devices

    def destination(self, ranks: Ranks, host: int) -> Ranks:
        """The device that devices of ``host`` ask for rows; for hot ones that which sums their gradients."""
        stripe = ranks + self.number  # type: ignore[operator]
        replicated = ranks < self.warm  # type: ignore[operator]
        near, far = host * self.devices + stripe % self.devices, stripe % self.world
        return replicated * near + ~replicated * far  # type: ignore

    def place(self, ranks: Ranks) -> Ranks:
        """The row's number on every device that holds it."""
        stripe = ranks + self.number  # type: ignore[operator]
        hot, warm = ranks < self.hot, ranks < self.warm  # type: ignore[operator]
        local = stripe % self.devices
        before = self.hot - self._first(self.hot, local, self.devices)
        cold = before + self._first(self.warm, local, self.devices) + stripe // self.world
        cold = cold - self._first(self.warm, stripe % self.world, self.world)
        return hot * ranks + (warm & ~hot) * (before + stripe // self.devices) + ~warm * cold  # type: ignore

    def _first(self, cut: int, stripe: Ranks, every: int) -> Ranks:
        """How many stripes of this remainder there are before a cut."""
        return (cut + self.number - stripe + every - 1) // every  # type: ignore

    def replicated(self, device: int) -> int:
        """How many of the rows that a device holds are hot or warm; they are its first ones."""
        local = device % self.devices
        return (
            self.hot
            + self._first(self.warm, local, self.devices)
            - self._first(self.hot, local, self.devices)
        )

    def count(self, device: int) -> int:
        """How many rows a device holds."""
        cold = self._first(self.rows, device, self.world) - self._first(self.warm, device, self.world)
        return self.replicated(device) + cold

    def ranks_on(self, device: int, places: NDArray[np.int64] | None = None) -> NDArray[np.int64]:
        """The ranks that lie on a device at its ``places``; default: at all."""
        at = np.arange(self.count(device)) if places is None else places
        warm = self._next(self.hot, device, self.devices) + (at - self.hot) * self.devices
        cold = self._next(self.warm, device, self.world) + (at - self.replicated(device)) * self.world
        return np.where(at < self.hot, at, np.where(at < self.replicated(device), warm, cold))

    def _next(self, cut: int, device: int, every: int) -> int:
        """The first rank from a cut on that is the device's."""
        return cut + (device - cut - self.number) % every

    def holds(self, ranks: NDArray[np.int64], device: int) -> NDArray[np.bool_]:
        """Of every rank, whether it lies on a device."""
        return (ranks < self.hot) | (self.destination(ranks, device // self.devices) == device)


def layouts(tables: tuple[Replicas, ...], rows: list[int], hosts: int, devices: int) -> list[RowLayout]:
    """Of every table."""
    return [
        RowLayout(number, of, cuts.hot, cuts.warm, hosts, devices)
        for number, (cuts, of) in enumerate(zip(tables, rows, strict=True))
    ]
