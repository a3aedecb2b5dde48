"""A DDP that is made in the midst of a job sums as one that was there from its beginning."""

from __future__ import annotations

import json
from pathlib import Path

from support.ranks import run_ranks

RANKS = Path(__file__).with_name("bucket_ranks.py")


def test_a_ddp_made_anew_goes_on_as_the_old_one() -> None:
    done = run_ranks([RANKS], 3)  # of two ranks, any order gives the same sums
    assert done.returncode == 0, done.stderr
    differ = json.loads(done.stdout)
    assert len(differ) >= 7
    assert differ == {way: [] for way in differ}
