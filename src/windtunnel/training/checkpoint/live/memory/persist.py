"""Writes shards of a committed step to storage, from the agent: training does not wait, nor end it by dying.

The slot is copied first, verified on the way: storage may take longer than the slot is left alone. All ranks'
nodes post ``persist/{step}/{generation}`` when their shards are there; then the service of place 0 completes
the step.
"""

from __future__ import annotations

import mmap
import threading
import time
from typing import Any

from windtunnel.errors import UserError
from windtunnel.training.checkpoint.live import slot as slots
from windtunnel.training.checkpoint.live.memory import room, transfer
from windtunnel.training.checkpoint.live.memory.serve import Message
from windtunnel.training.checkpoint.live.memory.state import State
from windtunnel.training.checkpoint.live.slot import CopyError, Header
from windtunnel.training.checkpoint.policy import fit

SHARED = "shared"
COMMIT_PATIENCE = 600.0
KEPT = 8


class Persister:
    """One thread for each step that is being written; of one step the node writes each shard once."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._urls: dict[str, tuple[str, Header]] = {}  # by key: what is to be completed
        self._threads: list[threading.Thread] = []

    def asked(self, message: Message) -> Message:
        """The request of a local rank: write this node's shards of a step, once it is committed."""
        state, step, url = self._state, message["step"], message["url"]
        state.require(message["generation"])
        key = f"persist/{step}/{message['generation']}"
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if any(thread.name == key for thread in self._threads):
            return {"answer": "begun before"}  # by another rank of this node
        thread = threading.Thread(target=self._write, args=(key, step, url), name=key, daemon=True)
        self._threads.append(thread)
        thread.start()
        return {"answer": "begun"}

    def decided(self, key: str, values: dict[Any, Any]) -> None:
        """All shards of a step are in storage: place 0 makes it a checkpoint. Does not wait."""
        if self._state.place != 0:
            return
        thread = threading.Thread(target=self._complete, args=(key, values), name=f"{key}-end", daemon=True)
        self._threads.append(thread)
        thread.start()

    def join(self, timeout: float) -> None:
        """Wait for what is being written."""
        end = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def _write(self, key: str, step: int, url: str) -> None:
        state = self._state
        generation = int(key.rpartition("/")[2])
        if not self._committed(step, generation):
            return
        with state.changed:
            world = state.world
            ranks = sorted(state.specs)
            wanted = {rank: sorted(state.specs[rank].nbytes) for rank in ranks}
        layouts: dict[int, list[str]] = {}
        try:
            for rank in ranks:
                layouts[rank] = []
                for shard in wanted[rank]:
                    if shard == SHARED and state.place != 0:
                        continue
                    header = self._shard(url, shard, step, world)
                    layouts[rank].append(header.layout)
                    self._urls[key] = (url, header)
        except Exception as error:  # storage has errors of many kinds; the run goes on without this one
            text = f"step {step} is not written to {url}: {error}"
            state.context.event("note", text=text)
            return
        while len(self._urls) > KEPT:
            del self._urls[next(iter(self._urls))]
        for rank in ranks:
            state.context.post(key, rank, layouts[rank])

    def _committed(self, step: int, generation: int) -> bool:
        state = self._state
        end = time.monotonic() + COMMIT_PATIENCE
        with state.changed:
            while state.committed < step:
                left = end - time.monotonic()
                if left <= 0 or state.generation != generation or state.closed:
                    return False
                state.changed.wait(left)
        return True

    def _shard(self, url: str, shard: str, step: int, world: int) -> Header:
        from windtunnel.training.checkpoint.live import storage  # only here: it is slow to import

        state = self._state
        with state.changed:
            found = state.folder.find(shard, step, world)
        if found is None:
            raise CopyError(f"{shard} of step {step} is not in memory any more")
        one, header = found
        free, bound = room.free(state.folder.path)
        if header.nbytes > free:
            told = f"a copy of {shard} takes {fit.amount(header.nbytes)}"
            raise UserError(f"{told}, {fit.amount(free)} are {bound}")
        # Not the heap's: this goes back to the machine at once.
        data = memoryview(mmap.mmap(-1, max(1, header.nbytes)))[: header.nbytes]
        slots.load(one.path, data, step=step)
        storage.write_shard(
            url,
            step,
            shard,
            data,
            world=header.world,
            has_shared=header.has_shared,
            generation=header.generation,
            layout=header.layout,
            checksum=header.checksum,
        )
        return header

    def _complete(self, key: str, values: dict[Any, Any]) -> None:
        from windtunnel.training.checkpoint.live import storage

        state = self._state
        if key not in self._urls:
            return
        url, header = self._urls.pop(key)
        try:
            blobs = {
                digest: self._layout(digest, int(rank)) for rank, given in values.items() for digest in given
            }
            storage.complete_step(
                url,
                header.step,
                world=header.world,
                has_shared=header.has_shared,
                generation=header.generation,
                layouts=blobs,
            )
        except Exception as error:
            state.context.event("note", text=f"step {header.step} in {url} is not completed: {error}")
            return
        state.context.event("persisted", step=header.step, url=url)

    def _layout(self, digest: str, rank: int) -> bytes:
        """A layout, from here or from the node of the rank that has it."""
        state = self._state
        blob = state.folder.layout(digest)
        if blob is not None:
            return blob
        membership = state.membership
        assert membership is not None
        address = membership.nodes[rank // membership.per_node].memory
        with transfer.connect(address, state.limits.connect) as sock:
            sock.settimeout(state.limits.silence)
            return transfer.layout(sock, digest)
