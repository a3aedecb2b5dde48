"""What strangers say to a running job: bytes on every socket of it, which should do nothing at all."""

from __future__ import annotations

import contextlib
import secrets
import select
import socket
import struct
from threading import Thread

from conformance.training import forge
from conformance.training.strikes import PATIENCE, Impossible, Target, Undo, nothing
from windtunnel.base import calls, handshake, keys, wire
from windtunnel.training.elastic.policy.state import past
from windtunnel.training.hosts import split_address

ANSWER = 2.0
"""Seconds that a socket is listened to, after what was sent to it."""


class Answered(RuntimeError):
    """A stranger was told something."""


def malformed(target: Target) -> Undo:
    """To every port of the run: nothing, half a frame, lengths beyond all bounds, deep brackets, noise."""
    deep = b"[" * 200_000 + b"]" * 200_000
    _send(
        target,
        b"",
        struct.pack("!IQ", 64, 0)[:7],
        struct.pack("!IQ", 2**32 - 1, 2**63),
        struct.pack("!IQ", len(deep), 0) + deep,
        handshake.ClientHandshake(keys.Keys.new(), "store").hello[:9],
        b"GET / HTTP/1.1\r\n\r\n",
        target.random.randbytes(4096),
    )
    return nothing


def without_secret(target: Target) -> Undo:
    """Well-formed messages that would end the job or join it, of one who does not know its secret."""
    frames = []
    for text in (b'{"op":"finish","status":1}', b'{"op":"join","pid":1,"workers":{}}', b'{"op":"list"}'):
        frames.append(wire.HEAD.pack(len(text), 0) + text)
    _send(target, *frames)
    return nothing


def wrong_secret(target: Target) -> Undo:
    """The handshake with another secret, its proof guessed; and the same bytes once more."""
    said = [
        handshake.ClientHandshake(keys.Keys.new(), name).hello for name in ("store", "memory", calls.SERVICE)
    ]
    for _ in range(2):
        _send(target, *(hello + secrets.token_bytes(32) for hello in said))
    return nothing


def replayed(target: Target) -> Undo:
    """A peer of a host's memory service knows the secret and asks it something, through one who listens. He
    says the same once more: the message on that connection, and all of it on new ones to every port."""
    hosts, wanted = past(target.job.events()).attended, target.place()["host"]
    if wanted not in hosts:
        raise Impossible("that host is not in the log")
    member, _ = hosts[wanted]
    secret = keys.Keys.read(target.job.folder / keys.NAME)
    said = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ear = Thread(
            target=_listen, args=(listener, split_address(member.memory, "memory"), said), daemon=True
        )
        ear.start()
        here = f"127.0.0.1:{listener.getsockname()[1]}"
        with forge.asked(member.memory, here, secret, ANSWER) as sock, contextlib.suppress(OSError):
            sock.sendall(said[handshake.STRANGE :])
            if got := sock.recv(1 << 16):
                raise Answered(f"{member.memory} answered the same message again with {len(got)} bytes")
        ear.join(PATIENCE)
    _send(target, bytes(said), bytes(said))
    return nothing


def _listen(listener: socket.socket, to: tuple[str, int], said: bytearray) -> None:
    """Pass one connection on to where it belongs; keep what the client ``said``."""
    with contextlib.suppress(OSError):
        client, _ = listener.accept()
        with client, socket.create_connection(to, ANSWER) as server:
            other = {client: server, server: client}
            while True:
                for sock in select.select(list(other), [], [])[0]:
                    data = sock.recv(1 << 16)
                    if not data:
                        return
                    if sock is client:
                        said += data
                    other[sock].sendall(data)


def _send(target: Target, *payloads: bytes) -> None:
    """Each on a connection of its own to every port; more than a handshake's answer must not come back."""
    ports = target.ports()
    if not ports:
        raise Impossible("no process of the run listens")
    for address in ports:
        for payload in payloads:
            with contextlib.suppress(OSError), socket.create_connection(address, ANSWER) as sock:
                sock.settimeout(ANSWER / 10)
                sock.sendall(payload)
                got = 0
                while part := sock.recv(1 << 16):
                    got += len(part)
                    if got > handshake.ClientHandshake.ANSWER:
                        raise Answered(f"{address} answered a stranger with {got} bytes")
