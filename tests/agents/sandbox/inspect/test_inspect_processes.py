"""What the processes of a cell did: who started, who wrote memory, who received something."""

# ruff: noqa: E501 (one program a line)

from __future__ import annotations

import platform

import pytest

from agents.sandbox.inspect.inspect_cell import Cell
from support.waiting import until
from windtunnel.agents.sandbox.inspect import DiffInspector, Inspector, kernel, memory
from windtunnel.agents.sandbox.model import References, TurnClass
from windtunnel.agents.sandbox.policy.effects import class_of
from windtunnel.linux.processes import command_line, state
from windtunnel.linux.snapshot import read_snapshot

pytestmark = pytest.mark.root

SERVER = r"""
import os, sys
block = bytearray(400 * 4096)
for at in range(0, len(block), 4096): block[at] = 1
out = open("answer", "w"); out.write("ready\n"); out.close()
while True:
    with open("ask") as pipe: pages = int(pipe.readline())
    for at in range(pages): block[at * 4096] = 2
    out = open("answer", "w"); out.write("done\n"); out.close()
"""


@pytest.fixture
def tracked(inspector: Inspector) -> Inspector:
    reason = memory.missing()
    if reason:
        pytest.skip(reason)
    return inspector


def serve(cell: Cell) -> None:
    cell.run(f"mkfifo ask answer; cat > server.py <<'E'\n{SERVER}E\npython3 server.py & read x < answer")


def kept(cell: Cell, inspector: Inspector) -> None:
    inspector.arm(cell.name)
    cell.settled()
    inspector.rebase(cell.name, read_snapshot(cell.pids()))


def test_a_process_that_started_or_ended(cell: Cell, inspector: Inspector) -> None:
    cell.watch(inspector)
    cell.run("sleep 1000 & while ! grep -q sleep /proc/$!/comm; do :; done")
    assert cell.child(inspector.effects(cell.name), "sleep").started
    cell.settled()  # the shell answers before it waits again, and its way there counts
    inspector.rebase(cell.name, read_snapshot(cell.pids()))
    assert not inspector.effects(cell.name).processes
    cell.run("true; /bin/true; kill %1; wait")
    effects = inspector.effects(cell.name)
    assert cell.child(effects, "sleep").ended
    assert not any(process.started for process in effects.processes), "what came and went does not count"


CHANGES = (
    "prlimit --nofile=50:50 --pid $P",
    "renice -n 17 -p $P",
    "taskset -p 1 $P",
    "ionice -c 3 -p $P",
    "echo 500 > /proc/$P/oom_score_adj",
    "echo 70000 > /proc/$P/timerslack_ns",
)


@pytest.mark.parametrize("kind", ["ebpf", "comparison"])
def test_what_one_process_sets_for_another_is_told(kind: str, cell: Cell) -> None:
    """Though the other one does not run."""
    if kind == "ebpf" and (reason := kernel.missing()):
        pytest.skip(reason)
    images = kind == "comparison"
    inspector = DiffInspector(lambda _: [], images=images) if images else Inspector()
    cell.watch(inspector)
    cell.run("sleep 1000 & P=$!; while ! grep -q sleep /proc/$P/comm; do :; done")
    for change in CHANGES:
        cell.settled()
        inspector.rebase(cell.name, read_snapshot(cell.pids()))
        assert "failed" not in cell.run(f"{{ {change}; }} 2>&1 >/dev/null")
        effects = inspector.effects(cell.name)
        assert cell.child(effects, "sleep").settings_changed, change
        assert class_of(effects, References())[0] is TurnClass.FULL
    inspector.close()


def test_dirty_pages_are_counted_to_the_page(cell: Cell, tracked: Inspector) -> None:
    serve(cell)
    cell.watch(tracked)
    counts = []
    for pages in (0, 100, 350):
        kept(cell, tracked)
        assert not tracked.effects(cell.name).processes, "it sleeps"
        cell.run(f"echo {pages} > ask; read x < answer")
        cell.settled()
        server = cell.child(tracked.effects(cell.name), "python3")
        assert server.inputs and server.writes and server.dirty_pages is not None
        counts.append(server.dirty_pages)
    kept(cell, tracked)
    cell.run("echo 350 > ask; read x < answer")
    cell.settled()
    again = cell.child(tracked.effects(cell.name), "python3").dirty_pages
    assert again is not None
    # the interpreter itself writes a few pages in every round, about the same ones
    assert abs(counts[1] - counts[0] - 100) < 20 and abs(counts[2] - counts[0] - 350) < 20
    assert abs(again - counts[2]) < 20


