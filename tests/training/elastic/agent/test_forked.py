"""What forked trainers and stores do in torch's name."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from host_helpers import alive, environment

from support import secret
from support.waiting import until
from windtunnel.base.keys import Keys
from windtunnel.linux.forkserver_client import ForkServerClient, ForkServerKeeper
from windtunnel.training.elastic.live import forked
from windtunnel.training.elastic.live.store import BEHIND, LOOPBACK, Door

PING = bytes.fromhex("00cef7853c0dbf080000")
"""What a client of PyTorch's store says first, and wants an answer to."""


def heard(address: tuple[str, int], user: int) -> bool:
    """Whether a store there answers a process of ``user``."""
    code = "import os, socket, sys; os.setuid(int(sys.argv[3]));"
    code += "sock = socket.create_connection((sys.argv[1], int(sys.argv[2])), 20);"
    code += "sock.sendall(bytes.fromhex(sys.argv[4])); print(len(sock.recv(4)))"
    words = [sys.executable, "-c", code, address[0], str(address[1]), str(user), PING.hex()]
    return subprocess.run(words, capture_output=True, timeout=60).stdout == b"4\n"


@pytest.mark.slow
def test_a_store_serves_those_who_know_the_secret_and_outlives_who_asked(tmp_path: Path) -> None:
    from torch.distributed import TCPStore

    keeper = ForkServerKeeper(tmp_path / "z", (forked.MODULE,), environment())
    try:
        asker = ForkServerClient(keeper.path, lambda _: None)
        address, pid = forked.start_store(asker, "127.0.0.1", secret.kept(tmp_path))
        asker.close()

        def client(where: str, seconds: float) -> TCPStore:
            host, _, port = where.rpartition(":")
            limit = timedelta(seconds=seconds)
            return TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=limit)

        door = Door(secret.KEYS, lambda: address)
        store, large = client(door.address, 30), b"x" * 300_000
        store.set("a", large)
        assert store.get("a") == large == client(door.address, 30).get("a")
        with pytest.raises(RuntimeError):  # a stranger
            client(address, 1).get("a")
        stranger = Door(Keys(b"some other secret"), lambda: address)
        with pytest.raises(RuntimeError):
            client(stranger.address, 1).get("a")
        assert alive(pid)
        ports = psutil.Process(pid).net_connections("inet")
        listens = {tuple(one.laddr) for one in ports if one.status == "LISTEN"}
        assert {ip for ip, _ in listens} == {"127.0.0.1", BEHIND}
        (behind,) = (one for one in listens if one[0] == BEHIND)
        with pytest.raises(TimeoutError):  # the kernel drops it, whoever it is
            socket.create_connection(behind, 0.3)
        own = (LOOPBACK, behind[1])
        assert heard(own, os.getuid())
        if os.getuid() == 0:
            assert not heard(own, 12345)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RuntimeError):  # at once: the end of the store is that of its connections
            store.wait(["never"], timedelta(seconds=60))
        stranger.close()
        door.close()
    finally:
        keeper.close()
    until(lambda: not alive(pid))


def test_a_port_that_is_taken_behind_is_given_up_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.create_server
    with real((BEHIND, 0)) as taken:
        number = taken.getsockname()[1]
        ports = iter([number, 0])
        monkeypatch.setattr(socket, "create_server", lambda address: real((address[0], next(ports))))
        own, gate = forked._store_listeners()
        with own, gate.listener:
            assert own.getsockname()[1] == gate.address[1] != number
