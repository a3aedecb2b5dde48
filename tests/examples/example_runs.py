"""Run the examples as a user would, on CPU with gloo, and read the losses that they print."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from support.ranks import run_alone, run_ranks

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parents[1] / "examples"
LOSS = re.compile(r"^step \d+  loss ([\d.]+|nan|inf)  ", re.MULTILINE)

sys.path.insert(0, str(EXAMPLES))  # as for the script of a user, its folder is where its modules are found


def run(script: Path, world: int, *flags: str) -> subprocess.CompletedProcess[str]:
    """``script`` as every rank of ``world``, or alone."""
    env = os.environ | {"PYTHONWARNINGS": "ignore"}
    command = [HERE / "ending.py", script, *flags]
    return run_ranks(command, world, env=env) if world > 1 else run_alone(command, env=env)


def run_by_torchrun(script: Path, world: int, *flags: str) -> subprocess.CompletedProcess[str]:
    """``script`` in interpreters of its own, which torchrun starts."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    command = [sys.executable, *launcher, str(HERE / "ending.py"), str(script), *flags]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


def losses(done: subprocess.CompletedProcess[str]) -> list[float]:
    """What a run printed, after checking that it ended well."""
    assert done.returncode == 0, done.stderr[-4000:]
    return [float(loss) for loss in LOSS.findall(done.stdout)]


def losses_by_layout(script: str, world: int, layouts: list[str]) -> dict[str, list[float]]:
    """Losses of each command line of an example, all from the same initial weights."""
    done = run(HERE / "layouts.py", world, script, *layouts)
    assert done.returncode == 0, done.stderr[-4000:]
    by_layout: dict[str, list[float]] = {}
    for part in done.stdout.split("layout ")[1:]:
        layout, _, printed = part.partition("\n")
        by_layout[layout] = [float(loss) for loss in LOSS.findall(printed)]
    return by_layout
