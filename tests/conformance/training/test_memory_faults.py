"""Kills, cuts, bit flips, stale senders: what is declared complete is whole, what is torn is made again."""

from __future__ import annotations

import contextlib
import os
import random
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import xxhash

from support import secret
from support.between import between, relay
from support.slots import read_header
from support.waiting import PATIENCE, until
from training.checkpoint.memory.memory_cluster import DIGEST, LAYOUT, Cluster, content
from windtunnel.base import wire
from windtunnel.base.plain import to_plain
from windtunnel.training.checkpoint.live.memory import messages
from windtunnel.training.checkpoint.live.slot import HEADER, CopyError, load
from windtunnel.training.checkpoint.model import Shard

N = 300_000
SHARD = "rank1"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, 2)
    yield cluster
    cluster.close()


def put(
    sock: socket.socket, step: int, data: bytes, *, generation: int = 1, shard: str = SHARD, **other: Any
) -> str:
    """A PUT up to its answer, with the layout where it is asked for."""
    checksum = xxhash.xxh3_128_hexdigest(other.pop("summed", data))
    message = {
        "op": "put",
        "generation": generation,
        "committed": -1,
        "base": -1,
        "keeps": [],
        "capacity": len(data),
        "shard": to_plain(Shard(shard, step, 2, False, generation, DIGEST, len(data), checksum)),
        **other,
    }
    answer = messages.ask(sock, message)
    if answer.get("answer") == "layout":
        answer = messages.ask(sock, message, LAYOUT)
    return str(answer.get("answer") or answer["error"])


def send(sock: socket.socket, data: bytes) -> None:
    sock.sendall(messages.LENGTH.pack(len(data)) + data)


def verdict(sock: socket.socket) -> str:
    answer, _ = wire.receive(sock)
    return str(answer.get("answer") or answer["error"])


def whole(folder: Path) -> dict[int, bytes]:
    """The steps that claim to be complete, each verified."""
    contents = {}
    for path in folder.glob("*.slot"):
        header = read_header(path)
        if header is not None and header.complete:
            it = header.shard
            into = memoryview(bytearray(it.nbytes))
            load(path, into)
            assert bytes(into) == content(it.name, it.step, it.nbytes)
            contents[it.step] = bytes(into)
    return contents


def test_bytes_that_are_not_the_owners_are_refused(cluster: Cluster) -> None:
    with secret.memory(cluster.service(0).address) as sock:
        data = bytearray(content(SHARD, 0, N))
        data[N // 3] ^= 1
        assert put(sock, 0, bytes(data), summed=content(SHARD, 0, N)) == "go"
        send(sock, bytes(data))
        assert verdict(sock) == "torn"
        assert whole(cluster.folder / "n0") == {}


def test_a_stale_generation_cannot_write(cluster: Cluster) -> None:
    service = cluster.service(0)
    with secret.memory(service.address) as early, secret.memory(service.address) as late:
        assert put(early, 0, content(SHARD, 0, N)) == "go"
        cluster.form(cluster.places)
        # What was under way is cut, and whoever was fenced and comes back is refused at once.
        with contextlib.suppress(OSError):
            send(early, content(SHARD, 0, N))
            assert verdict(early) == "stale"
        assert put(late, 1, content(SHARD, 1, N)) == "stale"
        assert put(late, 1, content(SHARD, 1, N), generation=2) == "go"
    assert whole(cluster.folder / "n0") == {}


def test_a_request_of_a_newer_generation_waits_for_it(cluster: Cluster) -> None:
    service = cluster.service(0)
    answers: list[str] = []

    def early() -> None:
        with secret.memory(service.address) as sock:
            answers.append(put(sock, 0, content(SHARD, 0, N), generation=2))

    thread = threading.Thread(target=early)
    thread.start()
    cluster.form(cluster.places)
    thread.join(PATIENCE)
    assert answers == ["go"]


def test_a_sender_that_comes_back_displaces_its_old_connection(cluster: Cluster) -> None:
    service = cluster.service(0)
    with secret.memory(service.address) as old, secret.memory(service.address) as new:
        assert put(old, 0, content(SHARD, 0, N)) == "go"
        assert put(new, 0, content(SHARD, 0, N)) == "go"
        send(new, content(SHARD, 0, N))
        assert verdict(new) == "complete"
        assert put(new, 0, content(SHARD, 0, N)) == "have"
        with pytest.raises(OSError):
            send(old, content(SHARD, 0, N))
            verdict(old)


def test_garbage_does_not_harm(cluster: Cluster) -> None:
    service = cluster.service(0)
    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b"\0" * 12):
        with wire.connect(service.address, 5.0) as sock:
            sock.sendall(garbage)
    with secret.memory(service.address) as sock:
        assert messages.ask(sock, {"op": "no such"})["error"] == "user"
        assert messages.ask(sock, {"op": "put", "generation": "x"})["error"] == "user"
        assert messages.ask(sock, {"op": "saved"})["error"] == "user"  # only local ranks may
        assert put(sock, 0, b"x" * 10, shard="../../x") == "user"
        assert put(sock, 0, b"x" * 10) == "go"
        sock.sendall(messages.LENGTH.pack(11))
        with pytest.raises(OSError):
            verdict(sock)


