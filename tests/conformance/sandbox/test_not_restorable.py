"""What no restore brings back is refused at the checkpoint by name, and what runs goes on; what looks like it
and does come back is not refused."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from windtunnel.agents.sandbox.errors import IncompleteError
from windtunnel.agents.sandbox.model import SandboxLimits, SandboxSpec

pytestmark = [
    pytest.mark.root,
    pytest.mark.xdist_group("not-restorable"),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs a C compiler"),
]

FOLDER = Path(__file__).parent / "c"
TCP_FULL = """
import socket, time
listening = socket.create_server(("127.0.0.1", 0))
ends = [socket.create_connection(listening.getsockname()), listening.accept()[0]]
for end in ends:
    end.setblocking(False)
    try:
        while True: end.send(bytes(65536))
    except BlockingIOError: pass
open("/workspace/ready", "w").close(); time.sleep(1000)
"""
SQLITE = """
import sqlite3, time
known = sqlite3.connect("/workspace/a.db", isolation_level=None)
known.execute("create table rows (value)")
known.execute("begin immediate"); known.execute("insert into rows values (1)")
open("/workspace/ready", "w").close(); time.sleep(1000)
"""
UNTIL = "until [ -e /workspace/ready ]; do sleep 0.02; done; rm /workspace/ready"


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = tmp_path_factory.mktemp("programs")
    for source in FOLDER.glob("*.c"):
        command = ["gcc", "-O2", "-static", "-pthread", "-o", built / source.stem, source]
        subprocess.run(command, check=True)
    return built


@pytest.fixture
def box(host: Any, programs: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    limits = SandboxLimits(pids=getattr(request, "param", 512))
    sandbox = host.create(SandboxSpec("not-restorable", limits=limits))
    for program in programs.iterdir():
        sandbox.put(f"/opt/{program.name}", program.read_bytes())
    sandbox.put("/opt/tcp.py", TCP_FULL.encode())
    sandbox.put("/opt/sqlite.py", SQLITE.encode())
    sandbox.run("chmod 755 /opt/*; cd /workspace")
    yield sandbox
    host.remove(sandbox.name)


REFUSED = {
    "deleted folder made anew": (
        "mkdir dist; (cd dist; touch /workspace/ready; exec sleep 1000) & "
        f"{UNTIL}; rm -rf dist; mkdir dist; touch dist/kept",
        "/workspace/dist, and another one has its name",
    ),
    "two deleted folders of one name": (
        "for i in 1 2; do mkdir dist; (cd dist; touch /workspace/ready; exec sleep 1000) & "
        f"{UNTIL}; rm -rf dist; done",
        "/workspace/dist, and another one has its name",
    ),
    "program in memory": (
        f"(/opt/inmemory /opt/waits &); {UNTIL}",
        "runs from a file in memory",
    ),
    "full connection": (f"(python3 /opt/tcp.py &); {UNTIL}", "a connection whose other end is full"),
    "SQLite transaction": (f"(python3 /opt/sqlite.py &); {UNTIL}", "as SQLite does"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_by_name_and_goes_on(box: Any, case: str) -> None:
    command, why = REFUSED[case]
    box.run(command)
    machine = box.machine()
    with pytest.raises(IncompleteError, match="; `allow_less` takes it as it is") as less:
        box.checkpoint(full=True)
    assert any(why in lack.why for lack in less.value.lacks), less.value.lacks
    kept = less.value.manifest
    assert kept is not None
    with pytest.raises(IncompleteError):
        box.restore(kept.id)
    assert box.machine() is machine and box.run("echo on").text.strip() == "on"


@pytest.mark.parametrize("box", [40], indirect=True)
def test_a_sandbox_at_its_limit_of_processes_comes_back(box: Any) -> None:
    box.run("for i in $(seq 200); do sleep 1000 & done 2>/dev/null; true")
    count = len(box.machine().cgroup.pids())
    kept = box.checkpoint(full=True)
    assert len(box.machine().cgroup.pids()) == count >= 38
    box.restore(kept.id)
    assert len(box.machine().cgroup.pids()) == count
    assert (
        "Resource temporarily unavailable" in box.run("(for i in 1 2 3; do sleep 9 & done)").stderr.decode()
    )


@pytest.mark.parametrize("thread", ["first", "other"])
def test_a_timer_that_notifies_one_thread_goes_on(box: Any, thread: str) -> None:
    box.run(f"(/opt/notified {thread} > /workspace/count &); {UNTIL}")
    box.restore(box.checkpoint(full=True).id)
    assert box.run(f"{UNTIL}; {UNTIL}; echo on").text.strip() == "on"


def test_semaphores_without_undo_are_not_refused_after_a_restore(box: Any) -> None:
    box.run(f"(/opt/shared memory &); {UNTIL}")
    box.restore(box.checkpoint(full=True).id)
    box.run(f"(/opt/shared semaphore &); {UNTIL}")
    assert box.checkpoint(full=True).lacks == ()
    box.run(f"(/opt/shared undo &); {UNTIL}")
    with pytest.raises(IncompleteError, match="SEM_UNDO"):
        box.checkpoint(full=True)
