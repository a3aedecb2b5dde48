"""The memory service of a host: checkpoints in this host's memory, and copies of those of others.

It lives in the agent, so it outlives the trainers. Local ranks call it on a Unix socket (`owner`),
other hosts' services and restoring trainers ask on a TCP port (`Holder`). The agent tells it of each new
membership and of each agreement; it tells the agent of copies that have arrived, and of events.

On a new membership all slots stay, and what was being sent or received is given up. The ranks agree on a step
that they all go back to (`restored`) and save it again as it is: what copies it lacks are made, and it is
committed once more, before anything older may be overwritten. Slots of a job of another size are deleted
when a step of the new one is committed, not before.
"""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from windtunnel.base import rpc, schema, wire
from windtunnel.base.errors import UserError
from windtunnel.base.keys import Keys
from windtunnel.base.listener import Listener
from windtunnel.base.plain import from_plain, to_plain
from windtunnel.training.checkpoint.live import slot as slots
from windtunnel.training.checkpoint.live.memory import messages
from windtunnel.training.checkpoint.live.memory.folder import Shelf
from windtunnel.training.checkpoint.live.memory.messages import (
    ERRORS,
    FROM_PEER,
    LARGEST,
    Handler,
    Message,
    Ranks,
    StaleGeneration,
)
from windtunnel.training.checkpoint.live.memory.owner import Owner
from windtunnel.training.checkpoint.live.memory.state import Context, State
from windtunnel.training.checkpoint.live.memory.storing import Persister
from windtunnel.training.checkpoint.live.slot import CopyError, SlotFile
from windtunnel.training.checkpoint.model import Shard
from windtunnel.training.checkpoint.settings import MemoryLimits
from windtunnel.training.elastic.model import Membership

_LONGEST_SOCKET_NAME = 100


