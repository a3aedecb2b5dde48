"""The store as a process: it serves, and ends when nobody supervises its run any more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_agents import until

from windtunnel.training.survive.live import store
from windtunnel.training.survive.live.supervisor.ownership import own, owned


@pytest.mark.slow
def test_serves_until_its_run_is_alone(tmp_path: Path) -> None:
    import torch.distributed as dist

    owner = own(tmp_path)
    port_file = tmp_path / "port"
    command = [sys.executable, "-m", store.__name__, str(port_file), "--run", str(tmp_path)]
    process = subprocess.Popen(
        [*command, "--orphan-after", "0.5"], env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        until(port_file.exists, "the port")
        port = int(port_file.read_text())
        client = dist.TCPStore("127.0.0.1", port, is_master=False)
        client.set("generation/1.1", "here")
        assert client.get("generation/1.1") == b"here"
        assert process.poll() is None
        owner.release()
        assert process.wait(30) == 0
    finally:
        owner.release()
        process.kill()
        process.wait(30)


@pytest.mark.slow
def test_spawn(tmp_path: Path) -> None:
    owner = own(tmp_path)
    address, process = store.spawn(tmp_path)
    try:
        import torch.distributed as dist

        host, _, port = address.rpartition(":")
        dist.TCPStore(host, int(port), is_master=False).set("a", "b")
    finally:
        process.kill()
        process.wait(30)
        owner.release()


def test_spawn_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(OSError, match="ended with status 1"):
        store.spawn(tmp_path)


def test_owned(tmp_path: Path) -> None:
    assert not owned(tmp_path)
    owner = own(tmp_path)
    assert owned(tmp_path)
    owner.release()
    assert not owned(tmp_path)
