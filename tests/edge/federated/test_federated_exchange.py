"""A group over real sockets: its exact mean, and every way in which it can break."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.certificates import Authority
from support.peers import KEYS, averaged, group
from windtunnel.base import handshake, wire
from windtunnel.base.keys import Keys
from windtunnel.edge.federated.live.exchange import ExchangeGroup, ExchangePeer, GroupFailed, Mean

NAMES = ["a", "b", "c", "d", "e"]


def drawn(count: int, length: int = 70_001) -> tuple[list[np.ndarray], list[float]]:
    draw = np.random.default_rng(count)
    return list(draw.normal(size=(count, length))), draw.integers(1, 9, count).astype(float).tolist()


@pytest.mark.parametrize("exchange", ["ring", "doubling"])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_all_come_to_the_weighted_mean_bit_for_bit_alike(exchange: str, size: int) -> None:
    vectors, weights = drawn(size)
    means = averaged(group(NAMES[:size], exchange), vectors, weights)
    expected = np.average(vectors, axis=0, weights=weights)
    for mean in means:
        assert isinstance(mean, Mean) and (mean.total, mean.lost, mean.refused) == (sum(weights), (), ())
        np.testing.assert_allclose(mean.vector, expected, rtol=0, atol=1e-12)
        assert isinstance(means[0], Mean) and np.array_equal(mean.vector, means[0].vector)


@pytest.mark.parametrize("exchange", ["ring", "doubling"])
def test_who_is_lost_before_its_vector_is_left_out_and_named(exchange: str) -> None:
    vectors, weights = drawn(5)

    def before(place: int, peer: ExchangePeer) -> None:
        if place == 2:  # it has trained, says so, and is gone
            peer._control()[0]({"ready": True})
            raise ConnectionError("killed")

    means = averaged(group(NAMES, exchange), vectors, weights, before=before)
    rest = [0, 1, 3, 4]
    expected = np.average(
        [vectors[place] for place in rest], axis=0, weights=[weights[place] for place in rest]
    )
    assert isinstance(means[2], ConnectionError)
    for place in rest:
        mean = means[place]
        assert isinstance(mean, Mean) and mean.lost == ("c",), mean
        np.testing.assert_allclose(mean.vector, expected, rtol=0, atol=1e-12)


def test_with_certificates_all_is_encrypted(tmp_path: Path) -> None:
    vectors, weights = drawn(4)
    keys = Keys(KEYS.secret, Authority(tmp_path / "ours").issue("device").load())
    means = averaged(group(NAMES[:4]), vectors, weights, keys=keys)
    expected = np.average(vectors, axis=0, weights=weights)
    for mean in means:
        assert isinstance(mean, Mean), mean
        np.testing.assert_allclose(mean.vector, expected, rtol=0, atol=1e-12)
    own = group(NAMES[:1])
    with ExchangePeer(own, 0, keys), pytest.raises(OSError):  # who knows the secret, and has no certificate
        handshake.connect(own.members[0][1], 5.0, KEYS, own.service(0))


def test_who_is_lost_within_an_exchange_is_in_no_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    vectors, weights = drawn(4)
    send = ExchangePeer._send

    def sent(self: ExchangePeer, place: int, step: tuple[int, int], data: bytes) -> None:
        if self.place == 3 and step == (1, 1):  # after it has sent a part to others
            self.__exit__()
            raise ConnectionError("killed")
        send(self, place, step, data)

    monkeypatch.setattr(ExchangePeer, "_send", sent)
    means = averaged(group(NAMES[:4], stall=2.0, patience=8.0), vectors, weights)
    expected = np.average(vectors[:3], axis=0, weights=weights[:3])
    for mean in means[:3]:
        assert isinstance(mean, Mean) and mean.lost == ("d",), mean
        np.testing.assert_allclose(mean.vector, expected, rtol=0, atol=1e-12)


def test_a_vector_that_is_not_finite_is_refused_by_name() -> None:
    vectors, weights = drawn(3)
    vectors[1][5] = np.nan
    means = averaged(group(NAMES[:3]), vectors, weights)
    expected = np.average([vectors[0], vectors[2]], axis=0, weights=[weights[0], weights[2]])
    for mean in means:
        assert isinstance(mean, Mean) and mean.refused == ("b",)
        np.testing.assert_allclose(mean.vector, expected, rtol=0, atol=1e-12)


def test_without_its_leader_a_group_has_no_mean() -> None:
    vectors, weights = drawn(3)

    def before(place: int, peer: ExchangePeer) -> None:
        if place == 0:
            raise ConnectionError("killed")

    means = averaged(group(NAMES[:3], stall=1.0, patience=2.0), vectors, weights, before=before)
    assert all(
        isinstance(error, GroupFailed) and "a, the leader of the group" in str(error) for error in means[1:]
    )


def test_the_model_comes_from_the_leader_where_the_device_before_is_gone() -> None:
    own = group(NAMES[:3], stall=1.0)
    with ExchangePeer(own, 0, KEYS) as leader, ExchangePeer(own, 2, KEYS) as member:
        leader.model(b"model" * 100_000)
        assert member.model() == b"model" * 100_000


@pytest.mark.parametrize(
    "frame",
    [
        {"epoch": 1, "step": 0, "from": 1, "at": 0, "of": 1 << 40},
        {"epoch": 1, "step": 0, "from": 1, "at": 8, "of": 16},
        {"epoch": "x", "step": 0, "from": 1},
        {},
    ],
)
def test_a_wrong_frame_ends_its_connection_and_nothing_else(frame: dict[str, Any]) -> None:
    own = group(NAMES[:1])
    with ExchangePeer(own, 0, KEYS) as peer:
        with handshake.connect(own.members[0][1], 5.0, KEYS, own.service(0)) as sock:
            wire.send(sock, frame, b"12345678")
            with pytest.raises(OSError):
                wire.receive(sock)
        mean = peer.mean(np.ones(3), 2.0)
        assert mean.total == 2.0


def test_strangers_are_not_let_in() -> None:
    own = group(NAMES[:1])
    with ExchangePeer(own, 0, KEYS):
        with pytest.raises(OSError):
            handshake.connect(own.members[0][1], 5.0, Keys.new(), own.service(0))
        with pytest.raises(OSError):  # a proof for another round
            handshake.connect(
                own.members[0][1], 5.0, KEYS, ExchangeGroup("another", own.members, "ring", 1).service(0)
            )
        host, _, port = own.members[0][1].rpartition(":")
        with socket.create_connection((host, int(port)), 5.0) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"x" * 200)
            sock.settimeout(10.0)
            with pytest.raises(ConnectionError):
                while sock.recv(100):
                    pass
                raise ConnectionError
