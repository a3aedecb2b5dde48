"""A file reaches every rack whole, whatever is lost, forged or killed; what is killed leaves nothing."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.multicast import file_of, standing
from support.waiting import until
from windtunnel.base.errors import HostError, UserError
from windtunnel.base.processes import start_time
from windtunnel.cli.main import main
from windtunnel.linux import mounts, namespaces, network, processes
from windtunnel.network.multicast.live.rack import DATA, HEAD, MAGIC, PAYLOAD, PORT
from windtunnel.network.multicast.live.racks import Racks, address
from windtunnel.network.multicast.live.send import MulticastReport, send
from windtunnel.network.multicast.policy.shuffle import Shuffle

MAIN = "from windtunnel.cli.main import main; main()"
SIZE = 50 * PAYLOAD + 77


@pytest.fixture(scope="module")
def racks() -> Iterator[Racks]:
    with standing() as racks:
        yield racks


def test_every_rack_gets_it_by_n_over_p_transmissions_a_packet(racks: Racks, tmp_path: Path) -> None:
    file = file_of(tmp_path, SIZE)
    report = send(racks, file, 3, out=tmp_path / "out", deadline=60.0)
    assert sorted(report.racks) == list(range(8)) and not report.lost
    assert report.total("relayed") == 51 * 4
    copies = sorted((tmp_path / "out").rglob("*"))
    assert [path.name for path in copies if path.is_file()] == ["weights.bin"] * 7  # and no part is left
    assert all(path.read_bytes() == file.read_bytes() for path in copies if path.is_file())


@pytest.mark.parametrize("loss", [0.02, 0.2])
def test_what_is_lost_is_asked_for(racks: Racks, tmp_path: Path, loss: float) -> None:
    report = send(racks, file_of(tmp_path, SIZE), loss=loss, seed=1, deadline=60.0)
    assert len(report.racks) == 8 and report.total("asked") > 0 and report.total("answered") > 0
    assert all(figures["same"] for rack, figures in report.racks.items() if rack)


def test_forged_and_stale_packets_are_refused(racks: Racks, tmp_path: Path) -> None:
    """Another multicast's packets, recorded on the wire, and some that never were one's."""

    def within(rack: int, kind: int, protocol: int) -> socket.socket:
        where = Path(f"/proc/{racks.pid(rack)}/ns/net")
        return namespaces.within(where, lambda: socket.socket(kind, socket.SOCK_DGRAM, protocol))

    with within(4, socket.AF_PACKET, socket.htons(3)) as wire, within(5, socket.AF_INET, 0) as forger:
        wire.bind(("rx0", 3))
        wire.settimeout(60)
        send(racks, file_of(tmp_path, SIZE), deadline=60.0)
        stale = []
        while len(stale) < 8:  # as many as a socket holds
            packet = wire.recv(1 << 16)[28:]
            if packet[:4] == MAGIC:
                stale.append(packet)
        forged = HEAD.pack(MAGIC, 1, DATA, 3) + bytes(PAYLOAD)
        stop = threading.Event()

        def strike() -> None:
            while not stop.is_set():
                for packet in (*stale, forged, b"", b"x" * 9, MAGIC):
                    for rack in (2, 4):
                        forger.sendto(packet, (address(rack), PORT))
                stop.wait(0.002)

        striking = threading.Thread(target=strike)
        striking.start()
        try:
            report = send(racks, file_of(tmp_path, SIZE), deadline=60.0)
        finally:
            stop.set()
            striking.join()
    assert len(report.racks) == 8 and report.total("refused") > 0
    assert all(figures["same"] for rack, figures in report.racks.items() if rack)


def began(racks: Racks, rack: int, device: str, nbytes: int) -> bool:
    """Whether a rack's device has carried so much, as seen from outside."""
    for line in Path(f"/proc/{racks.pid(rack)}/net/dev").read_text().splitlines():
        name, _, counts = line.strip().partition(":")
        if name == device:
            return max(int(counts.split()[0]), int(counts.split()[8])) > nbytes
    return False