class Holder:
    """What peers ask: to hold copies (PREPARE, PUT), and to read them (GET) and their layouts.

    A PUT is refused if its generation is not the one in force, at its begin and again before its slot is
    declared complete; so nobody who was fenced can leave anything behind. A newer PUT of a shard displaces an
    older one that is still under way: its sender has come back on a new connection."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._under_way: dict[int, socket.socket] = {}  # by the id of the shelf
        self._handlers: dict[str, Handler] = {
            "prepare": self._prepare,
            "layout?": self._give_layout,
            "put": self._put,
            "get": self._get,
        }

    def serve(self, sock: socket.socket) -> None:
        """Answer the requests of a connection, one after the other, until the peer goes.

        Raises:
            OSError: the connection ended, or is of no use any more.
        """
        # A peer that vanished between two requests is noticed by the kernel's probes.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        while True:
            wire.wait(sock)
            sock.settimeout(self._state.limits.silence)
            message, following = wire.receive(sock)
            if following > LARGEST:
                raise wire.WireError(f"a request with {following} bytes, more than {LARGEST}")
            answer = self._answer(sock, message, bytes(wire.rest(sock, following)))
            if answer is not None:
                wire.send(sock, answer)

    def _answer(self, sock: socket.socket, message: Message, raw: bytes) -> Message | None:
        try:
            op = schema.require(message, FROM_PEER)["op"]
        except wire.WireError as error:
            return {"error": "user", "text": str(error)}
        try:
            return self._handlers[op](sock, message, raw)
        except StaleGeneration as error:
            return {"error": "stale", "text": str(error)}
        except CopyError as error:
            return {"error": "copy", "text": str(error)}
        except (UserError, ValueError) as error:
            return {"error": "user", "text": str(error)}

    def _prepare(self, sock: socket.socket, message: Message, raw: bytes) -> Message:
        state = self._state
        state.require(message["generation"])
        self._ensure(message["shard"], message["world"], message["capacity"], message)
        return {"answer": "ready"}

    def _ensure(self, shard: str, world: int, capacity: int, message: Message) -> Shelf:
        state = self._state
        return state.folder.ensure(shard, world, capacity, message["generation"], state.base)

    def _give_layout(self, sock: socket.socket, message: Message, raw: bytes) -> None:
        blob = self._state.folder.layout(message["digest"])
        if blob is None:
            raise CopyError(f"layout {message['digest']} is not here")
        wire.send(sock, {"answer": "layout"}, blob)

    def _get(self, sock: socket.socket, message: Message, raw: bytes) -> None:
        shard, step, state = message["shard"], message["step"], self._state
        with state.changed:
            match = state.folder.find(shard, step, message.get("world"))
            if match is None:
                raise CopyError(f"{shard} of step {step} is not here")
            slot, it = match
            data = slot.first(it.nbytes)
        with data:
            wire.send(sock, to_plain(it))
            # If the slot is overwritten meanwhile the reader's checksum will say so.
            messages.send_data(sock, data)

    def _put(self, sock: socket.socket, message: Message, raw: bytes) -> Message | None:
        state, generation = self._state, message["generation"]
        shard = from_plain(Shard, message["shard"])
        state.require(generation)
        if raw:
            state.folder.keep_layout(shard.layout, raw, generation)
        if state.folder.layout(shard.layout) is None:
            return {"answer": "layout"}
        shelf = self._ensure(shard.name, shard.world, message["capacity"], message)
        if self._verified(shelf, shard):
            return {"answer": "have"}
        if state.saves(shard.name) and shard.world == state.world:
            return {"answer": "wait"}  # a rank of this host saves it itself, and will have it
        target = self._take(shelf, message, shard.step, sock)
        if target is None:
            return {"answer": "wait"}
        index, slot = target
        try:
            slot.begin(shard)
            wire.send(sock, {"answer": "go"})
            with slot.data as data:
                arrived = messages.receive_chunks(sock, data)
            if arrived != shard.checksum:
                return {"answer": "torn"}
            with state.changed:
                if state.generation != generation or self._under_way.get(id(shelf)) is not sock:
                    raise StaleGeneration(f"generation {generation} is over, {state.generation} is in force")
                state.folder.look()
                if shelf not in state.folder.shelves:
                    return {"answer": "wait"}  # wiped meanwhile: once more, into new memory
                slot.complete(arrived)
            return {"answer": "complete"}
        finally:
            with state.changed:
                del shelf.writing[index]
                if self._under_way.get(id(shelf)) is sock:
                    del self._under_way[id(shelf)]
                state.changed.notify_all()

    def _take(
        self, shelf: Shelf, message: Message, step: int, sock: socket.socket
    ) -> tuple[int, SlotFile] | None:
        """The slot for ``step``, marked as being written; None if it did not become free in time."""
        state, generation = self._state, message["generation"]
        end = time.monotonic() + state.limits.slot
        with state.changed:
            while True:
                if state.generation != generation or state.closed:
                    raise StaleGeneration(f"generation {generation} is over, {state.generation} is in force")
                other = self._under_way.get(id(shelf))
                committed = max(state.committed, message["committed"])
                base = max(state.base, message["base"])
                index = shelf.target(step, committed, base, message["keeps"]) if other is None else None
                if index is not None:
                    shelf.writing[index] = step
                    self._under_way[id(shelf)] = sock
                    return index, shelf.slots[index]
                if other is not None:
                    with contextlib.suppress(OSError):
                        other.shutdown(socket.SHUT_RDWR)
                left = end - time.monotonic()
                if left <= 0:
                    return None
                state.changed.wait(left)

    def _verified(self, shelf: Shelf, shard: Shard) -> bool:
        """Whether that very copy is here. It is read for this: what a peer counts on shall be true.

        One of another course that is the same to the last bit counts from now on as one of this: a restore
        takes the shards of a step from one course.
        """
        state = self._state
        with state.changed:
            match = shelf.find(shard.step)
        if match is None:
            return False
        slot, there = match
        if replace(there, generation=shard.generation) != shard:
            return False
        with slot.first(there.nbytes) as data:
            if slots.checksum_of(data) != there.checksum:
                return False
        with state.changed:
            unchanged = slot.whole == there
            if there == shard or not unchanged:
                return unchanged
            if shelf.writing or state.saves(shelf.shard):
                return False
            slot.relabel(shard.generation)
            return True

    def cut(self) -> None:
        """Copies that are under way belong to a generation that is over."""
        for sock in list(self._under_way.values()):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


class MemoryService:
    """``folder``: in tmpfs, of this host alone. ``host``: the address under which peers reach it; it listens
    there alone. ``keys``: of the job; whoever does not know them learns nothing here and leaves nothing.

    ``address``: "host:port" for peers. ``path``: "unix:/..." for local ranks.

    Raises:
        UserError: ``host`` is no address of this one.
    """

    def __init__(
        self,
        folder: Path,
        host: str,
        *,
        keys: Keys,
        context: Context,
        limits: MemoryLimits | None = None,
    ) -> None:
        limits = limits or MemoryLimits()
        self._folder = folder
        self._state = State(folder, keys, context, limits)
        self._holder = Holder(self._state)
        self._persister = Persister(self._state)
        self._owner = Owner(self._state, self._persister)
        try:
            outer = socket.create_server((host, 0), family=_family(host), backlog=256)
        except OSError as error:
            raise UserError(
                f"address {host!r}: peers cannot reach this host there ({error.strerror})"
            ) from error
        self.address = f"{host}:{outer.getsockname()[1]}"
        self._peers = Listener(
            outer, self._holder.serve, keys=keys, services=self._services, name="memory-listener"
        )
        self._spare: str | None = None
        path = folder / "memory.sock"
        if len(str(path)) > _LONGEST_SOCKET_NAME:
            self._spare = tempfile.mkdtemp(prefix="windtunnel-")
            path = Path(self._spare) / "memory.sock"
        path.unlink(missing_ok=True)
        served = rpc.RpcService.of(Ranks, self._owner, ERRORS)
        served.explain = lambda error: UserError(str(error)) if isinstance(error, ValueError) else error
        self._ranks = rpc.RpcServer(served, f"unix:{path}")
        self.path = self._ranks.address

    def _services(self) -> tuple[str, ...]:
        """What peers take this service for: its address, and where they reach it by another, that."""
        state, own = self._state, messages.service(self.address)
        membership, place = state.membership, state.place
        if membership is None or place is None:
            return (own,)
        return own, messages.service(membership.hosts[place].memory)

    def membership(self, membership: Membership, place: int | None) -> None:
        """A new generation; ``place``: this host's in it, None for none. Does not wait."""
        self._state.change(membership, place)
        self._owner.change(membership.hosts)
        self._holder.cut()

    def decided(self, key: str, values: dict[Any, Any]) -> None:
        """All ranks have posted ``key``; keys of others, and of generations that are over, are no matter of
        ours. Does not wait."""
        kind, _, rest = key.partition("/")
        step, _, term = rest.partition("/")
        if kind not in ("checkpoint", "persist") or term != self._state.term:
            return
        if kind == "persist":
            self._persister.decided(key, values)
        else:
            self._state.commit(int(step), max(int(value["course"]) for value in values.values()))

    def close(self) -> None:
        """Stop, and delete all that is kept."""
        with self._state.changed:
            self._state.closed = True
            self._state.changed.notify_all()
        self._ranks.close()
        self._peers.close()
        self._owner.close()
        self._state.folder.close()
        self._state.board.close()
        if self._spare:
            shutil.rmtree(self._spare, ignore_errors=True)
        shutil.rmtree(self._folder, ignore_errors=True)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
