"""The lossless sum of sparse gradients over ranks, in the way that suits them: `all_reduce`.

Gradients come as COO (``nn.Embedding(sparse=True)``; duplicates are added first) or as dense tensors that are
mostly zero, and go back as they came. On every rank the result has the same bits, and, with any scheme but
*hierarchy* and *dense*, those of zeros + gradient of rank 0 + gradient of rank 1 …, added in that order in
the gradients' own type; so -0.0 on all ranks becomes 0.0. *hierarchy* adds in pairs and *dense* as the
backend does, which differ in the last bits. NaN and infinity are kept as any number.

*zen*, step by step: (push) each rank puts its units (rows, or elements) into buckets by `policy.partition`
and sends each rank its bucket, positions there beside values; (sum) each rank adds up what came, in the order
of ranks; (pull) it sends the sum to all. Positions are a bitmap where that is shorter. *server* and *blocks*
are the same with contiguous slices and without bitmaps, *blocks* with blocks of 256 elements for units.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from windtunnel.base.errors import UserError
from windtunnel.training.gradsync.live.exchange import DEADLINE, Peers
from windtunnel.training.gradsync.live.sparsity import measure
from windtunnel.training.gradsync.live.units import (
    Unit,
    Units,
    as_came,
    dense,
    from_blocks,
    nonzero_units,
    pack,
    to_blocks,
    units_of,
    unpack,
)
from windtunnel.training.gradsync.model import Network
from windtunnel.training.gradsync.policy import partition
from windtunnel.training.gradsync.policy.sparse import SCHEMES, choose


def all_reduce(
    tensor: Tensor, group: dist.ProcessGroup | None = None, unit: Unit = "row", scheme: str = "auto", *,
    network: Network | None = None, seed: int = 0, deadline: float = DEADLINE,
) -> Tensor:  # fmt: skip
    """The sum of ``tensor`` over the ranks of ``group``, COO or dense as it is; ``tensor`` stays.

    ``unit``: of a dense tensor, what is left out if it is all zero. The units of a COO tensor are its own,
    or, with *element*, the elements of its rows that are not zero. ``scheme``: of `policy.sparse.SCHEMES`, or
    *auto*: that which takes least on ``network`` (else: whose busiest rank moves fewest bytes) for gradients
    as sparse and as alike as these are, which is measured at every call; a plan measures once and says which.
    ``deadline``: seconds.

    Raises:
        UserError: wrong arguments, or ranks whose arguments differ; on all ranks, before any data is sent.
        HostError: a peer is gone or silent; the group is spent.
    """
    return reduce_with(Peers(group, deadline), tensor, unit, scheme, network, seed)


def reduce_with(
    peers: Peers, tensor: Tensor, unit: Unit, scheme: str, network: Network | None = None, seed: int = 0
) -> Tensor:
    """`all_reduce` over ``peers``."""
    wrong = _wrong(tensor, unit, scheme)
    peers.agree(wrong or _words(tensor, unit, scheme, network, seed))
    if wrong:
        raise UserError(f"sparse sum: {wrong}")
    if tensor.numel() == 0:
        return tensor.detach().clone()
    mine = units_of(tensor, unit)
    if scheme == "auto":
        scheme = choose(measure(peers, mine, seed=seed), network, peers.size)
    match scheme:
        case "zen":
            total = push_pull(peers, mine, seed=seed)
        case "server":
            total = push_pull(peers, mine, seed=seed, contiguous=True)
        case "blocks":
            summed = push_pull(peers, to_blocks(mine), seed=seed, contiguous=True)
            total = from_blocks(summed, mine.total, mine.width)
        case "allgather":
            total = gathered(peers, mine)
        case "hierarchy":
            total = doubled(peers, mine)
        case _:
            whole = dense(mine)
            peers.all_reduce(whole)
            total = nonzero_units(whole)
    return as_came(total, tensor)


def _wrong(tensor: Tensor, unit: str, scheme: str) -> str:
    """What is not accepted about the arguments, in words."""
    if tensor.layout not in (torch.strided, torch.sparse_coo):
        return f"a tensor of layout {tensor.layout}; dense and COO are accepted"
    if unit not in ("row", "element"):
        return f"unit {unit!r}; row and element are accepted"
    if scheme != "auto" and scheme not in SCHEMES:
        return f"scheme {scheme!r}; auto, {', '.join(SCHEMES)} are accepted"
    if tensor.numel() >= 2**31:
        return f"{tensor.numel()} elements; fewer than 2^31 are accepted"
    return ""


def _words(tensor: Tensor, unit: str, scheme: str, network: Network | None, seed: int) -> str:
    """What must be the same on all ranks."""
    shape = "x".join(map(str, tensor.shape)) or "no dimensions"
    layout = "dense" if tensor.layout == torch.strided else f"sparse in {tensor.sparse_dim()} dimensions"
    dtype = str(tensor.dtype).removeprefix("torch.")
    words = f"{shape} {dtype} {layout}, by {unit}, scheme {scheme}, seed {seed}"
    if scheme == "auto" and network is not None:
        words += f", network {zlib.crc32(repr(network).encode()):08x}"
    return words


def push_pull(peers: Peers, mine: Units, *, seed: int, contiguous: bool = False) -> Units:
    """The sum, where each rank adds up the part that `policy.partition` gives it. The units of the result are
    in no order. ``contiguous``: the parts are, and positions are never coded as a bitmap."""
    key = partition.keys(mine.total, seed, contiguous=contiguous)
    length = partition.slice_length(mine.total, peers.size)
    order, starts, positions = _buckets(mine.indices, key, length, peers.size)
    values = mine.values[order]
    pushed = [
        pack(positions[begin:end], values[begin:end], length, bitmaps=not contiguous)
        for begin, end in pairwise(starts)
    ]
    parts = [unpack(one, mine.values) for one in peers.swap(pushed)]
    summed, total = add_up(parts, length, mine.values)
    pulled = [unpack(one, mine.values) for one in peers.gather(
        pack(summed, total, length, bitmaps=not contiguous)
    )]  # fmt: skip
    places = torch.cat([part + rank * length for rank, (part, _) in enumerate(pulled)])
    return replace(mine, indices=_units_at(places, key), values=torch.cat([one for _, one in pulled]))


def gathered(peers: Peers, mine: Units) -> Units:
    """The sum, where every rank is sent the units of all others."""
    messages = peers.gather(pack(mine.indices, mine.values, mine.total, bitmaps=False))
    parts = [unpack(one, mine.values) for one in messages]
    return _summed(parts, mine)


def doubled(peers: Peers, mine: Units) -> Units:
    """The sum by recursive doubling: with the rank one apart, then two, then four. Ranks beyond the last
    power of two give theirs to a rank before, and are given the sum. Of two, both add the lower one's first.
    """
    rank, even = peers.rank, 1 << (peers.size.bit_length() - 1)
    nothing = mine.values.new_empty(0).view(torch.uint8)
    mine = _summed([(mine.indices, mine.values)], mine)

    def message() -> Tensor:
        return pack(mine.indices, mine.values, mine.total, bitmaps=False)

    if rank >= even:
        peers.trade(rank - even, message())
        indices, values = unpack(peers.trade(rank - even, nothing), mine.values)
        return replace(mine, indices=indices, values=values)
    folded = rank + even < peers.size
    if folded:
        theirs = peers.trade(rank + even, nothing)
        mine = _summed([(mine.indices, mine.values), unpack(theirs, mine.values)], mine)
    step = 1
    while step < even:
        other = unpack(peers.trade(rank ^ step, message()), mine.values)
        pair = [(mine.indices, mine.values), other]
        mine = _summed(pair[::-1] if rank & step else pair, mine)
        step *= 2
    if folded:
        peers.trade(rank + even, message())
    return mine


def _summed(parts: Sequence[tuple[Tensor, Tensor]], like: Units) -> Units:
    indices, values = add_up(parts, like.total, like.values)
    return replace(like, indices=indices, values=values)


def add_up(parts: Sequence[tuple[Tensor, Tensor]], size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Positions (of ``size``) that any part has, ascending, and the sums of their values in the order of the
    parts; no part has a position twice."""
    there = torch.zeros(size, dtype=torch.bool, device=like.device)
    for positions, _ in parts:
        there[positions] = True
    summed = there.nonzero()[:, 0]
    place = there.cumsum(0, dtype=torch.int32) - 1
    total = like.new_zeros(len(summed), like.shape[1])
    for positions, values in parts:
        where = place[positions]
        total[where] += values
    return summed, total


