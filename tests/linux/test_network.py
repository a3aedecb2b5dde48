"""Links, addresses, token buckets and namespaces, made without ``ip``; and the networks of emulated hosts."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

import psutil
import pytest

from support.waiting import until
from windtunnel.base.processes import Identity
from windtunnel.linux import LinuxError, namespaces, network

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(network.missing() is not None, reason=network.missing() or ""),
]


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Path]:
    file = tmp_path / "netns"
    namespaces.make_network(file)
    yield file
    namespaces.release(file)


@pytest.fixture
def device() -> Iterator[str]:
    name = f"wtt{os.getpid() % 100000}"
    yield name
    network.remove_link(name)


@pytest.fixture
def ends() -> tuple[str, str]:
    """Both addresses of a /30: a network to each process, since those who test at once share the routes."""
    first = ip_address("198.18.0.0") + 4 * (os.getpid() % 32768)
    return str(first + 1), str(first + 2)


def up(name: str) -> bool:
    return psutil.net_if_stats()[name].isup


def serve(namespace: Path | str, address: str) -> tuple[socket.socket, int]:
    plug = namespaces.within(namespace, lambda: socket.create_server((address, 0)))
    return plug, plug.getsockname()[1]


def test_a_network_is_held_by_a_file_with_its_loopback_up(held: Path) -> None:
    assert namespaces.holds_namespace(held)
    own = os.readlink("/proc/self/ns/net")
    assert namespaces.within(held, lambda: os.readlink("/proc/thread-self/ns/net")) != own
    assert namespaces.within(held, lambda: [name for _, name in socket.if_nameindex()]) == ["lo"]
    assert namespaces.within(held, lambda: up("lo"))
    assert os.readlink("/proc/thread-self/ns/net") == own
    namespaces.release(held)
    assert not held.exists()
    namespaces.release(held)


def test_a_process_started_within_lives_inside(held: Path) -> None:
    process = namespaces.within(held, lambda: subprocess.Popen(["sleep", "60"]))
    try:
        inside = namespaces.within(held, lambda: os.readlink("/proc/thread-self/ns/net"))
        assert os.readlink(f"/proc/{process.pid}/ns/net") == inside
    finally:
        process.kill()
        process.wait()


def test_what_fails_inside_is_raised_outside(held: Path, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        namespaces.within(held, lambda: 1 // 0)
    with pytest.raises(OSError, match="Invalid argument"):
        namespaces.enter(Path("/proc/self/stat"))
    with pytest.raises(FileNotFoundError):
        namespaces.within(tmp_path / "none", lambda: None)


def test_a_pair_carries_what_is_sent(held: Path, device: str, ends: tuple[str, str]) -> None:
    near, far = ends
    network.make_pair(device, "eth0", held)
    network.configure(device, near, 30)
    network.configure("eth0", far, 30, held)
    server, port = serve(held, far)
    with server, socket.create_connection((far, port), 5):
        server.accept()[0].close()
    network.set_link(device, up=False)
    assert not up(device)
    network.set_link(device, up=True)
    until(lambda: up(device))  # the carrier comes a moment later
    network.remove_link(device)
    assert device not in psutil.net_if_stats()
    network.remove_link(device)


def test_refusals_are_told_in_words(held: Path, device: str) -> None:
    network.make_pair(device, "eth0", held)
    with pytest.raises(LinuxError, match="File exists") as refused:
        network.make_pair(device, "eth1", held)
    assert (refused.value.errno, refused.value.strerror) == (17, "File exists")
    with pytest.raises(OSError, match="no interface"):
        network.set_link("wt-no-such", up=True)


@pytest.mark.parametrize(("rate", "least"), [(1e6, 1.0), (8e6, 0.12)])
def test_a_rate_bounds_what_a_device_sends(
    held: Path, device: str, ends: tuple[str, str], rate: float, least: float
) -> None:
    """``least``: seconds below which 1.2 MB cannot have come through at the rate."""
    near, far = ends
    network.make_pair(device, "eth0", held)
    network.configure(device, near, 30)
    network.configure("eth0", far, 30, held)
    network.set_rate(device, 1e9)
    network.set_rate(device, rate)
    server, port = serve(held, far)
    with server, socket.create_connection((far, port), 5) as sender:
        receiver = server.accept()[0]
        code = "import socket,sys,time; s=socket.socket(fileno=int(sys.argv[1])); print(flush=True)\n"
        code += "t=time.monotonic(); n=0\n"
        code += "while n < 1_200_000: n += len(s.recv(1<<16))\nprint(time.monotonic()-t)"
        with subprocess.Popen(
            [sys.executable, "-c", code, str(receiver.fileno())],
            pass_fds=[receiver.fileno()],
            stdout=subprocess.PIPE,
        ) as reader:
            receiver.close()
            assert reader.stdout is not None
            assert reader.stdout.readline() == b"\n"  # its clock runs before the first byte is sent
            sender.sendall(bytes(1_200_000))
            assert float(reader.stdout.read()) > least


def test_links_are_made_by_many_threads_and_beside_an_event_loop(held: Path, device: str) -> None:
    names = [f"{device}{letter}" for letter in "abcdefgh"]
    try:
        threads = [threading.Thread(target=network.make_pair, args=(name, name, held)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(names) <= psutil.net_if_stats().keys()

        async def remove() -> None:
            for name in names:
                network.remove_link(name)

        asyncio.run(remove())
        assert not set(names) & psutil.net_if_stats().keys()
    finally:
        for name in names:
            network.remove_link(name)


def test_no_descriptor_stays_open(held: Path, device: str) -> None:
    network.make_pair(device, "eth0", held)
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(5):
        network.configure("lo", "127.0.0.9", 32, held) if _ == 0 else network.set_link(device, up=True)
    assert set(os.listdir("/proc/self/fd")) == before


def test_hosts_of_a_network_reach_each_other_until_a_link_is_down() -> None:
    mark = os.urandom(3).hex()
    net = network.Network(f"test-{mark}", rate=50e6)
    try:
        first, _ = net.add("first")
        second, address = net.add("second")
        server, port = serve(second, address)
        with server:

            def reach() -> bool:
                with suppress(OSError):
                    socket.create_connection((address, port), 1).close()
                    return True
                return False

            until(lambda: namespaces.within(first, reach))
            until(reach)
            net.part("first", "second", apart=True)
            assert not namespaces.within(first, reach)
            until(reach)
            net.part("second", "first", apart=False)
            until(lambda: namespaces.within(first, reach))
            net.link_down("second")
            assert not namespaces.within(first, reach)
            net.link_up("second")
            net.set_rate("second", 1e6)
            until(lambda: namespaces.within(first, reach))
        network.sweep()
        assert f"wt{mark}" in psutil.net_if_stats()
    finally:
        net.close()
    assert not [name for name in psutil.net_if_stats() if name.startswith(f"wt{mark}")]
    assert not Path(first).exists()


def test_networks_of_processes_that_are_gone_are_swept() -> None:
    mark = os.urandom(3).hex()
    net = network.Network(f"test-{mark}")
    net.add("only")
    owner = Path("/run/windtunnel-networks") / f"wt{mark}"
    own = Identity.own()
    owner.write_text(f"{Identity(own.pid, own.started + 1, own.boot)}\n")  # the pid was used again
    network.sweep()
    assert f"wt{mark}" not in psutil.net_if_stats()
    assert not owner.exists()
    assert not list(Path("/run/netns").glob(f"wt{mark}*"))
