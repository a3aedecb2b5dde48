"""After a restore an agent gets the replies that it had, and the model is asked for nothing twice."""

from __future__ import annotations

import sqlite3
import threading
from typing import Any

import pytest

from agents.sandbox.proxy.fake_model import Plan, answer, events
from agents.sandbox.proxy.fake_turns import FakeBox
from agents.sandbox.proxy.model_bench import Bench, chat, recorded
from support.waiting import until
from windtunnel.agents.sandbox.proxy import HostProxy
from windtunnel.agents.sandbox.proxy.conversation import conversation_file

PATH = "/v1/chat/completions"


def talk(bench: Bench, box: FakeBox, turns: int, **fields: Any) -> list[bytes]:
    """An agent of that many turns; each request holds what was answered before."""
    replies: list[bytes] = []
    for _ in range(turns):
        replies.append(bench.ask(box, next_request(replies, **fields)).reply())
    return replies


def next_request(replies: list[bytes], **fields: Any) -> dict[str, Any]:
    said = [text for reply in replies for text in (reply.decode(), "output of the command")]
    return chat("fix the bug", *said, **fields)


@pytest.mark.parametrize("stream", [False, True])
def test_restored_sandbox_is_answered_byte_for_byte(bench: Bench, proxy: HostProxy, stream: bool) -> None:
    box = bench.serve(proxy, FakeBox())
    replies = talk(bench, box, 4, stream=stream)
    proxy.restored(box.name, 2, on_purpose=False)
    box.back_to(2)
    again = bench.ask(box, next_request(replies[:1], stream=stream))
    assert again.reply() == replies[1], "the reply to the request that the checkpoint had in flight"
    assert box.turns == 2, "its turn is covered by the checkpoint"
    assert "set-cookie" not in again.headers
    assert again.headers["content-type"] == ("text/event-stream" if stream else "application/json")
    box.instant = False
    again = bench.ask(box, next_request(replies[:2], stream=stream))
    assert box.pending(5).promoted.wait(60) and not again.first.is_set(), "it waits for the new checkpoint"
    box.pending(5).finish()
    assert again.reply() == replies[2]
    assert box.turns == 3, "work that was done again ends a turn again"
    assert len(bench.model.calls) == 4


def test_other_request_after_a_restore_asks_the_model(bench: Bench, proxy: HostProxy) -> None:
    box = bench.serve(proxy, FakeBox())
    replies = talk(bench, box, 3)
    proxy.restored(box.name, 1, on_purpose=False)
    assert bench.ask(box, next_request([b"something else"])).reply() == answer(4, PATH)
    proxy.restored(box.name, 1, on_purpose=False)
    assert bench.ask(box, next_request(replies[:1])).reply() == replies[1], "the old branch is still known"
    assert bench.ask(box, next_request([b"something else"])).reply() == answer(4, PATH)


def test_reply_that_arrives_while_the_sandbox_is_dead(bench: Bench, proxy: HostProxy) -> None:
    bench.model.plan.events = threading.Semaphore(1)
    box = bench.serve(proxy, FakeBox())
    first = bench.ask(box, chat("go", stream=True))
    first.until(events(1, PATH)[0])
    first.leave.set()
    bench.model.plan.events.release(2)
    first.join(60)
    until(lambda: recorded(bench, box) == [200])
    proxy.restored(box.name, 1, on_purpose=False)
    assert bench.ask(box, chat("go", stream=True)).reply() == b"".join(events(1, PATH))
    assert len(bench.model.calls) == 1


def test_repeat_attaches_to_the_request_under_way(bench: Bench, proxy: HostProxy) -> None:
    bench.model.plan.events = threading.Semaphore(1)
    box = bench.serve(proxy, FakeBox())
    first = bench.ask(box, chat("go", stream=True))
    first.until(events(1, PATH)[0])
    second = bench.ask(box, chat("go", stream=True))
    second.until(events(1, PATH)[0])
    proxy.restored(box.name, 1, on_purpose=False)
    third = bench.ask(box, chat("go", stream=True))
    third.until(events(1, PATH)[0])
    bench.model.plan.events.release(2)
    assert {request.reply() for request in (first, second, third)} == {b"".join(events(1, PATH))}
    assert len(bench.model.calls) == 1
    assert box.turns == 1


def test_same_question_again_is_a_wish_for_another_answer(bench: Bench, proxy: HostProxy) -> None:
    box = bench.serve(proxy, FakeBox())
    two = [bench.ask(box, chat("go")).reply() for _ in range(2)]
    assert two == [answer(1, PATH), answer(2, PATH)]
    proxy.restored(box.name, 0, on_purpose=False)
    assert [bench.ask(box, chat("go")).reply() for _ in range(3)] == [*two, answer(3, PATH)]


