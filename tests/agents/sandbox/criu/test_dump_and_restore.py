"""What comes back, and what is left behind when something goes wrong."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_box import TinyBox, shell

from support.waiting import until
from windtunnel.agents.sandbox import criu as sandbox_criu
from windtunnel.agents.sandbox.criu import Criu
from windtunnel.agents.sandbox.errors import CriuError

pytestmark = pytest.mark.root

SHELL = """
X=42; cd /workspace; mkfifo in
sleep 1000 &
exec 3<>in
while read -r line <&3; do eval "$line"; done
"""

# two processes, one with three threads, each counting into its place of a file of fixed length; 8 MB of
# memory that must keep its digest
COUNTERS = """
import os, threading, time, hashlib
data = bytearray(os.urandom(8 << 20)); digest = hashlib.sha1(data).hexdigest()
file = os.open('/workspace/count', os.O_CREAT | os.O_RDWR)
os.pwrite(file, b'000000000 ' * 4, 0)
def count(place):
    number = 0
    while True:
        number += 1
        assert sum(range(200)) == 19900
        if place == 0 and number % 50 == 0:
            assert hashlib.sha1(data).hexdigest() == digest
        os.pwrite(file, b'%09d' % number, 10 * place)
        time.sleep(0.001)
if os.fork() == 0:
    count(3)
for place in (1, 2):
    threading.Thread(target=count, args=(place,), daemon=True).start()
count(0)
"""


def counters(box: TinyBox) -> Callable[[], None]:
    """Start COUNTERS; the answer waits until each of them has moved on."""
    box.path("/workspace/counters.py").write_text(COUNTERS)
    box.start("/usr/bin/python3", "/workspace/counters.py")
    file = box.path("/workspace/count")
    until(lambda: file.exists() and len(file.read_text().split()) == 4, "counters")

    def moving() -> None:
        seen = file.read_text().split()
        until(lambda: all(a != b for a, b in zip(file.read_text().split(), seen, strict=True)), "progress")

    moving()
    return moving


def test_a_shell_comes_back_with_its_state_born_in_its_cgroup(
    box: TinyBox, criu: Criu, tmp_path: Path
) -> None:
    box.start("/bin/sh", "-c", SHELL)
    until(lambda: len(box.pids()) == 2 and box.path("/workspace/in").exists(), "shell")
    box.freeze(True)
    criu.dump(box.pid, tmp_path / "images", box.externals)
    assert (box.cgroup / "cgroup.freeze").read_text() == "1\n"
    box.freeze(False)
    before = {file.name: file.read_bytes() for file in (tmp_path / "images").iterdir()}
    for _ in range(2):
        box.kill()
        box.remount()
        box.pid = criu.restore(tmp_path / "images", box.externals)
        assert len(box.pids()) == 2
        assert box.pid in box.pids()
        box.path("/workspace/in").open("w").write("kill -0 $! && echo $X $PWD > out\n")
        until(lambda: box.path("/workspace/out").exists(), "answer")
        until(lambda: box.path("/workspace/out").read_text() == "42 /workspace\n", "state of the shell")
        box.path("/workspace/out").unlink()
    # a restore writes nothing into the images: many may read them at once
    assert {file.name: file.read_bytes() for file in (tmp_path / "images").iterdir()} == before


def test_a_dump_that_is_killed_leaves_the_processes_as_they_were(
    box: TinyBox, criu: Criu, tmp_path: Path
) -> None:
    """CRIU's code inside the processes puts them back when CRIU dies, at whatever point that is."""
    moving = counters(box)
    pids = box.pids()
    chance = random.Random(20)
    killed = 0
    for turn in range(12):
        frozen = bool(turn % 2)
        box.freeze(frozen)
        try:
            criu.dump(box.pid, tmp_path / "cut", box.externals, timeout=chance.uniform(0.005, 0.08))
        except CriuError as failed:
            assert "stopped" in str(failed)
            killed += 1
            assert not (tmp_path / "cut").exists()
        else:
            for file in (tmp_path / "cut").iterdir():
                file.unlink()
            (tmp_path / "cut").rmdir()
        assert (box.cgroup / "cgroup.freeze").read_text() == f"{int(frozen)}\n"
        box.freeze(False)
        moving()
        assert box.pids() == pids
    assert killed
    box.freeze(True)
    criu.dump(box.pid, tmp_path / "whole", box.externals)
    box.freeze(False)
    moving()
    box.kill()
    box.remount()
    box.pid = criu.restore(tmp_path / "whole", box.externals)
    moving()


