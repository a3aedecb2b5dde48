"""Sockets, bounds, and what passes through untouched."""

from __future__ import annotations

import http.client
import socket

import httpx
import pytest

from agents.sandbox.proxy.fake_model import answer
from agents.sandbox.proxy.fake_turns import FakeBox
from agents.sandbox.proxy.model_bench import Bench, chat, recorded
from support.waiting import until
from windtunnel.agents.sandbox.proxy import HostProxy
from windtunnel.base.errors import UserError


def get(url: str, method: str = "GET", **options: object) -> httpx.Response:
    with httpx.Client(trust_env=False, timeout=60) as client:
        return client.request(method, url, **options)  # type: ignore[arg-type]


def test_large_bodies_are_refused(bench: Bench) -> None:
    proxy = bench.proxy(body=1000)
    box = bench.serve(proxy, FakeBox())
    sized = get(bench.url(box), "POST", json=chat("x" * 2000))
    assert sized.status_code == 413
    unsized = get(bench.url(box), "POST", content=iter([b"x" * 600] * 2))
    assert unsized.status_code == 413
    assert not bench.model.calls


def test_body_that_does_not_come_is_given_up(bench: Bench) -> None:
    proxy = bench.proxy(sending=0.1)
    box = bench.serve(proxy, FakeBox())
    with socket.create_connection(("127.0.0.1", bench.ports[box.name]), timeout=60) as plug:
        plug.sendall(b"POST /v1/messages HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{")
        assert b" 408 " in plug.recv(4096).split(b"\r\n")[0]


def test_an_offered_upgrade_is_answered_as_http_1(bench: Bench, proxy: HostProxy) -> None:
    """As clients do that would rather speak HTTP/2, and go on by the same connection."""
    box = bench.serve(proxy, FakeBox())
    offer = "connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
    head = f"HTTP/1.1\r\nhost: x\r\n{offer}content-length: "
    whole = [f"GET /v1/a {head}0\r\n\r\n", f"PUT /v1/b {head}4\r\n\r\nbody", f"GET /v1/c {head}0\r\n\r\n"]
    with socket.create_connection(("127.0.0.1", bench.ports[box.name]), timeout=60) as plug:
        for request in whole:
            plug.sendall(request.encode())
            answer = http.client.HTTPResponse(plug)
            answer.begin()
            assert answer.status == 200 and answer.read()
        plug.sendall("".join(whole).encode())
        until(lambda: len(bench.model.calls) == 6)
    assert [(call.path, call.body) for call in bench.model.calls[:3]] == [
        ("/v1/a", b""), ("/v1/b", b"body"), ("/v1/c", b"")
    ]  # fmt: skip
    assert "upgrade" not in bench.model.calls[0].headers


def test_requests_under_way_are_bounded(bench: Bench) -> None:
    bench.model.plan.answer.clear()
    proxy = bench.proxy(open_box=2)
    box, other = (bench.serve(proxy, FakeBox(name)) for name in ("one", "two"))
    held = [bench.ask(box, chat(f"task {n}")) for n in range(2)]
    bench.model.wait_for(2)
    refused = get(bench.url(box), "POST", json=chat("task 3"))
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    neighbour = bench.ask(other, chat("go"))
    bench.model.wait_for(3)
    bench.model.plan.answer.set()
    for request in (*held, neighbour):
        assert request.reply()


def test_forget_closes_the_socket_and_serve_takes_it_up_again(bench: Bench, proxy: HostProxy) -> None:
    box = bench.serve(proxy, FakeBox())
    proxy.forget(box.name)
    with pytest.raises(httpx.ConnectError):
        get(bench.url(box))
    bench.serve(proxy, box)
    assert bench.ask(box, chat("go")).reply() == answer(1, "")


def test_closing_keeps_a_held_reply_back_for_the_successor(bench: Bench) -> None:
    proxy = bench.proxy(ending=0.3)
    box = bench.serve(proxy, FakeBox("closing", instant=False))
    held = bench.ask(box, chat("go"))
    assert box.pending(1).promoted.wait(60)
    until(lambda: recorded(bench, box) == [200])
    proxy.close()
    proxy.close()
    assert b"ask again" in held.reply()
    assert held.status == 503
    box.pending(1).finish()
    with pytest.raises(UserError, match="closed"):
        proxy.forget(box.name)
    successor = bench.proxy()
    box.instant = True
    bench.serve(successor, box)
    assert bench.ask(box, chat("go")).reply() == answer(1, "")
    assert len(bench.model.calls) == 1
