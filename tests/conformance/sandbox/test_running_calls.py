"""Calls that wait go on over a full checkpoint, and are made again after a restore: in C, because Python
repeats them by itself. Each is made by a first thread and by another one, and checkpointed twice: the second
time the kernel knows it as restart_syscall(2).
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support.waiting import until

pytestmark = [
    pytest.mark.root,
    pytest.mark.xdist_group("calls"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler"),
]

SOURCE = Path(__file__).parent / "c" / "calls.c"
ETIMEDOUT = 110
CALLS = (
    "poll", "poll-none", "nanosleep", "nanosleep-left", "raw-nanosleep", "usleep", "sleep",
    "clock-nanosleep", "clock-nanosleep-absolute", "sem-timedwait", "futex", "select",
)  # fmt: skip
WANTED = 6000
"""Milliseconds that each call waits: long enough for two checkpoints meanwhile."""
THREADS = ("first", "thread")


@dataclass(frozen=True)
class Ended:
    """How a call ended: its result and errno, milliseconds that it took, signals that were handled."""

    result: int
    errno: int
    milliseconds: int
    handled: int

    @property
    def complete(self) -> bool:
        """As where nothing disturbed it."""
        result = (self.result, self.errno)
        return result in ((0, 0), (-1, ETIMEDOUT)) and self.milliseconds >= WANTED


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    built = tmp_path_factory.mktemp("calls") / "calls"
    subprocess.run(["gcc", "-O2", "-static", "-pthread", "-o", built, SOURCE], check=True)
    return built.read_bytes()


@pytest.fixture(scope="module")
def box(host: Any, program: bytes) -> Iterator[Any]:
    from windtunnel.agents.sandbox.model import SandboxSpec

    sandbox = host.create(SandboxSpec("calls"))
    sandbox.put("/opt/calls", program)
    sandbox.run("chmod 755 /opt/calls")
    yield sandbox
    host.remove(sandbox.name)


def start(box: Any, folder: str, milliseconds: int) -> None:
    """Every call in a program of its own, by both kinds of thread."""
    box.run(f"mkdir /workspace/{folder}; cd /workspace/{folder}")
    for call in CALLS:
        for thread in THREADS:
            name = f"{call}.{thread}"
            box.run(f"(/opt/calls {call} {milliseconds} {thread} > {name} & echo $! > {name}.pid)")


def read_ended(box: Any, folder: str, thread: str) -> dict[str, Ended]:
    lines = box.run(f"cat /workspace/{folder}/*.{thread}").text.splitlines()
    return {name: Ended(*map(int, words)) for name, *words in map(str.split, lines)}


def wait_for_all(box: Any, folder: str, thread: str) -> dict[str, Ended]:
    ended_calls: Callable[[], dict[str, Ended]] = lambda: read_ended(box, folder, thread)  # noqa: E731
    until(lambda: len(ended_calls()) == len(CALLS), f"the end of all calls ({folder}, {thread})")
    return ended_calls()


def test_they_go_on_with_the_time_that_is_left_and_are_made_again_by_a_restore(box: Any) -> None:
    begin = time.monotonic()
    start(box, "whole", WANTED)
    box.checkpoint(full=True)
    kept = box.checkpoint(full=True)
    for thread in THREADS:
        ended = wait_for_all(box, "whole", thread)
        assert [call for call in CALLS if not ended[call].complete] == [], ended
        # whoever began anew would take the time before the checkpoints twice
        most = (time.monotonic() - begin) * 1000
        assert all(outcome.milliseconds <= most for outcome in ended.values()), ended
    box.restore(kept.id)
    for thread in THREADS:
        ended = wait_for_all(box, "whole", thread)
        assert [call for call in CALLS if not ended[call].complete] == [], ended


@pytest.mark.parametrize("restored", [False, True], ids=["goes on", "restored"])
def test_a_signal_that_is_handled_ends_them(box: Any, restored: bool) -> None:
    folder = f"signals-{restored}"
    start(box, folder, 600_000)
    box.checkpoint(full=True)
    kept = box.checkpoint(full=True)
    if restored:
        box.restore(kept.id)
    box.run(f"kill -USR1 $(cat /workspace/{folder}/*.first.pid)")
    ended = wait_for_all(box, folder, "first")
    assert all(outcome.handled == 1 and outcome.milliseconds < 600_000 for outcome in ended.values()), ended
    box.run(f"kill $(cat /workspace/{folder}/*.thread.pid)")


@pytest.mark.parametrize("restored", [False, True], ids=["goes on", "restored"])
def test_programs_that_wait_live_on(box: Any, restored: bool) -> None:
    folder = f"/workspace/programs-{restored}"
    box.run(f"mkdir {folder}; cd {folder}; touch log; (tail -f log > copy & echo $! > tail.pid)")
    box.run("(perl -e 'sleep 600' & echo $! > perl.pid)")
    kept = box.checkpoint(full=True)
    box.checkpoint(full=True)
    if restored:
        box.restore(kept.id)
    box.run(f"cd {folder}; echo more >> log")
    until(lambda: box.run("cat copy").text.strip() == "more", "what tail copies")
    assert box.run("kill $(cat perl.pid tail.pid)").exit_code == 0
