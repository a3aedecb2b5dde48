"""What becomes of requests when their worker dies, and what their clients get."""

from __future__ import annotations

import asyncio
import json
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from windtunnel.base.errors import HostError
from windtunnel.serving.engine.live.link import DIED, Link, Over, Token
from windtunnel.serving.engine.live.serve import Served, serve
from windtunnel.store import runs


class Fronted(Link):
    """A link whose worker is the test."""

    def __init__(self) -> None:
        super().__init__({})
        self.messages: list[dict[str, Any]] = []
        self.ready.set()

    def _send(self, message: dict[str, Any]) -> None:
        self.messages.append(message)

    def restarted(self) -> list[int]:
        """The worker died, and another one is ready: the jobs that it gets."""
        self.ready.clear()
        self._died()
        self.messages.clear()
        self._received({"ready": {}})
        return [message["job"]["id"] for message in self.messages]


def job(number: int) -> dict[str, Any]:
    return {
        "id": number, "arrival": 1.0, "prompt": [7, 8], "stages": [9], "sampling": [0.0, 1.0, 3, None],
        "stop": [2], "objective": (0.5, 0.1),
    }  # fmt: skip


def report(*tokens: tuple[int, int, int], **other: Any) -> dict[str, Any]:
    nothing: dict[str, Any] = {name: [] for name in ("ended", "finished", "refused", "failed")}
    return {**nothing, "tokens": tokens, **other}


def received(events: asyncio.Queue[Any]) -> list[Any]:
    return [events.get_nowait() for _ in range(events.qsize())]


def test_admitted_requests_fail_with_their_worker_and_waiting_ones_get_the_next() -> None:
    link, first, second = Fronted(), asyncio.Queue(), asyncio.Queue()
    link.submit(job(1), first)
    waiting = link.submit(job(2), second)
    link._received(report(facts={"running": 1.0}))
    link._received({"admitted": [(1, 0)]})
    link._received(report((1, 0, 40)))
    assert link.restarted() == [2] and link.restarts == 1
    assert link.facts["running"] == 0
    assert received(first) == [Token(1, 0, 40), Over(1, failed=DIED)] and received(second) == []
    link._received(report((1, 0, 41)))
    link._received({"admitted": [(2, 5)]})
    link._received(report((2, 0, 50), ended=[(2, 0, True)], finished=[2]))
    assert received(first) == [] and waiting.cached == 5
    assert received(second) == [Token(2, 0, 50, ended=True, stopped=True), Over(2)]


def test_a_request_that_kills_before_it_is_admitted_is_given_to_no_other_worker() -> None:
    link, events = Fronted(), asyncio.Queue()
    link.submit(job(1), events)
    assert link.restarted() == []
    assert received(events) == [Over(1, failed=DIED)]


def test_logprobs_and_ends_come_with_their_tokens() -> None:
    link, events = Fronted(), asyncio.Queue()
    link.submit(job(1), events)
    message = report(ended=[(1, 0, True)], finished=[1])
    link._received({**message, "tokens": [(1, 0, 40, -0.5, [[40, -0.5]])]})
    assert received(events) == [Token(1, 0, 40, -0.5, ([40, -0.5],), True, True), Over(1)]


def test_a_server_without_a_worker_says_so_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path))
    statuses: list[int] = []
    clients: list[threading.Thread] = []

    async def worker(self: Link) -> None:
        self.about = {
            "limit": 99, "vocabulary": 259, "stop": [], "dtype": "float32", "threads": "1",
            "sampling": [1.0, 1.0, 0],
        }  # fmt: skip
        self.ready.set()
        while not self._jobs:
            await asyncio.sleep(0.01)
        raise LookupError("of nothing")

    def ask(url: str) -> None:
        body = json.dumps({"model": "tiny-attention", "prompt": "a"}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        try:
            urllib.request.urlopen(request, timeout=60)
        except urllib.error.HTTPError as error:
            statuses.append(error.code)
            error.close()

    def ready(url: str, run: str) -> None:
        clients.append(threading.Thread(target=ask, args=(url,)))
        clients[0].start()

    monkeypatch.setattr(Link, "_worker", worker)
    with pytest.raises(HostError, match="the link to the worker failed: LookupError: of nothing") as error:
        serve(Served("tiny-attention", port=0), ready)
    clients[0].join(60)
    assert statuses == [500] and error.value.status == 1
    assert runs.Store.open().list()[0].status == "failed"
