"""Workers: sums of a tensor over all of them, through the switch.

`connect` on every rank makes an `Aggregator`; its `all_reduce` adds a tensor in place, `hook` is a DDP
communication hook. A tensor is cut into fragments: first those that carry the blocks' exponents (the switch
finds their maxima, so nobody sends gradients before all are there), then a packet for each block as int32,
then as floats what saturated or was not finite. A lost packet is sent again by the policy's `is_due`.

An `all_reduce` that has not ended by its deadline (a worker, the switch or the server is gone) raises
`AggregationLost`, and so does every later one: the others may have ended that sum, or not. Close it then, and
connect anew.
"""

from __future__ import annotations

import secrets
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch._C._distributed_c10d import GradBucket

from windtunnel.base.compiled import jit
from windtunnel.base.errors import HostError, UserError
from windtunnel.linux import datagrams
from windtunnel.linux.datagrams import Array, DatagramBatch
from windtunnel.network.aggregation.live import wire
from windtunnel.network.aggregation.live.wire import HEAD, LONG, PACKET, SHORT
from windtunnel.network.aggregation.policy import MOST_WORKERS, fixed, is_due, priority
from windtunnel.network.aggregation.policy.fixed import UNFIT, VALUES

DEADLINE = 60.0
BATCH, TURN = 32, 0.1
LEAST, MOST, ASK = 20_000_000, 150_000_000, 0.05
"""ns that a worker waits for a result the first time, at least and at most; seconds between two questions to
join."""
STATE = np.dtype([(name, "i8") for name in (
    "job", "number", "full", "window", "base", "total", "metas", "blocks", "floor", "next", "newest",
    "patience", "trip", "room", "priority", "resent", "strange", "looked",
)] + [("token", "u8")])  # fmt: skip
SENT = np.dtype([(name, "i8") for name in ("at", "asked", "done")])


class AggregationLost(HostError):
    """A sum did not come by its deadline: a worker, the switch or the server is gone or cannot be reached."""


class WorkerMemory(NamedTuple):
    """All that the loop has. ``codes``: blocks' exponents, this worker's, then everybody's; ``agreed``: of
    which fragments of them that is so; ``again``: blocks that go as floats."""

    state: Array
    ring: Array
    codes: NDArray[np.int32]
    agreed: NDArray[np.bool_]
    again: NDArray[np.bool_]
    order: NDArray[np.int64]
    came: DatagramBatch
    packets: Array
    goes: DatagramBatch
    out: Array


@jit
def fill(m: WorkerMemory, values: NDArray[np.float32], sequence: int, k: int, repeat: bool) -> None:
    """Packet ``k`` to send becomes a fragment."""
    own, packet = m.state[0], m.out[k]
    index, op = sequence - own.base, wire.SUMS
    if index < own.metas:
        op = wire.MOST
        fixed.copy(packet.values, m.codes[index * VALUES : (index + 1) * VALUES])
    elif index < own.metas + own.blocks:
        block = index - own.metas
        part_ = values[block * VALUES : (block + 1) * VALUES]
        if m.codes[block] >= UNFIT:
            fixed.copy(packet.values, m.codes[:0])
        else:
            fixed.to_fixed(part_, fixed.scale(m.codes[block], own.room), packet.values)
    else:
        op = wire.FLOATS
        block = m.order[index - own.metas - own.blocks]
        fixed.copy(packet.floats, values[block * VALUES : (block + 1) * VALUES])
    kind = wire.RESENT if repeat else wire.GRADIENT
    wire.head(
        packet, kind, op, 0, 0 if repeat else own.priority, own.token, sequence, 1 << own.number, 0, own.job
    )
    datagrams.put(m.goes, k, m.out.ctypes.data + k * LONG, LONG, 0)


@jit
def take(m: WorkerMemory, packet: Any, out: NDArray[np.float32]) -> None:
    """A result that was lacking."""
    own = m.state[0]
    index = packet.sequence - own.base
    if index < own.metas:
        fixed.copy(m.codes[index * VALUES : (index + 1) * VALUES], packet.values)
        m.agreed[index] = True
        return
    if index < own.metas + own.blocks:
        block = index - own.metas
        part_ = out[block * VALUES : (block + 1) * VALUES]
        if m.codes[block] >= UNFIT or packet.flags & wire.SATURATED:
            m.again[block] = True
        else:
            fixed.from_fixed(packet.values, fixed.scale(m.codes[block], own.room), part_)
        return
    block = m.order[index - own.metas - own.blocks]
    fixed.copy(out[block * VALUES : (block + 1) * VALUES], packet.floats)


