"""Run an example as a user would, on CPU with gloo, and read the losses that it prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LOSS = re.compile(r"^step \d+  loss ([\d.]+|nan|inf)  ", re.MULTILINE)


@pytest.fixture
def run() -> Callable[..., subprocess.CompletedProcess[str]]:
    """``run(script, world, *flags)``: under torchrun for a world above 1, else alone."""

    def start(script: Path | str, world: int, *flags: str) -> subprocess.CompletedProcess[str]:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
        command = [sys.executable, *(launcher if world > 1 else []), str(EXAMPLES / script), *flags]
        names = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
        env = {key: value for key, value in os.environ.items() if key not in names}
        return subprocess.run(
            command, env=env | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120
        )

    return start


@pytest.fixture
def losses(run: Callable[..., subprocess.CompletedProcess[str]]) -> Callable[..., list[float]]:
    """The losses that ``run`` printed, after checking that it ended well."""

    def read(script: Path | str, world: int, *flags: str) -> list[float]:
        done = run(script, world, *flags)
        assert done.returncode == 0, done.stderr[-4000:]
        return [float(found) for found in LOSS.findall(done.stdout)]

    return read
