"""Ways out of a sandbox, on sockets of this machine."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from windtunnel.agents.sandbox.proxy import LoopThread
from windtunnel.agents.sandbox.proxy.egress import Egress


@pytest.fixture
def way(tmp_path: Path) -> Iterator[Callable[[str], tuple[int, int]]]:
    """Starts a way out; the ports of its proxy and of its name server."""
    loop, ways = LoopThread("egress"), []

    def start(network: str) -> tuple[int, int]:
        way = Egress(network, tmp_path / "egress.log")
        proxy = socket.create_server(("127.0.0.1", 0))
        names = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        names.bind(("127.0.0.1", 0))
        loop.call(way.listen(proxy, names))
        ways.append(way)
        return proxy.getsockname()[1], names.getsockname()[1]

    yield start
    for way in ways:
        loop.call(way.close())
    loop.close()


def asked(port: int, request: bytes) -> bytes:
    """All that is answered to these bytes, until the connection is closed."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as plug:
        plug.sendall(request)
        plug.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: plug.recv(65536), b""))
