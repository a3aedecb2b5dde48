"""The kernel's program and the policy give the same verdict on every packet of a recorded trace."""

from __future__ import annotations

import ipaddress
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from windtunnel.linux import bpf
from windtunnel.network.sharing.live import native
from windtunnel.network.sharing.policy.gap import DROP, step
from windtunnel.network.sharing.policy.units import NEVER

ETHERNET = bytes(12) + b"\x08\x00" + bytes(40)
SHOT, ON = 2, -1


@dataclass
class Kernel:
    """Programs of four entities; their clock is the packets' own."""

    maps: dict[str, bpf.Map]
    program: int

    def reset(self) -> None:
        native.put(self.maps["states"], np.zeros(4, native.STATES))
        self.common(0)

    def common(self, until: int, levels: int = 0) -> None:
        self.maps["common"][bytes(4)] = np.array([(until, levels, 0, 0, 0, 0)], native.COMMON).tobytes()

    def allow(self, allowed: list[tuple[int, int, int, int]]) -> None:
        native.put(self.maps["allowed"], np.array(allowed, native.ALLOWED))

    def run(self, packet: bpf.Packet) -> int:
        return bpf.tried(self.program, packet)[0]

    def states(self) -> np.ndarray:
        return native.read(self.maps, "states")


def kernels(by: native.By) -> Iterator[Kernel]:
    if os.geteuid() != 0:
        pytest.skip("BPF programs need root")
    try:
        maps = native.make_maps(by, 4, 8)
        kernel = Kernel(maps, native.load(by, maps, trial=True))
    except OSError as error:
        pytest.skip(f"BPF cannot be used here: {error}")
    kernel.reset()
    yield kernel
    os.close(kernel.program)
    native.close(maps)


@pytest.fixture
def marks() -> Iterator[Kernel]:
    yield from kernels("mark")


@pytest.fixture
def sources() -> Iterator[Kernel]:
    yield from kernels("source")


@pytest.fixture
def destinations() -> Iterator[Kernel]:
    yield from kernels("destination")


rates = st.tuples(
    st.integers(1, 2**27 - 1),
    st.integers(1, 2**27 - 1),
    st.integers(1500, 2**24),
    st.integers(0, 2**20) | st.just(NEVER),
)
gaps = st.sampled_from([0, 0, 1, 1200, 12_000, -1, -50_000, 10**7, 2**33, -(2**33)]) | st.integers(
    -(10**6), 10**7
)
traces = st.lists(
    st.tuples(gaps, st.integers(54, 65_536), st.integers(1, 3)) | st.lists(rates, min_size=4, max_size=4),
    max_size=50,
)


@pytest.mark.root
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(rates, min_size=4, max_size=4), traces, st.integers(0, 2**34))
def test_verdicts_are_the_same_packet_for_packet(
    marks: Kernel, allowed: list[tuple[int, int, int, int]], trace: list[object], until: int
) -> None:
    """Equal times, clocks that go back and leap ahead, rates that change in the midst, lent rates that
    end."""
    marks.reset()
    marks.allow(allowed)
    marks.common(until)
    for entity in (1, 2, 3):
        marks.maps["marks"][struct.pack("I", 100 + entity)] = struct.pack("I", entity)
    now, kept = 2**33, {entity: [0, 0, 0, 0, 0] for entity in (1, 2, 3)}
    for event in trace:
        if isinstance(event, list):
            allowed = event
            marks.allow(allowed)
            continue
        more, length, entity = event  # type: ignore[misc]
        now = max(0, now + more)
        own, lent, limit, mark = allowed[entity]
        state = kept[entity]
        verdict, state[0], state[1] = step(
            now, length, state[0], state[1], lent if now < until else own, limit, mark
        )
        action = marks.run(bpf.Packet(ETHERNET, length, now, 100 + entity))
        assert action == (SHOT if verdict == DROP else ON)
        state[3 if verdict == DROP else 2] += length
        state[4] += length * (verdict == 1)
    states = marks.states()
    for entity, state in kept.items():
        assert list(states[entity])[1:] == state


def of(source: str, destination: str) -> bytes:
    sender, receiver = ipaddress.ip_address(source), ipaddress.ip_address(destination)
    if sender.version == 4:
        return bytes(12) + b"\x08\x00" + b"\x45" + bytes(11) + sender.packed + receiver.packed + bytes(20)
    return bytes(12) + b"\x86\xdd" + b"\x60" + bytes(7) + sender.packed + receiver.packed + bytes(20)


@pytest.mark.root
@pytest.mark.parametrize("which", ["sources", "destinations"])
def test_the_longest_prefix_says_whose_a_packet_is(which: str, request: pytest.FixtureRequest) -> None:
    kernel = request.getfixturevalue(which)
    for place, prefix in enumerate(("10.1.0.0/16", "10.1.2.0/24", "fd00:1::/32"), 1):
        kernel.maps["prefixes"][bpf.prefix_key(prefix)] = struct.pack("I", place)
    cases = [("10.1.9.9", 1), ("10.1.2.3", 2), ("10.9.9.9", 0), ("fd00:1::7", 3), ("fd00:2::7", 0)]
    for address, entity in cases:
        other = "192.0.2.1" if "." in address else "2001:db8::1"
        pair = (address, other) if which == "sources" else (other, address)
        before = kernel.states()["passed"].copy()
        assert kernel.run(bpf.Packet(of(*pair), 100)) == ON
        assert list(kernel.states()["passed"] - before) == [100 * (place == entity) for place in range(4)]
    before = kernel.states()["passed"].copy()
    assert kernel.run(bpf.Packet(bytes(12) + b"\x08\x06" + bytes(40), 60)) == ON  # ARP belongs to nobody
    assert list(kernel.states()["passed"]) == list(before)


@pytest.mark.root
def test_the_shipped_object_is_built_from_the_source_beside_it() -> None:
    shipped = native.OBJECT.locate()
    assert list(shipped.parent.glob("*.o")) == [shipped]
