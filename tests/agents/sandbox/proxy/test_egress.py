"""What network egress lets out: its list, its proxy and its name server, on sockets of this machine."""

from __future__ import annotations

import http.client
import ipaddress
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from agents.sandbox.proxy.fake_model import FakeModel
from agents.sandbox.proxy.ways_out import asked
from windtunnel.agents.sandbox.proxy.egress import is_listed, parse_allowed, reachable
from windtunnel.base.errors import UserError

OWN = {ipaddress.ip_address("9.9.9.9")}


@pytest.mark.parametrize(
    ("network", "host", "port", "listed"),
    [
        ("egress", "pypi.org", 443, True),
        ("egress", "pypi.org", 25, False),
        ("egress:pypi.org,*.pythonhosted.org", "pypi.org", 80, True),
        ("egress:pypi.org,*.pythonhosted.org", "files.pythonhosted.org", 443, True),
        ("egress:pypi.org,*.pythonhosted.org", "pythonhosted.org", 443, False),
        ("egress:pypi.org,*.pythonhosted.org", "evilpythonhosted.org", 443, False),
        ("egress:pypi.org,*.pythonhosted.org", "pypi.org.evil", 443, False),
        ("egress:GitHub.com:22", "github.com", 22, True),
        ("egress:github.com:22", "github.com", 443, False),
        ("egress:[::1]:80,10.0.0.1:8080", "::1", 80, True),
        ("egress:[::1]:80,10.0.0.1:8080", "10.0.0.1", 8080, True),
        ("egress:localhost:8000", "127.0.0.1", 8000, True),
    ],
)
def test_the_list(network: str, host: str, port: int, listed: bool) -> None:
    assert is_listed(parse_allowed(network), host, port) is listed


@pytest.mark.parametrize(
    "text", ["", "a b", "*", "*.", "a/b", "http://a", "a:0", "a:x", "a:70000", "-a", "é", "*a", "[::1"]
)
def test_an_entry_that_is_none(text: str) -> None:
    if text == "*":
        assert parse_allowed("egress:*") == parse_allowed("egress")
        return
    with pytest.raises(UserError, match="is not accepted"):
        parse_allowed(f"egress:{text}")


NOT_PUBLIC = [
    "127.0.0.1", "127.9.9.9", "0.0.0.0", "10.1.2.3", "172.31.0.1", "192.168.1.1", "169.254.169.254",
    "100.64.0.1", "198.18.0.1", "224.0.0.1", "255.255.255.255", "::", "::1", "64:ff9b::7f00:1",
    "2002:7f00:1::1", "fe80::1", "fd00::1", "ff02::1", "9.9.9.9",
]  # fmt: skip


@pytest.mark.parametrize("address", NOT_PUBLIC)
def test_what_is_not_public_is_reached_where_it_is_named(address: str) -> None:
    ip = ipaddress.ip_address(address)
    for network in ("egress", "egress:internal.example,*.example"):
        assert reachable(parse_allowed(network), [ip], 443, OWN) == []
    assert reachable(parse_allowed(f"egress:[{address}]:443"), [ip], 443, OWN) == [ip]
    assert reachable(parse_allowed(f"egress:[{address}]:443"), [ip], 22, OWN) == []


def test_public_addresses_are_reached() -> None:
    public = [ipaddress.ip_address(text) for text in ("8.8.8.8", "2606:4700::1111")]
    assert reachable(parse_allowed("egress"), public, 443, OWN) == public


def test_a_tunnel_and_a_plain_request_reach_a_host_that_is_named(
    way: Callable[[str], tuple[int, int]], model: FakeModel, tmp_path: Path
) -> None:
    port = model.server.server_port
    proxy, _ = way(f"egress:localhost:{port}")
    tunnel = http.client.HTTPConnection("127.0.0.1", proxy, timeout=60)
    tunnel.set_tunnel("localhost", port)
    tunnel.request("POST", "/v1/x", b"body")
    assert tunnel.getresponse().read()
    tunnel.close()
    plain = http.client.HTTPConnection("127.0.0.1", proxy, timeout=60)
    headers = {"Host": "evil", "Proxy-Authorization": "x", "X-Own": "1"}
    plain.request("PUT", f"http://localhost:{port}/a%2Fb?c=d", b"body", headers)
    assert plain.getresponse().read()
    plain.close()
    first, second = model.calls
    assert (first.path, first.body) == ("/v1/x", b"body")
    assert (second.method, second.path, second.body) == ("PUT", "/a%2Fb?c=d", b"body")
    assert second.headers["host"] == f"localhost:{port}"
    assert "proxy-authorization" not in second.headers and second.headers["x-own"] == "1"
    assert (tmp_path / "egress.log").read_text().count(f"allowed: localhost:{port}\n") == 2


