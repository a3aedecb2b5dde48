"""Requests that two servers could read differently are refused, and each refusal ends one connection."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from agents.sandbox.proxy.fake_model import FakeModel
from agents.sandbox.proxy.fake_turns import FakeBox
from agents.sandbox.proxy.model_bench import Bench, plain
from windtunnel.agents.sandbox.place import Home
from windtunnel.agents.sandbox.proxy import HostProxy

GET = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n"
POST = b"POST /v1/x HTTP/1.1\r\nhost: x\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n"
REFUSED = {
    "both lengths": POST + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "two lengths": POST + b"content-length: 4\r\nContent-Length: 0\r\n\r\nabcd" + SMUGGLED,
    "two codings": POST + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "a coding twice": POST + b"transfer-encoding: chunked\r\ntransfer-encoding: x\r\n\r\n0\r\n\r\n",
    "a coding of 1.0": b"POST / HTTP/1.0\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "bare line feeds": b"GET / HTTP/1.1\nhost: x\n\n",
    "a folded header": GET + b"a: b\r\n c: d\r\n\r\n",
    "two hosts": GET + b"host: y\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "another version": b"GET / HTTP/2.0\r\nhost: x\r\n\r\n",
    "a space in the target": b"GET /a b HTTP/1.1\r\nhost: x\r\n\r\n",
    "a byte beyond ASCII": b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n",
    "huge headers": GET + b"a: " + b"x" * 70_000 + b"\r\n\r\n",
    "many headers": GET + b"".join(b"h%d: %s\r\n" % (n, b"x" * 100) for n in range(700)) + b"\r\n",
    "an endless head": GET + b"a: " + b"x" * 900_000,
    "an endless line": b"G" * 70_000,
    "an endless trailer": CHUNKED + b"0\r\na: " + b"x" * 900_000,
    "an endless extension": CHUNKED + b"1;" + b"x" * 900_000,
    "an absolute target": b"GET http://evil/ HTTP/1.1\r\nhost: x\r\n\r\n",
    "a chunk by bare line feed": CHUNKED + b"2\nab\r\n0\r\n\r\n",
}
LEAVING = (
    "/..", "/../v1", "/v1/../../x", "/%2e%2e/x", "/.%2E/x", "/a/..%2f..%2fx", "/%252e%252e/x", "/..%5cx",
    "/..;a=b/x", "//../x", "/./../x", "/a/b/../../../c",
    "/v1/a/../b", "/x/%2e%2e/y",
)  # fmt: skip


@pytest.fixture(scope="module")
def listening(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Bench, int]]:
    """One sandbox's port for all that is refused."""
    model = FakeModel()
    bench = Bench(Home(tmp_path_factory.mktemp("wire")), model)
    box = bench.serve(bench.proxy(), FakeBox())
    yield bench, bench.ports[box.name]
    bench.close()
    model.close()


@pytest.mark.parametrize("what", REFUSED)
def test_a_doubtful_request_is_refused(listening: tuple[Bench, int], what: str) -> None:
    bench, port = listening
    before = len(bench.model.calls)
    status, body = plain(port, REFUSED[what], ended=True)
    assert status == 400, body
    assert b"windtunnel: " in body
    assert len(bench.model.calls) == before
    assert plain(port, GET + b"\r\n")[0] == 200, "other connections are served"


def test_a_trailer_is_no_header(bench: Bench, proxy: HostProxy) -> None:
    box = bench.serve(proxy, FakeBox())
    asked = CHUNKED + b"2\r\nab\r\n0\r\nx-slipped: in\r\n\r\n"
    assert plain(bench.ports[box.name], asked)[0] == 200
    (call,) = bench.model.calls
    assert call.body == b"ab" and "x-slipped" not in call.headers


def test_a_header_cannot_be_slipped_in_by_the_target(bench: Bench, proxy: HostProxy) -> None:
    box = bench.serve(proxy, FakeBox())
    assert plain(bench.ports[box.name], "GET /x%0d%0aEvil:%201 HTTP/1.1\r\nhost: x\r\n\r\n")[0] == 200
    (call,) = bench.model.calls
    assert call.path == "/x%0d%0aEvil:%201"
    assert "evil" not in call.headers


def test_methods_that_show_or_tunnel_are_refused(bench: Bench, proxy: HostProxy) -> None:
    box = bench.serve(proxy, FakeBox())
    for method, target in (("TRACE", "/x"), ("CONNECT", "/x"), ("CONNECT", "host:80")):
        asked = f"{method} {target} HTTP/1.1\r\nhost: x\r\n\r\n"
        assert plain(bench.ports[box.name], asked)[0] in (400, 405)
    assert not bench.model.calls


def test_targets_that_leave_the_base_are_refused(bench: Bench) -> None:
    base = bench.model.url + "/base/v1/"
    proxy = bench.proxy()
    box = bench.serve(proxy, FakeBox(), upstream=base)
    own = bench.ports[box.name]
    for target in LEAVING:
        for prefix in ("", "/v1"):
            asked = f"POST {prefix}{target} HTTP/1.1\r\nhost: x\r\n\r\n"
            status, body = plain(own, asked)
            assert status == 400, asked
            assert b"a step up" in body
    for target in ("/v1/..%2F", "/v1/.."):
        assert plain(own, f"GET {target} HTTP/1.1\r\nhost: x\r\n\r\n")[0] == 400, "the version is the base's"
    assert not bench.model.calls
