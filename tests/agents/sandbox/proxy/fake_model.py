"""A model service for tests, in OpenAI's and Anthropic's shapes, whose every step waits for the test."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PATIENCE = 60.0


@dataclass
class Call:
    """One request that the service got."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Plan:
    """How the service behaves: it answers when ``answer`` is set, and sends the stream's n-th event when
    ``events`` were released n times. ``status``: of the next replies. ``break_after``: events (of a stream)
    after which it hangs up; 0: before any byte."""

    answer: threading.Event = field(default_factory=threading.Event)
    events: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(10_000))
    status: int = 200
    break_after: int | None = None


class FakeModel:
    """Counts calls; answer n says so, which makes it different from every other."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.plan = Plan()
        self.plan.answer.set()
        self.changed = threading.Condition()
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, *words: object) -> None:
                """Silence."""

            def do_GET(self) -> None:
                service.handle(self)

            do_POST = do_PUT = do_DELETE = do_GET

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.plan.answer.set()
        self.server.shutdown()
        self.server.server_close()

    def wait_for(self, calls: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.calls) >= calls, PATIENCE)

    def handle(self, http: BaseHTTPRequestHandler) -> None:
        body = http.rfile.read(int(http.headers.get("content-length", 0)))
        plan = self.plan
        with self.changed:
            self.calls.append(
                Call(http.command, http.path, {k.lower(): v for k, v in http.headers.items()}, body)
            )
            number = len(self.calls)
            self.changed.notify_all()
        assert plan.answer.wait(PATIENCE)
        if plan.break_after == 0:
            http.close_connection = True
            return
        asked = json.loads(body) if body[:1] == b"{" else {}
        if plan.status != 200 or not asked.get("stream"):
            self.send(http, plan.status, answer(number, http.path, plan.status))
        else:
            self.stream(http, plan, events(number, http.path))

    def send(self, http: BaseHTTPRequestHandler, status: int, body: bytes) -> None:
        http.send_response(status)
        http.send_header("content-type", "application/json")
        http.send_header("content-length", str(len(body)))
        http.send_header("set-cookie", "session=secret")
        http.end_headers()
        http.wfile.write(body)

    def stream(self, http: BaseHTTPRequestHandler, plan: Plan, parts: list[bytes]) -> None:
        http.send_response(200)
        http.send_header("content-type", "text/event-stream")
        http.send_header("transfer-encoding", "chunked")
        http.end_headers()
        http.wfile.flush()
        for place, part in enumerate(parts):
            if place == plan.break_after:
                http.close_connection = True
                return
            assert plan.events.acquire(timeout=PATIENCE)
            try:
                http.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
                http.wfile.flush()
            except OSError:
                return
        if plan.break_after == len(parts):
            http.close_connection = True
            return
        http.wfile.write(b"0\r\n\r\n")


def answer(number: int, path: str, status: int = 200) -> bytes:
    """The whole reply of the n-th call."""
    if status != 200:
        return json.dumps({"error": {"type": "told", "message": f"status {status}"}}).encode()
    if path.startswith("/v1/messages"):
        return json.dumps(
            {"type": "message", "content": [{"type": "text", "text": f"answer {number}"}]}
        ).encode()
    return json.dumps(
        {"choices": [{"message": {"role": "assistant", "content": f"answer {number}"}}]}
    ).encode()


def events(number: int, path: str) -> list[bytes]:
    """The events of the n-th call's stream."""
    if path.startswith("/v1/messages"):
        kinds = ["message_start", "content_block_delta", "message_stop"]
        return [
            f"event: {name}\ndata: {json.dumps({'type': name, 'text': f'answer {number}'})}\n\n".encode()
            for name in kinds
        ]
    words = [
        f"data: {json.dumps({'choices': [{'delta': {'content': text}}]})}\n\n"
        for text in ("answer", str(number))
    ]
    return [word.encode() for word in (*words, "data: [DONE]\n\n")]
