"""Writes shards of a committed step to storage, from the agent: training does not wait, nor end it by dying.

The slots are copied first, verified on the way: storage may take longer than they are left alone. For each
rank ``persist/{step}/{generation}`` is posted when its shards are there; then the service of place 0
completes the step.
"""

from __future__ import annotations

import mmap
import threading
import time
from typing import Any

from windtunnel.base.errors import UserError
from windtunnel.base.units import amount
from windtunnel.training.checkpoint.live import slot as slots
from windtunnel.training.checkpoint.live.memory import room, transfer
from windtunnel.training.checkpoint.live.memory.serve import Message
from windtunnel.training.checkpoint.live.memory.state import State
from windtunnel.training.checkpoint.live.slot import CopyError, Header
from windtunnel.training.checkpoint.model import SHARED

COMMIT_PATIENCE = 600.0
KEPT = 8


class Persister:
    """One thread for each step of each rank that is being written."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._urls: dict[str, tuple[str, Header]] = {}  # by key: what is to be completed
        self._threads: list[threading.Thread] = []

    def asked(self, message: Message) -> Message:
        """The request of a local rank that has saved a step: write its shards, once the step is committed.

        They are copied before this answers: the rank does not overwrite the slots earlier, but may soon."""
        state, rank, step, url = self._state, message["rank"], message["step"], message["url"]
        state.require(message["generation"])
        key = f"persist/{step}/{message['generation']}"
        try:
            copied = self._copied(rank, step)
        except (UserError, CopyError, OSError) as error:
            self._not_written(step, url, error)
            return {"answer": "not begun"}
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        arguments = (key, rank, step, url, copied)
        thread = threading.Thread(target=self._write, args=arguments, name=f"{key} {rank}", daemon=True)
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

    def _copied(self, rank: int, step: int) -> list[tuple[Header, memoryview]]:
        state = self._state
        with state.changed:
            spec, world = state.specs.get(rank), state.world
            shards = sorted(spec.nbytes) if spec else []
        wanted = [shard for shard in shards if shard != SHARED or state.place == 0]
        return [self._shard(shard, step, world) for shard in wanted]

    def _write(
        self, key: str, rank: int, step: int, url: str, copied: list[tuple[Header, memoryview]]
    ) -> None:
        from windtunnel.training.checkpoint.live import storage  # only here: it is slow to import

        if not self._committed(step, int(key.rpartition("/")[2])):
            return
        try:
            for header, data in copied:
                storage.write_shard(
                    url,
                    step,
                    header.shard,
                    data,
                    world=header.world,
                    has_shared=header.has_shared,
                    generation=header.generation,
                    layout=header.layout,
                    checksum=header.checksum,
                )
                self._urls[key] = (url, header)
        except Exception as error:  # storage has errors of many kinds; the run goes on without this one
            self._not_written(step, url, error)
            return
        while len(self._urls) > KEPT:
            del self._urls[next(iter(self._urls))]
        self._state.context.post(key, rank, [header.layout for header, _ in copied])

    def _not_written(self, step: int, url: str, error: Exception) -> None:
        self._state.context.event("note", text=f"step {step} is not written to {url}: {error}")

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

    def _shard(self, shard: str, step: int, world: int) -> tuple[Header, memoryview]:
        state = self._state
        with state.changed:
            found = state.folder.find(shard, step, world)
        if found is None:
            raise CopyError(f"{shard} of step {step} is not in memory")
        one, header = found
        free, bound = room.free(state.folder.path)
        if header.nbytes > free:
            told = f"a copy of {shard} takes {amount(header.nbytes)}"
            raise UserError(f"{told}, {amount(free)} are {bound}")
        # Not the heap's: this goes back to the host at once.
        data = memoryview(mmap.mmap(-1, max(1, header.nbytes)))[: header.nbytes]
        return slots.load(one.path, data, step=step), data

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
        """A layout, from here or from the host of the rank that has it."""
        state = self._state
        blob = state.folder.layout(digest)
        if blob is not None:
            return blob
        membership = state.membership
        assert membership is not None
        address = membership.hosts[rank // membership.per_host].memory
        with transfer.connect(address, state.limits.connect) as sock:
            sock.settimeout(state.limits.silence)
            return transfer.layout(sock, digest)
