"""Writes the shards of committed steps to storage: training does not wait for that, nor ends it by dying."""

from __future__ import annotations

import mmap
import threading
import time
from collections import OrderedDict
from typing import Any

from windtunnel.base import handshake
from windtunnel.base.errors import UserError
from windtunnel.base.plain import from_plain, to_plain
from windtunnel.base.units import amount
from windtunnel.training.checkpoint.live import slot as slots
from windtunnel.training.checkpoint.live.memory import messages
from windtunnel.training.checkpoint.live.memory.folder import free
from windtunnel.training.checkpoint.live.memory.state import State
from windtunnel.training.checkpoint.live.slot import CopyError
from windtunnel.training.checkpoint.model import SHARED, Shard
from windtunnel.training.elastic.policy.checkpoints import FAILED, keep

COMMIT_PATIENCE = 600.0
KEPT = 8


class Persister:
    """One thread for each step of each rank that is being written.

    The slots are copied first, verified on the way: storage may take longer than they are left alone. For
    each rank ``persist/{step}/{term}`` is posted when its shards are there; then the service of place 0
    completes the step.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        # by key: what is to be completed, and what was said of what is
        self._urls: OrderedDict[str, tuple[str, int]] = OrderedDict()
        self._completed: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._keep = 0  # steps that stay in storage, as was asked last

    def begin(self, rank: int, step: int, url: str, keep: int) -> None:
        """A local rank has saved a step: write its shards, once the step is committed.

        They are copied before this returns: the rank does not overwrite the slots earlier, but may soon."""
        self._keep = keep
        key = f"persist/{step}/{self._state.term}"
        try:
            copied = self._copied(rank, step)
        except (UserError, CopyError, OSError) as error:
            self._not_written(step, url, error)
            return
        arguments = (key, rank, step, url, copied)
        threading.Thread(target=self._write, args=arguments, name=f"{key} {rank}", daemon=True).start()

    def decided(self, key: str, values: dict[Any, Any]) -> None:
        """All shards of a step are in storage: place 0 makes it a checkpoint. Does not wait."""
        if self._state.place != 0:
            return
        threading.Thread(target=self._complete, args=(key, values), name=f"{key}-end", daemon=True).start()

    def _copied(self, rank: int, step: int) -> list[tuple[Shard, memoryview]]:
        state = self._state
        with state.changed:
            spec, world = state.specs.get(rank), state.world
            shards = sorted(spec.nbytes) if spec else []
        owned = [shard for shard in shards if shard != SHARED or state.place == 0]
        return [self._shard(shard, step, world) for shard in owned]

    def _write(
        self, key: str, rank: int, step: int, url: str, copied: list[tuple[Shard, memoryview]]
    ) -> None:
        from windtunnel.training.checkpoint.live import storage  # only here: it is slow to import

        if not self._committed(step, key.rpartition("/")[2]):
            return
        try:
            written = [to_plain(storage.write_shard(url, shard, data)) for shard, data in copied]
        except Exception as error:  # storage has errors of many kinds; the run goes on without this one
            self._not_written(step, url, error)
            return
        keep(self._urls, key, (url, step), KEPT)
        self._state.context.post(key, rank, written)

    def _not_written(self, step: int, url: str, error: Exception) -> None:
        self._state.context.event(FAILED, step=step, error=f"it is not written to {url}: {error}")

    def _committed(self, step: int, term: str) -> bool:
        state = self._state
        end = time.monotonic() + COMMIT_PATIENCE
        with state.changed:
            while state.committed < step:
                left = end - time.monotonic()
                if left <= 0 or state.term != term or state.closed:
                    return False
                state.changed.wait(left)
        return True

    def _shard(self, shard: str, step: int, world: int) -> tuple[Shard, memoryview]:
        state = self._state
        with state.changed:
            match = state.folder.find(shard, step, world)
        if match is None:
            raise CopyError(f"{shard} of step {step} is not in memory")
        slot, it = match
        there, bound = free(state.folder.path)
        if it.nbytes > there:
            text = f"a copy of {shard} takes {amount(it.nbytes)}"
            raise UserError(f"{text}, {amount(there)} are {bound}")
        # Not the heap's: this goes back to the host at once.
        data = memoryview(mmap.mmap(-1, max(1, it.nbytes)))[: it.nbytes]
        return slots.load(slot.path, data, step=step), data

    def _complete(self, key: str, values: dict[Any, Any]) -> None:
        from windtunnel.training.checkpoint.live import storage

        state = self._state
        if key in self._completed:  # the supervisor was started again, and may not have heard of it
            state.context.event("persisted", **self._completed[key])
        if key not in self._urls:
            return
        url, step = self._urls.pop(key)
        try:
            written_by_rank = [
                (int(rank), from_plain(storage.Written, record)) for rank in values for record in values[rank]
            ]
            blobs = {
                written.shard.layout: self._layout(written.shard.layout, rank)
                for rank, written in written_by_rank
            }
            manifest = storage.complete_step(url, [written for _, written in written_by_rank], blobs)
        except Exception as error:
            self._not_written(step, url, error)
            return
        said = {
            "key": key, "step": step, "url": url, "course": manifest.shards[0].shard.generation,
            "check": storage.check_of(manifest),
        }  # fmt: skip
        keep(self._completed, key, said, KEPT)
        state.context.event("persisted", **self._completed[key])
        if self._keep:
            try:
                storage.prune(url, self._keep)
            except Exception as error:  # what is needed is there; the next step's tries again
                state.context.event("note", text=f"older checkpoints stay in {url}: {error}")

    def _layout(self, digest: str, rank: int) -> bytes:
        """A layout, from here or from the host of the rank that has it."""
        state = self._state
        blob = state.folder.layout(digest)
        if blob is not None:
            return blob
        membership = state.membership
        assert membership is not None
        address = membership.hosts[rank // membership.per_host].memory
        with handshake.connect(address, state.limits.connect, state.keys, messages.service(address)) as sock:
            sock.settimeout(state.limits.silence)
            return messages.layout(sock, digest)
