"""What peers ask of a host: to hold copies (PREPARE, LAYOUT, PUT), and to read them (GET).

A PUT is refused if its generation is not the one in force, at its begin and again before its slot is declared
complete; so nobody who was fenced can leave anything behind.
"""

from __future__ import annotations

import contextlib
import socket
import time
from dataclasses import replace

from windtunnel.base import wire
from windtunnel.base.plain import from_plain, to_plain
from windtunnel.training.checkpoint.live import slot as slots
from windtunnel.training.checkpoint.live.memory import transfer
from windtunnel.training.checkpoint.live.memory.folder import Shelf
from windtunnel.training.checkpoint.live.memory.state import State
from windtunnel.training.checkpoint.live.memory.transfer import Handler, Message, Refused
from windtunnel.training.checkpoint.live.slot import SlotFile
from windtunnel.training.checkpoint.model import Shard


class Holder:
    """The handlers of these requests. A newer PUT of a shard displaces an older one that is still under way:
    its sender has come back on a new connection."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._under_way: dict[int, socket.socket] = {}  # by the id of the shelf
        self.handlers: dict[str, Handler] = {
            "prepare": self._prepare,
            "layout": self._take_layout,
            "layout?": self._give_layout,
            "put": self._put,
            "get": self._get,
        }

    def _prepare(self, sock: socket.socket, message: Message, raw: bytes) -> Message:
        state = self._state
        state.require(message["generation"])
        self._ensure(message["shard"], message["world"], message["capacity"], message)
        return {"answer": "ready"}

    def _ensure(self, shard: str, world: int, capacity: int, message: Message) -> Shelf:
        state = self._state
        return state.folder.ensure(
            shard, world, capacity, message["slots"], message["generation"], state.base
        )

    def _take_layout(self, sock: socket.socket, message: Message, raw: bytes) -> Message:
        self._state.require(message["generation"])
        self._state.folder.keep_layout(message["digest"], raw, message["generation"])
        return {"answer": "kept"}

    def _give_layout(self, sock: socket.socket, message: Message, raw: bytes) -> None:
        blob = self._state.folder.layout(message["digest"])
        if blob is None:
            raise Refused("copy", f"layout {message['digest']} is not here")
        wire.send(sock, {"answer": "layout"}, blob)

    def _get(self, sock: socket.socket, message: Message, raw: bytes) -> None:
        shard, step, state = message["shard"], message["step"], self._state
        with state.changed:
            match = state.folder.find(shard, step, message.get("world"))
            if match is None:
                raise Refused("copy", f"{shard} of step {step} is not here")
            slot, it = match
            data = slot.first(it.nbytes)
        with data:
            wire.send(sock, to_plain(it))
            # If the slot is overwritten meanwhile the reader's checksum will say so.
            transfer.send_data(sock, data)

    def _put(self, sock: socket.socket, message: Message, raw: bytes) -> Message | None:
        state, generation = self._state, message["generation"]
        shard = from_plain(Shard, message["shard"])
        state.require(generation)
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
                arrived = transfer.receive_chunks(sock, data)
            if arrived != shard.checksum:
                return {"answer": "torn"}
            with state.changed:
                if state.generation != generation or self._under_way.get(id(shelf)) is not sock:
                    raise Refused("stale", f"generation {generation} is over, {state.generation} is in force")
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
                    raise Refused("stale", f"generation {generation} is over, {state.generation} is in force")
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
            unchanged = slot.header is not None and slot.header.complete and slot.header.shard == there
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
