"""The target of a request reaches the upstream byte for byte, and never from above its base path."""

from __future__ import annotations

import posixpath
from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.sandbox.proxy.fake_turns import FakeBox
from agents.sandbox.proxy.model_bench import Bench, plain
from windtunnel.agents.sandbox.proxy import HostProxy
from windtunnel.agents.sandbox.proxy.upstream import join_target, split_base, steps_up
from windtunnel.base.errors import UserError

KEPT = (
    "/v1/files/a%2Fb?limit=3&x=%20", "/v1//models//", "/v1/%2e/x", "/v1/...", "/v1/models?",
    "/v1/a;b=c/d", "/?a=/../..", "/v1/models?q={}|^`\"<>", "/%", "/v1/%zz#f", "//host/path",
    "/effects/v1/x",
)  # fmt: skip


def test_targets_arrive_as_they_were_sent(bench: Bench, proxy: HostProxy) -> None:
    box = bench.serve(proxy, FakeBox(), upstream=bench.model.url + "/base")
    for target in KEPT:
        status, _ = plain(bench.ports[box.name], f"GET {target} HTTP/1.1\r\nhost: x\r\n\r\n")
        assert status == 200, target
    assert [call.path for call in bench.model.calls] == ["/base" + target for target in KEPT]


@pytest.mark.parametrize(
    ("upstream", "target", "asked"),
    [
        ("https://host", "/v1/messages", "/v1/messages"),
        ("https://host/base", "/v1/messages", "/base/v1/messages"),
        ("https://host/base/", "/v1/messages", "/base/v1/messages"),
        ("https://host/base/v1", "/v1/messages", "/base/v1/messages"),
        ("https://host/base/v1/", "/v1/messages?beta=true", "/base/v1/messages?beta=true"),
        ("https://host/base/v1", "/v1", "/base/v1"),
        ("https://host/base/v1", "/v1?x", "/base/v1?x"),
        ("https://host/base/v1", "/v10/x", "/base/v1/v10/x"),
        ("https://host/base/v1", "/models", "/base/v1/models"),
        ("https://host/openai/v2", "/v1/models", "/openai/v2/v1/models"),
    ],
)
def test_base_path_holds(upstream: str, target: str, asked: str) -> None:
    assert join_target(split_base(upstream)[1], target) == asked


@pytest.mark.parametrize(
    "url",
    [
        "ftp://x", "http://", "https:///v1", "http://a b", "http://host/v1?key=1", "http://host/#a",
        "http://user:hunter2@host/", "http://host:port", "http://host:0", "http://host/a/../b",
        "http://host/%2e%2e/b", "http://host/\r\nX: y", "http://[::1", "http://hést/",
        "http://999.1.1.1", "http://xn--a",
    ],
)  # fmt: skip
def test_upstream_that_is_none(url: str) -> None:
    with pytest.raises(UserError) as refused:
        split_base(url)
    assert "hunter2" not in str(refused.value)


PARTS = st.sampled_from(
    ["a", "v1", "..", ".", "", "%2e%2e", "..;x", "a%2f..", "%2F", "..\\", "%252e%252e", "..."]
)


@given(st.lists(PARTS, max_size=8), st.integers(0, 2))
def test_no_reading_of_an_accepted_target_is_above_the_base(parts: list[str], decoded: int) -> None:
    target = "/" + "/".join(parts)
    if steps_up(target):
        assert ".." in unquote(unquote(target))
        return
    whole = join_target("/base/v1", target)
    for _ in range(decoded):
        whole = unquote(whole)
    for reading in (whole, whole.replace("\\", "/"), whole.replace(";x", "")):
        assert posixpath.normpath(reading).startswith("/base/v1"), reading


def test_a_request_passes_but_for_what_it_says_of_its_way(bench: Bench, proxy: HostProxy) -> None:
    box = bench.serve(proxy, FakeBox())
    dropped = {
        "Forwarded": "for=1", "X-Forwarded-For": "1", "X-Forwarded-Host": "evil", "X-Forwarded-Anything": "1",
        "Via": "1.1 a", "X-Real-IP": "1", "Proxy-Authorization": "Basic x", "Proxy-Anything": "1",
        "Connection": "keep-alive, X-Named", "X-Named": "1", "TE": "trailers", "Upgrade": "h2c",
        "Keep-Alive": "1", "Trailer": "x",
    }  # fmt: skip
    head = "".join(f"{name}: {value}\r\n" for name, value in dropped.items())
    asked = f"PUT /v1/x HTTP/1.1\r\nhost: evil\r\n{head}x-own: 1\r\ncontent-length: 2\r\n\r\n\0x"
    assert plain(bench.ports[box.name], asked)[0] == 200
    (call,) = bench.model.calls
    assert (call.method, call.body, box.turns) == ("PUT", b"\0x", 0)
    assert set(call.headers) == {"host", "x-own", "content-length"}
    assert call.headers["host"] == bench.model.url.removeprefix("http://")
