"""Sockets of this process found from outside, and cut; never another one, nor one that listens."""

from __future__ import annotations

import socket

import pytest

from windtunnel.linux import sockets


def test_only_the_recorded_socket_is_shut() -> None:
    near, far = socket.socketpair()
    now = sockets.sockets_now()
    inode = now[near.fileno()]
    assert not sockets.shut(near.fileno(), inode + 1)  # the descriptor means another socket by now
    far.send(b"x")
    assert near.recv(1) == b"x"
    assert sockets.shut(near.fileno(), inode)
    assert far.recv(1) == b""
    fd = near.fileno()
    near.close()
    far.close()
    assert not sockets.shut(fd, inode)


def test_a_listener_is_never_shut() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert not sockets.shut(listener.fileno(), sockets.sockets_now()[listener.fileno()])
        assert sockets.ports(listener.fileno()) == (True, listener.getsockname()[1], 0)
        with socket.create_connection(listener.getsockname()) as near:
            assert sockets.ports(near.fileno())[2] == listener.getsockname()[1]


def test_recorder_takes_only_what_was_opened_within() -> None:
    before = socket.socketpair()
    recorder = sockets.SocketRecorder()
    with recorder.recording():
        within = socket.socketpair()
        with recorder.recording():
            nested = socket.socketpair()
    after = socket.socketpair()
    assert set(recorder.sockets) == {s.fileno() for s in (*within, *nested)}
    assert recorder.cut() == 4
    for near, far in (before, after):
        near.send(b"x")
        assert far.recv(1) == b"x"
    with pytest.raises(ConnectionAbortedError), recorder.recording():
        pass
    for sock in (*before, *within, *nested, *after):
        sock.close()
