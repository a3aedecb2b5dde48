"""What ranks say to each other, over torch.distributed, with every byte counted.

A message to several ranks has a part for each of them, and in it one for each table: first all ranks tell
each other how long the parts are, then the parts go. Bytes are counted as they are given to
torch.distributed, by phase, inside the host and between hosts; what a rank says to itself is not.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from windtunnel.base.errors import HostError, UserError
from windtunnel.base.plain import canonical


@dataclass
class RowDelivery:
    """Rows that went to ranks and came from them. ``heads``: [world, n]. ``give`` and ``take``: how many,
    [world, tables]. Of each table ``order`` [n], by rank, of those that went; ``places`` [m] and ``values``
    [m, width] of those that came, by rank."""

    heads: Tensor
    give: Tensor
    take: Tensor
    order: list[Tensor]
    places: list[Tensor]
    values: list[Tensor]

    def sources(self, table: int) -> Tensor:
        """From which rank each came, [m]."""
        return torch.repeat_interleave(self.take[:, table])


class Wire:
    """The ranks of ``group``, the first ``devices`` of them in the first host and so on."""

    def __init__(self, group: dist.ProcessGroup | None, devices: int) -> None:
        self.group = group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self.devices = devices
        self.host = self.rank // devices
        self.sent: dict[str, list[int]] = {}
        self._device = torch.device(
            "cuda", torch.cuda.current_device()
        ) if dist.get_backend(group) == "nccl" else torch.device("cpu")  # fmt: skip

    def all_to_all(self, phase: str, data: Tensor, give: Sequence[int], take: Sequence[int]) -> Tensor:
        """``data`` in parts of so many items for each rank, against what they give."""
        for rank, items in enumerate(give):
            self._count(phase, rank, items * data.element_size())
        buffer = torch.empty(sum(take), dtype=data.dtype, device=self._device)
        with self._naming(phase):
            dist.all_to_all_single(buffer, data.to(self._device), list(take), list(give), group=self.group)
        return buffer.cpu()

    def counts(self, counts: Tensor, *, near: bool = False) -> Tensor:
        """A row of ``counts`` [world, n] for each rank (``near``: of this host), against theirs."""
        here = torch.arange(self.world) // self.devices == self.host if near else torch.ones(self.world) > 0
        split = (here * counts.shape[1]).tolist()
        tensor = torch.zeros_like(counts)
        tensor[here] = self.all_to_all("counts", counts[here].flatten(), split, split).view(
            -1, counts.shape[1]
        )
        return tensor

    def exchange(self, phase: str, data: list[Tensor], give: Tensor, take: Tensor) -> list[Tensor]:
        """Of each table the rows [n, ...] for ranks, ordered by rank and counted by ``give`` [world, tables];
        returns those from ranks, counted by ``take``."""
        widths = torch.tensor([math.prod(datum.shape[1:]) for datum in data])
        by_rank = [datum.split(counts) for datum, counts in zip(data, give.t().tolist(), strict=True)]
        flat = [parts[rank].reshape(-1) for rank in range(self.world) for parts in by_rank]
        tensor = self.all_to_all(
            phase, torch.cat(flat), (give * widths).sum(1).tolist(), (take * widths).sum(1).tolist()
        )
        pieces = tensor.split((take * widths).flatten().tolist())
        return [
            torch.cat(pieces[number :: len(data)]).view(-1, *datum.shape[1:])
            for number, datum in enumerate(data)
        ]

    def deliver(
        self, phase: str, ranks: list[Tensor], places: list[Tensor], values: list[Tensor] | None = None, *,
        head: Tensor | None = None, stop: Callable[[Tensor], None] = lambda _: None, near: bool = False,
    ) -> RowDelivery:  # fmt: skip
        """Of each table ``places`` [n], and ``values`` [n, width] if they go with them, to ``ranks`` [n]. A
        ``head`` [n] goes to all before; ``stop`` gets those of all ranks, and may raise."""
        give = torch.stack([torch.bincount(rank, minlength=self.world) for rank in ranks], 1)
        head = give.new_empty(0) if head is None else head
        came = self.counts(torch.cat([head.expand(self.world, -1), give], 1), near=near)
        heads, take = came[:, : len(head)], came[:, len(head) :]
        stop(heads)
        order = [torch.argsort(rank, stable=True) for rank in ranks]
        packed = [place[by].int() for place, by in zip(places, order, strict=True)]
        tensors = [tensor.long() for tensor in self.exchange(phase, packed, give, take)]
        if values is not None:
            values = self.exchange(
                phase, [tensor[by] for tensor, by in zip(values, order, strict=True)], give, take
            )
        return RowDelivery(heads, give, take, order, tensors, values or [])

    def send(self, phase: str, rank: int, data: Tensor) -> dist.Work | None:
        """To another rank, at once."""
        self._count(phase, rank, data.numel() * data.element_size())
        with self._naming(phase):
            return dist.isend(data.to(self._device), self._of(rank), group=self.group)

    def finish(self, sending: list[dist.Work | None]) -> None:
        """What was sent has arrived."""
        with self._naming("sums"):
            for work in sending:
                if work is not None:
                    work.wait()

    def receive(self, phase: str, rank: int, items: int, dtype: torch.dtype) -> Tensor:
        """From another rank, in the order in which it sends."""
        buffer = torch.empty(items, dtype=dtype, device=self._device)
        with self._naming(phase):
            dist.recv(buffer, self._of(rank), group=self.group)
        return buffer.cpu()

    def objects(self, own: Any) -> list[Any]:
        """What every rank has; not counted."""
        gathered = [None] * self.world
        with self._naming("start"):
            dist.all_gather_object(gathered, own, group=self.group)
        return gathered

    def agreed(self, wrong: UserError | HostError | None) -> None:
        """What is ``wrong`` on the first rank that has something is an error of all."""
        own_fault = (type(wrong).__name__, str(wrong)) if wrong else None
        for rank, fault in enumerate(self.objects(own_fault)):
            if fault:
                raise (UserError if fault[0] == "UserError" else HostError)(f"rank {rank}: {fault[1]}")

    def alike(self, own: Mapping[str, Any]) -> None:
        """Every rank has the same ``own``, or it is an error of all."""
        every = self.objects([hashlib.sha256(canonical(part)).hexdigest() for part in own.values()])
        for what, mine in zip(own, zip(*every, strict=True), strict=True):
            if other := [rank for rank, digest in enumerate(mine) if digest != mine[0]]:
                raise UserError(
                    f"rank {other[0]} has another {what} than rank 0; accepted is the same on all ranks"
                )

    def _count(self, phase: str, rank: int, size: int) -> None:
        if rank != self.rank:
            self.sent.setdefault(phase, [0, 0])[rank // self.devices != self.host] += size

    def _of(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    @contextmanager
    def _naming(self, phase: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # a rank has died, or not come within the group's timeout
            first = str(error).splitlines()[0]
            raise HostError(
                f"ShardedEmbedding: rank {self.rank} cannot exchange {phase} with the others: {first}"
            ) from error