def _buckets(
    indices: Tensor, key: partition.Ints, length: int, parts: int
) -> tuple[Tensor, list[int], Tensor]:
    """`partition.buckets`, where the indices are."""
    if not indices.is_cuda:
        order, starts, positions = partition.buckets(indices.numpy(), key, length, parts)
        return torch.from_numpy(order), starts.tolist(), torch.from_numpy(positions)
    places = permuted(indices, key)
    owners = places // length
    order_ = owners.argsort(stable=True)
    counts = torch.bincount(owners, minlength=parts)
    starts_ = [0, *counts.cumsum(0).tolist()]
    return order_, starts_, (places - owners * length)[order_]


def _units_at(places: Tensor, key: partition.Ints) -> Tensor:
    if not places.is_cuda:
        return torch.from_numpy(partition.unpermute(places.numpy(), key))
    return unpermuted(places, key)


def permuted(units: Tensor, key: partition.Ints) -> Tensor:
    """`partition.permute` by operations on whole tensors, for GPUs."""
    total, mask, shift, *rounds = key.tolist()

    def once(x: Tensor) -> Tensor:
        for k in range(0, len(rounds), 3):
            x = ((x ^ rounds[k]) * rounds[k + 1]) & mask
            x = x ^ (x >> shift)
        return x

    return _until_inside(units, once, total)


def unpermuted(places: Tensor, key: partition.Ints) -> Tensor:
    """The inverse of `permuted`."""
    total, mask, shift, *rounds = key.tolist()

    def once(x: Tensor) -> Tensor:
        for k in range(len(rounds) - 3, -1, -3):
            x = x ^ (x >> shift)
            x = ((x * rounds[k + 2]) & mask) ^ rounds[k]
        return x

    return _until_inside(places, once, total)


def _until_inside(x: Tensor, once: Callable[[Tensor], Tensor], total: int) -> Tensor:
    x = once(x)
    while bool((outside := x >= total).any()):
        x = torch.where(outside, once(x), x)
    return x
