"""What agents asked when the daemon was killed, or while it was away, is answered on the same connections."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fake_model import FakeModel, answer, events
from fake_turns import FakeBox
from model_bench import Bench, chat, plain, recorded, response

from support.ports import free_port
from support.waiting import gone, until
from windtunnel.agents.sandbox.client.launch import WATCHDOG
from windtunnel.agents.sandbox.place import Home
from windtunnel.linux.processes import descriptors

SERVICE = Path(__file__).with_name("kept_proxy.py")
GET = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"


def post(text: str, **fields: object) -> bytes:
    body = json.dumps(chat(text, **fields)).encode()
    return b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (
        len(body),
        body,
    )


class Served:
    """`kept_proxy.py` under a watchdog."""

    def __init__(self, home: Path, upstream: str) -> None:
        self.home, self.life = home, 1
        self.port = free_port()
        command = [*WATCHDOG, str(home), sys.executable, str(SERVICE), str(home), str(self.port), upstream]
        self.process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        until(lambda: (home / "ready1").exists())

    def end(self, number: int) -> None:
        """End the daemon by a signal; the next one is started."""
        pid = int((self.home / "began").read_text().split()[-1])
        os.kill(pid, number)
        until(lambda: gone(pid))
        self.life += 1

    def back(self) -> None:
        until(lambda: (self.home / f"ready{self.life}").exists())


@pytest.fixture
def served(tmp_path: Path, model: FakeModel) -> Iterator[Served]:
    made = Served(tmp_path, model.url)
    yield made
    made.process.terminate()
    made.process.wait(60)


def connected(served: Served) -> socket.socket:
    return socket.create_connection(("127.0.0.1", served.port), timeout=60)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_calls_are_answered_by_the_next_daemon(served: Served, model: FakeModel, number: int) -> None:
    bench, box = Bench(Home(served.home), model), FakeBox("one")
    with ThreadPoolExecutor(2) as pool, connected(served) as idle, connected(served) as half:
        idle.sendall(GET)
        assert response(idle)[0] == 200
        text = post("half of it")
        half.sendall(text[:60])
        held = pool.submit(plain, served.port, post("first"))
        model.wait_for(2)
        until(lambda: recorded(bench, box) == [200])
        served.end(number)
        gap = pool.submit(plain, served.port, post("second"))
        served.back()
        assert held.result(60) == (200, answer(2, "")), "the recorded reply"
        assert gap.result(60) == (200, answer(3, ""))
        assert len(model.calls) == 3, "the model was asked once for each"
        idle.sendall(GET)
        assert response(idle) == (200, answer(4, "")), "the connection is the same"
        half.sendall(text[60:])
        assert response(half) == (200, answer(5, ""))
        # and once more, on connections that were taken up already
        idle.sendall(GET[:10])
        served.end(number)
        idle.sendall(GET[10:])
        assert response(idle) == (200, answer(6, ""))
    assert [call.path for call in model.calls].count("/v1/chat/completions") == 3


def test_a_call_that_the_model_thinks_about_is_asked_again(served: Served, model: FakeModel) -> None:
    model.plan.answer.clear()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(plain, served.port, post("first"))
        model.wait_for(1)
        served.end(signal.SIGKILL)
        model.wait_for(2)
        model.plan.answer.set()
        assert asked.result(60) == (200, answer(2, ""))


def test_a_reply_that_had_begun_breaks_off(served: Served, model: FakeModel) -> None:
    helper = {"model": "m", "max_tokens": 5, "stream": True, "messages": []}
    body = json.dumps(helper).encode()
    model.plan.events = threading.Semaphore(1)
    with connected(served) as plug:
        plug.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        )
        plug.sendall(body)
        got = b""
        while events(1, "")[0] not in got:
            got += plug.recv(4096)
        served.end(signal.SIGKILL)
        served.back()
        while part := plug.recv(4096):
            got += part
    assert b"0\r\n\r\n" not in got, "it does not look like a whole reply"
    assert len(model.calls) == 1
    assert plain(served.port, GET)[0] == 200


def test_a_client_that_left_in_the_gap_costs_nothing(served: Served, model: FakeModel) -> None:
    with connected(served) as plug:
        plug.sendall(post("first")[:40])
        until(lambda: plain(served.port, GET)[0] == 200)
        served.end(signal.SIGKILL)
    served.back()
    assert plain(served.port, GET)[0] == 200
    # the notify socket, its own pair, the daemon, the listener, the streams: no connection is left
    until(lambda: not any("memfd" in target for target in descriptors(served.process.pid).values()))
