"""The switch: a UDP process whose M slots are all that it knows of gradients.

Packets come in batches, are placed by the policy's `place` in one compiled loop, and leave in batches. What
is not about fragments (joining, leaving) is left to Python between two batches. A switch that is killed takes
its slots along: workers end with an error by their deadlines, and may join another.

``loss``: it throws away this share of all that it receives and sends, to see what becomes of that.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from windtunnel.base.compiled import jit
from windtunnel.base.errors import UserError
from windtunnel.linux import datagrams
from windtunnel.linux.datagrams import ADDRESS, Array, DatagramBatch
from windtunnel.network.aggregation.live import wire
from windtunnel.network.aggregation.live.wire import LONG, PACKET, SHORT
from windtunnel.network.aggregation.policy import (
    ACTIONS,
    ADD,
    COMPLETE,
    FLUSH,
    HOLD,
    MOST_WORKERS,
    RAW,
    RULES,
    SWAP,
    TAKE,
    FragmentOffer,
    SlotDecision,
    place,
    where,
)
from windtunnel.network.aggregation.policy.fixed import VALUES, add, copy, raise_to
from windtunnel.store.eventlog import EventLog

BATCH, TURN, TOLD = 64, 0.05, 4096
"""Datagrams of one system call; seconds between two looks at what is not about fragments; decisions that are
logged of one turn at most."""
IDLE = 30.0
"""Seconds after which a job that says nothing may lose its place to another."""
JOB = np.dtype([
    ("token", "u8"),
    *((name, "i8") for name in ("full", "newest", "window", "active", "ready", "left")),
    ("workers", ADDRESS, (MOST_WORKERS,)),
])  # fmt: skip
SLOT = np.dtype([(name, "i8") for name in ("occupied", "job", "sequence", "bits", "level", "op", "flags")])
COUNTS = np.dtype([
    ("did", "i8", (8,)), ("refused", "i8"), ("thrown", "i8"), ("occupied", "i8"), ("controls", "i8"),
    ("logged", "i8"), ("logs", "i8"), ("random", "u8"), ("lose", "f8"),
])  # fmt: skip
"""``refused``: packets that were not the protocol, or not from whom they said."""
_ASKED = (
    "bits", "full", "priority", "resent", "late", "occupied", "mine", "behind", "whole", "there", "level",
)  # fmt: skip
_DID = ("there", "level", "occupied", "sent")
LOG = np.dtype([(name, "i8") for name in (
    *_ASKED, "action", "after", "level_after", "slot", *("did_" + name for name in _DID),
)])  # fmt: skip
"""A decision, and then what the slot holds when the packet was dealt with, and how many datagrams go out."""
_JOB, _WORKERS = JOB.itemsize, int(JOB.fields["workers"][1])  # type: ignore[index]


class SwitchMemory(NamedTuple):
    """All that the loop has: of the job table, the slots and their values, and batches with their packets.
    ``server``: its address."""

    jobs: Array
    slots: Array
    values: Array
    counts: Array
    log: Array
    came: DatagramBatch
    packets: Array
    goes: DatagramBatch
    spare: Array
    controls: Array
    origins: Array
    server: Array


@jit
def thrown(counts: Any) -> bool:
    """Whether the next packet is to be lost."""
    if counts.lose <= 0.0:
        return False
    counts.random = counts.random * np.uint64(6364136223846793005) + np.uint64(1442695040888963407)
    lost = np.float64(counts.random >> np.uint64(11)) / 2.0**53 < counts.lose
    counts.thrown += lost
    return lost  # type: ignore[no-any-return]


@jit
def multicast(m: SwitchMemory, packet: int, size: int, job: int, to: int, count: int) -> int:
    """A packet at an address, to the workers in ``to``; how many datagrams there are then."""
    for worker in range(MOST_WORKERS):
        if to >> worker & 1:
            name = m.jobs.ctypes.data + job * _JOB + _WORKERS + worker * 16
            datagrams.put(m.goes, count, packet, size, name)
            count += 1
    return count


@jit
def flush(m: SwitchMemory, slot: Any, number: int, spare: int, full: int, count: int) -> int:
    """A slot's sum goes to the server in the ``spare`` packet, and the slot is free unless it is whole."""
    out, token = m.spare[spare], m.jobs[slot.job].token
    wire.head(out, wire.FLUSHED, slot.op, slot.flags, 0, token, slot.sequence, slot.bits, 0, slot.job)
    copy(out.values, m.values[number])
    datagrams.put(m.goes, count, m.spare.ctypes.data + spare * LONG, LONG, m.server.ctypes.data)
    if slot.bits != full:
        slot.occupied = 0
    return count + 1


