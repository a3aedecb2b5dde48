"""Models and loops that others wrote, under plans, and ranks that fail: real processes over gloo."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from support.preloaded import Process
from support.quick import windtunnel
from support.ranks import run_ranks

PROGRAM = Path(__file__).with_name("gradsync_strangers.py")
PAGE = Path(__file__).parents[3] / "docs" / "gradsync.md"


@pytest.mark.slow
@pytest.mark.parametrize(
    "part",
    [
        "models",
        "alone",
        pytest.param(
            "transformers",
            marks=pytest.mark.skipif(
                not (find_spec("transformers") and find_spec("accelerate")),
                reason="needs transformers and accelerate: pip install windtunnel[strangers]",
            ),
        ),
    ],
)  # fmt: skip
def test_strangers_train_under_a_plan_as_without(part: str) -> None:
    """BatchNorm, unused and tied and frozen parameters, mixed types, micro-batches, clipping, sparse
    gradients, a compiled model; Transformers' Trainer and Accelerate, which wrap the model themselves; a
    rank that is alone."""
    done = run_ranks([PROGRAM, part], 1 if part == "alone" else 2)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.parametrize("part", ["hooks", "closed"])
def test_what_users_do_beside_a_plan(part: str) -> None:
    """Hooks of others before and after, plans that are closed twice and trained on, states in the midst of
    micro-batches."""
    done = run_ranks([Path(__file__).with_name("gradsync_neighbours.py"), part], 2)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]


@pytest.mark.slow
def test_what_waits_survives_a_lost_host(tmp_path: Path) -> None:
    """Parameters and residuals of all ranks end with the bits of a run that nothing happened to."""
    program, plain, struck = (
        Path(__file__).with_name("gradsync_survivor.py"),
        tmp_path / "plain",
        tmp_path / "struck",
    )
    for folder in (plain, struck):
        folder.mkdir()
    done = run_ranks([program, plain], 2)
    assert done.returncode == 0, done.stderr[-3000:]
    struck_job = windtunnel(
        "train", "--hosts", "2", "--inject", "kill:host=1,step=6", "--out", tmp_path / "run", program, struck
    )
    assert struck_job.returncode == 0, struck_job.stderr[-3000:]
    assert "is not saved" not in struck_job.stderr + struck_job.stdout
    for rank in ("0", "1"):
        assert (struck / rank).read_text() == (plain / rank).read_text()
    assert (plain / "0").read_text() != (plain / "1").read_text()  # each rank has residuals of its own


@pytest.mark.slow
def test_the_example_in_the_documentation_runs(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python title=\"train.py\"\n(.*?)```", PAGE.read_text(), re.DOTALL)
    program = tmp_path / "train.py"
    program.write_text(block)
    done = run_ranks([program], 2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.fullmatch(r"\d+ groups, [\d.e+]+ ms an iteration\n", done.stdout), done.stdout


def test_a_rank_that_fails_in_a_step_ends_and_does_not_abort(tmp_path: Path) -> None:
    """At once, with the status of its exception, though its collective would wait for the other for minutes;
    which then learns of it. In an interpreter of its own, which must end as one does."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.mkfifo(tmp_path / "pipe")
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": "2"}
    common |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).with_name("gradsync_ending.py")), str(tmp_path / "pipe")]
    with (tmp_path / "told").open("w+") as output:
        ranks = [
            subprocess.Popen(
                command, env={**os.environ, **common, "RANK": "0"}, stderr=subprocess.PIPE, text=True
            ),
            Process(command[1:], env={**os.environ, **common, "RANK": "1"}, stdout=output),
        ]
        try:
            failed = ranks[0].communicate(timeout=100)[1]
            assert [process.wait() for process in ranks] == [1, 0], failed[-3000:]
        finally:
            for process in ranks:
                process.kill()
    assert "ValueError: it failed" in failed
    words = (tmp_path / "told").read_text()
    assert "HostError: gradient exchange: of 2 ranks one is gone, or gave up" in words