@jit
def hear(m: WorkerMemory, fd: int, values: NDArray[np.float32], out: NDArray[np.float32]) -> int:
    """All that has come: how many datagrams there were."""
    own, count = m.state[0], 0
    received = datagrams.receive(m.came, fd)
    time_ = datagrams.now(m.came)
    for k in range(received):
        packet, size = m.packets[k], m.came.messages[k].size
        if size < SHORT or packet.magic != wire.MAGIC or packet.token != own.token:
            own.strange += 1
            continue
        sequence = packet.sequence
        if not own.floor <= sequence < own.next or m.ring[sequence % len(m.ring)].done:
            continue
        slot = m.ring[sequence % len(m.ring)]
        if packet.kind == wire.REMINDER and packet.to >> own.number & 1:
            fill(m, values, sequence, count, True)
            slot.at, slot.asked = time_, slot.asked + 1
            own.resent += 1
            count += 1
        elif packet.kind == wire.RESULT and packet.bits == own.full and size == LONG:
            take(m, packet, out)
            slot.done = 1
            own.newest = max(own.newest, sequence)
            if slot.asked == 0:
                # what was repaired comes late: the estimate follows short times soon, and long ones slowly
                more = time_ - slot.at - own.trip
                own.trip += more if own.trip == 0 else more // (2 if more < 0 else 32)
                own.patience = min(2 * own.trip + LEAST, MOST)
            while own.floor < own.next and m.ring[own.floor % len(m.ring)].done:
                own.floor += 1
    datagrams.send_all(m.goes, fd, count)
    return received