def test_killed_relays_are_replaced_and_a_killed_source_is_told(tmp_path: Path) -> None:
    """Of each relay group one may go; who it fed gets the rest by the other."""
    file = file_of(tmp_path, 200 * PAYLOAD)
    with standing(rate=5e6) as racks:
        reports: list[MulticastReport] = []
        sending = threading.Thread(target=lambda: reports.append(send(racks, file, deadline=60.0)))
        sending.start()
        until(lambda: began(racks, 4, "tx", 20 * PAYLOAD))  # a relay of the second hop, in mid-send
        os.kill(racks.pid(4), signal.SIGKILL)
        sending.join()
        assert sorted(reports[0].racks) == [0, 1, 2, 3, 5, 6, 7] and set(reports[0].lost) == {4}
        assert "rack 4: its process has ended" in reports[0].lost[4]
        again = send(racks, file_of(tmp_path, SIZE), deadline=60.0)  # rack 4 is known to be gone
        assert set(again.lost) == {4}
        assert sorted(again.racks) == [0, 1, 2, 3, 5, 6, 7]
        os.kill(racks.pid(6), signal.SIGKILL)  # all that feed racks 0 and 1 from the second column
        with pytest.raises(HostError, match=r"racks 4, 6 are lost: requests: rack \d is cut off from rack 0"):
            send(racks, file, deadline=60.0)
    with standing(Shuffle(2, 1), rate=1e6) as racks:
        failed: list[HostError] = []

        def attempt() -> None:
            try:
                send(racks, file, deadline=60.0)
            except HostError as error:
                failed.append(error)

        sending = threading.Thread(target=attempt)
        sending.start()
        until(lambda: began(racks, 1, "rx0", 20 * PAYLOAD))
        os.kill(racks.pid(0), signal.SIGKILL)
        sending.join()
        assert "the source is lost: rack 0: its process has ended" in str(failed[0])


def test_a_full_disk_is_told_and_the_others_get_it(tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "rack-5").mkdir(parents=True)
    with standing() as racks:
        mounts.mount("tmpfs", out / "rack-5", "tmpfs", options="size=64k")
        try:
            report = send(racks, file_of(tmp_path, SIZE), out=out, deadline=60.0)
        finally:
            mounts.unmount(out / "rack-5")
    assert sorted(report.racks) == [0, 1, 2, 3, 4, 6, 7]
    assert "No space left on device" in report.lost[5] and "rack-5" in report.lost[5]


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Path]:
    """A network that no other test names anything in."""
    if (why := network.missing()) is not None:
        pytest.skip(why)
    namespaces.make_network(tmp_path / "netns")
    yield tmp_path / "netns"
    namespaces.release(tmp_path / "netns")


def named() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def networks_of(links: list[Path]) -> set[str]:
    return {str(link.readlink()) for link in links}


def test_two_fabrics_stand_side_by_side_and_nothing_is_named_here(here: Path, tmp_path: Path) -> None:
    def side_by_side() -> None:
        with standing(Shuffle(2, 1)) as first, standing(Shuffle(2, 1)) as other:
            for racks in (first, other):
                assert len(send(racks, file_of(tmp_path, SIZE), deadline=60.0).racks) == 2
            assert named() == ["lo"]

    namespaces.within(here, side_by_side)


def test_a_killed_controller_leaves_nothing(here: Path, tmp_path: Path) -> None:
    words = ["network", "multicast", "send", str(file_of(tmp_path, SIZE)), "--rate", "8 kb/s"]
    controller = namespaces.within(here, lambda: subprocess.Popen([sys.executable, "-c", MAIN, *words]))
    own = Path(f"/proc/{controller.pid}/ns/net")
    with ExitStack() as stack:
        try:
            below = until(lambda: len(pids := processes.descendants(controller.pid)) == 9 and pids)
            links = [Path(f"/proc/{pid}/ns/net") for pid in below]
            spaces = until(lambda: len(networks := networks_of(links) - networks_of([own])) == 9 and networks)
            for link in links:  # so that no other test's gets the number of one that went
                stack.enter_context(link.open("rb"))
        finally:
            controller.kill()
            controller.wait()
        until(lambda: all(start_time(pid) is None for pid in below), "racks end with their controller")
        held = {line.split()[3] for line in Path("/proc/self/mountinfo").read_text().splitlines()}
        assert not spaces & held
    assert namespaces.within(here, named) == ["lo"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing.bin"], "nothing.bin: there is no such file"),
        (["weights.bin", "--racks", "9"], "the nearest accepted are 8 and 24"),
        (["weights.bin", "--loss", "1"], "--loss 1 is not accepted"),
        (["weights.bin", "--racks", "160"], "--racks: 160 on one machine, accepted are up to 64"),
        (["weights.bin"], "network namespaces need root; accepted here is plan"),
    ],
)
def test_bad_sends_end_in_a_sentence(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    file_of(tmp_path, 1)
    monkeypatch.chdir(tmp_path)
    if "need root" in message:
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "argv", ["windtunnel", "network", "multicast", "send", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_source_that_there_is_not_is_refused(racks: Racks, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="rack 8 is not one of 0 to 7"):
        send(racks, file_of(tmp_path, 1), 8)
