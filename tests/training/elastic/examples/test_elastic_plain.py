"""`examples/elastic_plain.py`: one file, by itself, as ranks of torchrun and under ``windtunnel train``."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from support.quick import windtunnel
from support.ranks import run_alone, run_ranks

EXAMPLE = Path(__file__).parents[4] / "examples" / "elastic_plain.py"


def losses(output: str) -> dict[int, float]:
    """The loss of each step as it was printed last."""
    lines = re.findall(r"^step (\d+)  loss (\S+)$", output, re.MULTILINE)
    return {int(step): float(loss) for step, loss in lines}


def test_it_is_as_short_as_it_says() -> None:
    lines = EXAMPLE.read_text().splitlines()
    assert len(lines) < 60
    assert sum("# elastic" in line for line in lines) == 9


@pytest.mark.slow
def test_without_windtunnel() -> None:
    """By itself, and in the environment that torchrun makes."""
    for run in (run_alone([EXAMPLE]), run_ranks([EXAMPLE], 2)):
        assert run.returncode == 0, run.stderr
        assert set(losses(run.stdout)) == set(range(30))


@pytest.mark.slow
def test_a_lost_host_changes_no_loss(tmp_path: Path) -> None:
    """One host is lost after step 7, and another with its very last step: every loss is that of a run
    without a failure."""
    train = ["train", "--hosts", "3"]
    plain = windtunnel(*train, "--out", tmp_path / "plain", EXAMPLE)
    assert plain.returncode == 0, plain.stderr
    faults = ["--inject", "kill:host=2,step=7", "--inject", "kill:host=1,step=29"]
    struck = windtunnel(*train, *faults, "--out", tmp_path / "struck", EXAMPLE)
    assert struck.returncode == 0, struck.stderr
    assert losses(struck.stdout) == losses(plain.stdout)
    summary = json.loads((tmp_path / "struck" / "summary.json").read_text())
    first = summary["recoveries"][0]
    assert first["failure"] == "kill:host=2,step=7"
    assert first["steps_lost"] <= 1
