"""A model proxy between clients and a fake model, on sockets of this machine."""

from __future__ import annotations

import contextlib
import http.client
import socket
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from agents.sandbox.proxy.fake_model import FakeModel
from agents.sandbox.proxy.fake_turns import FakeBox
from windtunnel.agents.sandbox.place import Home
from windtunnel.agents.sandbox.proxy import HostProxy, limits
from windtunnel.agents.sandbox.proxy.conversation import conversation_file
from windtunnel.agents.sandbox.proxy.upstream import Upstream

PATIENCE = 60.0
TOOLS = [{"type": "function", "function": {"name": "bash", "parameters": {}}}]


class Asked(threading.Thread):
    """A request in a thread of its own: an agent that waits for its model."""

    def __init__(self, url: str, body: Any, headers: dict[str, str]) -> None:
        super().__init__(daemon=True)
        self.url, self.body, self.sent = url, body, headers
        self.status = 0
        self.headers: httpx.Headers = httpx.Headers()
        self.got = b""
        self.error: Exception | None = None
        self.first = threading.Event()
        self.changed = threading.Condition()
        self.leave = threading.Event()
        self.start()

    def run(self) -> None:
        try:
            with (
                httpx.Client(trust_env=False, timeout=PATIENCE) as client,
                client.stream("POST", self.url, json=self.body, headers=self.sent) as response,
            ):
                self.status, self.headers = response.status_code, response.headers
                self.first.set()
                for chunk in response.iter_raw():
                    with self.changed:
                        self.got += chunk
                        self.changed.notify_all()
                    if self.leave.is_set():
                        return
        except Exception as error:
            self.error = error

    def until(self, text: bytes) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: text in self.got, PATIENCE), self.got

    def reply(self) -> bytes:
        self.join(PATIENCE)
        assert not self.is_alive()
        if self.error is not None:
            raise self.error
        return self.got


class Bench:
    """HostProxy, model and sandboxes."""

    def __init__(self, home: Home, model: FakeModel) -> None:
        self.home, self.model = home, model
        self.proxies: list[HostProxy] = []
        self.ports: dict[str, int] = {}
        self.patch = pytest.MonkeyPatch()
        self.patch.setenv("NO_PROXY", "127.0.0.1")

    def proxy(self, **bounds: float) -> HostProxy:
        """A proxy with these bounds, which hold for the others too."""
        for name, value in {"ending": 1.0, **bounds}.items():
            self.patch.setattr(limits, name.upper(), value)
        proxy = HostProxy(self.home)
        self.proxies.append(proxy)
        return proxy

    def close(self) -> None:
        for proxy in self.proxies:
            proxy.close()
        self.patch.undo()

    def serve(self, proxy: HostProxy, box: FakeBox, upstream: Upstream | str = "") -> FakeBox:
        listener = socket.create_server(("127.0.0.1", 0))
        self.ports[box.name] = listener.getsockname()[1]
        where = upstream if isinstance(upstream, Upstream) else Upstream(upstream or self.model.url)
        proxy.serve_model(box, where, listener)
        return box

    def url(self, box: FakeBox, path: str = "/v1/chat/completions") -> str:
        return f"http://127.0.0.1:{self.ports[box.name]}{path}"

    def ask(self, box: FakeBox, body: Any, path: str = "/v1/chat/completions", **headers: str) -> Asked:
        return Asked(self.url(box, path), body, headers)


def chat(*texts: str, **fields: Any) -> dict[str, Any]:
    """A request of a main loop: system prompt, tools, and these messages, user and assistant in turn."""
    roles = ("user", "assistant")
    messages = [{"role": roles[place % 2], "content": text} for place, text in enumerate(texts)]
    return {
        "model": "big",
        "messages": [{"role": "system", "content": "You are an agent."}, *messages],
        "tools": TOOLS,
        **fields,
    }


def response(plug: socket.socket) -> tuple[int, bytes]:
    """Status and body of the next answer on a connection."""
    with http.client.HTTPResponse(plug) as read:
        read.begin()
        return read.status, read.read()


def plain(port: int, request: str | bytes, *, ended: bool = False) -> tuple[int, bytes]:
    """Status and body of what is answered to these bytes; ``ended``: the connection is closed then."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as plug:
        plug.sendall(request.encode() if isinstance(request, str) else request)
        answered = response(plug)
        if ended:
            with contextlib.suppress(ConnectionResetError):
                assert plug.recv(1) == b""
        return answered


def recorded(bench: Bench, box: FakeBox) -> list[int]:
    """The status of each reply on the disk (0: still under way), read as another program would."""
    with sqlite3.connect(conversation_file(bench.home, box.name)) as file:
        return [status for (status,) in file.execute("SELECT status FROM records ORDER BY id")]


@pytest.fixture
def model() -> Iterator[FakeModel]:
    service = FakeModel()
    yield service
    service.close()


@pytest.fixture
def bench(tmp_path: Path, model: FakeModel) -> Iterator[Bench]:
    model_bench = Bench(Home(tmp_path), model)
    yield model_bench
    model_bench.close()


@pytest.fixture
def proxy(bench: Bench) -> HostProxy:
    return bench.proxy()
