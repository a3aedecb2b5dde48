"""A port that only who opens it comes to, and whose connection it is."""

from __future__ import annotations

import os
import socket
import threading

import pytest

from support.waiting import PATIENCE
from windtunnel.base import connections
from windtunnel.base.listener import local_user
from windtunnel.linux.gate import ListeningGate


def test_nobody_comes_in_but_through_the_gate() -> None:
    gate = ListeningGate(("127.0.0.2", 0))
    for bound in ("127.0.0.1", "127.0.0.2"):
        with socket.socket() as stranger:
            stranger.bind((bound, 0))
            stranger.settimeout(0.1)
            with pytest.raises(TimeoutError):
                stranger.connect(gate.address)
    ours: list[socket.socket] = []
    several = [threading.Thread(target=lambda: ours.append(gate.connect(10.0))) for _ in range(8)]
    for thread in several:
        thread.start()
    theirs = [gate.listener.accept()[0] for _ in several]
    for thread in several:
        thread.join(PATIENCE)
    assert {sock.getpeername() for sock in theirs} == {sock.getsockname() for sock in ours}
    for sock in ours:  # long after the gate has closed behind them
        sock.sendall(b"there" * 10_000)
    for sock in theirs:
        assert sock.recv(5, socket.MSG_WAITALL) == b"there"
        sock.sendall(b"back")
    for sock in ours:
        assert sock.recv(4, socket.MSG_WAITALL) == b"back"
    with socket.socket() as stranger, pytest.raises(TimeoutError):
        stranger.settimeout(0.1)
        stranger.connect(gate.address)
    for sock in (*ours, *theirs, gate.listener):
        sock.close()
    with pytest.raises(OSError):
        gate.connect(1.0)


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_the_kernel_says_whose_a_connection_is_without_listing_all(
    family: socket.AddressFamily, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket(family) as client:
        host = "127.0.0.1" if family == socket.AF_INET else "::ffff:127.0.0.1"
        client.connect((host, listener.getsockname()[1]))
        with listener.accept()[0] as server:
            listed = connections._listed(server.getpeername(), server.getsockname())
            assert listed == connections.ConnectionEnd(connections.ESTABLISHED, os.getuid())
            monkeypatch.setattr(connections, "_listed", lambda *_: None)
            assert local_user(server) == os.getuid()
            asked = connections.end(server.getpeername(), server.getsockname())
            assert asked == listed
            assert connections.end(("127.0.0.1", 1), server.getsockname()) is None
