"""The parameter server: adds what the switch did not, and remembers results for whoever still asks.

It speaks with one switch only (its socket is connected, so the kernel drops what others send). What it knows
of a job are the last two windows of sums; when it is killed they are gone, and the job's workers end with an
error by their deadlines.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.base.compiled import jit
from windtunnel.linux import datagrams
from windtunnel.linux.datagrams import Array, DatagramBatch
from windtunnel.network.aggregation.live import wire
from windtunnel.network.aggregation.live.switch import BATCH, TOLD, TURN
from windtunnel.network.aggregation.live.wire import LONG, MOST_WINDOW, PACKET, SHORT
from windtunnel.network.aggregation.policy import (
    ACTIONS,
    ADD,
    ANSWER,
    COMPLETE,
    LATER,
    TAKE,
    OverdueFragment,
    PartialSum,
    ResendDecision,
    SumDecision,
    is_due,
    merge,
)
from windtunnel.network.aggregation.policy.fixed import VALUES, add, copy, raise_to
from windtunnel.store.eventlog import EventLog

PATIENCE = 10_000_000
"""ns that it waits for the rest of a sum before it reminds the switch for the first time."""
JOB = np.dtype([("token", "u8"), *((name, "i8") for name in (
    "full", "window", "direct", "floor", "newest", "last",
))])  # fmt: skip
ENTRY = np.dtype([(name, "i8") for name in ("sequence", "have", "since", "asked", "op", "flags")])
COUNTS = np.dtype([(name, "i8") for name in (
    "refused", "reminders", "logged", "logs", "whole", "parts", "waits",
)])  # fmt: skip
LOG = np.dtype([(name, "i8") for name in (
    "bits", "have", "full", "action", "after", "job", "place", "did_have", "sent",
)])  # fmt: skip
"""A sum that came, what was decided, and then the workers that the server has, and the datagrams that go."""
WAITS = np.dtype([(name, "i8") for name in ("waited", "patience", "asked", "later", "enough")])


class ServerMemory(NamedTuple):
    """All that the loop has; of entries and values one ring a job."""

    jobs: Array
    entries: Array
    sums: NDArray[np.int32]
    floats: NDArray[np.float64]
    counts: Array
    log: Array
    waits: Array
    came: DatagramBatch
    packets: Array
    goes: DatagramBatch
    spare: Array
    answers: Array


@jit
def handle(m: ServerMemory, k: int, time_: int, count: int) -> int:
    """Packet ``k`` of the batch: how many datagrams there are to send then, or -1: it is refused."""
    packet, size, counts = m.packets[k], m.came.messages[k].size, m.counts[0]
    if size < SHORT or packet.magic != wire.MAGIC or packet.job >= len(m.jobs):
        return -1
    number: Any = np.int64(packet.job)
    bits: Any = np.int64(packet.bits)
    job, here = m.jobs[number], m.packets.ctypes.data + k * LONG
    if packet.kind == wire.OPEN:
        if not 0 < packet.sequence <= MOST_WINDOW:
            return -1
        if job.token != packet.token:
            job.token, job.full, job.window = packet.token, bits, packet.sequence
            job.direct, job.floor, job.newest, job.last = packet.flags & wire.DIRECT, 0, -1, -1
            for entry in m.entries[number]:
                entry.sequence = -1
        wire.head(m.answers[k], wire.OPENED, 0, 0, 0, job.token, 0, 0, 0, number)
        datagrams.put(m.goes, count, m.answers.ctypes.data + k * LONG, SHORT, 0)
        return count + 1
    is_result = packet.kind == wire.RESULT and bits == job.full
    if size != LONG or job.window == 0 or packet.token != job.token or packet.sequence < 0:
        return -1
    if packet.kind > wire.FLUSHED and not is_result:
        return -1
    sequence, op = packet.sequence, packet.op
    place = sequence % (2 * job.window)
    entry, sums, floats = m.entries[number, place], m.sums[number, place], m.floats[number, place]
    if sequence < entry.sequence:
        return count
    if sequence > entry.sequence:
        entry.sequence, entry.have, entry.since, entry.asked = sequence, 0, time_, 0
        entry.op, entry.flags = op, 0
    if entry.have == 0 or bits == job.full:
        entry.op = op
    if entry.op != op:
        return -1
    action, have = merge(bits, entry.have, job.full)
    if counts.logged < counts.logs:
        row = m.log[counts.logged]
        row.bits, row.have, row.full, row.action, row.after = bits, entry.have, job.full, action, have
        row.job, row.place = number, place
        counts.logged += 1
    if action in (ADD, COMPLETE, TAKE):
        if action == TAKE:
            entry.flags = 0
        if op == wire.FLOATS:
            values = packet.floats
            if entry.have == 0:
                for at in range(VALUES):
                    floats[at] = 0.0
            for at in range(VALUES):
                floats[at] += values[at]
        elif entry.have == 0 or action == TAKE:
            copy(sums, packet.values)
        else:
            saturated = raise_to(sums, packet.values) if op == wire.MOST else add(sums, packet.values)
            entry.flags |= wire.SATURATED * saturated
        entry.flags |= packet.flags & wire.SATURATED
        entry.have = have
        job.newest = max(job.newest, sequence)
        counts.whole += action == TAKE
        counts.parts += bits != job.full
    to = job.full
    if action in (COMPLETE, TAKE):
        job.last = max(job.last, sequence)
    elif action == ANSWER and packet.kind == wire.RESENT:
        to = bits
    else:
        to = 0
    if job.direct and bits == job.full:
        wire.head(m.answers[k], wire.KNOWN, op, 0, 0, job.token, sequence, have, 0, number)
        datagrams.put(m.goes, count, m.answers.ctypes.data + k * LONG, SHORT, 0)
        return count + 1
    if to == 0:
        return count
    if op == wire.FLOATS:
        rounded = packet.floats
        for at in range(VALUES):
            rounded[at] = np.float32(floats[at])
    else:
        copy(packet.values, sums)
    wire.head(packet, wire.RESULT, op, entry.flags, 0, job.token, sequence, have, to, number)
    datagrams.put(m.goes, count, here, LONG, 0)
    return count + 1


@jit
def remind(m: ServerMemory, number: int, time_: int, patience: int, count: int) -> int:
    """Ask for what sums of a job lack: first the switch, then the workers, too. How many datagrams then."""
    job = m.jobs[number]
    for sequence in range(job.floor, max(job.newest, job.last) + 1):
        entry = m.entries[number, sequence % (2 * job.window)]
        if entry.sequence < sequence:  # nothing came of it, though later ones are whole
            if sequence + LATER > job.last:
                continue
            entry.sequence, entry.have, entry.since, entry.asked = sequence, 0, time_, 0
        if entry.have == job.full:
            job.floor += sequence == job.floor
            continue
        if count >= len(m.spare):
            break
        waited, later = time_ - entry.since, job.last - sequence
        if is_due(waited, patience, entry.asked, later, LATER):
            if m.counts[0].waits < len(m.waits):  # that it is not is no news
                row = m.waits[m.counts[0].waits]
                row.waited, row.patience, row.asked, row.later = waited, patience, entry.asked, later
                row.enough = LATER
                m.counts[0].waits += 1
            missing = job.full & ~entry.have if entry.asked else 0
            wire.head(m.spare[count], wire.REMINDER, 0, 0, 0, job.token, sequence, 0, missing, number)
            datagrams.put(m.goes, count, m.spare.ctypes.data + count * LONG, SHORT, 0)
            entry.since, entry.asked = time_, entry.asked + 1
            m.counts[0].reminders += 1
            count += 1
    return count


@jit
def loop(m: ServerMemory, fd: int, patience: int, until: int) -> None:
    """Serve ``until`` then (ns)."""
    last_look = 0
    while True:
        received = datagrams.receive(m.came, fd)
        time_ = datagrams.now(m.came)
        count = 0
        for k in range(received):
            logged = m.counts[0].logged
            sent = handle(m, k, time_, count)
            if m.counts[0].logged > logged:
                row = m.log[logged]
                row.did_have, row.sent = m.entries[row.job, row.place].have, sent - count
            if sent < 0:
                m.counts[0].refused += 1
            else:
                count = sent
        datagrams.send_all(m.goes, fd, count)
        if time_ - last_look >= patience // 8:
            last_look = time_
            for number in range(len(m.jobs)):
                if m.jobs[number].token != 0:
                    datagrams.send_all(m.goes, fd, remind(m, number, time_, patience, 0))
        if time_ >= until:
            return
        if received <= 0:
            datagrams.wait(m.came, fd, False, max(patience // 8_000_000, 1))


class ParameterServer:
    """A parameter server on ``sock``, of the switch at ``switch``; ``log``: decisions, for replay."""

    def __init__(self, sock: socket.socket, switch: tuple[str, int], log: Path | None = None) -> None:
        sock.connect(switch)
        self.sock = sock
        self._log = EventLog(log) if log is not None else None
        packets, ring = np.zeros(BATCH, PACKET), (wire.MOST_JOBS, 2 * MOST_WINDOW)
        self.memory = ServerMemory(
            np.zeros(wire.MOST_JOBS, JOB), np.zeros(ring, ENTRY), np.zeros((*ring, VALUES), np.int32),
            np.zeros((*ring, VALUES)), np.zeros(1, COUNTS), np.zeros(TOLD if log is not None else 0, LOG),
            np.zeros(TOLD if log is not None else 0, WAITS),
            datagrams.batch(BATCH, packets), packets, datagrams.batch(2 * MOST_WINDOW),
            np.zeros(2 * MOST_WINDOW, PACKET), np.zeros(BATCH, PACKET),
        )  # fmt: skip
        self.memory.counts["logs"] = len(self.memory.log)
        for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, 1 << 22)

        loop(self.memory, sock.fileno(), PATIENCE, 0)  # compiled before it is asked

    def serve(self, until: Callable[[], bool] = lambda: False) -> None:
        """Serve until then.

        Raises:
            LogFailed: the log cannot be written.
        """
        while not until():
            loop(self.memory, self.sock.fileno(), PATIENCE, time.monotonic_ns() + int(TURN * 1e9))
            if self._log is not None:
                self._tell(self._log)

    def _tell(self, log: EventLog) -> None:
        counts = self.memory.counts[0]
        for row in self.memory.log[: int(counts["logged"])]:
            arrived = PartialSum(int(row["bits"]), int(row["have"]), int(row["full"]))
            merged = SumDecision(ACTIONS[row["action"]], int(row["after"]))
            log.decision("network.aggregation", "decide", arrived, merged)
            log.append("effect", have=int(row["did_have"]), sent=int(row["sent"]))
        for row in self.memory.waits[: int(counts["waits"])]:
            waiting = OverdueFragment(*(int(row[name]) for name in WAITS.names or ()))
            log.decision("network.aggregation", "decide", waiting, ResendDecision(True))
        if counts["waits"]:
            log.append("effect", reminders=int(counts["reminders"]))
        counts["logged"] = counts["waits"] = 0

    def report(self) -> dict[str, int]:
        """What it has done."""
        return {name: int(self.memory.counts[0][name]) for name in ("whole", "parts", "reminders", "refused")}
