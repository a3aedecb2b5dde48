"""The store of a generation does for torch what torch's own does, and ends with its generation."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from support.meeting import MeetingServer
from windtunnel.base.remote import RemoteLink
from windtunnel.training.elastic.live import store
from windtunnel.training.elastic.live.group import CuttableGroup
from windtunnel.training.elastic.live.store import MeetingStore
from windtunnel.training.elastic.model import MemberHost, Membership

AT_ONCE, LONG = timedelta(), timedelta(seconds=50)


@pytest.fixture
def meeting(tmp_path: Path) -> Iterator[MeetingServer]:
    server = MeetingServer(f"{tmp_path}/meeting")
    yield server
    server.close()


def test_it_does_what_torch_asks_of_a_store(meeting: MeetingServer) -> None:
    """By way of `PrefixStore`, so as C++ calls it."""
    here, there = (MeetingStore(RemoteLink(meeting.address), 1, LONG) for _ in range(2))
    store, other = dist.PrefixStore("x", here), dist.PrefixStore("x", there)  # type: ignore[attr-defined]
    store.set("a", bytes(range(256)))
    assert other.get("a") == bytes(range(256)) and there.get("x/a") == bytes(range(256))
    assert store.check(["a"]) and not store.check(["a", "b"])
    waiting = threading.Thread(target=other.wait, args=(["b"],))
    waiting.start()
    store.set("c", "é")
    store.set("b", "1")
    waiting.join()
    assert other.multi_get(["c", "b"]) == ["é".encode(), b"1"]
    with pytest.raises(dist.DistStoreError, match="nobody said"):  # type: ignore[attr-defined]
        store.wait(["d"], AT_ONCE)
    assert [store.add("n", 2), other.add("n", 3), store.add("n", 0)] == [2, 5, 5]
    assert store.compare_set("t", "", "mine") == b"mine" == other.compare_set("t", "", "theirs")
    here.set_timeout(AT_ONCE)
    with pytest.raises(dist.DistStoreError, match="nobody said"):  # type: ignore[attr-defined]
        store.get("d")


def test_who_waits_comes_out_when_the_generation_is_over(meeting: MeetingServer) -> None:
    mine = MeetingStore(RemoteLink(meeting.address), 1, LONG)
    newer = threading.Timer(0.1, meeting.form, (2,))
    newer.start()
    with pytest.raises(dist.DistStoreError, match="generation 1 is over"):  # type: ignore[attr-defined]
        mine.get("never")
    newer.join()
    MeetingStore(RemoteLink(meeting.address), 2).set("a", "1")


def test_a_script_of_its_own_meets_there(meeting: MeetingServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["torch.distributed.rendezvous"], "_create_c10d_store", None)
    store.use_in_environment()
    environment = {"WINDTUNNEL_AGENT": meeting.address, "WINDTUNNEL_GENERATION": "1"}
    environment |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    dist.init_process_group("gloo")
    dist.barrier()
    dist.destroy_process_group()
    meeting.meet(1, {}, ["default_pg/0//cpu//0/0"], 0.0)


def test_a_group_that_was_superseded_while_it_formed_takes_no_number(meeting: MeetingServer) -> None:
    """torch puts the number of the group into the keys under which its ranks look for each other: a survivor
    that counted the attempt would wait for a fresh process in vain."""
    hosts = (MemberHost(0, "127.0.0.1", ""), MemberHost(1, "127.0.0.1", ""))
    group = CuttableGroup("gloo", 20.0)
    newer = threading.Timer(0.2, meeting.form, (2,))  # its peer never comes: till this, the group forms
    newer.start()
    with pytest.raises(RuntimeError, match="generation 1 is over") as caught:
        group.form(Membership(1, 1, hosts, 1, ""), 0, MeetingStore(RemoteLink(meeting.address), 1, LONG))
    newer.join()
    group.leave(caught.value)
    assert c10d._world.group_count == 0
