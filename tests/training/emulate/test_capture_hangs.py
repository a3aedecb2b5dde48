"""When a rank that does not get on is taken to hang."""

from __future__ import annotations

import subprocess
import time
from ctypes import c_int64
from pathlib import Path

import pytest

from support.waiting import until
from windtunnel.linux.processes import command_line, state
from windtunnel.training.emulate.live.failure import RankFiles
from windtunnel.training.emulate.live.progress import LEAST_LOOKS, Watch, counted


@pytest.mark.parametrize(
    ("seconds", "run", "wait", "expected"),
    [
        (2.0, 0.0, 0.0, 2.0),  # asleep
        (2.0, 2.0, 0.0, 2.0),  # it computes
        (2.0, 0.0, 2.0, 0.0),  # others had the CPU
        (2.0, 0.5, 1.5, 0.5),
        (2.0, 0.5, 1.0, 1.0),  # asleep for half a second
        (2.0, 8.0, 8.0, 1.0),  # eight threads on four CPUs
    ],
)
def test_only_time_that_a_rank_could_use_counts(
    seconds: float, run: float, wait: float, expected: float
) -> None:
    assert counted(seconds, run, wait) == pytest.approx(expected)


def test_late_looks_are_followed_by_more_before_it_is_a_hang(tmp_path: Path) -> None:
    command = ["sh", "-c", "trap '' USR1; echo; exec sleep 1000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None and child.stdout.readline()
            # loading the program reads files, which is getting on
            until(lambda: command_line(child.pid) == "sleep 1000" and state(child.pid) == "S")
            watch = Watch(child.pid, RankFiles(tmp_path, 0), c_int64(), 0.2)
            watch.checked_at = time.monotonic() - 10.0
            watch._start = watch.checked_at, watch._before
            looks = 0
            while not watch.hangs:
                watch.look(float("inf"))
                looks += 1
            assert watch.quiet > 9.0 and looks >= LEAST_LOOKS
        finally:
            child.kill()
