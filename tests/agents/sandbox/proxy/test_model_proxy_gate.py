"""A reply reaches the agent only when the checkpoint of its turn is safe, and never hangs."""

from __future__ import annotations

import json
import threading

import pytest

from agents.sandbox.proxy.fake_model import Plan, answer, events
from agents.sandbox.proxy.fake_turns import FakeBox
from agents.sandbox.proxy.model_bench import Bench, chat
from support.waiting import until
from windtunnel.agents.sandbox.errors import IncompleteError
from windtunnel.agents.sandbox.model import Lack
from windtunnel.agents.sandbox.proxy import HostProxy


def test_request_goes_out_at_once_and_reply_is_held_until_safe(bench: Bench, proxy: HostProxy) -> None:
    box = bench.serve(proxy, FakeBox(instant=False))
    asked = bench.ask(box, chat("go"))
    bench.model.wait_for(calls=1)
    pending = box.pending(1)
    assert pending.promoted.wait(60), "the reply is there: the checkpoint is urgent"
    assert not asked.first.is_set()
    pending.finish()
    assert asked.reply() == answer(1, "/v1/chat/completions")
    assert len(box.requests) == 1


def test_checkpoint_that_is_done_first_is_not_promoted(bench: Bench, proxy: HostProxy) -> None:
    bench.model.plan.answer.clear()
    box = bench.serve(proxy, FakeBox(instant=False))
    asked = bench.ask(box, chat("go"))
    pending = box.pending(1)
    bench.model.wait_for(calls=1)
    pending.finish()
    until(lambda: pending.taken)
    bench.model.plan.answer.set()
    asked.reply()
    assert not pending.promoted.is_set()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_stream_is_buffered_then_passed_on_as_it_comes(bench: Bench, proxy: HostProxy, path: str) -> None:
    bench.model.plan.events = threading.Semaphore(1)
    box = bench.serve(proxy, FakeBox(instant=False))
    asked = bench.ask(box, chat("go", stream=True), path)
    parts = events(1, path)
    assert box.pending(1).promoted.wait(60)
    assert not asked.first.is_set()
    box.pending(1).finish()
    asked.until(parts[0])
    assert asked.got == parts[0], "what came before the gate opened"
    bench.model.plan.events.release()
    asked.until(parts[1])
    assert asked.is_alive(), "passed on while the stream goes on"
    bench.model.plan.events.release()
    assert asked.reply() == b"".join(parts)
    assert asked.headers["content-type"] == "text/event-stream"


def test_helpers_and_the_rest_pass_ungated(bench: Bench, proxy: HostProxy) -> None:
    box = bench.serve(proxy, FakeBox(instant=False))
    held = bench.ask(box, chat("go"))
    box.pending(1)
    title = {"model": "small", "messages": [{"role": "user", "content": "Generate a title for this chat"}]}
    assert bench.ask(box, title).reply()
    assert bench.ask(box, chat("go", max_tokens=1), "/v1/messages/count_tokens").reply()
    assert bench.ask(box, {"input": "words", "model": "embed"}, "/v1/embeddings").reply()
    assert bench.ask(box, [1, 2], "/v1/chat/completions").reply(), "not understood, and passed on"
    assert not held.first.is_set()
    assert len(box.pendings) == 1
    box.pending(1).finish()
    held.reply()


LACKS = (Lack("processes", "gdb (process 7 inside)", "it debugs"),)
FAULTS = [OSError("the disk\nis full"), IncompleteError("gdb is not kept", LACKS)]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_reply_is_held_back_until_its_turn_is_kept(
    bench: Bench, proxy: HostProxy, fault: Exception
) -> None:
    box = bench.serve(proxy, FakeBox(instant=False))
    box.checkpoint_error = fault
    asked = bench.ask(box, chat("go"))
    box.pending(1).finish(fault)
    for attempt in range(3):
        message = json.loads(asked.reply())["error"]["message"]
        assert (asked.status, asked.headers["retry-after"]) == (503, "5")
        assert "held back" in message and str(fault) in message, message
        assert box.checkpoints == attempt, "whoever asks again has it tried again"
        if attempt == 2:
            box.checkpoint_error = None
        asked = bench.ask(box, chat("go"))
    assert asked.reply() == answer(1, "/v1/chat/completions"), "the recorded reply"
    assert "x-windtunnel-checkpoint" not in asked.headers
    assert (len(bench.model.calls), box.turns, box.checkpoints) == (1, 1, 3)


