"""What /proc tells of processes, and how they are ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from support.waiting import PATIENCE, until
from windtunnel.linux import processes
from windtunnel.linux.snapshot import read_descriptors
from windtunnel.linux.system import tied_command


def test_a_process_is_looked_at() -> None:
    process = processes.look(os.getpid())
    assert process is not None
    assert (process.pid, process.parent, process.session) == (os.getpid(), os.getppid(), os.getsid(0))
    assert processes.state(os.getpid()) in "RS"
    assert processes.look(2**22 + 1) is None
    assert processes.state(2**22 + 1) == ""
    assert processes.inner_pid(os.getpid()) > 0
    assert processes.host_pid(processes.inner_pid(os.getpid()), [os.getpid()]) == os.getpid()
    assert "python" in processes.command_line(os.getpid()) or "pytest" in processes.command_line(os.getpid())


def test_descriptors_are_told_and_which_are_inherited() -> None:
    reader, writer = os.pipe()
    try:
        os.set_inheritable(writer, True)
        assert {reader, writer} <= processes.descriptors(os.getpid()).keys()
        opened = read_descriptors(os.getpid())
        assert opened[reader].flags & os.O_CLOEXEC and not opened[writer].flags & os.O_CLOEXEC
    finally:
        os.close(reader)
        os.close(writer)


def test_what_stands_is_told_from_what_runs() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert processes.stands(process.pid)
        assert processes.state(process.pid) == "T"
        process.send_signal(signal.SIGCONT)
        os.waitid(os.P_PID, process.pid, os.WCONTINUED)
        assert not processes.stands(process.pid)
        process.kill()


def test_processes_are_found_and_killed_by_what_they_carry() -> None:
    mark = f"WINDTUNNEL_TEST_MARK={os.getpid()}-{time.monotonic_ns()}"
    name, _, value = mark.partition("=")
    program = "import subprocess, sys; subprocess.Popen(['sleep', '600']); print(flush=True); input()"
    parent = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, name: value},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with parent:
        assert parent.stdout is not None and parent.stdout.readline() == b"\n"
        assert len(processes.carrying(mark)) == 2
        assert processes.kill_carrying(mark) >= 2
    assert processes.carrying(mark) == []


def test_who_is_beginning_a_program_is_found() -> None:
    """The kernel gives a new program its environment a moment after the old one has gone."""
    mark = f"WINDTUNNEL_TEST_MARK={os.getpid()}-{time.monotonic_ns()}"
    name, _, value = mark.partition("=")
    again = ["sh", "-c", 'exec sh -c "$0" "$0"', 'exec sh -c "$0" "$0"']
    with subprocess.Popen(again, env={**os.environ, name: value}) as process:
        pids = [processes.carrying(mark) for _ in range(100)]
        process.kill()
    assert pids == [[process.pid]] * 100


def test_the_stubborn_are_killed_at_last() -> None:
    program = (
        "import signal, time\n"
        "for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, signal.SIG_IGN)\n"
        "print('up', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as stubborn:
        assert stubborn.stdout is not None and stubborn.stdout.readline() == b"up\n"
        processes.end({stubborn.pid}, (0.05, 0.05))
        assert stubborn.wait(PATIENCE) == -signal.SIGKILL


def test_a_command_ends_with_the_thread_that_started_it() -> None:
    started: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        started.append(subprocess.Popen(tied_command(["sleep", "1000"])))
        until(lambda: processes.command_line(started[0].pid) == "sleep 1000")

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert started[0].wait() == -signal.SIGKILL
    with pytest.raises(FileNotFoundError, match="'no-such-program'"):
        tied_command(["no-such-program"])