def test_an_offered_upgrade_is_answered_as_http_1(
    way: Callable[[str], tuple[int, int]], model: FakeModel
) -> None:
    """As clients do that would rather speak HTTP/2: curl --http2, and Java's."""
    port = model.server.server_port
    proxy, _ = way(f"egress:localhost:{port}")
    head = (
        "connection: Upgrade, HTTP2-Settings, content-length\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
    )
    request = f"POST http://localhost:{port}/x HTTP/1.1\r\nhost: x\r\n{head}content-length: 4\r\n\r\nbody"
    assert asked(proxy, request.encode()).startswith(b"HTTP/1.1 200")
    (call,) = model.calls
    assert set(call.headers) == {"host", "connection", "content-length"}
    assert (call.headers["connection"], call.body) == ("close", b"body")


def test_what_follows_a_plain_request_goes_nowhere(
    way: Callable[[str], tuple[int, int]], model: FakeModel
) -> None:
    port = model.server.server_port
    proxy, _ = way(f"egress:localhost:{port}")
    request = f"GET http://localhost:{port}/one HTTP/1.1\r\nhost: x\r\n\r\n"
    answer = asked(
        proxy, (request + request.replace("/one", "/two") + "GET /three HTTP/1.1\r\n\r\n").encode()
    )
    assert answer.count(b"HTTP/1.1 200") == 1
    assert [call.path for call in model.calls] == ["/one"]


def test_a_name_that_resolves_to_the_host_is_refused(
    way: Callable[[str], tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """DNS rebinding: the address decides, and it is the one that is connected to."""
    real, looked_up = socket.getaddrinfo, []

    def rebound(host: str, *rest: object, **options: object) -> object:
        looked_up.append(host)
        return real("127.0.0.1" if host == "named.example" else host, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(socket, "getaddrinfo", rebound)
    proxy, names = way("egress:named.example")
    answer = asked(proxy, b"CONNECT named.example:443 HTTP/1.1\r\n\r\n")
    assert b"403 named.example is 127.0.0.1, not a public address" in answer
    assert looked_up.count("named.example") == 1
    assert question(names, "named.example") == (0, [])


def question(port: int, name: str, kind: int = 1) -> tuple[int, list[str]]:
    """The code and the addresses of the answer of a name server."""
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as plug:
        plug.settimeout(60)
        plug.connect(("127.0.0.1", port))
        plug.send(struct.pack(">HHHHHH", 7, 0x100, 1, 0, 0, 0) + labels + struct.pack(">BHH", 0, kind, 1))
        reply = plug.recv(4096)
    number, flags, _, count = struct.unpack_from(">HHHH", reply)
    assert (number, flags & 0xFFF0) == (7, 0x8180)
    width = 4 if kind == 1 else 16
    addresses = [reply[len(reply) - (left * (12 + width)) + 12 :][:width] for left in range(count, 0, -1)]
    return flags & 0xF, [str(ipaddress.ip_address(address)) for address in addresses]


def test_names_on_the_list_are_answered(way: Callable[[str], tuple[int, int]]) -> None:
    _, port = way("egress:localhost")
    assert question(port, "localhost") == (0, ["127.0.0.1"])
    assert question(port, "LOCALHOST", 16) == (0, []), "no text"
    assert question(port, "elsewhere.example")[0] == 5
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as plug:
        for junk in (b"", b"x", bytes(12), b"\0" * 11 + b"\1\xff", bytes(range(40)), b"\xff" * 600):
            plug.sendto(junk, ("127.0.0.1", port))
    assert question(port, "localhost") == (0, ["127.0.0.1"]), "junk hurts nobody"
