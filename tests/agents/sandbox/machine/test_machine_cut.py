"""Commands that are cut off, and sandboxes that die under a command."""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections.abc import Callable

import pytest

from support.waiting import until
from windtunnel.agents.sandbox.errors import MachineError
from windtunnel.agents.sandbox.machine import Machine
from windtunnel.agents.sandbox.model import SandboxSpec
from windtunnel.agents.sandbox.place import Home

pytestmark = pytest.mark.root


def running(box: Machine, words: str) -> bool:
    return any(words in line for line in box.commands())


def test_the_rest_of_a_cut_command_is_not_run(box: Machine) -> None:
    box.run("x=1; cd /tmp; sleep 1001 &")
    result = box.run("x=2; sleep 1000; touch /tmp/after", timeout=0.2)
    assert result.ended == "timeout"
    assert result.note == "the shell was started anew with its state from before the command"
    assert box.run("echo $x; pwd; ls").stdout == b"1\n/tmp\n"
    assert box.run("ls").stdout == b""
    assert running(box, "sleep 1001") and not running(box, "sleep 1000")


def test_a_host_that_ignores_interrupts_has_commands_that_do_not(start: Callable[..., Machine]) -> None:
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        box = start()
        box.run("x=1")  # its shell is there
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert box.run("sleep 1000 & kill $!; wait $!; echo $?").stdout == b"143\n"


SPINS = (
    "while :; do :; done",
    "trap '' INT TERM; while :; do sleep 0.01; done",
    "python3 -c 'import signal as s,time\nfor n in (2, 15): s.signal(n, s.SIG_IGN)\ntime.sleep(1000)'",
    "sleep 1000 & wait",
    "read x </.windtunnel/requests",
    "set -n",
)


def test_a_shell_that_does_not_come_back_is_replaced(box: Machine) -> None:
    box.run("x='kept'")
    for spin in SPINS:
        ended = box.run(spin, timeout=0.2).ended
        assert ended == "timeout" or spin == "set -n"
        assert box.run("echo $x", timeout=60).stdout == b"kept\n", spin
        assert not running(box, "sleep") and not running(box, "python3"), spin


def test_cancel_works_from_another_thread(box: Machine) -> None:
    cancel = threading.Event()
    results = []
    thread = threading.Thread(target=lambda: results.append(box.run("sleep 1000", cancel=cancel, timeout=60)))
    thread.start()
    until(lambda: running(box, "sleep 1000"), "the command starts")
    cancel.set()
    thread.join()
    assert results[0].ended == "cancelled"
    assert not running(box, "sleep 1000")


def test_two_shells_run_at_the_same_time(box: Machine) -> None:
    thread = threading.Thread(
        target=lambda: box.run("read line </tmp/pipe; echo $line >/tmp/got", timeout=60)
    )
    box.run("mkfifo /tmp/pipe; exec true; true", shell="other")
    thread.start()
    assert box.run("echo hello >/tmp/pipe", shell="other", timeout=60).exit_code == 0
    thread.join()
    assert box.run("cat /tmp/got").stdout == b"hello\n"


def test_a_removed_channel_is_no_hang(box: Machine) -> None:
    box.run("rm -rf /.windtunnel/main", timeout=60)
    result = box.run("echo fine", timeout=60)
    assert (result.ended, result.stdout) == ("exit", b"fine\n")
    box.run("rm -rf /.windtunnel", timeout=60)
    result = box.run("echo fine", timeout=60)
    assert (result.ended, result.stdout) == ("exit", b"fine\n")


def test_a_channel_that_another_shell_removed_fails_one_command(box: Machine) -> None:
    box.run("rm -rf /.windtunnel/main", shell="other", timeout=60)
    with pytest.raises(MachineError, match="shell main cannot be reached: No such file"):
        box.run("echo lost", timeout=60)
    assert box.run("echo fine", timeout=60).stdout == b"fine\n"


def test_a_replaced_answer_is_noticed(box: Machine) -> None:
    result = box.run("x=1; rm /.windtunnel/main/ack; touch /.windtunnel/main/ack")
    assert result.ended == "shell-died" and "channel" in result.note
    assert box.run("echo fine").stdout == b"fine\n"


def test_a_command_that_ran_on_without_its_daemon_is_waited_for(home: Home, box: Machine) -> None:
    box.run("mkfifo /tmp/go")
    pid, root = box.pid, box.externals.root
    # the daemon dies while the shell runs a command: nobody reads its answer
    held = os.open(home.channel("box") / "main/in", os.O_WRONLY | os.O_NONBLOCK)
    os.write(held, b"x=1; read line </tmp/go; x=$line\nbuiltin printf 'done old\\n' >/.windtunnel/main/ack\n")
    os.close(held)
    box.close()
    again = Machine.adopt(home, SandboxSpec("box"), root, pid)
    assert again.run("echo late >/tmp/go", shell="other", timeout=60).exit_code == 0
    assert again.run("echo $x", timeout=60).stdout == b"late\n"
    again.close()


def test_an_input_that_cannot_be_made_is_told_and_leaves_nothing(
    box: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "mkfifo", full)
        with pytest.raises(MachineError, match="shell main cannot be reached: No space left"):
            box.run("cat", stdin=b"x", timeout=60)
    assert not list(box.externals.of("channel").glob("main/out.*"))
    assert box.run("cat", stdin=b"x", timeout=60).stdout == b"x"
