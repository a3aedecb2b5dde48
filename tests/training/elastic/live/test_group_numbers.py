"""A group that was cut while it formed leaves nothing by which its process would miss the next one."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import distributed_c10d as c10d

from support.meeting import MeetingServer
from windtunnel.base.remote import RemoteLink
from windtunnel.training.elastic.live.group import CuttableGroup
from windtunnel.training.elastic.live.store import MeetingStore
from windtunnel.training.elastic.model import MemberHost, Membership


def test_a_group_that_was_superseded_while_it_formed_takes_no_number(tmp_path: Path) -> None:
    """torch puts the number of the group into the keys under which its ranks look for each other: a survivor
    that counted the attempt would wait for a fresh process in vain."""
    meeting = MeetingServer(f"{tmp_path}/meeting")
    hosts = (MemberHost(0, "127.0.0.1", ""), MemberHost(1, "127.0.0.1", ""))
    group = CuttableGroup("gloo", 20.0)
    newer = threading.Timer(0.2, meeting.form, (2,))  # its peer never comes: till this, the group forms
    newer.start()
    with pytest.raises(RuntimeError, match="generation 1 is over") as caught:
        store = MeetingStore(RemoteLink(meeting.address), 1, timedelta(seconds=20))
        group.form(Membership(1, 1, hosts, 1, ""), 0, store)
    newer.join()
    group.leave(caught.value)
    meeting.close()
    assert c10d._world.group_count == 0
