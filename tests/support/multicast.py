"""Racks of a small fabric, made of processes and networks of this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from windtunnel.linux import network
from windtunnel.network.multicast.live.rack import serve
from windtunnel.network.multicast.live.racks import Racks
from windtunnel.network.multicast.live.send import send
from windtunnel.network.multicast.policy.shuffle import Shuffle

RATE = 25e6


@contextmanager
def standing(shuffle: Shuffle = Shuffle(2, 2), rate: float = RATE) -> Iterator[Racks]:  # noqa: B008 - frozen
    if (why := network.missing()) is not None:
        pytest.skip(why)
    racks = Racks(shuffle, rate, partial(serve, parts={}))
    try:
        yield racks
    finally:
        racks.close()


def file_of(folder: Path, size: int) -> Path:
    file = folder / "weights.bin"
    file.write_bytes(os.urandom(size))
    return file


def sent(folder: Path) -> Path:
    """The log of a multicast that had to repair."""
    with standing() as racks:
        report = send(racks, file_of(folder, 500_000), loss=0.1, log=folder / "events.jsonl", deadline=60.0)
    assert not report.lost and report.total("asked")
    return folder / "events.jsonl"
