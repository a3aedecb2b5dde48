"""Attempts to get out of a sandbox, made from inside it as its root user: conformance has the whole list."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from windtunnel.agents.sandbox.machine import Machine, addresses, socket_inside

pytestmark = pytest.mark.root

PRELUDE = """
import ctypes, errno, os, socket, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    arguments = [ctypes.c_char_p(a) if isinstance(a, bytes) else ctypes.c_long(a) for a in arguments]
    done = libc.syscall(ctypes.c_long(number), *arguments)
    return errno.errorcode[ctypes.get_errno()] if done < 0 else 'done'
def attempt(work):
    try:
        return work() or 'done'
    except OSError as error:
        return errno.errorcode[error.errno]
"""
X86 = {
    "mount": (165, b"none", b"/mnt", b"tmpfs", 0, 0),
    "umount": (166, b"/proc/kcore", 2),
    "move_mount": (429, -1, b"", -1, b"", 0),
    "open_tree": (428, -100, b"/", 1),
    "fsopen": (430, b"tmpfs", 0),
    "pivot_root": (155, b"/", b"/"),
    "unshare user": (272, 0x10000000),
    "unshare mount": (272, 0x20000),
    "clone user": (56, 0x10000011, 0, 0, 0, 0),
    "clone mount": (56, 0x20011, 0, 0, 0, 0),
    "setns": (308, 0, 0),
    "load module": (313, 0, b"", 0),
    "init_module": (175, b"", 0, b""),
    "delete_module": (176, b"loop", 0),
    "kexec_load": (246, 0, 0, 0, 0),
    "bpf": (321, 0, 0, 0),
    "perf_event_open": (298, 0, 0, -1, -1, 0),
    "io_uring_setup": (425, 1, 0),
    "userfaultfd": (323, 0),
    "keyctl": (250, 0, -3),
    "add_key": (248, b"user", b"x", b"y", 1, -3),
    "open_by_handle_at": (304, 0, 0, 0),
    "name_to_handle_at": (303, -100, b"/", 0, 0, 0),
    "reboot": (169, 0xFEE1DEAD - (1 << 32), 672274793, 0, 0),
    "swapon": (167, b"/tmp/x", 0),
    "settimeofday": (164, 0, 0),
    "clock_settime": (227, 0, 0),
    "syslog": (103, 3, 0, 0),
    "quotactl": (179, 0, 0, 0, 0),
    "fanotify_init": (300, 0, 0),
    "ioperm": (173, 0x80, 1, 1),
    "iopl": (172, 3),
    "acct": (163, b"/tmp/x"),
    "vsock": (41, 40, 1, 0),
}


def inside(box: Machine, code: str) -> str:
    box.put("/tmp/attempt.py", (PRELUDE + code).encode())
    result = box.run("python3 /tmp/attempt.py", timeout=60)
    assert result.stderr == b"", result
    return result.text.strip()


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="needs the call numbers of x86-64")
def test_refused_system_calls(box: Machine) -> None:
    said = inside(box, f"for name, a in {X86!r}.items(): print(name, call(*a), sep='=')")
    found = dict(line.split("=") for line in said.splitlines())
    assert found == dict.fromkeys(X86, "EPERM")
    assert inside(box, "print(call(435, b'x' * 88, 88))") == "ENOSYS", "clone3"
    assert inside(box, "print(call(0x40000000 + 39))") == "ENOSYS", "x32"


def test_clone_of_plain_processes_and_threads_works(box: Machine) -> None:
    code = (
        "import threading as t, subprocess; t = t.Thread(target=lambda: print('thread')); t.start(); t.join()"
    )
    assert inside(box, code + "\nprint(subprocess.run(['true']).returncode)") == "thread\n0"


def test_no_right_comes_back(box: Machine) -> None:
    code = """
lines = open('/proc/self/status').read().splitlines()
status = dict(line.split(':\\t', 1) for line in lines if ':\\t' in line)
print(status['CapEff'], status['CapBnd'], status['CapAmb'], status['NoNewPrivs'], status['Seccomp'])
import subprocess, shutil
os.chmod(shutil.copy('/usr/bin/cat', '/tmp/suid'), 0o4755)
print(subprocess.run(['setsid', '/tmp/suid', '/proc/self/status'], capture_output=True, text=True, user=65534
    ).stdout.split('CapEff:')[1].split()[0])
print(open('/proc/self/oom_score_adj').read().strip(), attempt(lambda: os.nice(-5) and None))
"""
    said = inside(box, code).splitlines()
    # chown, dac_override, fowner, fsetid, kill, setgid, setuid, setpcap, net_bind_service, sys_chroot,
    # audit_write, setfcap
    assert said[0] == "00000000a00405fb 00000000a00405fb 0000000000000000 1 2"
    assert said[1] == "0000000000000000"
    assert said[2].endswith("EACCES") or said[2].endswith("EPERM")


@pytest.fixture
def host_services(tmp_path: Path) -> Iterator[tuple[int, str]]:
    """A TCP port on the host's loopback and an abstract Unix socket."""
    tcp = socket.create_server(("127.0.0.1", 0))
    name = f"windtunnel-{tmp_path}"[:100]
    unix = socket.socket(socket.AF_UNIX)
    unix.bind("\0" + name)
    unix.listen()
    yield tcp.getsockname()[1], name
    tcp.close()
    unix.close()


def test_host_services_are_out_of_reach(box: Machine, host_services: tuple[int, str]) -> None:
    port, name = host_services
    code = f"""
print(attempt(lambda: socket.create_connection(('127.0.0.1', {port}), 5) and None))
print(attempt(lambda: socket.socket(socket.AF_UNIX).connect('\\0' + {name!r})))
print(attempt(lambda: socket.create_connection(('192.0.2.1', 80), 5) and None))
print(attempt(lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1) and None))
print(attempt(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW) and None))
print([name for _, name in socket.if_nameindex()])
"""
    assert inside(box, code).splitlines() == [
        "ECONNREFUSED", "ECONNREFUSED", "ENETUNREACH", "EPERM", "EPERM", "['lo']"
    ]  # fmt: skip


def test_a_listener_inside_belongs_to_the_host(start: Callable[..., Machine]) -> None:
    box = start(network="proxy")
    with socket_inside(box.externals.netns, "listen on", 8400) as listener:
        served = threading.Thread(target=lambda: listener.accept()[0].sendall(b"from the host"))
        served.start()
        code = "print(socket.create_connection(('127.0.0.1', 8400), 10).recv(100).decode())"
        assert inside(box, code) == "from the host"
        served.join()
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.1", 8400), 1)


def test_the_host_network_reaches_the_host_and_nothing_else(start: Callable[..., Machine]) -> None:
    one, two = start("one", network="host"), start("two", network="host")
    pairs = [addresses(box.home, name) for box, name in ((one, "one"), (two, "two"))]
    assert pairs[0] and pairs[1] and len({*pairs[0], *pairs[1]}) == 4
    with socket.create_server((pairs[0][0], 0)) as server:
        server.settimeout(10)
        port = server.getsockname()[1]
        code = f"""
print(socket.create_connection(({pairs[0][0]!r}, {port}), 10).getsockname()[0])
for target in (({pairs[1][1]!r}, 80), ('192.0.2.1', 80)):
    print(attempt(lambda: socket.create_connection(target, 1) and None))
"""
        assert inside(one, code).splitlines() == [pairs[0][1], "ENETUNREACH", "ENETUNREACH"]
    assert Machine.prepare(one.home, one.spec, one.externals.root) == one.externals, "prepare changes nothing"
    assert addresses(one.home, "one") == pairs[0]
