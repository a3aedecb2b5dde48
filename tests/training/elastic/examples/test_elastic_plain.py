"""`examples/elastic_plain.py`: one file, by itself, under torchrun and under ``windtunnel train``."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]
EXAMPLE = ROOT / "examples" / "elastic_plain.py"
BIN = Path(sys.executable).parent


def done(*command: str | Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [str(word) for word in command], env=env, capture_output=True, text=True, timeout=240, check=False
    )


def losses(output: str) -> dict[int, float]:
    """The loss of each step as it was printed last."""
    found = re.findall(r"^step (\d+)  loss (\S+)$", output, re.MULTILINE)
    return {int(step): float(loss) for step, loss in found}


def test_it_is_as_short_as_it_says() -> None:
    lines = EXAMPLE.read_text().splitlines()
    assert len(lines) < 60
    assert sum("# elastic" in line for line in lines) == 8


@pytest.mark.slow
def test_without_windtunnel() -> None:
    alone = done(sys.executable, EXAMPLE)
    assert alone.returncode == 0, alone.stderr
    torchrun = done(BIN / "torchrun", "--standalone", "--nproc-per-node", "2", EXAMPLE)
    assert torchrun.returncode == 0, torchrun.stderr
    assert set(losses(alone.stdout)) == set(losses(torchrun.stdout)) == set(range(30))


@pytest.mark.slow
def test_a_lost_host_changes_no_loss(tmp_path: Path) -> None:
    """One host is lost after step 7, and another with its very last step: every loss is that of a run
    without a failure."""
    train = [BIN / "windtunnel", "train", "--hosts", "3"]
    plain = done(*train, "--out", tmp_path / "plain", EXAMPLE)
    assert plain.returncode == 0, plain.stderr
    faults = ["--inject", "kill:host=2,step=7", "--inject", "kill:host=1,step=29"]
    struck = done(*train, *faults, "--out", tmp_path / "struck", EXAMPLE)
    assert struck.returncode == 0, struck.stderr
    assert losses(struck.stdout) == losses(plain.stdout)
    summary = json.loads((tmp_path / "struck" / "summary.json").read_text())
    first = summary["recoveries"][0]
    assert first["failure"] == "kill:host=2,step=7"
    assert first["steps_lost"] <= 1
