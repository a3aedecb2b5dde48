"""What the front tells a new worker of requests that an earlier one began, and its clients of that."""

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
from windtunnel.serving.engine.live.link import CRASHES, Link, Over, Token
from windtunnel.serving.engine.live.loop import Job
from windtunnel.serving.engine.live.serve import Served, serve
from windtunnel.store import runs


class Fronted(Link):
    """A link whose worker is the test."""

    def __init__(self) -> None:
        super().__init__({})
        self.sent: list[dict[str, Any]] = []
        self.ready.set()

    def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    def reborn(self) -> dict[str, Any]:
        """The worker died, and another one is ready: what it is told first."""
        self.ready.clear()
        self._died()
        self.sent.clear()
        self._heard({"ready": {}})
        return self.sent[0]["job"]


def asked(number: int, stages: list[Any]) -> dict[str, Any]:
    return {
        "id": number, "arrival": 1.0, "prompt": [7, 8], "stages": stages, "sampling": [0.0, 1.0, 3, None],
        "stop": [2], "objective": (0.5, 0.1), "again": False, "had": 0,
    }  # fmt: skip


def report(*tokens: tuple[int, int, int], **other: Any) -> dict[str, Any]:
    nothing: dict[str, Any] = {name: [] for name in ("ended", "finished", "refused", "failed")}
    return {**nothing, "tokens": tokens, **other}


def told(events: asyncio.Queue[Any]) -> list[Any]:
    return [events.get_nowait() for _ in range(events.qsize())]


def test_a_plain_answer_goes_on_behind_what_was_told() -> None:
    link, events = Fronted(), asyncio.Queue()
    link.submit(asked(1, [9]), events)
    assert Job.of(link.sent[0]["job"]).objective.ttft == 0.5
    link._heard(report((1, 0, 40), (1, 0, 41)))
    again = link.reborn()
    assert again["prompt"] == [7, 8, 40, 41] and again["stages"] == [7] and again["had"] == 2
    assert Job.of(again).again is True and Job.of(again).had == 2 and Job.of(again).objective.tpot == 0.1
    assert Job.of(again).objective.ttft == float("inf")  # it cannot be late for what it has given
    link._heard(report((1, 0, 42)))
    third = link.reborn()
    assert third["prompt"] == [7, 8, 40, 41, 42] and third["stages"] == [6] and third["had"] == 3
    link._heard(report((1, 0, 43), ended=[(1, 0, True)], finished=[1]))
    assert [one.token for one in told(events)[:-1]] == [40, 41, 42, 43]


def test_branches_begin_anew_only_where_nothing_was_told() -> None:
    link, events = Fronted(), asyncio.Queue()
    stages = [{"heads": [[5], [6]], "tokens": [4, 4], "join": []}]
    link.submit(asked(1, stages), events)
    assert link.reborn()["stages"] == stages
    link._heard(report((1, 1, 40), (1, 2, 50)))
    assert [(one.unit, one.token) for one in told(events)] == [(1, 40), (2, 50)]
    link._heard({"ready": {}})
    (over,) = told(events)
    assert "the worker died when it had told of this request's branches" in over.failed


def test_who_kills_workers_is_not_given_to_another_one() -> None:
    """Who waited meanwhile is; he is charged as well where nobody else can have been the reason."""
    link, events, others = Fronted(), asyncio.Queue(), asyncio.Queue()
    link.submit(asked(1, [9]), events)
    other = link.submit(asked(2, [9]), others)
    for _ in range(CRASHES - 1):
        link._heard({"admitted": [(1, 0)]})
        link.reborn()
    assert told(events) == []
    link._heard({"admitted": [(1, 0)]})
    link._died()
    failed = f"{CRASHES} workers died while they served this request"
    assert told(events) == [Over(1, failed=failed)]
    link._heard(report((1, 0, 40)))
    assert told(events) == told(others) == []
    link._died()
    link._heard({"admitted": [(2, 5)]})
    assert other.cached == 5
    link._died()
    assert told(others) == []
    link._died()
    assert told(others) == [Over(2, failed=failed)]


def test_logprobs_and_ends_come_with_their_tokens() -> None:
    link, events = Fronted(), asyncio.Queue()
    link.submit(asked(1, [9]), events)
    message = report(ended=[(1, 0, True)], finished=[1])
    link._heard({**message, "tokens": [(1, 0, 40, -0.5, [[40, -0.5]])]})
    assert told(events) == [Token(1, 0, 40, -0.5, ([40, -0.5],), True, True), Over(1)]


def test_a_server_without_a_worker_says_so_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path))
    statuses: list[int] = []
    clients: list[threading.Thread] = []

    async def worker(self: Link) -> None:
        self.about = {"limit": 99, "vocabulary": 259, "stop": [], "dtype": "float32", "threads": "1"}
        self.ready.set()
        while not self._jobs:
            await asyncio.sleep(0.01)
        raise LookupError("of nothing")

    def ask(url: str) -> None:
        body = json.dumps({"model": "tiny-attention", "prompt": "a"}).encode()
        asked = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        try:
            urllib.request.urlopen(asked, timeout=60)
        except urllib.error.HTTPError as error:
            statuses.append(error.code)
            error.close()

    def ready(url: str, run: str) -> None:
        clients.append(threading.Thread(target=ask, args=(url,)))
        clients[0].start()

    monkeypatch.setattr(Link, "_worker", worker)
    with pytest.raises(HostError, match="the link to the worker failed: LookupError: of nothing") as told:
        serve(Served("tiny-attention", port=0), ready)
    clients[0].join(60)
    assert statuses == [500] and told.value.status == 1
    assert runs.Store.open().list()[0].status == "failed"
