"""Which losses of several hosts at once do checkpoints in memory survive (GEMINI, SOSP 2023, section 4)?

Memory services that hold real shards are killed, k at once with their memory, and the newest step is read
back from the rest: each kill ends as the placement says.
"""

from __future__ import annotations

import random
from itertools import combinations
from pathlib import Path

import pytest

from conformance.training.hosts import Hosts
from windtunnel.training.checkpoint.policy.placement import Kind, place, survives

PLACES, COPIES = 8, 2
SHARD = 64 << 10  # bytes
SEED = 20230923


def trials(lost: int) -> list[tuple[int, ...]]:
    """Which hosts are killed: every choice of two, a sample of larger ones."""
    every = list(combinations(range(PLACES), lost))
    return every if lost == 2 else random.Random(SEED + lost).sample(every, 24)


@pytest.mark.parametrize(("kind", "lost"), [("group", 2), ("group", 3), ("group", 4), ("ring", 2)])
def test_every_kill_ends_as_the_placement_says(kind: Kind, lost: int) -> None:
    kept = place(PLACES, COPIES, kind)
    with Hosts(PLACES, SHARD) as hosts:
        folder: Path = hosts._folder
        for gone in trials(lost):
            hosts.save(COPIES, kind)
            assert hosts.readable()
            hosts.kill(gone)
            assert hosts.readable() == survives(kept, gone), gone
    assert not folder.exists()
    assert all(host.process.poll() is not None for host in hosts._hosts)
