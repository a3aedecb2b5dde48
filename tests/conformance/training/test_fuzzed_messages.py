"""Whatever comes on a socket, its reader raises what it says it does, closes that connection, and lives."""

from __future__ import annotations

import contextlib
import json
import queue
import re
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support import secret
from support.waiting import PATIENCE
from windtunnel.base import handshake, remote, schema, wire
from windtunnel.base.calls import SERVICE, methods
from windtunnel.base.listener import Listener
from windtunnel.base.rpc import RpcServer, RpcService
from windtunnel.base.wire import WireError
from windtunnel.training.checkpoint.live.memory import LocalMemory, MemoryLimits, MemoryService
from windtunnel.training.checkpoint.live.memory.messages import FROM_PEER
from windtunnel.training.elastic.live.calls import Hello, HostAgent, Supervision
from windtunnel.training.elastic.live.supervisor import Supervisor
from windtunnel.training.elastic.model import MemberHost, Membership
from windtunnel.training.elastic.policy.rules import Rules
from windtunnel.training.elastic.policy.state import SupervisorSettings
from windtunnel.training.hosts import Offer

NAMES = re.findall(
    r"\w+",
    """host address memory domain pid generation epoch workers posts key rank value kind t step what status
    signal error result action shard rate membership place mine values beat digest committed base keeps
    slots capacity header world slot replicate seconds until url layout copies placement nbytes self""",
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 9)
    | st.sampled_from([2**62, -(2**63), 2**70, 1e300, float("nan"), float("inf"), "", "../x", "7", "rank0"]),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.sampled_from([*NAMES, "0", "-1"]), inner),
    max_leaves=6,
)


def messages(table: schema.Table) -> st.SearchStrategy[dict[str, Any]]:
    """Some of them sound for a field or two, most of them not at all."""
    fields = st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=10)
    ops = st.sampled_from([*table, "no such", 7])
    return st.builds(lambda op, fields: {**fields, "op": op}, ops, fields)


FEW = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


