"""What each network of a sandbox reaches; attempts to get out are in conformance."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import pytest

from windtunnel.agents.sandbox.machine import Machine
from windtunnel.agents.sandbox.machine.walls import addresses, socket_inside

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


def inside(box: Machine, code: str) -> str:
    box.put("/tmp/attempt.py", (PRELUDE + code).encode())
    result = box.run("python3 /tmp/attempt.py", timeout=60)
    assert result.stderr == b"", result
    return result.text.strip()


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
