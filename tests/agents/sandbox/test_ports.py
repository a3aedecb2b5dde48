"""Connections from and to the outside: a port's URL stays the same; what was connected comes back closed."""

from __future__ import annotations

import contextlib
import http.client
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from support.waiting import until
from windtunnel.agents.sandbox.host import SandboxHost
from windtunnel.agents.sandbox.model import SandboxSpec
from windtunnel.base.errors import UserError

pytestmark = pytest.mark.root
SERVE = (
    "mkdir -p /srv/page && echo %s > /srv/page/index.html && cd /srv/page && "
    "(python3 -m http.server 8000 --bind 127.0.0.1 >/dev/null 2>&1 &) && "
    "until (exec 3<>/dev/tcp/127.0.0.1/8000) 2>/dev/null; do :; done"
)


def page(url: str) -> str:
    with urlopen(url, timeout=60) as answer:
        return str(answer.read().decode().strip())


def test_a_url_survives_a_restore_and_a_fork_has_its_own(host: Any, make: Callable[..., Any]) -> None:
    box = make()
    assert box.run(SERVE % "first", timeout=60).exit_code == 0
    url = box.port(8000)
    assert page(url) == "first"
    box.checkpoint()
    box.run("echo second > /srv/page/index.html")
    assert page(url) == "second"
    box.restore()
    assert (box.port(8000), page(url)) == (url, "first")
    (fork,) = host.fork(box.name, 1)
    other = fork.port(8000)
    fork.run("echo third > /srv/page/index.html")
    assert other != url
    assert (page(other), page(url)) == ("third", "first")
    with contextlib.suppress(http.client.HTTPException, OSError):
        page(box.port(8001))
        pytest.fail("nobody listens there")
    with pytest.raises(UserError, match="port 0 is not accepted"):
        box.port(0)


def test_the_next_host_has_the_same_url(own_home: Path) -> None:
    with SandboxHost(own_home, pool_size=2 * 2**30) as host:
        box = host.create(SandboxSpec("served"))
        box.run(SERVE % "first", timeout=60)
        url = box.port(8000)
        assert page(url) == "first"
    with SandboxHost(own_home) as host:
        assert page(url) == "first"
        host.remove("served")
        with pytest.raises(OSError, match="refused"):
            page(url)


OUTSIDE = """python3 -c "
from http.client import HTTPConnection
way = HTTPConnection('127.0.0.1', 3128); way.set_tunnel('localhost', %d); way.connect()
plug = way.sock; open('/workspace/said', 'w').write('up')
try: said = repr(plug.recv(1))
except OSError as error: said = type(error).__name__
open('/workspace/said', 'w').write(said)
import time; time.sleep(1000)
" </dev/null >/dev/null 2>&1 & until [ -s /workspace/said ]; do sleep 0.01; done"""


def test_a_connection_to_the_outside_comes_back_closed(make: Callable[..., Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        box = make(network=f"egress:localhost:{port}")
        box.run(OUTSIDE % port, timeout=60)
        point = box.checkpoint(full=True).id
        assert box.get("/workspace/said") == b"up"
        box.restore(point)
        until(lambda: box.get("/workspace/said") not in (b"up", b""))
        assert box.get("/workspace/said") in (b"ConnectionAbortedError", b"ConnectionResetError", b"b''")
        assert "set_tunnel" in " ".join(box.info().processes), "it goes on"
