"""How sparse gradients are, and how alike on different ranks: what a scheme is chosen from."""

from __future__ import annotations

import numpy as np
import torch

from windtunnel.training.gradsync.live.exchange import Peers
from windtunnel.training.gradsync.live.units import Units, to_blocks
from windtunnel.training.gradsync.policy import partition
from windtunnel.training.gradsync.policy.bytes import overlap
from windtunnel.training.gradsync.policy.sparse import BLOCK, Sparsity

SAMPLE = 256
"""Units of a rank that others are told of."""


def measure(peers: Peers, mine: Units, *, seed: int = 0, sample: int = SAMPLE) -> Sparsity:
    """How sparse and alike the ranks' gradients are: the same on all ranks.

    Densities are exact. Overlap and skew are of units that all ranks pick by one hash, about ``sample`` of
    each rank's, so that what they have in common is estimated without sending all indices."""
    world = peers.size
    own = torch.tensor([len(mine.indices), len(to_blocks(mine).indices)], dtype=torch.int64)
    told = [one.tolist() for one in peers.gather_equal([own.to(peers.device)] * world)]
    most = max(count for count, _ in told)
    blocks = -(-mine.total * mine.width // BLOCK)
    itemsize = mine.values.element_size()
    if most == 0:
        return Sparsity(mine.total, mine.width, itemsize, 0.0, blocks=0.0)
    key = partition.keys(mine.total, seed + 1)
    indices = mine.indices.cpu().numpy()
    picked = indices[partition.permute(indices, key) < mine.total * min(1.0, sample / most)]
    message = torch.from_numpy(picked.astype(np.int32).view(np.uint8))
    sets = [one.view(torch.int32).numpy().astype(np.int64) for one in peers.gather(message)]
    growth, skew = overlap(sets, mine.total)
    density = sum(count for count, _ in told) / world / max(1, mine.total)
    touched = sum(count for _, count in told) / world / max(1, blocks)
    return Sparsity(mine.total, mine.width, itemsize, density, growth, skew, touched)
