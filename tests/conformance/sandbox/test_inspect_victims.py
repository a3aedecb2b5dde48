"""A process whose memory is watched goes on as if nothing had been, wherever it waits, and whoever is killed."""

# ruff: noqa: E501 (one program a line)

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from windtunnel.agents.sandbox.inspect import memory

pytestmark = pytest.mark.root

BLOCKED = {
    "nanosleep": "import time; time.sleep(0.4)",
    "select": "import select; select.select([], [], [], 0.4)",
    "poll": "import select; select.poll().poll(400)",
    "epoll": "import select; select.epoll().poll(0.4)",
    "futex": "import threading; threading.Event().wait(0.4)",
    "read": "import os; os.write(2, os.read(0, 1))",
    "wait": "import os, time\nif os.fork(): os.wait()\nelse: time.sleep(0.4)",
    "threads": "import threading, time\nt = [threading.Thread(target=time.sleep, args=(0.4,)) for _ in range(8)]\n[x.start() for x in t]; [x.join() for x in t]",
    "sigsuspend": "import signal\nsignal.signal(14, lambda *_: None); signal.setitimer(0, 0.4); signal.pause()",
    "busy": "import time\nend = time.monotonic() + 0.4\nwhile time.monotonic() < end: pass",
}  # fmt: skip


@pytest.fixture
def victim(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[bytes]]:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    if memory.missing():
        pytest.skip(memory.missing())
    code = f"print(flush=True)\n{BLOCKED[request.param]}\nraise SystemExit(7)"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdin is not None
    process.stdout.readline()
    yield process
    process.kill()
    process.wait()
    process.stdin.close()
    process.stdout.close()


@pytest.mark.parametrize("victim", BLOCKED, indirect=True)
def test_a_process_goes_on_as_if_nothing_had_been(victim: subprocess.Popen[bytes]) -> None:
    assert victim.stdin is not None
    tracker = memory.Tracker(victim.pid)
    listed = subprocess.run(["ls", "-l", f"/proc/{victim.pid}/fd"], capture_output=True, text=True).stdout
    assert "pipe:" in listed and "userfaultfd" not in listed, "nothing stays in it"
    assert "TracerPid:\t0" in Path(f"/proc/{victim.pid}/status").read_text()
    tracker.reset()
    tracker.written()
    victim.stdin.write(b"x")
    victim.stdin.flush()
    assert victim.wait(60) == 7
    tracker.close()


KILLED = """
import os, sys, time
from windtunnel.agents.sandbox.inspect import memory
from windtunnel.linux import inject
real = inject.Stopped.registers
def stuck(self):
    print("stopped", flush=True); time.sleep(1000)
inject.Stopped.registers = stuck
memory.userfaultfd_of(int(sys.argv[1]))
"""


@pytest.mark.parametrize("victim", ["read"], indirect=True)
def test_a_killed_tracker_leaves_no_process_stopped(victim: subprocess.Popen[bytes]) -> None:
    tracer = subprocess.Popen([sys.executable, "-c", KILLED, str(victim.pid)], stdout=subprocess.PIPE)
    assert tracer.stdout is not None and tracer.stdout.readline() == b"stopped\n"
    assert b") t " in Path(f"/proc/{victim.pid}/stat").read_bytes()
    tracer.send_signal(signal.SIGKILL)
    tracer.wait()
    tracer.stdout.close()
    assert victim.stdin is not None
    victim.stdin.write(b"x")
    victim.stdin.flush()
    assert victim.wait(60) == 7
