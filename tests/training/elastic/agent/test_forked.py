"""What forked trainers and stores do in torch's name."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from host_helpers import alive, environment

from support import secret
from support.waiting import until
from windtunnel.base.keys import Keys
from windtunnel.linux.forkserver_client import ForkServerClient, ForkServerKeeper
from windtunnel.training.elastic.live import forked, tunnel


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

        door = tunnel.Door(secret.KEYS, lambda: address)
        store, large = client(door.address, 30), b"x" * 300_000
        store.set("a", large)
        assert store.get("a") == large == client(door.address, 30).get("a")
        with pytest.raises(RuntimeError):  # a stranger
            client(address, 1).get("a")
        stranger = tunnel.Door(Keys(b"some other secret"), lambda: address)
        with pytest.raises(RuntimeError):
            client(stranger.address, 1).get("a")
        assert alive(pid)
        ports = psutil.Process(pid).net_connections("inet")
        assert {one.laddr.ip for one in ports if one.status == "LISTEN"} == {"127.0.0.1"}
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RuntimeError):  # at once: the end of the store is that of its connections
            store.wait(["never"], timedelta(seconds=60))
        stranger.close()
        door.close()
    finally:
        keeper.close()
    until(lambda: not alive(pid))
