"""Plain loops that lose processes and hosts end with the bits of a run that nobody disturbed."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest
from foreign_trainer import BATCH, EPOCHS, SAMPLES
from runs_helpers import end_well, of, running

from support.ranks import run_ranks
from windtunnel.training.elastic.report import guarantee

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_launch")]

TRAINER = Path(__file__).with_name("foreign_trainer.py")
STEPS = EPOCHS * SAMPLES // BATCH


@pytest.mark.parametrize("seed", [1, 2])
def test_killed_at_random_steps(tmp_path: Path, seed: int) -> None:
    """Four ranks on two hosts: of two ranks, any layout of DDP's buckets gives the same sums."""
    undisturbed = run_ranks([TRAINER], 4)
    assert undisturbed.returncode == 0, undisturbed.stderr
    ends = dict(re.findall(r"rank (\d) ends with (\w+) after", undisturbed.stdout))
    drawn = random.Random(seed)
    first, second, third = sorted(drawn.sample(range(1, STEPS - 1), 3))
    place, rank, last = drawn.randrange(2), drawn.randrange(4), drawn.randrange(4)
    strikes = (
        f"kill:host={place},step={first}",
        f"kill:rank={rank},step={second}",
        f"kill:rank={last},step={third}",
    )
    with running(tmp_path, script=TRAINER, hosts=2, per_host=2, faults=strikes) as launched:
        results = end_well(launched)
        assert {event["fault"] for event in of(launched, "injected")} == set(strikes)
        assert {str(rank): digest for rank, digest in results.items()} == ends
        doubt = "loader loader: what its workers draw at random is drawn anew after a failure"
        assert guarantee(launched.events()) == f"not sure to be bit-identical: {doubt}"
