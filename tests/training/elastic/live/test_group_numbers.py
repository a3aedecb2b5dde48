"""A group that was cut while it formed leaves nothing by which its process would miss the next one."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d as c10d

from windtunnel.training.elastic.live.group import CuttableGroup
from windtunnel.training.elastic.model import MemberHost, Membership


def test_a_group_that_was_cut_while_it_formed_takes_no_number() -> None:
    """torch puts the number of the group into the keys under which its ranks look for each other: a survivor
    that counted the attempt would wait for a fresh process in vain."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    hosts = (MemberHost(0, "127.0.0.1", ""), MemberHost(1, "127.0.0.1", ""))
    membership = Membership(1, 1, hosts, 1, f"127.0.0.1:{store.port}", "")
    group = CuttableGroup("gloo", 20.0)
    cutter = threading.Timer(0.2, group.cut)  # its peer never comes: whenever this comes, the group forms
    cutter.start()
    with pytest.raises((RuntimeError, ConnectionAbortedError)) as caught:
        group.form(membership, 0)
    cutter.join()
    group.leave(caught.value)
    assert c10d._world.group_count == 0
