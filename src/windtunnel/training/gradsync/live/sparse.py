"""The lossless sum of sparse gradients over ranks, in the way that suits them: `all_reduce`.

Gradients come as COO (``nn.Embedding(sparse=True)``; duplicates are added first) or as dense tensors that are
mostly zero, and go back as they came. On every rank the result has the same bits, and, with any scheme but
*hierarchy* and *dense*, those of zeros + gradient of rank 0 + gradient of rank 1 …, added in that order in
the gradients' own type; so -0.0 on all ranks becomes 0.0. *hierarchy* adds in pairs and *dense* as the
backend does, which differ in the last bits. NaN and infinity are kept as any number.

*zen*, step by step: (push) each rank puts its units (rows) into buckets by `policy.sparse`
and sends each rank its bucket, positions there beside values; (sum) each rank adds up what came, in the order
of ranks; (pull) it sends the sum to all. Positions are a bitmap where that is shorter.

A message is the number of units (int64; below zero: a bitmap follows), their values, zeros up to a multiple
of four bytes, and positions (int32 each, or a bit for every position of the part that they are of); it has no
bytes where it has no units.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from windtunnel.base.errors import UserError
from windtunnel.training.gradsync.live.exchange import DEADLINE, Peers
from windtunnel.training.gradsync.model import INDEX, JobNetwork, Sparsity
from windtunnel.training.gradsync.policy.sparse import (
    SCHEMES,
    Order,
    choose,
    growth_of,
    promising,
    slice_length,
)

T = TypeVar("T")
SAMPLE = 256
"""Units of a rank that others are told of."""
TRIED = 0.5
"""Seconds for which each scheme is tried, on all gradients of a job together."""
TURNS = 30
COUNT = 8
"""Bytes of the number of units that begins a message."""
_BITS = torch.arange(8, dtype=torch.uint8)


@dataclass(frozen=True)
class Units:
    """Units of a gradient that are there: numbers [k], ascending, of ``total``, and values [k, width]."""

    indices: Tensor
    values: Tensor
    total: int

    @property
    def width(self) -> int:
        return self.values.shape[1]


def units_of(tensor: Tensor) -> Units:
    """The rows of a gradient that are there (COO) or have any element that is not zero (dense)."""
    if tensor.layout == torch.strided:
        rows = len(tensor) if tensor.dim() else 1
        return nonzero_units(tensor.detach().reshape(rows, -1))
    tensor = tensor.detach().coalesce()
    indices = torch.zeros(tensor._nnz(), dtype=torch.int64, device=tensor.device)
    total = 1
    for place, length in enumerate(tensor.shape[: tensor.sparse_dim()]):
        indices = indices * length + tensor.indices()[place]
        total *= length
    width = tensor.shape[tensor.sparse_dim() :].numel()
    return Units(indices, tensor.values().reshape(len(indices), width), total)


def nonzero_units(whole: Tensor) -> Units:
    """The rows of a matrix that are not all zero."""
    indices = (whole != 0).any(1).nonzero()[:, 0]
    return Units(indices, whole[indices], len(whole))


def dense(units: Units) -> Tensor:
    """The matrix that they are of [total, width]."""
    whole = units.values.new_zeros(units.total, units.width)
    whole[units.indices] = units.values
    return whole


def as_came(total: Units, tensor: Tensor) -> Tensor:
    """In the form of ``tensor``: dense, or COO without duplicates."""
    if tensor.layout == torch.strided:
        return dense(total).reshape(tensor.shape)
    row_shape = tensor.shape[tensor.sparse_dim() :]
    indices, places = total.indices, []
    for length in reversed(tensor.shape[: tensor.sparse_dim()]):
        places.append(indices % length)
        indices = indices // length
    shaped, stacked = total.values.reshape(-1, *row_shape), torch.stack(places[::-1])
    return torch.sparse_coo_tensor(stacked, shaped, tensor.shape, is_coalesced=True, check_invariants=False)


def add_up(parts: Sequence[Units]) -> Units:
    """What is there in any part, and the sums of values in the order of the parts."""
    like = parts[0]
    there = torch.zeros(like.total, dtype=torch.bool, device=like.values.device)
    for part in parts:
        there[part.indices] = True
    summed = there.nonzero()[:, 0]
    place = there.cumsum(0, dtype=torch.int32) - 1
    total = like.values.new_zeros(len(summed), like.width)
    for part in parts:
        total[place[part.indices]] += part.values
    return Units(summed, total, like.total)


def pack(units: Units, *, bitmap: bool = False) -> Tensor:
    """Their message (see above); ``bitmap``: where it is shorter than positions."""
    count, values = len(units.indices), units.values
    if count == 0:
        return torch.empty(0, dtype=torch.uint8, device=values.device)
    bitmap = bitmap and -(-units.total // 8) < INDEX * count
    if bitmap:
        there = torch.zeros(-(-units.total // 8) * 8, dtype=torch.uint8, device=values.device)
        there[units.indices] = 1
        index = (there.view(-1, 8) << _BITS.to(values.device)).sum(1, dtype=torch.uint8)
    else:
        index = units.indices.to(torch.int32).view(torch.uint8)
    head = torch.tensor([-count if bitmap else count]).view(torch.uint8)
    body = values.contiguous().reshape(-1).view(torch.uint8)
    return torch.cat([head.to(values.device), body, body.new_zeros(-len(body) % INDEX), index])


def unpack(message: Tensor, like: Units) -> Units:
    """The units of a message, of as many and as wide ones as ``like`` has."""
    if len(message) == 0:
        return Units(like.indices[:0], like.values[:0], like.total)
    count = int(message[:COUNT].view(torch.int64))
    end = COUNT + abs(count) * like.width * like.values.element_size()
    values = message[COUNT:end].view(like.values.dtype).reshape(abs(count), -1)
    index = message[end + (COUNT - end) % INDEX :]
    if count > 0:
        return Units(index.view(torch.int32).long(), values, like.total)
    there = (index[:, None] >> _BITS.to(message.device)) & 1
    return Units(there.reshape(-1).nonzero()[:, 0], values, like.total)


def all_reduce(
    tensor: Tensor, group: dist.ProcessGroup | None = None, scheme: str = "auto", *,
    seed: int = 0, deadline: float = DEADLINE,
) -> Tensor:  # fmt: skip
    """The sum of ``tensor`` over the ranks of ``group``, COO or dense as it is; ``tensor`` stays.

    Rows of a dense tensor that are all zero are left out (of a flat one, single zeros). ``scheme``: of
    `policy.sparse.SCHEMES`, or *auto*: that whose ranks send fewest bytes for gradients as sparse and as
    alike as these are, which is measured at every call; a plan measures once and says which.
    ``deadline``: seconds.

    Raises:
        UserError: wrong arguments, or ranks whose arguments differ; on all ranks, before any data is sent.
        HostError: a peer is gone or silent; the group is spent.
    """
    return reduce_with(Peers(group, deadline), tensor, scheme, seed)


def reduce_with(peers: Peers, tensor: Tensor, scheme: str, seed: int = 0) -> Tensor:
    """`all_reduce` over ``peers``."""
    wrong = _wrong(tensor, scheme)
    peers.agree(wrong or _words(tensor, scheme, seed))
    if wrong:
        raise UserError(f"sparse sum: {wrong}")
    if tensor.numel() == 0:
        return tensor.detach().clone()
    mine = units_of(tensor)
    if scheme == "auto":
        scheme = choose(measure(peers, mine, seed=seed), peers.size)
    if peers.size == 1:
        total = add_up([mine])
    elif scheme == "dense":
        whole = dense(mine)
        peers.all_reduce(whole)
        total = nonzero_units(whole)
    elif scheme == "zen":
        total = push_pull(peers, mine, seed)
    elif scheme == "hierarchy":
        total = doubled(peers, mine)
    else:
        total = add_up([unpack(tensor, mine) for tensor in peers.swap([pack(mine)] * peers.size)])
    return as_came(total, tensor)


def _wrong(tensor: Tensor, scheme: str) -> str:
    """What is not accepted about the arguments, in words."""
    if tensor.layout not in (torch.strided, torch.sparse_coo):
        return f"a tensor of layout {tensor.layout}; dense and COO are accepted"
    if scheme != "auto" and scheme not in SCHEMES:
        return f"scheme {scheme!r}; auto, {', '.join(SCHEMES)} are accepted"
    if tensor.numel() >= 2**31:
        return f"{tensor.numel()} elements; fewer than 2^31 are accepted"
    return ""


def _words(tensor: Tensor, scheme: str, seed: int) -> str:
    """What must be the same on all ranks."""
    shape = "x".join(map(str, tensor.shape)) or "no dimensions"
    layout = "dense" if tensor.layout == torch.strided else f"sparse in {tensor.sparse_dim()} dimensions"
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{shape} {dtype} {layout}, scheme {scheme}, seed {seed}"


def push_pull(peers: Peers, mine: Units, seed: int | None) -> Units:
    """The sum, where each rank adds up the part that `policy.sparse` gives it: of units in the order that
    ``seed`` gives, or, where it is None, as they are, and then positions are never coded as a bitmap."""
    size, order, bitmap = peers.size, Order(mine.total, seed), seed is not None
    length = slice_length(mine.total, size)
    places, by = order.places(mine.indices).sort()
    ends = torch.searchsorted(places, torch.arange(1, size, device=places.device) * length).tolist()
    parts = zip(places.tensor_split(ends), mine.values[by].tensor_split(ends), strict=True)
    pushed = [
        Units(positions - rank * length, values, length) for rank, (positions, values) in enumerate(parts)
    ]
    summed = add_up(
        [unpack(tensor, pushed[0]) for tensor in peers.swap([pack(units, bitmap=bitmap) for units in pushed])]
    )
    pulled = [unpack(tensor, summed) for tensor in peers.swap([pack(summed, bitmap=bitmap)] * size)]
    places = torch.cat([units.indices + rank * length for rank, units in enumerate(pulled)])
    indices, by = order.units_at(places).sort()
    return replace(mine, indices=indices, values=torch.cat([units.values for units in pulled])[by])


def doubled(peers: Peers, mine: Units) -> Units:
    """The sum by recursive doubling: with the rank one apart, then two, then four. Ranks beyond the last
    power of two give theirs to a rank before, and are given the sum. Of two, both add the lower one's first.
    """
    rank, even = peers.rank, 1 << (peers.size.bit_length() - 1)
    nothing = Units(mine.indices[:0], mine.values[:0], mine.total)

    def traded(peer: int, units: Units) -> Units:
        return unpack(peers.trade(peer, pack(units)), mine)

    if rank >= even:
        traded(rank - even, mine)
        return traded(rank - even, nothing)
    folded = rank + even < peers.size
    if folded:
        mine = add_up([mine, traded(rank + even, nothing)])
    step = 1
    while step < even:
        theirs = traded(rank ^ step, mine)
        mine = add_up([theirs, mine] if rank & step else [mine, theirs])
        step *= 2
    if folded:
        traded(rank + even, mine)
    return mine


def measure(peers: Peers, mine: Units, *, seed: int = 0, sample: int = SAMPLE) -> Sparsity:
    """How sparse and alike the ranks' gradients are: the same on all ranks.

    The density is exact. Overlap is of units that all ranks pick by one hash, about ``sample`` of those of
    each, so that what they have in common is estimated without sending all indices."""
    world = peers.size
    counts = [int(count) for count in peers.swap_small([torch.tensor([len(mine.indices)])] * world)]
    share = min(1.0, sample / max(1, *counts))
    picked = mine.indices[Order(mine.total, seed + 1).places(mine.indices) < mine.total * share]
    sets = [
        tensor.view(torch.int64).cpu().numpy() for tensor in peers.swap([picked.view(torch.uint8)] * world)
    ]
    density = sum(counts) / world / mine.total
    return Sparsity(mine.total, mine.width, mine.values.element_size(), density, growth_of(sets))


def tried(
    tensor: Tensor, sparsity: Sparsity, network: JobNetwork, group: dist.ProcessGroup | None = None,
    deadline: float = DEADLINE, enough: float = TRIED,
) -> dict[str, float]:  # fmt: skip
    """Seconds that the sum of ``tensor``, as sparse as ``one`` on ``network``, takes by each scheme that may
    be the best there, each repeated for ``enough`` seconds; the same on all ranks, which call it at once.

    Raises:
        HostError: a peer is gone or silent; the group is spent.
    """
    names = promising(sparsity, network) if network.world > 1 else []
    calls = {name: partial(all_reduce, tensor, group, name, deadline=deadline) for name in names}
    return least_times(calls, enough, group, deadline)


def least_times(
    calls: Mapping[T, Callable[[], object]], enough: float,
    group: dist.ProcessGroup | None = None, deadline: float = DEADLINE,
) -> dict[T, float]:  # fmt: skip
    """The least seconds that each call takes on the slowest rank, where all begin at once. Calls are in turn,
    so that what else the hosts do meets all alike, each until it has taken ``enough`` seconds, at least twice
    and at most `TURNS` times; all ranks get the same."""
    best = dict.fromkeys(calls, math.inf)
    spent = dict.fromkeys(calls, 0.0)
    for turn in range(TURNS):
        for name, call in calls.items():
            if turn < 2 or spent[name] < enough:
                peers = Peers(group, deadline)
                peers.swap_small([torch.zeros(1)] * peers.size)
                begin = time.perf_counter()
                call()
                mine = torch.tensor([time.perf_counter() - begin])
                slowest = max(tensor.item() for tensor in peers.swap_small([mine] * peers.size))
                best[name], spent[name] = min(best[name], slowest), spent[name] + slowest
    return best
