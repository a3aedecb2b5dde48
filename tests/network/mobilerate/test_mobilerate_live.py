"""The relay, datagrams over faulty ways, and a link between two networks that leaves nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from support.waiting import until
from windtunnel.base.errors import HostError, UserError
from windtunnel.linux import network, processes
from windtunnel.network.mobilerate import live
from windtunnel.network.mobilerate.live import place, transport
from windtunnel.network.mobilerate.live.relay import Relay
from windtunnel.network.mobilerate.outcome import MobileWorld, outcome
from windtunnel.network.mobilerate.policy import POLICIES
from windtunnel.traces.bandwidth import GENERATORS, BandwidthTrace

MAIN = "from windtunnel.cli.main import main; main()"
rooted = [pytest.mark.root, pytest.mark.skipif(place.missing() is not None, reason=place.missing() or "")]
as_root = lambda test: rooted[0](rooted[1](test))  # noqa: E731


def still(seconds: float) -> BandwidthTrace:
    return GENERATORS["near-stationary"](seconds, np.random.default_rng(0))


# --- the relay


@pytest.fixture
def relay() -> Iterator[tuple[Relay, int, int]]:
    """A relay with pipes in the devices' place, and where what it writes here and there can be read."""
    here, back = os.pipe(), os.pipe()
    for end in (here[0], back[0]):
        os.set_blocking(end, False)
    relay = Relay(back[1], here[1], [0.5, 1.0], 1.0, 10.0, 0.4, 2, 0.0, 0, began=0.0)
    yield relay, here[0], back[0]
    for end in (*here, *back):
        os.close(end)


def read(end: int) -> bytes:
    try:
        return os.read(end, 1 << 16)
    except BlockingIOError:
        return b""


def test_a_relay_lets_packets_pass_at_opportunities_in_order_and_drops_what_finds_it_full(
    relay: tuple[Relay, int, int],
) -> None:
    link, there, here = relay
    link.coming.extend((0.2, bytes([0x45, number]) + bytes(1498)) for number in range(3))
    assert link.turn(0.3) == pytest.approx(0.5) and link.dropped == 1
    assert read(there) == b""
    assert link.turn(0.51) == pytest.approx(1.0)
    assert read(there)[1] == 0 and link.waits == [pytest.approx(0.31)] and link.late == [pytest.approx(0.01)]
    link.back.append((0.7, b"back"))
    link.turn(0.7)
    assert read(here) == b"back"
    link.turn(1.6)  # the second one of the first turn; the first of the next has nobody
    assert read(there)[1] == 1 and link.passed == 3000
    link.coming.extend((1.7, bytes([0x45, number]) + bytes(498)) for number in range(2))
    link.turn(2.0)
    assert len(read(there)) == 1000  # small ones share an opportunity
    link.coming.append((10.1, bytes(1500)))
    assert link.turn(10.2) > 11 and read(there) == b""  # the trace has ended


def test_a_packet_that_came_after_an_opportunity_does_not_leave_by_it_however_late_the_relay(
    relay: tuple[Relay, int, int],
) -> None:
    link, there, _ = relay
    link.coming.append((0.6, bytes(1500)))
    link.turn(0.9)
    assert read(there) == b""
    link.turn(1.2)
    assert len(read(there)) == 1500 and link.late == [pytest.approx(0.2)]


# --- datagrams


@contextmanager
def receiver() -> Iterator[tuple[str, int]]:
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as plug,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end,
    ):
        plug.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=transport.receive, args=(plug,))
        thread.start()
        try:
            yield plug.getsockname()
        finally:
            end.sendto(b"", plug.getsockname())  # no reason to end
            with suppress(OSError):
                plug.shutdown(socket.SHUT_RDWR)
            thread.join()


class Faulty:
    """A socket on whose way acknowledgements get lost, come twice and in another order, or are nonsense."""

    def __init__(self, plug: socket.socket, faults: bool) -> None:
        self._plug, self._faults, self._kept, self._turn = plug, faults, list[bytes](), 0
        self.fileno, self.send, self.setblocking = plug.fileno, plug.send, plug.setblocking

    def recv(self, size: int) -> bytes:
        data = self._plug.recv(size)
        if not self._faults:
            return data
        self._turn += 1
        self._kept.append(data)
        kind = self._turn % 5
        if kind == 0:
            return transport.ACK.pack(10**9, -1.0, 10**9)
        if kind == 1:
            return b"no acknowledgement"
        return self._kept[-1] if kind == 2 else self._kept[self._turn // 2]


@pytest.mark.parametrize("faults", [False, True])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_sender_ends_in_time_and_decides_every_interval(policy: str, faults: bool) -> None:
    with receiver() as address, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as plug:
        plug.connect(address)
        late = transport.send(Faulty(plug, faults), policy, 0.2)  # type: ignore[arg-type]
    assert len(late) >= 100 and min(late) >= 0


def test_a_sender_without_a_receiver_ends_too() -> None:
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as plug,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as gone,
    ):
        gone.bind(("127.0.0.1", 0))
        plug.connect(gone.getsockname())
        gone.close()
        assert len(transport.send(plug, "sira-h", 0.1)) >= 50


