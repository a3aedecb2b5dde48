"""What forked trainers and stores do in torch's name."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from host_helpers import alive, environment

from support.waiting import until
from windtunnel.linux.forkserver_client import ForkServerClient, ForkServerKeeper
from windtunnel.training.elastic.live import forked


@pytest.mark.slow
def test_a_store_serves_and_outlives_who_asked(tmp_path: Path) -> None:
    from torch.distributed import TCPStore

    keeper = ForkServerKeeper(tmp_path / "z", (forked.MODULE,), environment())
    try:
        asker = ForkServerClient(keeper.path, lambda _: None)
        address, pid = forked.start_store(asker, "127.0.0.1")
        asker.close()
        host, _, port = address.rpartition(":")
        patience = timedelta(seconds=30)
        store = TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=patience)
        store.set("a", "1")
        assert store.get("a") == b"1"
        assert alive(pid)
    finally:
        keeper.close()
    until(lambda: not alive(pid))
