"""Real processes that cannot be dumped: each is named with what it holds, and runs on."""

from __future__ import annotations

import contextlib
import socket
import sys
from pathlib import Path

import pytest
from tiny_box import TinyBox

from support.waiting import until
from windtunnel.agents.sandbox.criu import Criu
from windtunnel.agents.sandbox.errors import CriuError
from windtunnel.linux.processes import state

pytestmark = pytest.mark.root

HEAD = """
import ctypes, mmap, os, socket, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def must(value):
    if value < 0: open('/workspace/impossible', 'w').write(os.strerror(ctypes.get_errno())); sys.exit()
    return value
try:
"""
TAIL = """
except (OSError, AttributeError) as failed:
    open('/workspace/impossible', 'w').write(str(failed)); sys.exit()
open('/workspace/ready', 'w').close()
time.sleep(1000)
"""
UNSHARED_CHILD = """
    child = os.fork()
    if child == 0:
        must(libc.unshare({flag})); open('/workspace/inner', 'w').close(); time.sleep(1000)
    while not {{"inner", "impossible"}} & set(os.listdir('/workspace')): time.sleep(0.01)
"""
CASES = {
    "deleted big file": (
        "file = open('/workspace/big', 'wb'); file.write(bytes(70 << 20)); file.flush(); "
        "os.unlink(file.name)",
        "holds the deleted file /workspace/big open",
    ),
    "deleted name": (
        "open('/workspace/a', 'w'); os.link('/workspace/a', '/workspace/b'); held = open('/workspace/a'); "
        "os.unlink('/workspace/a')",
        "holds /workspace/a open, which was deleted while another name",
    ),
    "vsock": ("held = socket.socket(40, 1, 0)", "Unknown socket collected .family 40"),
    "userfaultfd": (
        "must(libc.syscall(323, 0))",
        "holds a file of a kind that CRIU cannot keep .*userfaultfd",
    ),
    "io_uring": (
        "room = ctypes.create_string_buffer(120); must(libc.syscall(425, 8, room))",
        "send_fds failed",
    ),
    "perf": (
        "what = ctypes.create_string_buffer(struct.pack('IIQ', 1, 112, 0) + bytes(112)); "
        "must(libc.syscall(298, what, 0, -1, -1, 0))",
        "holds a file of a kind that CRIU cannot keep .*perf_event",
    ),
    "secret memory": (
        "file = must(libc.syscall(447, 0)); os.ftruncate(file, 4096); held = mmap.mmap(file, 4096)",
        "secretmem",
    ),
    "bpf map": (
        "what = ctypes.create_string_buffer(struct.pack('IIIII', 27, 0, 0, 4096, 0) + bytes(108)); "
        "must(libc.syscall(321, 0, what, 128))",
        "(?i)bpf.?map",
    ),
    "landlock": (
        "rules = ctypes.create_string_buffer(struct.pack('Q', 1)); must(libc.syscall(444, rules, 8, 0))",
        "holds a file of a kind that CRIU cannot keep .*landlock",
    ),
    "message queue": (
        "must(libc.mq_open(b'/queue', 0o102, 0o600, None))",
        "holds /queue open on a file system that no mount inside shows",
    ),
    "kvm": (
        "os.mknod('/workspace/kvm', 0o20666, os.makedev(10, 232)); os.open('/workspace/kvm', 2)",
        "holds a file of a kind that CRIU cannot keep .*chr 10:232",
    ),
    "user namespace": (
        UNSHARED_CHILD.format(flag="0x10000000").lstrip(),
        "Can't dump nested user namespace",
    ),
    "time namespace": (
        "must(libc.unshare(0x80)); child = os.fork()\n    if child == 0: time.sleep(1000)",
        "Can't dump nested time namespace",
    ),
    "debugger": (
        "child = os.fork()\n    if child == 0: libc.ptrace(0, 0, 0, 0); os.kill(os.getpid(), 19); "
        "time.sleep(1000)\n    os.waitpid(child, os.WUNTRACED)",
        r"is being traced by /usr/bin/python3 /workspace/program.py \(process 1 inside\); end the debugger",
    ),
}


@pytest.mark.skipif(sys.maxsize < 2**32, reason="numbers of system calls are those of x86-64")
@pytest.mark.parametrize("case", CASES)
def test_refusal_names_process_and_resource(case: str, box: TinyBox, criu: Criu, tmp_path: Path) -> None:
    code, sentence = CASES[case]
    box.path("/workspace/program.py").write_text(f"{HEAD}    {code}\n{TAIL}")
    box.start("/usr/bin/python3", "/workspace/program.py")
    ready, impossible = box.path("/workspace/ready"), box.path("/workspace/impossible")
    until(lambda: ready.exists() or impossible.exists(), case)
    if impossible.exists():
        pytest.skip(f"this kernel refuses it: {impossible.read_text()}")
    pids = box.pids()
    with pytest.raises(CriuError, match=sentence) as refused:
        criu.dump(box.pid, tmp_path / "images", box.externals, timeout=30)
    assert "/workspace/program.py (process " in str(refused.value)
    assert not (tmp_path / "images").exists()
    assert box.pids() == pids
    as_before = {"S", "t" if case == "debugger" else "S"}
    until(lambda: {state(pid) for pid in pids} <= as_before, "their sleep to go on")


@pytest.mark.parametrize("accepted", [True, False], ids=["accepted", "waiting"])
def test_a_socket_to_a_process_outside(
    accepted: bool, box: TinyBox, criu: Criu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.ExitStack() as stack, socket.socket(socket.AF_UNIX) as server:
        # a unix socket's path must be short, the temporary folder's may not be
        monkeypatch.chdir(box.path("/workspace"))
        server.bind("outside")
        server.listen()
        program = "import socket, time; s = socket.socket(socket.AF_UNIX); s.connect('/workspace/outside'); "
        box.start("/usr/bin/python3", "-c", program + "open('/workspace/ready', 'w'); time.sleep(1000)")
        until(box.path("/workspace/ready").exists, "connection")
        if accepted:
            stack.enter_context(server.accept()[0])
        with pytest.raises(CriuError, match="connected by a unix socket to a process outside the sandbox"):
            criu.dump(box.pid, tmp_path / "images", box.externals)
        assert box.pid in box.pids()
