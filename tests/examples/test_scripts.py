"""The examples run as they are, as ranks of a job and alone, learn, and refuse what does not go together.

Ranks find the environment that torchrun gives; that torchrun itself starts them is a test of conformance.
"""

from __future__ import annotations

import pytest
from example_runs import EXAMPLES, losses, run, run_by_torchrun

pytest.importorskip("torch")

SCRIPTS = {
    "train_llama.py": ["--steps", "5", "--batch", "2", "--seq", "64"],
    "train_moe.py": ["--steps", "5", "--batch", "2", "--seq", "64"],
    "train_dlrm.py": ["--steps", "25"],
    "train_resnet.py": ["--steps", "5", "--batch", "16", "--channels-last"],
    "train_diloco.py": ["--steps", "12", "--batch", "2", "--seq", "64", "--sync", "4"],
}


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("script", SCRIPTS)
def test_loss_goes_down(script: str, world: int) -> None:
    check(losses(run(EXAMPLES / script, world, *SCRIPTS[script])), script)


@pytest.mark.conformance
def test_torchrun_starts_an_example() -> None:
    script = "train_dlrm.py"
    check(losses(run_by_torchrun(EXAMPLES / script, 2, *SCRIPTS[script])), script)


def check(series: list[float], script: str) -> None:
    assert len(series) == int(SCRIPTS[script][1])
    assert sum(series[-2:]) < sum(series[:2]) - 0.1


def test_examples_need_nothing_of_windtunnel() -> None:
    """They are what a user would bring; train_llama.py imports it only when `windtunnel train` started it.
    Those that show how a program survives failures need it."""
    for path in EXAMPLES.glob("*.py"):
        if path.name.startswith("elastic_") or path.name == "train_pipeline.py":
            continue
        lines = path.read_text().splitlines()
        imported = [
            line for line in lines if line.lstrip().startswith(("import windtunnel", "from windtunnel"))
        ]
        assert all(path.name == "train_llama.py" and line.startswith("        ") for line in imported), (
            path.name
        )


@pytest.mark.slow
def test_what_does_not_go_together_is_refused_by_the_script() -> None:
    done = run(EXAMPLES / "train_llama.py", 1, "--tp", "3")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("a world of 1 does not divide into --pp 1 x --cp 1 x --tp 3")