@contextlib.contextmanager
def killed_service(folder: Path) -> Iterator[str]:
    """The address of a service in a process of its own, which is killed at the end."""
    script = Path(__file__).with_name("memory_process.py")
    process = subprocess.Popen(
        [sys.executable, str(script), str(folder)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.communicate()


def put_whole(sock: socket.socket, step: int) -> None:
    assert put(sock, step, content(SHARD, step, N)) == "go"
    send(sock, content(SHARD, step, N))
    assert verdict(sock) == "complete"


def test_a_holder_that_is_killed_anywhere_has_no_torn_complete_slot(tmp_path: Path) -> None:
    """Killed at random bytes of a copy, it keeps the one before."""
    rng = random.Random(5)
    for attempt, at in enumerate([0, N - 1, *(rng.randrange(N) for _ in range(4))]):
        folder = tmp_path / f"f{attempt}"
        with killed_service(folder) as address, secret.memory(address) as sock:
            put_whole(sock, 3)
            put_whole(sock, 4)
            data = content(SHARD, 5, N)
            assert put(sock, 5, data, keeps=[4], committed=4) == "go"
            sock.sendall(messages.LENGTH.pack(N) + data[:at])
            (slot,) = [p for p in folder.glob("*.slot") if (h := read_header(p)) and h.shard.step == 5]
            until(lambda p=slot, b=data[:at]: p.read_bytes()[HEADER : HEADER + len(b)] == b)
        assert list(whole(folder)) == [4]


def test_an_owner_that_is_killed_while_it_sends_leaves_nothing_torn(cluster: Cluster) -> None:
    """The copy before stays, and the torn one is taken anew."""
    holder = cluster.service(0)
    for step, complete in ((3, []), (4, [3]), (5, [4])):
        data = content(SHARD, step, N)
        with secret.memory(holder.address) as sock:
            assert put(sock, step, data, keeps=complete, committed=step - 1) == "go"
            sock.sendall(messages.LENGTH.pack(N) + data[: N // 2])
        until(lambda: not holder._holder._under_way)
        assert list(whole(cluster.folder / "n0")) == complete
        with secret.memory(holder.address) as sock:
            put_whole(sock, step)
        assert step in whole(cluster.folder / "n0")


@pytest.mark.parametrize("where", [HEADER + N // 2, 40])
def test_a_flipped_bit_in_a_replica_is_noticed_and_mended(cluster: Cluster, where: int) -> None:
    cluster.reserve(N)
    cluster.save(0, 0, N)
    cluster.wait(0)
    replicas = (cluster.folder / "n1").glob("rank0*.slot")
    (path,) = [p for p in replicas if (h := read_header(p)) and h.shard.step == 0]
    with path.open("r+b") as file:
        file.seek(where)
        byte = file.read(1)
        file.seek(where)
        file.write(bytes([byte[0] ^ 0x10]))
    into = memoryview(bytearray(N))
    with pytest.raises(CopyError):
        cluster.ranks[0].fetch(1, "rank0", 0, into)
    cluster.ranks[0].fetch(0, "rank0", 0, into)
    assert bytes(into) == content("rank0", 0, N)
    cluster.form(cluster.places)
    cluster.go_back(0, N)
    cluster.wait(0)
    assert cluster.holders("rank0", 0) == [0, 1]


def test_a_flipped_bit_in_a_layout_is_noticed(cluster: Cluster) -> None:
    cluster.reserve(N)
    for host in (0, 1):
        assert cluster.ranks[0].layout(DIGEST) == LAYOUT
        path = cluster.folder / f"n{host}" / f"layout-{DIGEST}"
        path.write_bytes(bytes([LAYOUT[0] ^ 0x10]) + LAYOUT[1:])
    with pytest.raises(CopyError, match="layout"):
        cluster.ranks[0].layout(DIGEST)


def test_connections_that_break_anywhere_are_made_again(tmp_path: Path) -> None:
    """Each of the first connections to a holder is cut after so many bytes."""
    rng = random.Random(3)
    cuts = [0, 5, 300, *(rng.randrange(2 * N) for _ in range(5))]

    def cutting(client: socket.socket, server: socket.socket) -> None:
        relay(client, server, bytearray(), cuts.pop(0) if cuts else sys.maxsize)

    cluster = Cluster(tmp_path, 2)
    target = cluster.services[1]
    real = target.address
    with between(real, cutting) as through:
        target.address = through
        cluster.form([0, 1])
        target.address = real
        cluster.reserve(N)
        for step in range(4):
            cluster.save(step, step % 2, N)
            cluster.wait(step)
            assert cluster.holders("rank0", step) == [0, 1]
    assert not cuts
    cluster.close()


def test_a_frozen_holder_holds_nobody_up_after_the_membership_has_changed(tmp_path: Path) -> None:
    frozen, released = threading.Event(), threading.Event()

    def freezing(client: socket.socket, server: socket.socket) -> None:
        """It takes and says nothing from the moment on at which it freezes."""
        ends = {client: server, server: client}
        while not frozen.is_set():
            for end in select.select([*ends], [], [], 0.01)[0]:
                if not (part := end.recv(1 << 16)):
                    return
                ends[end].sendall(part)
        released.wait(60.0)

    cluster, size = Cluster(tmp_path, 2), 30 << 20  # more than sockets take
    target = cluster.services[1]
    real = target.address
    with between(real, freezing) as through:
        target.address = through
        cluster.form([0, 1])
        target.address = real
        cluster.reserve(size)
        frozen.set()
        cluster.save(0, 0, size, ranks=[0])
        memory = cluster.ranks[0]
        assert not memory.wait_committed(0, 0.05)
        (sender,) = cluster.service(0)._owner._senders.values()
        alone = replace(cluster.membership, generation=9, hosts=cluster.membership.hosts[:1])
        cluster.service(0).membership(alone, 0)
        until(lambda: not sender._thread.is_alive())
        assert not memory.wait_committed(0, 30.0)  # at once: that generation is over
        assert [copy.shard.step for copy in memory.copies()] == [0]
        released.set()
    cluster.close()


def test_a_service_that_ends_fails_its_clients_and_leaves_no_thread(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    cluster = Cluster(tmp_path, 2)
    cluster.reserve(N)
    cluster.save(0, 0, N)
    cluster.wait(0)
    memory = cluster.ranks[0]
    waiting = threading.Thread(target=lambda: _fails(lambda: memory.wait_committed(9, 60.0)))
    waiting.start()
    cluster.stop(0)
    waiting.join(PATIENCE)
    assert not waiting.is_alive()
    with pytest.raises(OSError):
        memory.copies()
    cluster.close()
    until(lambda: set(threading.enumerate()) <= before)


def _fails(call: Any) -> None:
    with contextlib.suppress(OSError):
        call()


def test_many_generations_leak_nothing(cluster: Cluster) -> None:
    cluster.reserve(1000)

    def count() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    def round() -> None:
        cluster.form(cluster.places)
        cluster.reserve(1000)
        step = cluster.generation
        cluster.save(step, step % 2, 1000)
        cluster.wait(step)

    for _ in range(3):
        round()
    fds, threads = count()
    for _ in range(10):
        round()
    until(lambda: count()[0] <= fds + 4 and count()[1] <= threads + 4)


def test_idle_mode_sends_within_windows_and_flushes_the_rest(cluster: Cluster) -> None:
    cluster.reserve(N, mode="idle", chunk=64 << 10, bandwidth=50e6)
    cluster.save(0, 0, N)
    assert not cluster.ranks[0].wait_committed(0, 0.05)
    for memory in cluster.ranks:
        memory.open_window(100.0)
    cluster.wait(0)
    assert [m.traffic() for m in cluster.ranks] == [{0: (N, N)}] * 2
    for memory in cluster.ranks:
        memory.close_window()
    pacers = [cluster.service(place)._owner._pacer for place in (0, 1)]
    until(lambda: not any(pacer._until[rank] for rank, pacer in enumerate(pacers)))
    cluster.save(1, 1, N)
    for memory in cluster.ranks:
        memory.flush()
    cluster.wait(1)
    assert cluster.ranks[0].traffic()[1] == (N, 0)
