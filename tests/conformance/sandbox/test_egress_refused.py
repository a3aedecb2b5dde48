"""What the proxy of a network egress refuses: other hosts, and requests that are none or read in two ways."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from agents.sandbox.proxy.ways_out import asked

REFUSED = [
    (b"CONNECT elsewhere.example:443 HTTP/1.1\r\n\r\n", 403, b"elsewhere.example:443 is not on the list"),
    (b"CONNECT localhost:1 HTTP/1.1\r\n\r\n", 403, b"localhost:1 is not on the list"),
    (b"CONNECT 127.0.0.1:443 HTTP/1.1\r\n\r\n", 403, b"is not on the list"),
    (b"CONNECT localhost HTTP/1.1\r\n\r\n", 403, b"localhost:0 is not on the list"),
    (b"CONNECT [fe80::1%25eth0]:443 HTTP/1.1\r\n\r\n", 403, b"is not on the list"),
    (b"CONNECT a_b..c:443 HTTP/1.1\r\n\r\n", 400, b"the name of the host is malformed"),
    (b"CONNECT user@named.example:443 HTTP/1.1\r\n\r\n", 400, b"the name of the host is malformed"),
    (b"GET http://elsewhere.example/ HTTP/1.1\r\n\r\n", 403, b"not on the list"),
    (b"GET http://named.example@elsewhere.example/ HTTP/1.1\r\n\r\n", 400, b"this is a proxy"),
    (b"GET https://named.example/ HTTP/1.1\r\n\r\n", 400, b"this is a proxy"),
    (b"GET / HTTP/1.1\r\nhost: named.example\r\n\r\n", 400, b"this is a proxy"),
    (b"GET http://named.example:x/ HTTP/1.1\r\n\r\n", 400, b"URL is malformed"),
    (b"POST http://named.example/ HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n", 411, b"content-length"),
    (b"POST http://a.example/ HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", 400, b"length"),
    (b"GET http://named.example/ HTTP/1.1\r\na: b\n c: d\r\n\r\n", 400, b"malformed"),
    (b"GET http://named.example/ HTTP/1.1\nhost: x\r\n\r\n", 400, b"malformed"),
    (b"\x16\x03\x01\r\n\r\n", 400, b"malformed"),
    (b"CONNECT " + b"x" * 20_000 + b":1 HTTP/1.1\r\n\r\n", 431, b"more than 16384 bytes"),
]  # fmt: skip


@pytest.mark.parametrize(("request_", "status", "words"), REFUSED)
def test_a_refusal_is_a_sentence(
    way: Callable[[str], tuple[int, int]], request_: bytes, status: int, words: bytes
) -> None:
    proxy, _ = way("egress:named.example")
    head, _, body = asked(proxy, request_).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert body.startswith(b"windtunnel: ") and words in body
