"""Memory that moves to compressed memory and back: the demo, a model that sends everything away, kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from support.node import effects, zram
from support.waiting import until
from windtunnel.base.errors import HostError
from windtunnel.control.node import MemoryActuator, MemoryModel, Pages, Schedule, run
from windtunnel.control.node.live.demo import _PAGES

GROUPED = True
"""A swap is of the whole host."""
pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="memory of other processes is moved by root"),
]
MAIN = [sys.executable, "-c", "from windtunnel.cli.main import main; main()", "control", "node"]
SCHEDULE = Schedule(0.02, 1, 2.0, 1.0, 0.02, 1.0, 0.2, 60.0)


@pytest.fixture
def swap() -> Iterator[str]:
    with zram() as device:
        if not device:
            pytest.skip("this host makes no zram")
        yield device


@pytest.fixture
def load(swap: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", _PAGES, "60", "swap"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline()
        yield process
        process.kill()


class Greedy(MemoryModel):
    """Finds all cold, and itself to be right."""

    def predict(self) -> list[int]:
        return list(range(len(self._state.idle)))

    def assess(self) -> bool:
        return True


def hold_demo(words: dict) -> None:
    assert words["kind"] == "measured" and words["with"]["counts"]["predict"] > 0
    assert words["with"]["slow"] > 0.3 > words["without"]["slow"]
    assert words["with"]["remote"] < 0.05
    assert words["with"]["accesses"] > 0.5 * words["without"]["accesses"]


def demo() -> dict:
    command = [*MAIN, "demo", "memory", "--json", "--seconds", "5"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_demo_moves_memory_to_the_swap_of_this_host(swap: str) -> None:
    words, swaps = demo(), Path("/proc/swaps").read_text()
    hold_demo(words)
    assert swap in words["with"]["tier"] and words["with"]["remote"] > 0.0
    assert Path("/proc/swaps").read_text().splitlines()[0] == swaps.splitlines()[0]


def test_the_demo_moves_pages_of_files_without_a_swap() -> None:
    before = Path("/proc/swaps").read_text()
    if len(before.splitlines()) > 1:
        pytest.skip("this host has a swap")
    words = demo()
    hold_demo(words)
    assert words["with"]["tier"].startswith("files") and Path("/proc/swaps").read_text() == before


def test_a_model_that_sends_everything_away_is_stopped_by_its_faults(load, tmp_path: Path) -> None:
    log, pages = tmp_path / "log", Pages(load.pid)
    model = Greedy(pages, np.random.default_rng(0), 60.0, (0.02,))
    with run(model, MemoryActuator(pages), SCHEDULE, log=log):
        until(lambda: effects(log, "mitigate"), "the guard of the actuator")
        (stop,) = effects(log, "mitigate")
        since = len(effects(log, "predict"))
        assert stop["back"] > 30
        until(lambda: len(effects(log, "prediction")) > stop["back"], "predictions that are not used")
        assert len(effects(log, "predict")) == since


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_killed_or_frozen_agent_leaves_a_load_that_goes_on(load, number: int, tmp_path: Path) -> None:
    log, pages = tmp_path / "log", Pages(load.pid)
    model = MemoryModel(pages, np.random.default_rng(0), 0.3, (0.05, 0.1))
    with (
        pytest.raises(HostError, match="the actuator ended"),
        run(model, MemoryActuator(pages), SCHEDULE, log=log) as agent,
    ):
        until(lambda: [row for row in effects(log, "predict") if row["slow"]], "memory to go")
        for process in (agent.model, agent.actuator):
            os.kill(process.pid, number)
    before = pages.remote()
    assert load.poll() is None and before >= 0
    until(lambda: pages.remote() > 0, "memory that comes back because the load accesses it")
