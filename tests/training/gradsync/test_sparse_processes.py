"""Sparse sums between processes over gloo: a recommender that trains alike to the bit, and lost peers."""

from __future__ import annotations

from pathlib import Path

from support.ranks import run_ranks

LOST = """
import os, sys, time, torch, torch.distributed as dist
from windtunnel.base.errors import HostError
from windtunnel.training.gradsync.live.sparse import all_reduce

dist.init_process_group("gloo")
rank, how = dist.get_rank(), sys.argv[1]
mine = torch.eye(64)
assert torch.equal(all_reduce(mine), 3 * mine)
if rank == 1 and how == "gone":
    os._exit(0)
if rank == 1:  # silent: until the others are gone
    while not all(os.path.exists(sys.argv[2] + other) for other in "02"):
        time.sleep(0.05)
    os._exit(0)
try:
    all_reduce(mine, deadline=60 if how == "gone" else 0.5)
except HostError as error:
    print(f"rank {rank}: {error}", flush=True)
open(sys.argv[2] + str(rank), "w").close()
os._exit(0)
"""


def test_a_lost_peer_is_an_error_on_all_others(tmp_path: Path) -> None:
    """At once where it is gone, by the deadline where it is silent."""
    script = tmp_path / "lost.py"
    script.write_text(LOST)
    for how, word in (("gone", "is gone, or gave up"), ("silent", "did not answer within 0.5 s")):
        done = run_ranks([script, how, str(tmp_path / how)], 3)
        assert done.returncode == 0, done.stderr
        for rank in (0, 2):
            assert f"rank {rank}: gradient exchange: of 3 ranks rank" in done.stdout
        assert word in done.stdout, done.stdout