@jit
def loop(m: WorkerMemory, fd: int, values: NDArray[np.float32], out: NDArray[np.float32], until: int) -> bool:
    """Whether all ``total`` sums are there by ``until`` (ns)."""
    own = m.state[0]
    while own.floor < own.total:
        while hear(m, fd, values, out) == len(m.packets):
            pass
        time_ = datagrams.now(m.came)
        last, count = min(own.floor + own.window, own.total), 0
        while own.next < last and count < len(m.out):
            block = own.next - own.base - own.metas
            if 0 <= block < own.blocks and not m.agreed[block // VALUES]:
                break
            fill(m, values, own.next, count, False)
            slot = m.ring[own.next % len(m.ring)]
            slot.at, slot.asked, slot.done = time_, 0, 0
            own.next += 1
            count += 1
        ahead = count
        if time_ - own.looked > LEAST // 8:
            own.looked = time_
            for sequence in range(own.floor, own.next):
                slot = m.ring[sequence % len(m.ring)]
                if slot.done or count >= len(m.out):
                    continue
                later = own.newest - sequence
                if is_due(time_ - slot.at, own.patience, slot.asked, later, own.window - 1):
                    fill(m, values, sequence, count, True)
                    slot.at, slot.asked = time_, slot.asked + 1
                    own.resent += 1
                    count += 1
        datagrams.send_all(m.goes, fd, count)
        if time_ >= until:
            return False
        if ahead == 0:
            datagrams.wait(m.came, fd, False, 2)
    return True


class Aggregator:
    """A worker's place at a switch; made by `connect`. Not for several threads at once.

    ``remaining``: seconds that the job has left, as far as its user knows; with the times inside and outside
    of `all_reduce` it makes the priority of what is sent. ``resent``: fragments sent again so far;
    ``floats``: blocks that went as floats.
    """

    remaining = 1.0

    def __init__(
        self, sock: socket.socket, token: int, rank: int, world: int, *, window: int, headroom: int | None,
        deadline: float,
    ) -> None:  # fmt: skip
        self.rank, self.world, self.deadline = rank, world, deadline
        self.floats, self._sock, self._lost = 0, sock, ""
        self._pool: ThreadPoolExecutor | None = None
        self._buckets = 1
        packets = np.zeros(2 * BATCH, PACKET)
        self._memory = WorkerMemory(
            np.zeros(1, STATE), np.zeros(wire.MOST_WINDOW, SENT), np.zeros(0, np.int32),
            np.zeros(0, np.bool_), np.zeros(0, np.bool_), np.zeros(0, np.int64),
            datagrams.batch(len(packets), packets), packets, datagrams.batch(2 * BATCH),
            np.zeros(2 * BATCH, PACKET),
        )  # fmt: skip
        state = self._memory.state
        state["number"], state["token"], state["full"] = rank, token, (1 << world) - 1
        state["patience"], state["newest"] = MOST, -1
        state["room"] = fixed.headroom(world) if headroom is None else headroom
        self._inside = self._outside = 0.0
        self._ended = time.monotonic()
        nothing = np.zeros(0, np.float32)
        loop(self._memory, sock.fileno(), nothing, nothing, 0)  # compiled before anybody waits
        self._join(token, window)

    @property
    def resent(self) -> int:
        return int(self._memory.state["resent"][0])

    def _join(self, token: int, window: int) -> None:
        """Raises AggregationLost, or UserError where the switch refuses."""
        asks = wire.control(wire.JOIN, token, sequence=window, bits=self.rank, to=self.world)
        last = time.monotonic() + self.deadline
        self._sock.settimeout(ASK)
        while time.monotonic() < last:
            with suppress(OSError):  # nobody there as yet, or no answer as yet
                self._sock.send(asks)
                response = np.frombuffer(self._sock.recv(SHORT).ljust(SHORT, b"\0"), HEAD)[0]
                if response["magic"] != wire.MAGIC or int(response["token"]) != token:
                    continue
                if response["kind"] == wire.REFUSED:
                    raise UserError(
                        f"aggregation: the switch refuses worker {self.rank} of {self.world}: it has all the"
                        " jobs that it takes, or this one with other workers"
                    )
                if response["kind"] == wire.JOINED:
                    state = self._memory.state
                    state["job"], state["window"] = response["job"], response["sequence"]
                    return
        raise AggregationLost(
            f"the switch has not let worker {self.rank} join within {self.deadline:g} s: it or its server"
            " cannot be reached"
        )

    def all_reduce(
        self, tensor: torch.Tensor, deadline: float | None = None, *, layer: int = 0, layers: int = 1
    ) -> torch.Tensor:
        """Add ``tensor`` over all workers, in place, and return it. Every worker calls it with the same
        number of elements, in the same order of calls. Any floating type; sums are of float32. ``layer`` of
        ``layers``, the front one 0, is for its priority.

        Raises:
            UserError: it does not hold floats.
            AggregationLost: it has not ended by the deadline (seconds), or an earlier one has not.
        """
        if not tensor.is_floating_point():
            raise UserError(f"aggregation: tensor is of {tensor.dtype}, accepted are floating types")
        if self._lost:
            raise AggregationLost(self._lost)
        values = tensor.detach().to(torch.float32).cpu().contiguous().reshape(-1).numpy()
        out = np.empty_like(values)
        if len(values):
            began = time.monotonic()
            level = priority(layer, layers, self._inside / max(self._outside, 1e-6), self.remaining)
            self._memory.state["priority"] = level
            self._reduce(values, out, self.deadline if deadline is None else deadline)
            self._outside, self._ended = self._outside + began - self._ended, time.monotonic()
            self._inside += self._ended - began
            tensor.detach().copy_(torch.from_numpy(out).reshape(tensor.shape))
        return tensor

    def _reduce(self, values: NDArray[np.float32], out: NDArray[np.float32], deadline: float) -> None:
        blocks = -(-len(values) // VALUES)
        metas = -(-blocks // VALUES)
        m = self._memory = self._memory._replace(
            codes=np.empty(blocks, np.int32), agreed=np.zeros(metas, np.bool_),
            again=np.zeros(blocks, np.bool_),
        )  # fmt: skip
        fixed.exponents(values, m.codes)
        state, last = m.state, time.monotonic() + deadline
        state["base"], state["metas"], state["blocks"] = state["floor"], metas, blocks
        state["total"] = state["base"] + metas + blocks
        self._run(m, values, out, last, deadline)
        order = np.flatnonzero(m.again)
        if len(order):
            self.floats += len(order)
            m = self._memory = m._replace(order=order)
            state["total"] += len(order)
            self._run(m, values, out, last, deadline)

    def _run(
        self,
        m: WorkerMemory,
        values: NDArray[np.float32],
        out: NDArray[np.float32],
        last: float,
        deadline: float,
    ) -> None:
        fd = self._sock.fileno()
        while not loop(m, fd, values, out, int(1e9 * min(last, time.monotonic() + TURN))):
            if time.monotonic() >= last:
                state = m.state[0]
                self._lost = (
                    f"worker {self.rank} has {state['floor'] - state['base']} of"
                    f" {state['total'] - state['base']} sums after {deadline:g} s: a worker, the switch or"
                    " its server is gone"
                )
                raise AggregationLost(self._lost)

    def close(self) -> None:
        """Leave the job, which ends when all its workers have left."""
        if self._pool is not None:
            self._pool.shutdown()
        with suppress(OSError):
            self._sock.send(wire.control(wire.LEAVE, int(self._memory.state["token"][0])))
        self._sock.close()

    def __enter__(self) -> Aggregator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect(
    switch: str | tuple[str, int], *, rank: int | None = None, world: int | None = None,
    token: int | None = None, window: int = 128, headroom: int | None = None, deadline: float = DEADLINE,
    group: Any = None,
) -> Aggregator:  # fmt: skip
    """Join the job of this process group at ``switch``, which is "host:port".

    ``rank``, ``world``, ``token``: of workers without `torch.distributed`, where the token is any number
    below 2^64 that all of them, and nobody else, know. ``window``: fragments under way at most. ``headroom``:
    bits left free for sums (default: as many as make saturation impossible). ``deadline``: seconds, of
    joining and of every sum.

    Raises:
        UserError: an argument that cannot be, or the switch refuses.
        AggregationLost: the switch or its server cannot be reached.
    """
    if token is None:
        if not dist.is_initialized():
            raise UserError("aggregation: no process group, and rank, world and token are not given")
        rank, world = dist.get_rank(group), dist.get_world_size(group)
        drawn = [secrets.randbits(63) | 1]
        dist.broadcast_object_list(drawn, src=dist.get_global_rank(group, 0) if group else 0, group=group)
        token = drawn[0]
    if rank is None or world is None or not 0 <= rank < world <= MOST_WORKERS:
        raise UserError(
            f"aggregation: worker {rank} of {world}; accepted are 0 to {MOST_WORKERS - 1} of them"
        )
    if not 1 <= window <= wire.MOST_WINDOW:
        raise UserError(f"aggregation: window is {window}; accepted is 1 to {wire.MOST_WINDOW}")
    if headroom is not None and not 0 <= headroom <= 24:
        raise UserError(f"aggregation: headroom is {headroom}; accepted is 0 to 24")
    if not 0 < token < 1 << 64:
        raise UserError("aggregation: token is out of range; accepted is 1 to 2^64 - 1")
    place = wire.address(switch, "aggregation") if isinstance(switch, str) else switch
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        sock.connect(place)
        return Aggregator(sock, token, rank, world, window=window, headroom=headroom, deadline=deadline)
    except OSError as error:
        sock.close()
        raise AggregationLost(f"the switch at {switch} cannot be reached: {error.strerror}") from error
    except BaseException:
        sock.close()
        raise


def hook(group: Aggregator, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A DDP communication hook: ``ddp.register_comm_hook(group, hook)``. Buckets are added up in a thread of
    their own while backward goes on."""
    if group._pool is None:
        group._pool = ThreadPoolExecutor(1, "windtunnel-aggregation")
    future: torch.futures.Future[Any] = torch.futures.Future()
    buffer, index = bucket.buffer(), bucket.index()
    group._buckets = max(group._buckets, index + 1)

    def add() -> None:
        try:
            layer = group._buckets - 1 - index  # DDP's first bucket has the last layers
            future.set_result(group.all_reduce(buffer.div_(group.world), layer=layer, layers=group._buckets))
        except BaseException as error:
            future.set_result(error)

    group._pool.submit(add)
    return future.then(_unwrapped)


hook.__annotations__ = {}  # DDP wants types there, or nothing; with deferred annotations there are words


def _unwrapped(future: torch.futures.Future[Any]) -> torch.Tensor:
    """As DDP takes it: an exception that a callback raises is one that backward ends with."""
    value = future.value()
    if isinstance(value, BaseException):
        raise value
    assert isinstance(value, torch.Tensor)
    return value
