"""Run the examples as a user would, on CPU with gloo, and read the losses that they print."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
EXAMPLES = HERE.parents[1] / "examples"
LOSS = re.compile(r"^step \d+  loss ([\d.]+|nan|inf)  ", re.MULTILINE)

sys.path.insert(0, str(EXAMPLES))  # as for the script of a user, its folder is where its modules are found


def run(script: Path, world: int, *flags: str) -> subprocess.CompletedProcess[str]:
    """``script`` under torchrun for a world above 1, else alone."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    ending = str(HERE / "ending.py")
    command = [sys.executable, *(launcher if world > 1 else []), ending, str(script), *flags]
    names = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
    env = {key: value for key, value in os.environ.items() if key not in names}
    # Port 0 lets the system choose a free one where nobody else has to know it.
    env |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"} | ({"MASTER_PORT": "0"} if world == 1 else {})
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


def losses(script: Path, world: int, *flags: str) -> list[float]:
    """What ``run`` printed, after checking that it ended well."""
    done = run(script, world, *flags)
    assert done.returncode == 0, done.stderr[-4000:]
    return [float(found) for found in LOSS.findall(done.stdout)]


def losses_by_layout(script: str, world: int, layouts: list[str]) -> dict[str, list[float]]:
    """Losses of each command line of an example, all from the same initial weights."""
    done = run(HERE / "layouts.py", world, script, *layouts)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, list[float]] = {}
    for part in done.stdout.split("layout ")[1:]:
        layout, _, printed = part.partition("\n")
        found[layout] = [float(loss) for loss in LOSS.findall(printed)]
    return found
