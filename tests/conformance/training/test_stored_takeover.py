"""The launcher, and the supervisor with it, is killed about a write to storage: the next goes on at once."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from support.quick import windtunnel
from windtunnel.store import eventlog
from windtunnel.training.checkpoint.live import storage
from windtunnel.training.elastic.policy.checkpoints import FAILED

pytestmark = [pytest.mark.slow]

STEPS = 8
SCRIPT = """
import sys, time, torch
from pathlib import Path
from windtunnel.store import eventlog
from windtunnel.training.checkpoint import PeerCheckpointer
from windtunnel.training.elastic import run

stored, shows = Path(sys.argv[1]), sys.argv[2]

def train(job):
    state = {"x": torch.zeros(8)}
    checkpointer = PeerCheckpointer(job, persist=str(stored), persist_every=1)
    for step in range(checkpointer.restore(state), %d):
        state["x"] += 1
        checkpointer.step(step, state)
        while step == 4 and shows and not list(stored.glob(f"steps/*4-*/{shows}")):
            time.sleep(0.005)
        job.step(step)
        while step == 5 and (job.folder / eventlog.NAME).read_text().count('"kind":"started"') < 2:
            time.sleep(0.05)
    return float(state["x"][0])

run(train)
"""


@pytest.mark.parametrize(
    ("fault", "shows"),
    [
        ("point=before_persist,step=4", ""),
        ("step=4", ""),  # while it is written
        ("step=4", "rank0.*"),
        ("step=4", "complete"),  # when its manifest is there, and nobody knows it yet
    ],
)
def test_a_launcher_that_dies_about_a_write_holds_nobody_up(
    fault: str, shows: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank waits in vain, none is lost, and every step that was due is in storage: a write whose word was
    lost would be waited for at the end, and then end the run with status 3."""
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path / "home"))
    (tmp_path / "train.py").write_text(SCRIPT % STEPS)
    words = ["train", "--hosts", "2", "--inject", f"kill-launcher:{fault}", "--json"]
    first = windtunnel(*words, tmp_path / "train.py", tmp_path / "stored", shows)
    assert first.returncode == -signal.SIGKILL, first.stderr[-2000:]
    done = windtunnel("train", "--resume", "last", "--json")
    assert done.returncode == 0, done.stderr[-2000:]
    summary = json.loads(done.stdout)
    assert summary["recoveries"] == [] and STEPS - 1 in summary["stored"]["durable"]
    kept = storage.steps(str(tmp_path / "stored"))
    assert [(checkpoint.step, checkpoint.bad) for checkpoint in kept] == [(step, "") for step in range(STEPS)]
    kinds = [event["kind"] for event in eventlog.read(Path(summary["directory"]) / eventlog.NAME)]
    assert "lost" not in kinds and FAILED not in kinds and kinds.count("decided") == 1
