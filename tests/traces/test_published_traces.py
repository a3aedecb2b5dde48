"""Published failures: the statistics that were published come out, and files are read or refused by line."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from windtunnel.base.errors import UserError
from windtunnel.traces.failures import (
    CONTROLLED,
    LLAMA3,
    LLAMA3_SECONDS,
    SPOT,
    HostChange,
    llama3,
    read_csv,
    read_skypilot,
    regular,
    spot,
)


def test_the_table_adds_up() -> None:
    assert sum(cause.count for cause in LLAMA3) == 419


def test_llama3_has_its_rate_and_mix() -> None:
    changes = [c for seed in range(20) for c in llama3(2048, LLAMA3_SECONDS, np.random.default_rng(seed))]
    assert len(changes) / 20 == pytest.approx(419, rel=0.05)
    causes = Counter(change.cause for change in changes)
    assert causes["faulty GPU"] / len(changes) == pytest.approx(148 / 419, rel=0.1)
    assert all(
        change.software == (change.cause in ("software bug", "NCCL watchdog timeout", "dependency"))
        for change in changes
    )
    drawn = llama3(2048, LLAMA3_SECONDS, np.random.default_rng(1), domain_size=16)
    assert drawn == llama3(2048, LLAMA3_SECONDS, np.random.default_rng(1), domain_size=16)
    wide = [change for change in drawn if len(change.lost) > 1]
    assert wide
    assert all(len(c.lost) == 16 and c.lost[0] % 16 == 0 and "switch" in c.cause for c in wide)


@pytest.mark.parametrize("kind", sorted(SPOT))
def test_spot_traces(kind: str) -> None:
    changes = spot(200, kind, np.random.default_rng(5))
    removals = [change for change in changes if change.lost]
    assert len(removals) == SPOT[kind].instants
    assert sum(len(change.lost) for change in removals) == SPOT[kind].removed
    there = set(range(200))
    times = [change.time for change in changes]
    assert times == sorted(times)
    assert times[-1] <= SPOT[kind].seconds
    for change in changes:
        assert set(change.lost) <= there
        assert not set(change.joined) & there
        there = (there - set(change.lost)) | set(change.joined)
    with pytest.raises(UserError, match="spot trace is 'p9'; accepted are p3, g4dn"):
        spot(4, "p9", np.random.default_rng(5))


def test_few_hosts_are_never_overdrawn() -> None:
    there = {0, 1, 2}
    for change in spot(3, "p3", np.random.default_rng(2)):
        assert set(change.lost) <= there
        there = (there - set(change.lost)) | set(change.joined)
        assert there <= {0, 1, 2}


def test_controlled_traces() -> None:
    for every in CONTROLLED.values():
        changes = regular(30, every, 15)
        assert len({host for change in changes for host in change.lost}) == 15
        assert changes[-1].time == 15 * every


def test_csv() -> None:
    text = "0,add,i-a\n0,add,i-b\n\n1500,remove,i-b\n2000,add,i-c\n2000,remove,i-a\n"
    assert read_csv(text, "t.csv") == (
        HostChange(0.0, (), (0, 1), cause="trace"),
        HostChange(1.5, (1,), cause="trace"),
        HostChange(2.0, (0,), (2,), cause="trace"),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0,add", "line 1: '0,add' is not"),
        ("0,add,a\n5,drop,a", "line 2"),
        ("x,add,a", "line 1"),
        ("0,add,a\n1,add,a", "line 2: add of host 'a', which is there already"),
        ("0,remove,a", "line 1: remove of host 'a', which is not there"),
    ],
)
def test_csv_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_csv(text, "t.csv")


def test_skypilot() -> None:
    assert read_skypilot('{"metadata": {"gap_seconds": 300}, "data": [2, 2, 1, 3]}', "t.json") == (
        HostChange(0.0, joined=(0, 1), cause="trace"),
        HostChange(600.0, (1,), cause="trace"),
        HostChange(900.0, joined=(1, 2), cause="trace"),
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "t.json is no capture with"),
        ('{"data": [1]}', "t.json is no capture with"),
        ('{"metadata": {"gap_seconds": 0}, "data": [1]}', "gap_seconds is 0 and must be positive"),
        ('{"metadata": {"gap_seconds": 300}, "data": [1, -1]}', r"data\[1\] is -1"),
        ('{"metadata": {"gap_seconds": 300}, "data": [true]}', r"data\[0\] is True"),
    ],
)
def test_skypilot_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_skypilot(text, "t.json")
