"""The collectives that options are made of, over process groups of their own.

Over gloo an all-to-all goes in pairwise rounds (`exchange`); all others are the backend's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from windtunnel.base.errors import HostError
from windtunnel.training.gradsync.live.exchange import Peers
from windtunnel.training.gradsync.model import Scope

# PyTorch 2.13 gave them other names
_GATHER = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_SCATTER = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True)
class Members:
    """A process group as one of its ranks sees it."""

    group: dist.ProcessGroup
    size: int
    rank: int


class Collectives:
    """Over the ranks of ``group`` (None: all), which lie on ``hosts`` one host after the other; with
    ``hierarchical`` also inside hosts and between them. All ranks make it at once. A collective that takes
    more than ``deadline`` seconds is a `HostError`."""

    def __init__(
        self, hosts: int, group: dist.ProcessGroup | None, deadline: float, *, hierarchical: bool
    ) -> None:
        if group is None:
            group = dist.group.WORLD
        assert group is not None
        ranks = dist.get_process_group_ranks(group)
        me, world = dist.get_rank(group), len(ranks)
        self._deadline = deadline
        self.members: dict[Scope, Members] = {"flat": _made(ranks, me)}
        places = world // hosts
        if hierarchical:
            for host in range(hosts):
                found = _made(ranks[host * places : (host + 1) * places], me % places)
                if host == me // places:
                    self.members["inside"] = found
            for place in range(places):
                found = _made(ranks[place::places], me // places)
                if place == me % places:
                    self.members["between"] = found

    def all_reduce(self, scope: Scope, code: Tensor) -> Tensor:
        """The sum, in place."""
        self._done(lambda: dist.all_reduce(code, group=self.members[scope].group, async_op=True))
        return code

    def all_gather(self, scope: Scope, code: Tensor) -> Tensor:
        """All ranks' codes, one behind the other."""
        one = self.members[scope]
        found = torch.empty(one.size * code.numel(), dtype=code.dtype, device=code.device)
        self._done(lambda: _GATHER(found, code, group=one.group, async_op=True))
        return found

    def reduce_scatter(self, scope: Scope, out: Tensor, row: Tensor) -> Tensor:
        """``out`` becomes the rank's part of the sum of ``row``."""
        self._done(lambda: _SCATTER(out, row, group=self.members[scope].group, async_op=True))
        return out

    def all_to_all(self, scope: Scope, codes: Sequence[Tensor]) -> Tensor:
        """What all ranks have for this one, one behind the other; ``codes[i]`` is for rank i, all of one
        size."""
        one = self.members[scope]
        if dist.get_backend(one.group) == "nccl":
            sent = torch.cat([*codes])
            found = torch.empty_like(sent)
            self._done(lambda: dist.all_to_all_single(found, sent, group=one.group, async_op=True))
            return found
        return torch.cat(Peers(one.group, self._deadline).swap_equal(codes))

    def close(self) -> None:
        """Give up the groups; nothing may be under way in them."""
        for one in self.members.values():
            dist.destroy_process_group(one.group)

    def _done(self, call: Callable[[], dist.Work | None]) -> None:
        try:
            if (work := call()) is not None:
                work.wait(timedelta(seconds=self._deadline))
        except RuntimeError as error:
            raise HostError(
                f"gradsync: a collective failed or took more than {self._deadline:g} s: a rank is gone, or "
                f"has not come to it ({str(error).splitlines()[0]})"
            ) from error


def _made(ranks: Sequence[int], me: int) -> Members:
    found = dist.new_group([*ranks])
    return Members(found, len(ranks), me)