@jit
def handle(m: SwitchMemory, k: int, rules: int, share: int, direct: bool, count: int) -> int:
    """Packet ``k`` of the batch: how many datagrams there are to send then, or -1: it is refused."""
    packet, size, counts = m.packets[k], m.came.messages[k].size, m.counts[0]
    if size < SHORT or packet.magic != wire.MAGIC:
        return -1
    kind, origin, from_server = packet.kind, m.came.addresses[k].word, False
    from_server = origin == m.server[0].word
    if kind >= wire.JOIN:
        if size != SHORT or counts.controls >= len(m.controls):
            return -1
        wire.head(
            m.controls[counts.controls], kind, packet.op, packet.flags, 0, packet.token, packet.sequence,
            packet.bits, packet.to, packet.job,
        )  # fmt: skip
        m.origins[counts.controls] = origin
        counts.controls += 1
        return count
    if packet.job >= len(m.jobs):
        return -1
    number: Any = np.int64(packet.job)
    job = m.jobs[number]
    if job.ready == 0 or packet.token != job.token or packet.sequence < 0:
        return -1
    bits: Any = np.int64(packet.bits)
    sequence = packet.sequence
    at = where(rules, number, sequence, len(m.slots), share)
    slot, here = m.slots[at], m.packets.ctypes.data + k * LONG
    mine = slot.occupied == 1 and slot.job == number and slot.sequence == sequence
    if from_server:
        if kind not in (wire.RESULT, wire.REMINDER, wire.KNOWN) or (kind == wire.RESULT and size != LONG):
            return -1
        if mine and kind == wire.REMINDER:
            count = flush(m, slot, at, k, job.full, count)
        elif mine:
            slot.occupied = 0
        to = 0 if kind == wire.KNOWN else np.int64(packet.to) & job.full
        return multicast(m, here, size, number, to, count)
    worker = 0
    while worker < MOST_WORKERS and bits != 1 << worker:
        worker += 1
    if worker == MOST_WORKERS or job.workers[worker].word != origin or size != LONG:
        return -1
    if kind not in (wire.GRADIENT, wire.RESENT) or packet.op > wire.FLOATS:
        return -1
    if sequence > job.newest + job.window or (mine and slot.op != packet.op):
        return -1  # no worker is that far ahead
    job.newest, job.active = max(job.newest, sequence), 1
    late, resent = sequence <= job.newest - job.window, kind == wire.RESENT or packet.op == wire.FLOATS
    occupied, other = slot.occupied == 1, m.jobs[slot.job]
    behind = (other.newest - slot.sequence) // max(other.window, 1) if occupied else 0
    whole = occupied and slot.bits == other.full
    priority: Any = np.int64(packet.priority)
    there, level = slot.bits, slot.level
    action, after, level_after = place(
        rules, bits, job.full, priority, resent, late, occupied, mine, behind, whole, there, level
    )
    counts.did[action] += 1
    if counts.logged < counts.logs:
        row = m.log[counts.logged]
        row.bits, row.full, row.priority, row.resent, row.late = bits, job.full, priority, resent, late
        row.occupied, row.mine, row.behind, row.whole = occupied, mine, behind, whole
        row.there, row.level = there, level
        row.action, row.after, row.level_after, row.slot = action, after, level_after, at
        counts.logged += 1
    server = m.server.ctypes.data
    if action == RAW:
        slot.level = level_after
        datagrams.put(m.goes, count, here, LONG, server)
        return count + 1
    if action == FLUSH:
        count = flush(m, slot, at, k, job.full, count)
        datagrams.put(m.goes, count, here, LONG, server)
        return count + 1
    if action == SWAP:
        count = flush(m, slot, at, k, other.full, count)
    values = m.values[at]
    if action in (TAKE, SWAP) or (action == COMPLETE and not mine):
        slot.occupied, slot.job, slot.sequence = 1, number, sequence
        slot.op, slot.flags = packet.op, packet.flags & wire.SATURATED
        copy(values, packet.values)
    elif action in (ADD, COMPLETE):
        combine = raise_to(values, packet.values) if slot.op == wire.MOST else add(values, packet.values)
        slot.flags |= wire.SATURATED * combine
    slot.bits, slot.level = after, level_after
    if action == COMPLETE:
        copy(packet.values, values)
        answers = wire.RESULT if direct else wire.GRADIENT
        to = job.full if direct else 0
        wire.head(packet, answers, slot.op, slot.flags, level_after, job.token, sequence, after, to, number)
        datagrams.put(m.goes, count, here, LONG, server)
        count += 1
        if direct:
            count = multicast(m, here, LONG, number, to, count)
        elif not rules & HOLD:
            slot.occupied = 0
    return count


