"""Requests that two servers could read differently are refused, and each refusal ends one connection."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest
import uvicorn
from fake_turns import FakeBox
from hypothesis import given
from hypothesis import strategies as st
from model_bench import Bench, plain

from windtunnel.agents.sandbox.proxy import ModelProxy
from windtunnel.agents.sandbox.proxy.strict import StrictProtocol, head_fault

GET = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n"
POST = b"POST /v1/x HTTP/1.1\r\nhost: x\r\n"
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n"
REFUSED = {
    "both lengths": POST + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n" + SMUGGLED,
    "two equal lengths": POST + b"content-length: 4\r\ncontent-length: 4\r\n\r\nabcd" + SMUGGLED,
    "two lengths": POST + b"content-length: 4\r\nContent-Length: 0\r\n\r\nabcd" + SMUGGLED,
    "a list of lengths": POST + b"content-length: 4, 4\r\n\r\nabcd",
    "a signed length": POST + b"content-length: +4\r\n\r\nabcd",
    "a huge length": POST + b"content-length: " + b"9" * 30 + b"\r\n\r\n",
    "a hidden coding": POST + b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
    "two codings": POST + b"transfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "a coding twice": POST + b"transfer-encoding: chunked\r\ntransfer-encoding: x\r\n\r\n0\r\n\r\n",
    "a coding of 1.0": b"POST / HTTP/1.0\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "bare line feeds": b"GET / HTTP/1.1\nhost: x\n\n",
    "one bare line feed": GET + b"a: b\nc: d\r\n\r\n",
    "an end by a bare line feed": GET + b"a: b\r\n\n",
    "a bare carriage return": GET + b"a: b\rc: d\r\n\r\n",
    "a folded header": GET + b"a: b\r\n c: d\r\n\r\n",
    "a space before the colon": POST + b"content-length : 4\r\n\r\nabcd",
    "an empty name": GET + b": x\r\n\r\n",
    "no colon": GET + b"x\r\n\r\n",
    "a zero byte": GET + b"a: b\0c\r\n\r\n",
    "two hosts": GET + b"host: y\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "another version": b"GET / HTTP/2.0\r\nhost: x\r\n\r\n",
    "no version": b"GET /\r\n\r\n",
    "two spaces": b"GET  / HTTP/1.1\r\nhost: x\r\n\r\n",
    "a space in the target": b"GET /a b HTTP/1.1\r\nhost: x\r\n\r\n",
    "a byte beyond ASCII": b"GET /\xff HTTP/1.1\r\nhost: x\r\n\r\n",
    "huge headers": GET + b"a: " + b"x" * 70_000 + b"\r\n\r\n",
    "many headers": GET + b"".join(b"h%d: %s\r\n" % (n, b"x" * 100) for n in range(700)) + b"\r\n",
    "an endless line": b"G" * 70_000,
    "an absolute target": b"GET http://evil/ HTTP/1.1\r\nhost: x\r\n\r\n",
    "a chunk size that is none": POST + b"transfer-encoding: chunked\r\n\r\nzz\r\nab\r\n0\r\n\r\n",
    "a negative chunk": POST + b"transfer-encoding: chunked\r\n\r\n-1\r\nab\r\n0\r\n\r\n",
    "a chunk of hex text": POST + b"transfer-encoding: chunked\r\n\r\n0x2\r\nab\r\n0\r\n\r\n",
    "a chunk too long": POST + b"transfer-encoding: chunked\r\n\r\n2\r\nabc\r\n0\r\n\r\n",
    "a chunk by bare line feed": POST + b"transfer-encoding: chunked\r\n\r\n2\nab\r\n0\r\n\r\n",
    "a giant chunk": POST + b"transfer-encoding: chunked\r\n\r\n" + b"f" * 30 + b"\r\n",
}


@pytest.fixture(scope="module")
def listening(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One sandbox's port for all that is refused."""
    from fake_model import FakeModel

    from windtunnel.agents.sandbox.place import Home

    model = FakeModel()
    bench = Bench(Home(tmp_path_factory.mktemp("strict")), model)
    box = bench.serve(bench.proxy(), FakeBox())
    yield bench, bench.ports[box.name]
    bench.proxies[0].close()
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