def test_a_restore_that_fails_or_is_cut_leaves_no_process(box: TinyBox, criu: Criu, tmp_path: Path) -> None:
    counters(box)
    box.freeze(True)
    criu.dump(box.pid, tmp_path / "images", box.externals)
    box.kill()
    box.remount()
    chance = random.Random(7)
    for _ in range(5):
        with pytest.raises(CriuError, match="stopped"):
            criu.restore(tmp_path / "images", box.externals, timeout=chance.uniform(0.004, 0.02))
        assert not box.pids()
    (tmp_path / "images" / "core-1.img").write_bytes(b"nonsense")
    with pytest.raises(CriuError, match=r"process restore: CRIU failed: .*core-1\.img"):
        criu.restore(tmp_path / "images", box.externals)
    assert not box.pids()


@pytest.mark.parametrize(
    "change",
    [lambda file: file.unlink(), lambda file: file.write_text("longer than it was")],
    ids=["missing", "other size"],
)
def test_files_that_do_not_fit_are_named(
    change: Callable[[Path], None], box: TinyBox, criu: Criu, tmp_path: Path
) -> None:
    held = box.path("/workspace/open")
    held.write_text("seven")
    box.start("/bin/sh", "-c", "exec 5</workspace/open; >/workspace/ready; exec sleep 1000")
    until(box.path("/workspace/ready").exists, "start")
    criu.dump(box.pid, tmp_path / "images", box.externals)
    box.kill()
    box.remount()
    change(held)
    with pytest.raises(CriuError, match="workspace/open is not as it was at the checkpoint"):
        criu.restore(tmp_path / "images", box.externals)
    assert not box.pids()


TALK = """
import socket, threading, time, os
listening = socket.socket()
listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listening.bind(('127.0.0.1', 5000)); listening.listen()
near = socket.create_connection(('127.0.0.1', 5000)); far, _ = listening.accept()
def echo():
    while data := far.recv(100): far.sendall(data)
threading.Thread(target=echo, daemon=True).start()
outside = socket.create_connection(('127.0.0.1', 7000))
file = os.open('/workspace/said', os.O_CREAT | os.O_WRONLY | os.O_APPEND)
def wait():
    try: word = repr(outside.recv(1))
    except OSError as failed: word = type(failed).__name__
    os.write(file, word.encode())
threading.Thread(target=wait, daemon=True).start()
count = os.open('/workspace/count', os.O_CREAT | os.O_RDWR)
number = 0
while True:
    near.sendall(b'x'); assert near.recv(1) == b'x'
    number += 1; os.pwrite(count, b'%09d' % number, 0); time.sleep(0.001)
"""


def test_connections_inside_go_on_and_lost_ones_end(box: TinyBox, criu: Criu, tmp_path: Path) -> None:
    server = (
        "import socket; s = socket.socket(); s.bind(('127.0.0.1', 7000)); s.listen(); print(flush=True); "
        "kept = [s.accept(), s.accept()]"
    )
    netns = f"--net={box.externals.netns}"
    with subprocess.Popen(["nsenter", netns, "python3", "-c", server], stdout=subprocess.PIPE) as outside:
        try:
            assert outside.stdout is not None
            outside.stdout.readline()
            box.path("/workspace/talk.py").write_text(TALK)
            box.start("/usr/bin/python3", "/workspace/talk.py")
            count, said = box.path("/workspace/count"), box.path("/workspace/said")
            until(lambda: count.exists() and count.read_text() > "000000003", "talk")
            box.freeze(True)
            criu.dump(box.pid, tmp_path / "images", box.externals)
            box.freeze(False)
            at_dump = count.read_text()
            until(lambda: count.read_text() != at_dump, "progress after the dump")
            assert said.read_text() == ""
            box.kill()
            box.remount()
            box.pid = criu.restore(tmp_path / "images", box.externals)
            at_restore = count.read_text()
            until(lambda: count.read_text() != at_restore, "progress after the restore")
            until(said.read_text, "end of the lost connection")
            assert said.read_text() in ("ConnectionAbortedError", "ConnectionResetError", "b''")
        finally:
            outside.kill()