def test_sandbox_that_died_before_its_checkpoint_was_safe(bench: Bench, proxy: HostProxy) -> None:
    box = bench.serve(proxy, FakeBox(instant=False))
    dying = bench.ask(box, chat("go"))
    assert box.pending(1).promoted.wait(60)
    proxy.restored(box.name, 0, on_purpose=False)
    box.back_to(0)
    assert b"restored meanwhile" in dying.reply() and dying.status == 503
    again = bench.ask(box, chat("go"))
    box.pending(2)
    assert not again.first.is_set(), "the turn is done anew, and needs a checkpoint of its own"
    box.pending(1).finish()
    assert not again.first.is_set(), "an old checkpoint releases nothing of the new life"
    box.pending(2).finish()
    again.reply()


def test_rollback_on_purpose_asks_anew(bench: Bench, proxy: HostProxy) -> None:
    box = bench.serve(proxy, FakeBox())
    replies = talk(bench, box, 4)
    proxy.restored(box.name, 2, on_purpose=True)
    box.back_to(2)
    assert bench.ask(box, next_request([])).reply() == replies[0], "before the turn: as it was"
    other = bench.ask(box, next_request(replies[:1])).reply()
    assert other == answer(5, PATH)
    proxy.restored(box.name, 2, on_purpose=False)
    assert bench.ask(box, next_request(replies[:1])).reply() == other, (
        "a crash later returns to the new branch"
    )
    assert len(bench.model.calls) == 5


def test_rollback_lets_go_of_the_reply_under_way(bench: Bench, proxy: HostProxy) -> None:
    bench.model.plan.answer.clear()
    box = bench.serve(proxy, FakeBox())
    old = bench.ask(box, chat("go"))
    bench.model.wait_for(1)
    until(lambda: box.turns == 1)
    proxy.restored(box.name, 1, on_purpose=True)
    new = bench.ask(box, chat("go"))
    bench.model.wait_for(2)
    bench.model.plan.answer.set()
    assert new.reply() in (answer(1, PATH), answer(2, PATH))
    old.reply()
    proxy.restored(box.name, 1, on_purpose=False)
    assert bench.ask(box, chat("go")).reply() == new.reply()


def test_forks_share_what_was_said_before(bench: Bench, proxy: HostProxy) -> None:
    box = bench.serve(proxy, FakeBox())
    replies = talk(bench, box, 3)
    fork = FakeBox("fork")
    fork.back_to(2)
    proxy.forked(box.name, fork.name, 2)
    bench.serve(proxy, fork)
    got = bench.ask(fork, next_request(replies[:1])).reply()
    assert got == answer(4, PATH)
    assert bench.ask(fork, next_request([])).reply() == replies[0]
    proxy.restored(box.name, 2, on_purpose=False)
    assert bench.ask(box, next_request(replies[:1])).reply() == replies[1], "the source has its own record"


def test_a_fork_of_a_sandbox_that_is_gone_leaves_nothing_of_it(bench: Bench, proxy: HostProxy) -> None:
    proxy.forked("gone", "fork", 2)
    bench.serve(proxy, FakeBox("fork"))
    assert not bench.home.box("gone").exists()


def test_record_outlives_the_proxy(bench: Bench) -> None:
    before = bench.proxy()
    box = bench.serve(before, FakeBox())
    replies = talk(bench, box, 3)
    before.close()
    bench.proxies.remove(before)
    after = bench.proxy()
    after.restored(box.name, 2, on_purpose=False)
    bench.serve(after, box)
    assert bench.ask(box, next_request(replies[:1])).reply() == replies[1]
    helper = {"model": "small", "messages": [{"role": "user", "content": "is this a new topic?"}]}
    turns = box.turns
    bench.ask(box, helper).reply()
    assert box.turns == turns, "it is no request of the main loop"


def test_keys_are_neither_recorded_nor_told(bench: Bench, proxy: HostProxy) -> None:
    box = bench.serve(proxy, FakeBox())
    secret = {"authorization": "Bearer hidden-key-1", "x-api-key": "hidden-key-2"}
    bench.ask(box, chat("go"), **secret).reply()
    bench.model.plan = Plan(break_after=0)
    bench.model.plan.answer.set()
    bench.ask(box, chat("go", "x", "y"), **secret).reply()
    assert bench.model.calls[0].headers["x-api-key"] == "hidden-key-2"
    files = [file for file in bench.home.path.rglob("*") if file.is_file()]
    assert files
    assert not any(b"hidden-key" in file.read_bytes() for file in files)
    assert all(file.stat().st_mode & 0o077 == 0 for file in files)


def test_record_that_cannot_be_written_does_not_stop_the_agent(bench: Bench, proxy: HostProxy) -> None:
    box = bench.serve(proxy, FakeBox())
    with sqlite3.connect(conversation_file(bench.home, box.name)) as file:
        file.execute("DROP TABLE records")
    assert bench.ask(box, chat("go")).reply() == answer(1, PATH)


def test_reply_larger_than_the_bound_is_refused(bench: Bench) -> None:
    proxy = bench.proxy(reply=10)
    box = bench.serve(proxy, FakeBox())
    with pytest.raises(Exception, match=r"closed|incomplete|larger"):
        bench.ask(box, chat("go")).reply()
