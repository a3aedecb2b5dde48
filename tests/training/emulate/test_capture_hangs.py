"""What stands still is a hang, and ends with all that it started; what is only slow is none."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from capturing import SCRIPTS, session

from support.waiting import gone, until
from windtunnel.base.errors import HangError
from windtunnel.linux.processes import command_line, state
from windtunnel.training.emulate.live.progress import ASKED, Watch, Word, counted
from windtunnel.training.emulate.live.session import Session

NAMES = re.findall(r"^def case_(\w+)", (SCRIPTS / "stuck.py").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stuck")


@pytest.fixture(scope="module")
def stuck(folder: Path) -> Iterator[Session]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STUCK_FOLDER", str(folder))
        with session("stuck.py", cluster="h100-sxm:2x8", timeout=1.0) as one:
            yield one


@pytest.mark.parametrize("name", ["sleeps", "spins", "stopped"])
def test_what_stands_still_hangs_where_it_stands(stuck: Session, name: str) -> None:
    with pytest.raises(HangError) as caught:
        stuck.capture([NAMES.index(name)])
    said = rf"the script hung as rank \d+: for \d+ s it stood at stuck\.py:\d+ in case_{name}"
    assert re.fullmatch(said, str(caught.value))
    assert f"in case_{name}" in caught.value.details


def test_a_loop_that_reads_what_never_changes_hangs_whatever_else_it_does(stuck: Session) -> None:
    with pytest.raises(HangError) as caught:
        stuck.capture([NAMES.index("reads")])
    line = 1 + (SCRIPTS / "stuck.py").read_text().splitlines().index("    while x.sum().item() < 100:")
    said = (
        rf"the script hung as rank \d+: for \d+ s the loop at stuck\.py:{line} in case_reads "
        "read the same of the device, and did nothing new"
    )
    assert re.fullmatch(said, str(caught.value))


def test_all_that_a_hanging_rank_started_is_ended(stuck: Session, folder: Path) -> None:
    with pytest.raises(HangError, match="in case_child"):
        stuck.capture([NAMES.index("child")])
    until(lambda: gone(int((folder / "child").read_text())))


@pytest.mark.parametrize("names", [["prepares"], ["records"], ["grows"]])
def test_what_is_only_slow_comes_to_its_end(stuck: Session, names: list[str]) -> None:
    slices = stuck.capture([NAMES.index(name) for name in names])
    assert all(len(one.steps) > 1 for one in slices)


@pytest.mark.parametrize(
    ("seconds", "run", "wait", "moving", "told"),
    [
        (2.0, 0.0, 0.0, False, 2.0),  # asleep
        (2.0, 2.0, 0.0, False, 2.0),  # one line that computes
        (2.0, 2.0, 0.0, True, 0.2),  # many lines
        (2.0, 0.1, 0.0, True, 2.0),  # many lines, but mostly asleep
        (2.0, 0.0, 2.0, False, 0.0),  # others had the CPU
        (2.0, 0.5, 1.5, False, 0.5),
        (2.0, 0.5, 1.0, False, 1.0),  # asleep for half a second
        (2.0, 8.0, 8.0, False, 1.0),  # eight threads on four CPUs
        (2.0, 0.5, 1.5, True, 0.05),
    ],
)
def test_only_time_that_a_rank_could_use_counts(
    seconds: float, run: float, wait: float, moving: bool, told: float
) -> None:
    assert counted(seconds, run, wait, moving) == pytest.approx(told)


def test_late_looks_are_followed_by_more_before_it_is_a_hang(tmp_path: Path) -> None:
    command = ["sh", "-c", "trap '' USR1; echo; exec sleep 1000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None and child.stdout.readline()
            # loading the program reads files, which is getting on
            until(lambda: command_line(child.pid) == "sleep 1000" and state(child.pid) == "S")
            watch = Watch(child.pid, 0, tmp_path / "stack", Word(), 0.2, tmp_path / "loop")
            watch.checked_at = time.monotonic() - 10.0
            watch._start = watch.checked_at, watch._before
            looks = 0
            while not watch.hangs:
                watch.look(float("inf"))
                looks += 1
                (tmp_path / "stack").write_text("")
            assert watch.quiet > 9.0 and looks >= ASKED
        finally:
            child.kill()