@jit
def loop(m: SwitchMemory, fd: int, rules: int, share: int, direct: bool, until: int) -> None:
    """Serve ``until`` then (ns), or until there is something for Python to do."""
    counts = m.counts[0]
    while True:
        received = datagrams.receive(m.came, fd)
        if received <= 0:
            left = until - datagrams.now(m.came)
            if left <= 0 or counts.controls > 0:
                break
            datagrams.wait(m.came, fd, False, left // 1_000_000 + 1)
            continue
        count = 0
        for k in range(received):
            if thrown(counts):
                continue
            logged = counts.logged
            sent = handle(m, k, rules, share, direct, count)
            if counts.logged > logged:
                row, slot = m.log[logged], m.slots[m.log[logged].slot]
                row.did_there, row.did_level, row.did_occupied = slot.bits, slot.level, slot.occupied
                row.did_sent = sent - count
            if sent < 0:
                counts.refused += 1
            else:
                count = sent
        delivered = 0
        for place_ in range(count):  # what gets lost is left out
            if counts.lose > 0.0 and thrown(counts):
                continue
            message = m.goes.vectors[place_]
            datagrams.put(m.goes, delivered, message.base, message.size, m.goes.messages[place_].name)
            delivered += 1
        datagrams.send_all(m.goes, fd, delivered)
        if counts.controls > 0 or datagrams.now(m.came) >= until:
            break
    occupied_slots = 0
    for slot in m.slots:
        occupied_slots += slot.occupied
    counts.occupied = occupied_slots


class Switch:
    """A switch on ``sock``, with ``slots`` of which static pools get a part for each of ``jobs``.

    ``server``: where what it does not add goes. ``direct``: results leave here, with a copy to the server.
    ``log``: decisions, for `windtunnel replay`.

    Raises:
        UserError: a number that cannot be.
    """

    def __init__(
        self, sock: socket.socket, server: tuple[str, int], *, slots: int = 512, policy: str = "esa",
        jobs: int = 4, direct: bool = False, loss: float = 0.0, seed: int = 0, log: Path | None = None,
    ) -> None:  # fmt: skip
        if policy not in RULES:
            raise UserError(f"aggregation: policy {policy!r} is unknown; accepted are {', '.join(RULES)}")
        if not 1 <= jobs <= wire.MOST_JOBS:
            raise UserError(f"aggregation: jobs is {jobs}; accepted is 1 to {wire.MOST_JOBS}")
        if not jobs <= slots <= 1 << 20:
            raise UserError(f"aggregation: slots is {slots}; accepted is {jobs} (one a job) to {1 << 20}")
        if not 0 <= loss < 1:
            raise UserError(f"aggregation: loss is {loss}; accepted is 0 up to 1")
        self.sock, self.policy, self.rules = sock, policy, RULES[policy]
        self.share, self.direct = slots // jobs, direct
        self._log = EventLog(log) if log is not None else None
        packets = np.zeros(BATCH, PACKET)
        self.memory = SwitchMemory(
            np.zeros(jobs, JOB), np.zeros(slots, SLOT), np.zeros((slots, VALUES), np.int32),
            np.zeros(1, COUNTS), np.zeros(TOLD if log is not None else 0, LOG),
            datagrams.batch(BATCH, packets), packets, datagrams.batch(BATCH * (MOST_WORKERS + 2)),
            np.zeros(BATCH, PACKET), np.zeros(256, PACKET), np.zeros(256, np.uint64),
            np.array([(datagrams.word(server), 0)], ADDRESS),
        )  # fmt: skip
        counts = self.memory.counts
        counts["lose"], counts["random"], counts["logs"] = loss, seed, len(self.memory.log)
        self._last_arrival = [0.0] * jobs
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)

        loop(
            self.memory, sock.fileno(), self.rules.code, self.share, direct, 0
        )  # compiled before it is asked

    def serve(self, until: Callable[[], bool] = lambda: False) -> None:
        """Serve until then.

        Raises:
            LogFailed: the log cannot be written.
        """
        fd = self.sock.fileno()
        while not until():
            end = time.monotonic_ns() + int(TURN * 1e9)
            loop(self.memory, fd, self.rules.code, self.share, self.direct, end)
            self._between(time.monotonic())

    def _between(self, now: float) -> None:
        """What is not about fragments."""
        counts, jobs = self.memory.counts[0], self.memory.jobs
        for number in np.flatnonzero(jobs["active"]):
            self._last_arrival[number], jobs["active"][number] = now, 0
        for place_ in range(int(counts["controls"])):
            message = self.memory.controls[place_].copy()
            self._control_message(message, int(self.memory.origins[place_]), now)
        counts["controls"] = 0
        if self._log is not None:
            for row in self.memory.log[: int(counts["logged"])]:
                offer: dict[str, Any] = {name: int(row[name]) for name in _ASKED}
                truths = ("resent", "late", "occupied", "mine", "whole")
                offer |= {name: bool(offer[name]) for name in truths}
                placed = SlotDecision(ACTIONS[row["action"]], int(row["after"]), int(row["level_after"]))
                self._log.decision(
                    "network.aggregation", self.policy, FragmentOffer(self.rules, **offer), placed
                )
                self._log.append("effect", **{name: int(row["did_" + name]) for name in _DID})
            counts["logged"] = 0

    def _control_message(self, head: Any, origin: int, now: float) -> None:
        jobs, kind, token = self.memory.jobs, int(head["kind"]), int(head["token"])
        matches = np.flatnonzero(jobs["token"] == np.uint64(token)) if token else np.zeros(0, np.int64)
        if kind == wire.OPENED and origin == int(self.memory.server[0]["word"]) and len(matches):
            jobs["ready"][matches[0]] = 1
        elif kind == wire.LEAVE and len(matches):
            number = int(matches[0])
            for worker in np.flatnonzero(jobs["workers"]["word"][number] == np.uint64(origin)):
                jobs["left"][number] |= 1 << int(worker)
            if jobs["left"][number] == jobs["full"][number]:  # until then some may need results
                self._end(number)
        elif kind == wire.JOIN and token:
            self._join(head, int(matches[0]) if len(matches) else self._free(now), origin, now)

    def _free(self, now: float) -> int | None:
        """The place of a job that there is not, or that has said nothing for long."""
        for number, job in enumerate(self.memory.jobs):
            if job["token"] == 0:
                return number
        quiet = min(range(len(self._last_arrival)), key=self._last_arrival.__getitem__)
        if now - self._last_arrival[quiet] < IDLE:
            return None
        self._end(quiet)
        return quiet

    def _end(self, number: int) -> None:
        slots = self.memory.slots
        slots["occupied"][slots["job"] == number] = 0
        self.memory.jobs[number] = np.zeros(1, JOB)[0]

    def _join(self, head: Any, number: int | None, origin: int, now: float) -> None:
        token, worker, world = int(head["token"]), int(head["bits"]), int(head["to"])
        pool = max(self.share >> self.direct, 1) if self.rules.static else wire.MOST_WINDOW
        window = min(int(head["sequence"]), wire.MOST_WINDOW, pool)
        joined = number is not None and self.memory.jobs["token"][number] == np.uint64(token)
        full = (1 << world) - 1
        fits = 0 <= worker < world <= MOST_WORKERS and window > 0
        if number is None or not fits or (joined and self.memory.jobs["full"][number] != full):
            self._say(wire.control(wire.REFUSED, token, bits=worker), origin)
            return
        job = self.memory.jobs[number]
        if not joined:
            job["token"], job["full"], job["window"], job["newest"] = token, full, window, -1
        if job["workers"]["word"][worker] not in (0, origin):
            return  # a worker has one place
        self._last_arrival[number] = now
        job["workers"]["word"][worker] = origin
        window = int(job["window"])
        if not job["ready"]:
            flags = wire.DIRECT * self.direct
            opens = wire.control(wire.OPEN, token, sequence=window, bits=full, job=number, flags=flags)
            self._say(opens, int(self.memory.server[0]["word"]))
        else:
            self._say(wire.control(wire.JOINED, token, sequence=window, bits=worker, job=number), origin)

    def _say(self, message: bytes, to: int) -> None:
        with suppress(OSError):  # it will be asked for again
            self.sock.sendto(message, datagrams.address(to))

    def report(self) -> str:
        """What it has done, as one JSON value."""
        counts = self.memory.counts[0]
        did = {name: int(times) for name, times in zip(ACTIONS, counts["did"], strict=True)}
        rest = {name: int(counts[name]) for name in ("refused", "thrown", "occupied")}
        return json.dumps({"policy": self.policy, **did, **rest})