@given(st.binary(max_size=200) | st.builds(lambda v: frame(json.dumps(v).encode()), VALUES))
@settings(FEW, max_examples=150)
def test_frames(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(data)
        theirs.close()
        with contextlib.suppress(WireError):
            message, following = wire.receive(ours)
            assert isinstance(message, dict)
            wire.skip(ours, following)
    with contextlib.suppress(WireError):
        handshake.ServerHandshake(secret.KEYS, ("x",)).take(bytearray(data))


def frame(text: bytes, following: int = 0) -> bytes:
    return wire.HEAD.pack(len(text), following) + text


@pytest.mark.parametrize(
    "data",
    [
        frame(b"[" * 200_000),
        frame(b'{"a":' * 150 + b"1" + b"}" * 150),
        frame(b'{"a": 1'),
        frame(b"{}")[:-1],
        wire.HEAD.pack(1 << 31, 0) + b"{}",
        frame(b"\xff\xfe"),
    ],
)
def test_frames_that_ended_jobs(data: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        threading.Thread(target=lambda: (theirs.sendall(data), theirs.close()), daemon=True).start()
        with pytest.raises(WireError):
            wire.receive(ours)


def calls_of(protocol: type) -> st.SearchStrategy[dict[str, Any]]:
    """Some of them sound for a field or two, most of them not at all."""
    given_fields = st.dictionaries(st.sampled_from(["link", "hello", "fields", *NAMES]), VALUES, max_size=8)
    names = st.sampled_from([*methods(protocol), "no_such"])
    build = lambda name, fields: {"id": 1, "do": f"{protocol.__name__}.{name}", "with": fields}  # noqa: E731
    return st.builds(build, names, given_fields)


def test_the_supervisor_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Supervisor, "kill_launcher", lambda _: None)  # which an agent may ask for
    supervisor = Supervisor(
        tmp_path,
        Rules(),
        SupervisorSettings(2, 1, lease=60.0),
        order_hosts=lambda count: None,
        keys=secret.KEYS,
    )
    supervisor.start()

    link = remote.RemoteLink(f"tcp:{supervisor.address}", keys=secret.KEYS)
    messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    attend = lambda: link.call(Supervision, "attend", "", Hello("h", "m", 1), lambda m, _: messages.put(m))  # noqa: E731
    threading.Thread(target=attend, daemon=True).start()
    number = messages.get(timeout=PATIENCE)["link"]

    @given(st.lists(calls_of(Supervision), min_size=1, max_size=5))
    @settings(FEW, max_examples=40)
    def strike(said: list[dict[str, Any]]) -> None:
        with (
            contextlib.suppress(OSError),
            handshake.connect(supervisor.address, 5.0, secret.KEYS, SERVICE) as sock,
        ):
            for message in said:
                wire.send(sock, {**message, "with": {"link": number, **message["with"]}})
        ended = supervisor.wait(0.0)
        assert ended is None, ended

    strike()
    assert link.call(Supervision, "ask", "", number, "commit/0") is None
    supervisor.abandon()
    assert supervisor.wait(PATIENCE) is not None


class Quiet:
    def post(self, key: str, rank: int, value: object) -> None: ...

    def event(self, kind: str, **fields: object) -> None: ...


def test_the_memory_service_lives(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    limits = MemoryLimits(connect=1.0, silence=2.0, membership=0.01, slot=0.01)
    service = MemoryService(tmp_path / "n", "127.0.0.1", keys=secret.KEYS, context=Quiet(), limits=limits)
    hosts = (MemberHost(0, "127.0.0.1", service.address),)
    service.membership(Membership(1, 1, hosts, 1, "test"), 0)

    @given(messages(FROM_PEER))
    @FEW
    def strike(message: dict[str, Any]) -> None:
        for sock in (secret.memory(service.address), wire.connect(service.path, 5.0)):
            with sock, contextlib.suppress(OSError):
                wire.send(sock, message)
                sock.settimeout(0.2)
                wire.receive(sock)

    strike()
    memory = LocalMemory(service.path, 0, 1)
    memory.copies()
    memory.close()
    service.close()
    assert "Traceback" not in capfd.readouterr().err  # of a thread that did not expect it


class Deaf:
    """Every method of `HostAgent`, each of which does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda **_: None


def test_the_servers_of_trainers_and_of_hosts_live(tmp_path: Path) -> None:
    local = RpcServer(RpcService.of(HostAgent, Deaf()), f"unix:{tmp_path}/s")
    offer = Offer("127.0.0.1:0", secret.KEYS, lambda: None)  # type: ignore[arg-type, return-value]

    @given(calls_of(HostAgent))
    @FEW
    def strike(message: dict[str, Any]) -> None:
        for sock in (
            wire.connect(f"unix:{tmp_path}/s", 5.0),
            handshake.connect(offer.address, 5.0, secret.KEYS, SERVICE),
        ):
            with sock, contextlib.suppress(OSError):
                wire.send(sock, message)
                assert {"error", "value"} & wire.receive(sock)[0].keys()

    strike()
    assert remote.RemoteLink(local.address).call(HostAgent, "beat", "", 1, 1) is None
    for server in (local, offer):
        server.close()


def test_strangers_hold_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than are let wait; each is cut off at last, and who knows the secret comes in meanwhile."""
    done: list[int] = []
    sock = socket.create_server(("127.0.0.1", 0), backlog=256)
    listener = Listener(sock, lambda _: done.append(1), keys=secret.KEYS, services=lambda: ("x",))
    address = sock.getsockname()
    with monkeypatch.context() as impatient:
        impatient.setattr(handshake, "PATIENCE", 0.5)
        strangers = [socket.create_connection(address, PATIENCE) for _ in range(100)]
        for number, stranger in enumerate(strangers):
            with contextlib.suppress(OSError):
                stranger.sendall(handshake.MAGIC[: number % 9])
    with handshake.connect(f"127.0.0.1:{address[1]}", PATIENCE, secret.KEYS, "x") as known:
        assert known.recv(1) == b""
    for stranger in strangers:
        with stranger, contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    listener.close()
    assert done == [1]
