"""One transaction on a group: all of its writes, or none, whoever dies.

    gCAS 0 → owner, gWRITE the record, gFLUSH | gMEMCPY each part to its place, gFLUSH, gCAS owner → 0

The journal is the lock word, and behind it the record: owner, length, digest, and each part with its offset.
From the first gFLUSH on the transaction will be done, by this coordinator or the next one, which finds the
lock held; before it the record is not whole, and only the lock is opened.

Source: Kim et al., HyperLoop (SIGCOMM 2018), section 5.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from typing_extensions import Buffer

from windtunnel.base.errors import LessError

if TYPE_CHECKING:
    from windtunnel.data.group.live.client import ReplicationGroup

RECORD, PART, LOCK = struct.Struct("<QQ32s"), struct.Struct("<QQ"), 8
"""Owner, bytes of the body, its digest; of each part in it: offset and length; bytes of the lock word."""
BREATH = 0.001  # seconds before the lock is tried again
_COUNT = itertools.count(1)


def commit(group: ReplicationGroup, at: int, writes: Sequence[tuple[int, Buffer]], patience: float) -> None:
    """Do ``writes`` by the journal ``at`` an offset. Raises:

    UserError: they, or the record of them, do not fit into the region.
    LessError: the lock is not to be had within ``patience`` seconds.
    GroupHalted, StaleEpoch: it is done, or was never begun, once the next coordinator has the group.
    """
    parts = [(offset, bytes(data)) for offset, data in writes]
    for offset, data in parts:
        group.check(offset, len(data))
    body = b"".join(PART.pack(offset, len(data)) + data for offset, data in parts)
    group.check(at, LOCK + RECORD.size + len(body))
    owner, last = group.epoch << 32 | next(_COUNT) & 0xFFFFFFFF, time.monotonic() + patience
    while any(before := group.cas(at, 0, owner).result()):
        # in part: given back before anybody else is in the way of it
        won = [member.name for member, word in zip(group.members, before, strict=True) if word == 0]
        group.cas(at, owner, 0, execute=won).result()
        if time.monotonic() > last:
            raise LessError(f"the lock is held by {max(before):#x} for {patience:g} s: nothing was written")
        threading.Event().wait(BREATH)
    group.write(at + LOCK, RECORD.pack(owner, len(body), hashlib.sha256(body).digest()) + body)
    group.flush().result()
    _apply(group, at, body)
    group.cas(at, owner, 0).result()


def recover(group: ReplicationGroup, at: int) -> None:
    """What an older coordinator has begun: done to its end, or forgotten."""
    tail = group.members[-1]
    owners = {int.from_bytes(group.read(member, at, LOCK), "little") for member in group.members}
    for owner in owners - {0}:
        holder, length, digest = RECORD.unpack(group.read(tail, at + LOCK, RECORD.size))
        if holder == owner and length <= group.size - at - LOCK - RECORD.size:
            body = group.read(tail, at + LOCK + RECORD.size, length)
            if hashlib.sha256(body).digest() == digest:
                _apply(group, at, body)
        group.cas(at, owner, 0).result()


def _apply(group: ReplicationGroup, at: int, body: bytes) -> None:
    place = 0
    while place < len(body):
        offset, length = PART.unpack_from(body, place)
        place += PART.size
        group.memcpy(at + LOCK + RECORD.size + place, offset, length)
        place += length
    group.flush().result()
