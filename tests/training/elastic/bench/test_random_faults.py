"""The benchmark of random faults: what it draws, and how it judges."""

from __future__ import annotations

import socket
from collections import Counter
from pathlib import Path
from random import Random
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.harness.rows import Row
from benchmarks.training.elastic import strangers, strikes
from benchmarks.training.elastic.faults import HOSTS, KINDS, ROUNDS, Kind, Ran, Struck, drawn, rows
from windtunnel.base import keys, wire
from windtunnel.base.listener import Listener

pytestmark = pytest.mark.conformance


TRUTH = ({0: "a", 1: "b", 2: "c"}, {0: {"2": "whole"}})


def judged(struck: list[Struck], losses: list[tuple[int, str, float]], state: str = "whole") -> list[Row]:
    plan = [(one.kind, one.rank) for one in struck]
    return list(rows(plan, [Ran(struck, losses, 2, {0: state})], TRUTH))[:3]


def fault(kind: Kind, outcome: str, begin: float, end: float, lost: int = 0) -> Struck:
    return Struck(kind, 0, outcome, 1.0, lost, begin=begin, end=end)


def test_every_kind_is_drawn_as_often_and_alike_again() -> None:
    plan = drawn(ROUNDS)
    assert len(plan) >= 100 and len(KINDS) >= 20
    assert set(Counter(kind.name for kind, _ in plan).values()) == {ROUNDS}
    assert {rank for _, rank in plan} == set(range(HOSTS))
    assert plan == drawn(ROUNDS) != drawn(ROUNDS, seed=12)


def test_what_is_lost_wrong_or_done_again_misses_the_target() -> None:
    good = [fault(KINDS[0], "survived", 0.0, 2.0), fault(KINDS[-1], "refused", 2.0, 4.0)]
    right = [(0, "a", 0.5), (1, "b", 1.5), (1, "b", 2.5), (2, "c", 3.5)]
    assert [(row.measured, row.met) for row in judged(good, right)] == [(2, True), (0, True), (0, True)]
    assert judged(good, [*right, (2, "x", 3.6)])[1].measured == 1
    assert judged(good, right, "torn")[1].met is False
    survived, _, again = judged([good[0], fault(KINDS[1], "lost", 2.0, 4.0, lost=3)], right)
    assert survived.met is False and KINDS[1].name in survived.note and again.measured == 3
    assert judged([*good, fault(KINDS[2], "not struck", 4.0, 5.0)], right)[0].met is False


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
    secret, heard = keys.of_run(tmp_path, None), []

    def serve(peer: socket.socket) -> None:
        while True:
            heard.append(wire.receive(peer)[0])
            wire.send(peer, {"held": []})
            if forgetful:
                session = wire.session(peer)
                assert session is not None
                session._in._count = 0

    host = SimpleNamespace(id=7, memory=here)
    monkeypatch.setattr(strangers, "past", lambda _: SimpleNamespace(hosts={7: (host, 1)}))
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
            assert heard == [{"op": "list"}]
    finally:
        listener.close()
