"""Queues and programs on packets, in a network of their own, beside what others put there."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from windtunnel.linux import LinuxError, bpf, namespaces, network, queues

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(network.missing() is not None, reason=network.missing() or ""),
]


def returns(value: int) -> bpf.BpfProgram:
    return bpf.BpfProgram("constant", struct.pack("<BBhiBBhi", 0xB7, 0, 0, value, 0x95, 0, 0, 0), (), "tc")


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Path]:
    file = tmp_path / "netns"
    namespaces.make_network(file)
    try:
        pair = {"ifname": "wt1"}
        network.ask(lambda route: route.link("add", ifname="wt0", kind="veth", peer=pair), file)
        queues.make_clsact("wt0", file)
    except LinuxError as error:
        namespaces.release(file)
        pytest.skip(f"links or clsact cannot be made here: {error}")
    yield file
    namespaces.release(file)


@pytest.fixture
def program() -> Iterator[int]:
    try:
        code = bpf.loaded(returns(-1), {})
    except OSError as error:
        pytest.skip(f"BPF cannot be used here: {error}")
    yield code
    os.close(code)


def test_a_program_hangs_on_clsact_beside_others_and_goes_alone(held: Path, program: int) -> None:
    assert not queues.make_clsact("wt0", held)
    queues.attach("wt0", "egress", program, "foreign", held)
    queues.attach("wt0", "egress", program, "ours", held)
    queues.attach("wt0", "ingress", program, "ours", held)
    attached = queues.filters("wt0", held)
    assert {(entry.hook, entry.kind, entry.name) for entry in attached} == {
        ("egress", "bpf", "foreign"),
        ("egress", "bpf", "ours"),
        ("ingress", "bpf", "ours"),
    }
    for entry in attached:
        if entry.name == "ours":
            queues.detach("wt0", entry, held)
    assert [entry.name for entry in queues.filters("wt0", held)] == ["foreign"]
    queues.remove_clsact("wt0", held)
    assert "ffff:" not in queues.queues("wt0", held) and queues.filters("wt0", held) == []


def test_an_ingress_queue_of_others_is_not_replaced(held: Path) -> None:
    queues.remove_clsact("wt0", held)
    network.ask(lambda route: route.tc("add", "ingress", socket.if_nametoindex("wt0")), held)
    with pytest.raises(LinuxError, match="wt0 has a queue of kind ingress that is not ours"):
        queues.make_clsact("wt0", held)
    assert queues.filters("wt0", held) == []


def test_classes_and_their_filters_are_made(held: Path) -> None:
    queues.make_classes("wt0", 25e6, [10e6, 15e6], 25e6, held)
    queues.classify("wt0", "10.0.0.2", 2, held)
    assert queues.queues("wt0", held)["1:"] == "htb"
    queues.remove_queue("wt0", held)
    assert "1:" not in queues.queues("wt0", held)
    with pytest.raises(LinuxError, match="No such file"):
        queues.try_queue("wt0", "no-such-queue", held)


def test_a_program_is_tried_with_a_length_and_a_clock(program: int) -> None:
    assert bpf.tried(program, bpf.Packet(bytes(14), 1514, 7))[0] == -1
    assert bpf.number_of(program) > 0 and bpf.maps_of(bpf.number_of(program)) == {}
    with pytest.raises(OSError, match="Invalid argument"):
        bpf.tried(program, bpf.Packet(bytes(4), 4))


def test_maps_with_a_lock_and_many_values_at_once() -> None:
    try:
        states = bpf.Map(bpf.ARRAY, 4, 48, 5000, "states", lock=True)
        prefixes = bpf.Map(bpf.LPM_TRIE, 20, 4, 100, "prefixes")
    except OSError as error:
        pytest.skip(f"BPF cannot be used here: {error}")
    try:
        value = bytes(8) + bytes(range(40))
        states[struct.pack("I", 4321)] = value
        assert states.all(locked=True) == bytes(48 * 4321) + value + bytes(48 * (4999 - 4321))
        assert states.memory >= 48 * 5000
        keys = [struct.pack("I16s", 96 + 24, bytes(12) + bytes([10, 0, net, 0])) for net in range(3)]
        prefixes.put(b"".join(keys), b"".join(struct.pack("I", net) for net in range(3)))
        assert prefixes.get(struct.pack("I16s", 128, bytes(12) + bytes([10, 0, 2, 9]))) == struct.pack("I", 2)
        assert prefixes.get(struct.pack("I16s", 128, bytes(12) + bytes([10, 0, 9, 9]))) is None
    finally:
        states.close()
        prefixes.close()
