"""What strangers say to a job is judged by what comes back."""

from __future__ import annotations

import socket
from pathlib import Path
from random import Random
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from conformance.training import strangers, strikes
from windtunnel.base import keys, wire
from windtunnel.base.listener import Listener


def test_whoever_answers_a_stranger_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for _ in range(3):
                sock, _ = listener.accept()
                with sock:
                    sock.recv(1 << 16)
                    sock.sendall(b"x" * 500)

        thread = Thread(target=serve)
        thread.start()
        target = strikes.Target(None, None, Random(0))  # type: ignore[arg-type]
        monkeypatch.setattr(strikes.Target, "ports", lambda _: [listener.getsockname()])
        with pytest.raises(strangers.Answered, match="answered a stranger with 500 bytes"):
            strangers.without_secret(target)
        for _ in range(2):
            socket.create_connection(listener.getsockname()).close()
        thread.join()
    monkeypatch.setattr(strikes.Target, "ports", lambda _: [])
    with pytest.raises(strikes.Impossible, match="listens"):
        strangers.malformed(target)


@pytest.mark.parametrize("forgetful", [False, True])
def test_what_was_recorded_is_said_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgetful: bool
) -> None:
    """To a service that authenticates, which is silent; and to one whose sessions take a message twice."""
    sock = socket.create_server(("127.0.0.1", 0))
    here = f"127.0.0.1:{sock.getsockname()[1]}"
    secret, requests = keys.of_run(tmp_path, None), []

    def serve(peer: socket.socket) -> None:
        while True:
            requests.append(wire.receive(peer)[0])
            wire.send(peer, {"held": []})
            if forgetful:
                session = wire.session(peer)
                assert session is not None
                session._in._count = 0

    host = SimpleNamespace(id=7, memory=here)
    monkeypatch.setattr(strangers, "past", lambda _: SimpleNamespace(attended={7: (host, 1)}))
    monkeypatch.setattr(strikes.Target, "place", lambda _: {"host": 7})
    monkeypatch.setattr(strikes.Target, "ports", lambda _: [sock.getsockname()])
    job: Any = SimpleNamespace(events=list, folder=tmp_path)
    service = (f"memory {here}",)
    listener = Listener(sock, serve, keys=secret, services=lambda: service, name="test")
    try:
        if forgetful:
            with pytest.raises(strangers.Answered, match="answered the same message again"):
                strangers.replayed(strikes.Target(job, tmp_path, Random(0)))
        else:
            strangers.replayed(strikes.Target(job, tmp_path, Random(0)))
            assert requests == [{"op": "list"}]
    finally:
        listener.close()