def test_what_lacks_and_is_allowed_is_told_in_a_header(bench: Bench, proxy: HostProxy) -> None:
    box = bench.serve(proxy, FakeBox(instant=False))
    asked = bench.ask(box, chat("go"))
    box.pending(1).lacks = LACKS
    box.pending(1).finish()
    assert asked.reply() == answer(1, "/v1/chat/completions")
    assert asked.headers["x-windtunnel-checkpoint"] == "gdb (process 7 inside): it debugs"


@pytest.mark.parametrize("allows", [False, True])
def test_a_turn_that_cannot_be_ended(bench: Bench, proxy: HostProxy, allows: bool) -> None:
    box = bench.serve(proxy, FakeBox())
    box.error, box.allows = RuntimeError("sandbox one is dead"), allows
    asked = bench.ask(box, chat("go"))
    words = asked.reply().decode()
    if allows:
        words = asked.headers["x-windtunnel-checkpoint"]
    assert asked.status == (200 if allows else 503)
    assert "the end of the turn failed: sandbox one is dead" in words


def test_hanging_checkpoint_and_hanging_turn_are_bounded(bench: Bench) -> None:
    proxy = bench.proxy(gate=0.2)
    slow = bench.serve(proxy, FakeBox("slow", instant=False))
    asked = bench.ask(slow, chat("go"))
    assert b"the checkpoint was not done within 0.2 s" in asked.reply() and asked.status == 503
    stuck = bench.serve(proxy, FakeBox("stuck"))
    stuck.unblocked.clear()
    for number in range(3):
        asked = bench.ask(stuck, chat(f"task {number}"))
        assert b"the end of the turn was not done within 0.2 s" in asked.reply() and asked.status == 503
    stuck.unblocked.set()
    slow.pending(1).finish()


@pytest.mark.parametrize("status", [400, 401, 429, 500, 529])
def test_errors_of_the_service_are_passed_on_and_not_recorded(
    bench: Bench, proxy: HostProxy, status: int
) -> None:
    bench.model.plan.status = status
    box = bench.serve(proxy, FakeBox())
    asked = bench.ask(box, chat("go"))
    assert asked.reply() == answer(1, "", status)
    assert asked.status == status
    assert "set-cookie" not in asked.headers
    bench.model.plan.status = 200
    assert bench.ask(box, chat("go")).reply() == answer(2, "/v1/chat/completions")
    assert box.turns == 1, "the repeat belongs to the turn that has ended"


def test_service_that_is_down(bench: Bench, proxy: HostProxy) -> None:
    box = bench.serve(proxy, FakeBox(), upstream="http://127.0.0.1:9")
    asked = bench.ask(box, chat("go"))
    assert b"cannot be reached" in asked.reply()
    assert asked.status == 502


@pytest.mark.parametrize("sent", [1, 2, 3])
def test_stream_that_breaks_off_is_seen_to(bench: Bench, proxy: HostProxy, sent: int) -> None:
    """Even after its closing event: what is not recorded must not be acted on."""
    bench.model.plan = Plan(break_after=sent)
    bench.model.plan.answer.set()
    box = bench.serve(proxy, FakeBox())
    asked = bench.ask(box, chat("go", stream=True))
    with pytest.raises(Exception, match=r"incomplete chunked read|peer closed"):
        asked.reply()
    assert b"[DONE]" not in asked.got
    bench.model.plan = Plan()
    bench.model.plan.answer.set()
    assert bench.ask(box, chat("go", stream=True)).reply() == b"".join(events(2, ""))
