"""Only who knows the secret gets a session; and on a session nothing passes but what its peer sent, once."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from support.waiting import PATIENCE
from windtunnel.base import handshake, wire
from windtunnel.base.errors import UserError
from windtunnel.base.handshake import ClientHandshake, HandshakeRefused, ServerHandshake
from windtunnel.base.keys import Keys, of_run
from windtunnel.base.wire import Secured, WireError

KEYS = Keys(b"a secret of the tests")
OTHER = Keys(b"another one of the tests")


def shaken(client: ClientHandshake, server: ServerHandshake) -> tuple[wire.WireSession, wire.WireSession]:
    answer, none = server.take(bytearray(client.hello))
    assert none is None
    proof, ours = client.prove(answer)
    _, theirs = server.take(bytearray(proof))
    assert theirs is not None
    return ours, theirs


def pair() -> tuple[Secured, Secured]:
    """Two ends of a connection with a session."""
    left, right = (Secured(fileno=sock.detach()) for sock in socket.socketpair())
    left.authentic, right.authentic = shaken(ClientHandshake(KEYS, "x"), ServerHandshake(KEYS, ("x",)))
    for sock in (left, right):
        sock.settimeout(5.0)
    return left, right


def test_neither_side_takes_one_that_does_not_know_the_secret() -> None:
    client, server = ClientHandshake(OTHER, "x"), ServerHandshake(KEYS, ("x",))
    answer, _ = server.take(bytearray(client.hello))
    with pytest.raises(HandshakeRefused):
        client.prove(answer)  # a server with another secret
    with pytest.raises(HandshakeRefused):
        server.take(bytearray(32))  # a client that guesses
    with pytest.raises(HandshakeRefused):  # what the server showed is no proof of the client
        again = ServerHandshake(KEYS, ("x",))
        answer, _ = again.take(bytearray(ClientHandshake(KEYS, "x").hello))
        again.take(bytearray(answer[32:]))
    with pytest.raises(HandshakeRefused):
        ServerHandshake(KEYS, ("y",)).take(
            bytearray(ClientHandshake(KEYS, "x").hello)
        )  # another service is meant


def test_a_handshake_that_was_recorded_is_of_no_use() -> None:
    client, server = ClientHandshake(KEYS, "x"), ServerHandshake(KEYS, ("x",))
    answer, _ = server.take(bytearray(client.hello))
    proof, _ = client.prove(answer)
    later = ServerHandshake(KEYS, ("x",))
    later.take(bytearray(client.hello))
    with pytest.raises(HandshakeRefused):
        later.take(bytearray(proof))
    with pytest.raises(HandshakeRefused):
        ClientHandshake(KEYS, "x").prove(answer)


def flipped(frame: bytes, frames: list[bytes]) -> bytes:
    return frame[:14] + bytes([frame[14] ^ 1]) + frame[15:]


@pytest.mark.parametrize(
    "attack",
    [
        flipped,
        lambda frame, before: before[0],  # replayed
        lambda frame, before: before[-1],  # of the other direction, reflected
        lambda frame, before: before[1],  # of another connection
        lambda frame, before: b"",  # left out
    ],
)
def test_a_frame_that_was_meddled_with_ends_the_connection(
    attack: Callable[[bytes, list[bytes]], bytes],
) -> None:
    left, right = pair()
    other, _ = pair()
    assert left.authentic and right.authentic and other.authentic
    first = wire.frame({"op": "a"}, 0, left.authentic)
    right.authentic.verify(first[-wire.TAG :], first[: wire.HEAD.size], first[wire.HEAD.size : -wire.TAG])
    elsewhere = [wire.frame({"op": "b"}, 0, other.authentic) for _ in range(2)][1]
    reflected = [wire.frame({"op": "b"}, 0, right.authentic) for _ in range(2)][1]
    left.sendall(attack(wire.frame({"op": "b"}, 0, left.authentic), [first, elsewhere, reflected]))
    left.sendall(wire.frame({"op": "c"}, 0, left.authentic))
    with pytest.raises(WireError, match="not from the peer"):
        wire.receive(right)


def test_what_follows_a_frame_is_sealed_too() -> None:
    left, right = pair()
    wire.send(left, {"op": "a"}, b"raw bytes")
    message, following = wire.receive(right)
    assert (message, wire.rest(right, following)) == ({"op": "a"}, b"raw bytes")
    assert left.authentic is not None
    left.sendall(wire.frame({"op": "a"}, 3, left.authentic) + b"abd" + left.authentic.seal(b"abc"))
    with pytest.raises(WireError, match="not from the peer"):
        wire.rest(right, wire.receive(right)[1])


def test_both_sides_over_a_real_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        got: list[object] = []

        def serve() -> None:
            for _ in range(2):
                sock = Secured(fileno=listener.accept()[0].detach())
                with sock:
                    try:
                        handshake.admit(sock, KEYS, ("x",))
                        got.append(wire.receive(sock)[0])
                    except WireError as error:
                        got.append(error)

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(HandshakeRefused, match="does not know the job's secret"):
            handshake.connect(address, 5.0, OTHER, "x")
        with handshake.connect(address, 5.0, KEYS, "x") as sock:
            wire.send(sock, {"op": "a"})
        thread.join(PATIENCE)
    assert isinstance(got[0], WireError) and got[1] == {"op": "a"}


def test_a_secret_is_kept_where_only_its_owner_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WINDTUNNEL_SECRET", raising=False)
    keys = of_run(tmp_path, None)
    kept = tmp_path / "secret"
    assert kept.stat().st_mode & 0o777 == 0o600 and keys.secret in kept.read_bytes()
    assert keys.secret.decode() not in repr(keys)
    assert of_run(tmp_path, None) == keys  # the run's own, when it is taken up again
    monkeypatch.setenv("WINDTUNNEL_SECRET", "of the environment")
    assert of_run(tmp_path, None).secret == b"of the environment" == Keys.read(kept).secret
    given = tmp_path / "given"
    given.write_text("of the file, longer\n")
    with pytest.raises(UserError, match="others may read"):
        of_run(tmp_path, given)
    given.chmod(0o600)
    assert of_run(tmp_path, given).secret == b"of the file, longer"
    given.write_text("short")
    with pytest.raises(UserError, match="5 bytes; accepted are 16"):
        of_run(tmp_path, given)
    with pytest.raises(UserError, match="cannot be read"):
        of_run(tmp_path, tmp_path / "none")