def test_a_header_cannot_be_slipped_in_by_the_target(bench: Bench, proxy: ModelProxy) -> None:
    box = bench.serve(proxy, FakeBox())
    assert plain(bench.ports[box.name], "GET /x%0d%0aEvil:%201 HTTP/1.1\r\nhost: x\r\n\r\n")[0] == 200
    (call,) = bench.model.calls
    assert call.path == "/x%0d%0aEvil:%201"
    assert "evil" not in call.headers


class Wire(asyncio.Transport):
    """What a connection wrote, and whether it ended."""

    def __init__(self) -> None:
        super().__init__()
        self.said, self.over = b"", False

    def write(self, data: Any) -> None:
        self.said += bytes(data)

    def close(self) -> None:
        self.over = True

    def is_closing(self) -> bool:
        return self.over

    def pause_reading(self) -> None:
        """It is not real."""

    resume_reading = pause_reading


def read_all(pieces: list[bytes]) -> tuple[list[tuple[str, tuple[tuple[bytes, bytes], ...], bytes]], bytes]:
    """The requests that come out of ``pieces``, with what was answered."""
    got = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        got.append((scope["target"], tuple(scope["headers"]), body))
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    async def drive() -> bytes:
        config = uvicorn.Config(app, http=StrictProtocol, lifespan="off", log_config=None, date_header=False)
        config.load()
        server = uvicorn.Server(config)

        async def settled() -> None:
            for _ in range(40):
                await asyncio.sleep(0)

        wire, made = Wire(), StrictProtocol(config, server.server_state, {})
        made.connection_made(wire)
        for piece in pieces:
            made.data_received(piece)
            await settled()
        made.connection_lost(None)
        await asyncio.gather(*server.server_state.tasks)
        return wire.said

    return got, asyncio.run(drive())


LINES = st.sampled_from(
    [
        b"GET / HTTP/1.1\r\n", b"POST /x?y HTTP/1.1\r\n", b"host: x\r\n", b"content-length: 3\r\n", b"abc",
        b"transfer-encoding: chunked\r\n", b"\r\n", b"\n", b"\r", b" folded\r\n", b"3\r\nabc\r\n",
        b"0\r\n\r\n", b"a : b\r\n", b"content-length: 0\r\n", b"\0", b"\xff", b"connection: close\r\n",
    ]
)  # fmt: skip


@given(st.lists(LINES | st.binary(max_size=6), max_size=14), st.lists(st.integers(0, 300), max_size=6))
def test_the_reader_survives_anything_and_no_cut_changes_what_it_reads(
    lines: list[bytes], cuts: list[int]
) -> None:
    text = b"".join(lines)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    whole, _ = read_all([text] if text else [])
    pieces, _ = read_all([text[a:b] for a, b in pairwise(places) if a < b])
    assert pieces == whole
    for target, headers, body in whole:
        names = [name for name, _ in headers]
        assert target.startswith("/")
        assert names.count(b"host") == 1 or b"HTTP/1.0" in text
        assert not (b"content-length" in names and b"transfer-encoding" in names)
        assert names.count(b"content-length") <= 1
        assert body in text or b"transfer-encoding" in names
        assert not any(byte in value for _, value in headers for byte in (b"\r", b"\n", b"\0"))


NAMES = st.text("abcXYZ019-_", min_size=1, max_size=12).filter(
    lambda name: name.lower() not in ("host", "content-length", "transfer-encoding")
)
VALUES = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=30)


@given(st.dictionaries(NAMES, VALUES, max_size=8), st.integers(0, 10**17))
def test_what_is_well_formed_is_accepted(headers: dict[str, str], length: int) -> None:
    fields = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    assert (
        head_fault(f"POST /x HTTP/1.1\r\nHost: y\r\nContent-Length: {length}\r\n{fields}\r\n".encode()) == ""
    )
