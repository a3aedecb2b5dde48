"""What the front tells a new worker of requests that an earlier one began, and its clients of that."""

from __future__ import annotations

import asyncio
from typing import Any

from windtunnel.serving.engine.live.link import CRASHES, Link, Over, Token
from windtunnel.serving.engine.live.worker import job


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
    nothing: dict[str, Any] = {name: [] for name in ("admitted", "ended", "finished", "refused", "failed")}
    return {**nothing, "tokens": tokens, **other}


def told(events: asyncio.Queue[Any]) -> list[Any]:
    return [events.get_nowait() for _ in range(events.qsize())]


def test_a_plain_answer_goes_on_behind_what_was_told() -> None:
    link, events = Fronted(), asyncio.Queue()
    link.submit(asked(1, [9]), events)
    assert job(link.sent[0]["job"]).objective.ttft == 0.5
    link._heard(report((1, 0, 40), (1, 0, 41)))
    again = link.reborn()
    assert again["prompt"] == [7, 8, 40, 41] and again["stages"] == [7] and again["had"] == 2
    assert job(again).again is True and job(again).had == 2 and job(again).objective.tpot == 0.1
    assert job(again).objective.ttft == float("inf")  # it cannot be late for what it has given
    link._heard(report((1, 0, 42)))
    third = link.reborn()
    assert third["prompt"] == [7, 8, 40, 41, 42] and third["stages"] == [6] and third["had"] == 3
    link._heard(report((1, 0, 43), ended=[(1, 0, True)], finished=[1]))
    assert [one.token for one in told(events)[:-1]] == [40, 41, 42, 43]


def test_branches_are_computed_anew_and_told_from_where_they_were() -> None:
    link, events = Fronted(), asyncio.Queue()
    stages = [{"heads": [[5], [6]], "tokens": [4, 4], "join": []}]
    link.submit(asked(1, stages), events)
    link._heard(report((1, 1, 40), (1, 2, 50), (1, 1, 41)))
    assert link.reborn()["stages"] == stages
    link._heard(report((1, 1, 40), (1, 2, 50)))
    link._heard(report((1, 1, 41), (1, 2, 51)))
    assert [(one.unit, one.token) for one in told(events)] == [(1, 40), (2, 50), (1, 41), (2, 51)]
    link.reborn()
    link._heard(report((1, 1, 40), (1, 2, 99)))
    (over,) = told(events)
    assert over.failed == "the worker died, and another one came to other tokens"
    assert link.sent[-1] == {"do": "cancel", "id": 1}


def test_who_kills_workers_is_not_given_to_another_one() -> None:
    link, events = Fronted(), asyncio.Queue()
    link.submit(asked(1, [9]), events)
    for _ in range(CRASHES - 1):
        link.reborn()
    assert told(events) == []
    link._died()
    assert told(events) == [Over(1, failed=f"{CRASHES} workers died while they served this request")]
    link._heard(report((1, 0, 40)))
    assert told(events) == []


def test_logprobs_and_ends_come_with_their_tokens() -> None:
    link, events = Fronted(), asyncio.Queue()
    link.submit(asked(1, [9]), events)
    message = report(ended=[(1, 0, True)], finished=[1])
    link._heard({**message, "tokens": [(1, 0, 40, -0.5, [[40, -0.5]])]})
    assert told(events) == [Token(1, 0, 40, -0.5, ([40, -0.5],), True, True), Over(1)]
