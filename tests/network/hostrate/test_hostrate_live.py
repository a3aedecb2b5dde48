"""Flows on a thin link, held back by a controller, and after it was killed."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from support.hostrate import Place, available, control_of, senders, sending, unified, veth
from support.waiting import until
from windtunnel.base.errors import UserError
from windtunnel.linux import LinuxError, libbpf, namespaces, network, queues
from windtunnel.network.hostrate.live import controller, native
from windtunnel.network.hostrate.live.own import OwnSockets, keep_short
from windtunnel.network.hostrate.spec import check

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(network.missing() is not None, reason=network.missing() or ""),
]


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with veth(tmp_path) as place:
        yield place


def test_a_controller_keeps_the_queue_short_and_a_killed_one_leaves_nothing(
    place: Place, tmp_path: Path
) -> None:
    """New flows get its congestion control; kill -9: it is gone, caps end, the flows go on as CUBIC."""
    (tmp_path / "senders.yaml").write_text(json.dumps(senders()))
    loop = place.command("wt0", tmp_path / "senders.yaml")
    try:
        assert loop.stdout is not None and loop.stderr is not None
        line = loop.stdout.readline()
        assert line.startswith("Runs  wt0, congestion control wt_hr_"), loop.stderr.read()
        name = line.split()[4].rstrip(",")
        assert name in available()
        before = queues.queues("wt0", place.here)
        with sending(place, 4) as plugs:
            until(lambda: all(control_of(plug) == name for plug in plugs))
            until(lambda: 2 < place.backlog() < 60, "the queue at its marks")
            loop.send_signal(signal.SIGKILL)
            loop.wait()
            until(lambda: place.backlog() > 120, "the queue of CUBIC on its own")
            assert name not in available()
        assert queues.queues("wt0", place.here) == before
    finally:
        loop.kill()
        loop.communicate()


def test_a_loop_ends_with_its_interface_and_one_without_a_queue_is_refused(place: Place) -> None:
    spec = check(senders(), "senders.yaml")
    network.ask(
        lambda route: route.link("add", ifname="wt2", kind="veth", peer={"ifname": "wt3"}), place.here
    )
    for device, words in (("wt2", "wt2 has no queue; accepted is"), ("eth9", "there is no interface eth9")):
        with pytest.raises((UserError, LinuxError), match=words):
            place.do(lambda device=device: controller.run(device, spec))  # type: ignore[misc]
    gone = lambda _: network.remove_link("wt0")  # noqa: E731
    with pytest.raises(LinuxError, match="there is no interface wt0"):
        place.do(lambda: controller.run("wt0", spec, ready=gone))


def test_senders_of_a_cgroup_are_found_and_others_keep_their_own(place: Place) -> None:
    group = unified()
    inner = group / "inner"
    inner.mkdir()
    code = "import socket, sys; plug = socket.create_connection(('10.9.1.2', int(sys.argv[1])));"
    code += "plug.sendall(bytes(200_000)); print(plug.getsockopt(6, 13, 16).rstrip(b'\\0').decode());"
    code += "plug.shutdown(1); plug.recv(1)"
    try:
        entities = {"jobs": {"match": str(group)}, "other": {"match": str(inner)}}
        held = native.Senders(check(senders(by="cgroup", entities=entities), "senders.yaml"))
        try:
            controls = {}
            for folder in (None, group, inner):
                join = f"open({str(folder)!r} + '/cgroup.procs', 'w').write('0');" if folder else ""
                line = [sys.executable, "-c", join + code, str(place.port)]
                done = place.do(lambda line=line: subprocess.run(line, capture_output=True, text=True))  # type: ignore[misc]
                controls[folder] = done.stdout.strip()
                if folder is group:
                    acked, _ = held.counts()
                    assert acked[0] > 50 and acked[1] == 0
            assert controls[group] == controls[inner] == held.name != controls[None]
            assert held.counts()[0][1] > 50
        finally:
            held.close()
        with pytest.raises(
            UserError, match=r"entities\.jobs\.match is '/sys', accepted is the folder of a cgr"
        ):
            native.Senders(check(senders(by="cgroup", entities={"jobs": {"match": "/sys"}}), "x"))
    finally:
        inner.rmdir()
        group.rmdir()


def test_without_bpf_own_sockets_that_receive_are_clamped(place: Place, tmp_path: Path) -> None:
    """Senders are this kernel's usual ones; what their receivers tell them keeps the queue short."""
    spec, stop = check(senders(), "senders.yaml"), threading.Event()
    server = namespaces.within(place.there, lambda: socket.create_server(("", 0)))
    place.port, plugs, failed = server.getsockname()[1], [], []

    def drain(plug: socket.socket) -> None:
        with suppress(OSError):
            while plug.recv(1 << 16):
                pass

    def loop() -> None:
        try:
            place.do(lambda: keep_short("wt0", spec, lambda: plugs, stop))
        except BaseException as error:
            failed.append(error)

    with sending(place, 3):
        plugs += [server.accept()[0] for _ in range(3)]
        threads = [threading.Thread(target=drain, args=(plug,)) for plug in plugs]
        for thread in threads:
            thread.start()
        until(lambda: place.backlog() > 60, "the queue of senders as they are")
        held = threading.Thread(target=loop)
        held.start()
        try:
            until(lambda: failed or 2 < place.backlog() < 40, "the queue at its marks")
        finally:
            stop.set()
            held.join()
        assert failed == []
        until(lambda: place.backlog() > 60, "the queue of senders that are let go")
    for thread in threads:
        thread.join()
    for plug in (*plugs, server):
        plug.close()
    with pytest.raises(ValueError, match="told apart by source; by is 'cgroup'"):
        OwnSockets(check(senders(by="cgroup", entities={"a": {"match": "/x"}}), "x"), list)


def test_a_kernel_that_refuses_is_quoted_and_a_name_is_given_once(monkeypatch: pytest.MonkeyPatch) -> None:
    elf = native.OBJECT.locate().read_bytes()
    with pytest.raises(LinuxError, match="the program: the kernel refused: "):
        libbpf.LoadedObject(elf[:4000], {})
    with pytest.raises(LinuxError, match="the program has no map nowhere"):
        libbpf.LoadedObject(elf, {"nowhere": 1})
    spec = check(senders(), "x")
    try:
        held = native.Senders(spec)
    except LinuxError as error:
        pytest.skip(str(error))
    try:
        with pytest.raises(
            LinuxError, match="the congestion control control: the kernel refused: File exists"
        ):
            native.Senders(spec)
        with pytest.raises(LinuxError, match="the program has no map nowhere"):
            held._loaded.register("nowhere")
    finally:
        held.close()
    assert held.name not in available()
    monkeypatch.setattr(network, "missing", lambda: "network namespaces need root")
    with pytest.raises(UserError, match="hostrate: a congestion control in BPF need"):
        controller.run("lo", spec)


def test_the_shipped_object_is_built_from_the_source_beside_it() -> None:
    shipped = native.OBJECT.locate()
    assert list(shipped.parent.glob("*.o")) == [shipped]