def test_what_comes_twice_is_counted_once_and_a_new_sender_begins_anew() -> None:
    def said(*numbers: int) -> list[int]:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as plug:
            plug.connect(address)
            plug.send(b"short")
            acks = []
            for number in numbers:
                plug.send(transport.HEAD.pack(number, 0.5) + bytes(100))
                acks.append(transport.ACK.unpack(plug.recv(64)))
            assert [ack[:2] for ack in acks] == [(number, 0.5) for number in numbers]
            return [ack[2] for ack in acks]

    with receiver() as address:
        assert said(0, 1, 1, 3, 2, 0) == [1, 2, 2, 3, 4, 4]
        assert said(0, 0) == [1, 1]
        assert said(*range(3 * transport.RECENT))[-1] == 3 * transport.RECENT


# --- the link


def test_tries_that_came_late_are_thrown_away_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    lates = iter([(0.1, 0.0), (0.0, 0.1), (0.001, 0.001), *[(1.0, 0.0)] * 3])
    good = outcome([0.01], 1500, 2, 1.0, 0)
    monkeypatch.setattr(live, "_once", lambda *_: (good, next(lates)))
    assert live.measure(still(1.0), "sira-h", 1.0) == live.RelayMeasurement(good, (0.001, 0.001), 2)
    assert live.measure(still(1.0), "sira-h", 1.0) == live.RelayMeasurement(None, (1.0, 0.0), 3)


def test_without_tun_it_is_said_and_an_unknown_policy_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from windtunnel.cli.network.mobilerate import group

    with pytest.raises(UserError, match="policy 'vegas'; accepted are sira-h, sira-h-literal, sira, cubic"):
        live.measure(still(1.0), "vegas", 1.0)
    controls = tmp_path / "controls"
    controls.write_text("reno cubic\n")
    monkeypatch.setattr(transport, "CONTROLS", controls)
    assert live.lacking("bbr") == "the kernel has no bbr, but reno cubic"
    monkeypatch.setattr(network, "missing", lambda: None)
    monkeypatch.setattr(place, "TUN", tmp_path / "tun")
    done = CliRunner().invoke(group, ["link", "driving", "--policy", "sira-h"])
    assert isinstance(done.exception, UserError) and done.exception.status == 2
    assert str(done.exception) == (
        f"network mobilerate link: {tmp_path}/tun cannot be opened: No such file or directory;"
        " accepted without it is network mobilerate run"
    )


@as_root
def test_ours_and_the_kernels_cross_the_link() -> None:
    trace = still(1.5)
    for arm in ("sira-h", "cubic"):
        report, _ = live._once(trace, arm, 1.5, MobileWorld(0.02, 100), 0, None)
        # how much of it is used is for the benchmark to say
        assert 0 < report.use <= 1.01 and report.mean > 0


@as_root
def test_a_program_runs_over_it_and_its_status_is_told(capfd: pytest.CaptureFixture[str]) -> None:
    server = "import socket; s = socket.create_server(('', 7)); p, _ = s.accept(); p.sendall(b'over there')"
    client = "import socket, sys, time\n"
    client += "for _ in range(600):\n try: p = socket.create_connection(('10.77.0.2', 7)); break\n"
    client += " except OSError: time.sleep(0.05)\nprint(p.recv(99).decode(), flush=True); sys.exit(7)"
    words = [sys.executable, "-c"]
    assert live.through(still(5.0), [*words, client], server=[*words, server]) == 7
    assert capfd.readouterr().out == "over there\n"
    with pytest.raises(UserError, match="no-such-program: No such file or directory"):
        live.through(still(1.0), ["no-such-program"])


@as_root
def test_a_process_that_fails_is_named() -> None:
    with pytest.raises(HostError, match=r"transport import main; main\(\) send .* failed with status 1"):
        live._once(still(1.0), "sira-h", 1.0, live.USUAL, 0, Path("/proc/no/such/folder/log"))


@as_root
def test_a_killed_command_leaves_no_process_network_or_device(tmp_path: Path) -> None:
    """Networks and devices live by descriptors: once all processes are gone, so are they."""
    words = [
        sys.executable,
        "-c",
        MAIN,
        "network",
        "mobilerate",
        "link",
        "near-stationary",
        "--seconds",
        "600",
    ]
    own = os.stat("/proc/self/ns/net").st_ino

    def spaces(pids: list[int]) -> set[int]:
        inodes = {own}
        for pid in pids:
            with suppress(OSError):
                inodes.add(os.stat(f"/proc/{pid}/ns/net").st_ino)
        return inodes - {own}

    command = subprocess.Popen([*words, "--policy", "sira-h"], stdout=subprocess.DEVNULL)
    try:
        until(lambda: len(spaces(processes.descendants(command.pid))) == 2, "a sender and a receiver")
        there = processes.descendants(command.pid)
        assert len(there) == 3
        command.send_signal(signal.SIGKILL)
        command.wait()
        until(lambda: all(processes.state(pid) in ("", "X", "Z") for pid in there), "the end of all")
    finally:
        command.kill()
        command.wait()