def test_memory_is_unknown_without_a_tracker(cell: Cell, inspector: Inspector) -> None:
    serve(cell)
    cell.watch(inspector)
    cell.run("echo 1 > ask; read x < answer")
    assert cell.child(inspector.effects(cell.name), "python3").dirty_pages is None


def test_a_new_mapping_is_told(cell: Cell, tracked: Inspector) -> None:
    serve_program = "import mmap\nkeep=[]\n" + SERVER.replace(
        "for at in range(pages): block",
        "keep.append(mmap.mmap(-1, 9 << 20, flags=2)); keep[-1][0] = 1\n    for at in (): block",
    )
    cell.run(
        f"mkfifo ask answer; cat > server.py <<'E'\n{serve_program}E\npython3 server.py & read x < answer"
    )
    cell.watch(tracked)
    kept(cell, tracked)
    cell.run("echo 1 > ask; read x < answer")
    assert cell.child(tracked.effects(cell.name), "python3").new_mappings
    kept(cell, tracked)
    assert not tracked.effects(cell.name).processes


def test_descriptors_of_the_shell(cell: Cell, inspector: Inspector) -> None:
    cell.run("seq 100 > lines; exec 8<lines")
    cell.watch(inspector)
    cell.run("read x < lines; cat lines > /dev/null")
    assert not cell.child(inspector.effects(cell.name), "bash").descriptors_changed
    cell.run("read x <&8")
    shell = cell.child(inspector.effects(cell.name), "bash")
    assert shell.descriptors_changed and shell.shell, "its place in the file moved"
    inspector.rebase(cell.name, read_snapshot(cell.pids()))
    cell.run("exec 7<lines")
    assert cell.child(inspector.effects(cell.name), "bash").descriptors_changed


def test_a_signal_is_input(cell: Cell, inspector: Inspector) -> None:
    cell.run(
        "python3 -c \"import signal\nsignal.signal(10, lambda *_: None)\nopen('up','w')\nwhile True: signal.pause()\" & while ! [ -e up ]; do :; done"
    )
    cell.watch(inspector)
    pid = next(pid for pid in cell.pids() if command_line(pid).startswith("python3"))
    wait_asleep(pid)
    inspector.rebase(cell.name, read_snapshot(cell.pids()))
    cell.run(f"kill -USR1 {pid}")
    wait_asleep(pid)
    assert cell.child(inspector.effects(cell.name), "python3").inputs


def wait_asleep(pid: int) -> None:
    until(lambda: state(pid) == "S")


def test_doubts_in_words(cell: Cell, inspector: Inspector) -> None:
    cell.watch(inspector)
    cell.run(
        'python3 -c "import ctypes; ctypes.CDLL(None).shmget(0,4096,0o1600); s=ctypes.CDLL(None).shmat; s.restype=ctypes.c_long; i=ctypes.CDLL(None).shmget(0,64,0o1600); s(i,0,0); ctypes.CDLL(None).shmctl(i,0,0)"'
    )
    assert any("System V" in doubt.text for doubt in inspector.effects(cell.name).doubts)
    inspector.rebase(cell.name)
    assert inspector.effects(cell.name).doubts, "a snapshot of files does not cover it"
    inspector.rebase(cell.name, read_snapshot(cell.pids()))
    assert not inspector.effects(cell.name).doubts


FOREIGN = r"""
import ctypes, mmap
code = mmap.mmap(-1, 4096, prot=7)
code.write(bytes.fromhex("53b814000000cd805bc3"))  # push rbx; mov eax, 20; int 0x80; pop rbx; ret
ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))()
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the other system call table of x86-64")
def test_system_calls_of_another_table_are_a_doubt(cell: Cell, inspector: Inspector) -> None:
    cell.run(f"cat > foreign.py <<'E'\n{FOREIGN}E")
    cell.watch(inspector)
    cell.run("python3 foreign.py")
    assert any("32-bit" in doubt.text for doubt in inspector.effects(cell.name).doubts)


def test_references(cell: Cell, inspector: Inspector) -> None:
    cell.run(
        "mkdir d; echo x > d/open; echo x > d/lost; cd d; (exec sleep 1000 < open 9< lost) & cd ..; while ! grep -q sleep /proc/$!/comm; do :; done; rm d/lost"
    )
    cell.watch(inspector)
    references = inspector.references(cell.name, read_snapshot(cell.pids()))
    assert {"/workspace/d/open", "/workspace/d/lost", "/workspace/d", "/usr/bin/sleep"} <= references.paths
    assert "/usr/bin/bash" in references.mapped and references.mapped <= references.paths
    assert not any(path.startswith(("/dev", "/proc", str(cell.root))) for path in references.paths)
