"""Network egress, from inside real sandboxes: what is listed is reached, by pip too, and nothing else is."""

from __future__ import annotations

import io
import socket
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import psutil
import pytest

from windtunnel.agents.sandbox.model import SandboxSpec

pytestmark = [pytest.mark.conformance, pytest.mark.root]
WHEEL = "little-1.0-py3-none-any.whl"


def wheel() -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as file:
        file.writestr("little.py", "WORD = 'installed'\n")
        info = "little-1.0.dist-info"
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: little\nVersion: 1.0\n")
        file.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        file.writestr(f"{info}/RECORD", "")
    return data.getvalue()


class Index(BaseHTTPRequestHandler):
    """A package index of one package."""

    def do_GET(self) -> None:
        page = f'<a href="/{WHEEL}">{WHEEL}</a>'.encode()
        body = wheel() if self.path.endswith(".whl") else page
        self.send_response(200)
        self.send_header("content-type", "application/octet-stream" if body[:2] == b"PK" else "text/html")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def index() -> Iterator[tuple[str, int]]:
    """A server of this host, on one of its addresses that is not its loopback's."""
    own = [
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == socket.AF_INET and not entry.address.startswith("127.")
    ]
    if not own:
        pytest.skip("this host has no address but its loopback's")
    with ThreadingHTTPServer((own[0], 0), Index) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield own[0], server.server_port
        server.shutdown()


def test_pip_installs_before_and_after_a_restore_and_in_a_fork(host: Any, index: tuple[str, int]) -> None:
    address, port = index
    box = host.create(SandboxSpec("out", image="host+python3-pip", network=f"egress:{address}:{port}"))
    install = (
        f"pip install --quiet --index-url http://{address}:{port}/simple --trusted-host {address} little && "
        "python3 -c 'import little; print(little.WORD)' && pip uninstall --quiet --yes little"
    )

    def installs(sandbox: Any) -> None:
        done = sandbox.run(install, timeout=120)
        assert done.stdout.strip() == b"installed", done.stderr

    installs(box)
    box.checkpoint()
    box.restore()
    installs(box)
    (fork,) = host.fork("out", 1)
    installs(fork)
    installs(box)
    assert f"allowed: {address}:{port}" in (host.home.box(fork.name) / "egress.log").read_text()
    for name in (fork.name, "out"):
        host.remove(name)


ATTACKS = """
import socket, sys
refused = lambda text: sys.stdout.write(text.split("\\r\\n")[0] + "\\n")
def ask(request):
    with socket.create_connection(("127.0.0.1", 3128), timeout=30) as plug:
        plug.sendall(request.encode())
        refused(plug.recv(4096).decode())
for where in ("127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "{address}", "0.0.0.0", "2130706433"):
    ask("CONNECT " + where + ":{port} HTTP/1.1\\r\\n\\r\\n")
    ask("CONNECT " + where + ":443 HTTP/1.1\\r\\n\\r\\n")
    ask("GET http://" + where + "/ HTTP/1.1\\r\\nhost: named.example\\r\\n\\r\\n")
ask("GET http://named.example@{address}:{port}/ HTTP/1.1\\r\\n\\r\\n")
# past the proxy there is nothing
for address in ("{address}", "192.0.2.1", "2600::"):
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as plug:
            plug.settimeout(5)
            plug.connect((address, {port}))
            print("REACHED", address)
    except OSError as error:
        print("403", error)
"""


def test_a_program_inside_reaches_nothing_that_is_not_listed(host: Any, index: tuple[str, int]) -> None:
    address, port = index
    box = host.create(SandboxSpec("kept-in", network="egress"))
    done = box.run(["python3", "-c", ATTACKS.replace("{address}", address).replace("{port}", str(port))])
    lines = done.stdout.decode().splitlines()
    assert len(lines) == 7 * 3 + 1 + 3, done
    assert all("403" in line or line.startswith("HTTP/1.1 400") for line in lines), lines
    log = (host.home.box("kept-in") / "egress.log").read_text()
    assert log.count("refused: ") == 22 and "allowed: " not in log
    host.remove("kept-in")