def test_an_address_that_is_gone_closes_the_connection_alone(
    box: TinyBox, criu: Criu, tmp_path: Path
) -> None:
    netns = box.externals.netns
    shell('nsenter --net="$1" ip addr add 10.9.9.1/32 dev lo', netns)
    program = """
import os, socket, time
server = socket.create_server(('10.9.9.1', 7000))
near = socket.create_connection(('10.9.9.1', 7000)); far, _ = server.accept(); server.close()
file = os.open('/workspace/said', os.O_CREAT | os.O_WRONLY | os.O_APPEND); os.write(file, b'up')
try: os.write(file, repr(near.recv(1)).encode())
except OSError as failed: os.write(file, type(failed).__name__.encode())
time.sleep(1000)
"""
    box.path("/workspace/program.py").write_text(program)
    box.start("/usr/bin/python3", "/workspace/program.py")
    said = box.path("/workspace/said")
    until(lambda: said.exists() and said.read_text() == "up", "connection")
    criu.dump(box.pid, tmp_path / "images", box.externals)
    box.kill()
    said.write_text("")
    box.remount()
    shell('umount -l "$1"; unshare --net="$1" ip link set lo up', netns)
    box.pid = criu.restore(tmp_path / "images", box.externals)
    until(said.read_text, "end of the connection")
    assert box.pid in box.pids()


def test_the_kernel_cache_is_ours_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    shared, work = tmp_path / "shared", tmp_path / "work"
    shared.mkdir()
    work.mkdir()
    monkeypatch.setattr(sandbox_criu, "SHARED_MEMORY", shared)
    monkeypatch.setattr(sandbox_criu, "is_tmpfs", lambda path: path == str(shared))
    for program in ("one", "other"):
        (tmp_path / program).write_text("#!/bin/sh\n> /run/$(basename $0)\n")
        (tmp_path / program).chmod(0o755)
        assert sandbox_criu.run(tmp_path / program, ["check"], work, timeout=60) == 0
    made = sandbox_criu.kernel_cache()
    assert made is not None and list(shared.iterdir()) == [made]
    assert sorted(file.name for file in made.iterdir()) == ["one", "other"]
    shutil.rmtree(made)
    made.mkdir(mode=0o777)
    made.chmod(0o777)
    assert sandbox_criu.kernel_cache() is None
    made.rmdir()
    made.symlink_to(tmp_path)
    assert sandbox_criu.kernel_cache() is None
    monkeypatch.setattr(sandbox_criu, "is_tmpfs", lambda path: True)
    assert sandbox_criu.kernel_cache() is None


def test_nothing_restored_runs_before_it_was_looked_at(box: TinyBox, criu: Criu, tmp_path: Path) -> None:
    moving = counters(box)
    criu.dump(box.pid, tmp_path / "images", box.externals)
    file = box.path("/workspace/count")
    for _ in range(2):
        box.kill()
        box.remount()
        file.write_bytes(b"untouched " * 4)
        seen = []

        def look(pid: int, seen: list[object] = seen) -> None:
            assert "frozen 1" in (box.cgroup / "cgroup.events").read_text()
            assert pid in box.pids()
            assert len(box.pids()) == 2
            seen.append(file.read_bytes())

        box.pid = criu.restore(tmp_path / "images", box.externals, meanwhile=look)
        assert seen == [b"untouched " * 4]
        moving()
    box.kill()
    box.remount()

    def refuse(_: int) -> None:
        raise CriuError("not as it was")

    with pytest.raises(CriuError, match="not as it was"):
        criu.restore(tmp_path / "images", box.externals, meanwhile=refuse)
    assert not box.pids()
    assert (box.cgroup / "cgroup.freeze").read_text() == "0\n"
    box.remount()
    seen = []
    # who wanted it has ended meanwhile
    with pytest.raises(CriuError):
        criu.restore(tmp_path / "images", box.externals, meanwhile=seen.append, wanted=tmp_path / "gone")
    assert not seen and not box.pids()
