"""Bytes between the ranks of a group, in pairwise rounds and by a deadline.

In round i every rank sends to the i-th after it and receives from the i-th before it, and waits for both. So
a link carries one message at a time in either direction: an all-to-all that starts all at once loses up to
three quarters of a slow link to retransmission, since many senders meet in one queue. Lengths go ahead of
messages, all at once, since they are small; a message without bytes is not sent.

On failure: a peer that is gone closes its connections, and one that hangs is silent. Whoever waits for it
learns of the one at once and of the other at the deadline; whoever waits for these, at the deadline, which
all ranks have alike. Then `HostError` is raised, and as the connections are spent, the group is, too.

gloo moves bytes of the processor only, so those of a GPU are copied there and back; NCCL moves them as they
are.
"""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from windtunnel.base.errors import HostError, UserError
from windtunnel.training.gradsync.model import Scope

# PyTorch 2.13 gave them other names
_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
DEADLINE = 120.0
WORDS = 192
"""Bytes in which a rank says what it brings (`agree`)."""


class Peers:
    """The ranks of ``group`` (None: all) as this one sees them; everything that is exchanged through it must
    be done ``deadline`` seconds from now."""

    def __init__(self, group: dist.ProcessGroup | None = None, deadline: float = DEADLINE) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._seconds = deadline
        self._until = time.monotonic() + deadline
        gloo = dist.get_backend(group) != "nccl"
        self.device = torch.device("cpu") if gloo else torch.device("cuda", torch.cuda.current_device())

    def swap(self, messages: Sequence[Tensor]) -> list[Tensor]:
        """What each rank sends to this one (uint8), for ``messages[i]`` to rank i; one's own is handed over.

        Raises:
            HostError: a peer is gone, or the deadline is over; so do all methods.
        """
        mine = [message.to(self.device) for message in messages]
        lengths = self.swap_small([torch.tensor([tensor.numel()]) for tensor in mine])
        tensors = [self._new(int(length)) for length in lengths]
        self._rounds(mine, tensors)
        return [tensor.to(own.device) for tensor, own in zip(tensors, messages, strict=True)]

    def swap_small(self, messages: Sequence[Tensor]) -> list[Tensor]:
        """As `swap`, where all messages have one shape and type and are small: all at once."""
        mine = [message.to(self.device) for message in messages]
        tensors = [torch.empty_like(tensor) for tensor in mine]
        tensors[self.rank] = mine[self.rank]
        others = [peer for peer in range(self.size) if peer != self.rank]
        self._move([(peer, mine[peer]) for peer in others], [(peer, tensors[peer]) for peer in others])
        return tensors

    def trade(self, peer: int, message: Tensor) -> Tensor:
        """What ``peer`` has for this rank, which has ``message`` for it, both bytes."""
        mine = message.to(self.device)
        length = torch.tensor([mine.numel()], device=self.device)
        theirs = torch.empty_like(length)
        self._move([(peer, length)], [(peer, theirs)])
        tensor = self._new(int(theirs))
        self._move([(peer, mine)], [(peer, tensor)])
        return tensor.to(message.device)

    def all_reduce(self, tensor: Tensor) -> None:
        """The sum over all ranks, in place; this and what follows is the backend's own, of one size and type
        on all ranks."""
        if self.size == 1:
            return
        staged = tensor.to(self.device)
        self._call(lambda: dist.all_reduce(staged, group=self.group, async_op=True))
        if staged is not tensor:
            tensor.copy_(staged)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Those of all ranks, one behind the other."""
        mine = tensor.to(self.device)
        gathered = mine.new_empty(self.size * mine.numel())
        self._call(lambda: _GATHER(gathered, mine, group=self.group, async_op=True))
        return gathered.to(tensor.device)

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """This rank's part of the sum; ``tensor`` has as many equal parts as there are ranks."""
        mine = tensor.to(self.device)
        part = mine.new_empty(mine.numel() // self.size)
        self._call(lambda: _SCATTER(part, mine, group=self.group, async_op=True))
        return part.to(tensor.device)

    def all_to_all(self, tensors: Sequence[Tensor]) -> Tensor:
        """What all ranks have for this one, one behind the other, for ``tensors[i]`` to rank i; over gloo in
        pairwise rounds."""
        mine = torch.cat([*tensors]).to(self.device)
        tensor = torch.empty_like(mine)
        if dist.get_backend(self.group) == "nccl":
            self._call(lambda: dist.all_to_all_single(tensor, mine, group=self.group, async_op=True))
            return tensor
        self._rounds(mine.split(len(tensors[0])), tensor.split(len(tensors[0])))
        return tensor.to(tensors[0].device)

    def gather(self, value: Any) -> list[Any]:
        """What each rank says: anything that can be pickled."""
        mine = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
        return [pickle.loads(theirs.numpy().tobytes()) for theirs in self.swap([mine] * self.size)]

    def agree(self, words: str, who: str = "gradient exchange") -> None:
        """That every rank says the same; ``who`` asks, for the message.

        Raises:
            UserError: it does not; on every rank the same sentence.
        """
        padded = words.encode()[:WORDS].ljust(WORDS)
        message = torch.frombuffer(bytearray(padded), dtype=torch.uint8)
        answers = [
            bytes(tensor.tolist()).decode(errors="ignore").strip()  # a letter may have been cut in two
            for tensor in self.swap_small([message] * self.size)
        ]
        for peer, theirs in enumerate(answers):
            if theirs != answers[0]:
                raise UserError(
                    f"{who}: rank {peer} has {theirs}, rank 0 has {answers[0]}; "
                    "the same on all ranks is accepted"
                )

    def _new(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def _rounds(self, mine: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
        """``mine[i]`` to rank i, and what it has for this rank into ``found[i]``, in pairwise rounds."""
        tensors[self.rank].copy_(mine[self.rank])
        for turn in range(1, self.size):
            to, source = (self.rank + turn) % self.size, (self.rank - turn) % self.size
            self._move([(to, mine[to])], [(source, tensors[source])])

    def _move(self, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> None:
        """Send and receive all that has bytes, and wait for it."""
        try:
            operations = [
                (peer, dist.P2POp(act, tensor, group=self.group, group_peer=peer))
                for act, pairs in ((dist.irecv, receives), (dist.isend, sends))
                for peer, tensor in pairs
                if tensor.numel()
            ]
            if not operations:
                return
            work = dist.batch_isend_irecv([operation for _, operation in operations])
        except RuntimeError as error:
            raise self._lost("one", error) from error
        # NCCL has one handle for all that was called together
        names = (
            [f"rank {peer}" for peer, _ in operations]
            if len(work) == len(operations)
            else ["one"] * len(work)
        )
        for name, handle in zip(names, work, strict=True):
            self._wait(handle, name)

    def _call(self, call: Callable[[], dist.Work]) -> None:
        try:
            work = call()
        except RuntimeError as error:
            raise self._lost("one", error) from error
        self._wait(work, "one")

    def _wait(self, work: dist.Work, name: str) -> None:
        left = max(0.0, self._until - time.monotonic())
        try:
            # gloo counts whole milliseconds: none is lost, or one that is silent would be taken for gone
            work.wait(timedelta(milliseconds=1 + math.floor(1e3 * left)))
        except RuntimeError as error:
            raise self._lost(name, error) from error

    def _lost(self, name: str, error: RuntimeError) -> HostError:
        over = time.monotonic() >= self._until
        why = f"did not answer within {self._seconds:g} s" if over else "is gone, or gave up"
        return HostError(
            f"gradient exchange: of {self.size} ranks {name} {why}; the group cannot go on",
            details=str(error),
        )


def scopes(
    hosts: int, group: dist.ProcessGroup | None, deadline: float, *, hierarchical: bool
) -> dict[Scope, dist.ProcessGroup]:
    """Groups of their own over the ranks of ``group`` (None: all), which lie on ``hosts`` one host after the
    other; with ``hierarchical`` also inside hosts and between them. All ranks call it at once; one that does
    not within ``deadline`` seconds is an error of torch's own on the others."""
    ranks, me = dist.get_process_group_ranks(group), dist.get_rank()
    places = len(ranks) // hosts
    every: dict[Scope, list[list[int]]] = {"flat": [ranks]}
    if hierarchical:
        every["inside"] = [ranks[host * places : (host + 1) * places] for host in range(hosts)]
        every["between"] = [ranks[place::places] for place in range(places)]
    # all ranks make all groups, also those that they are not in
    # NCCL's watchdog ends the process when the time is over
    limit = None if dist.get_backend(group) == "nccl" else timedelta(seconds=deadline)
    created = {
        scope: [(dist.new_group(members, limit), me in members) for members in lists]
        for scope, lists in every.items()
    }
    return {scope: group for scope, groups in created.items() for group, mine in groups if mine}
