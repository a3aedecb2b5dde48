"""A `PeerCheckpointer` that says where the time of its saves goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from windtunnel.training.checkpoint.live import snapshot
from windtunnel.training.checkpoint.live.checkpointer import PeerCheckpointer
from windtunnel.training.checkpoint.live.memory import LocalMemory
from windtunnel.training.checkpoint.live.state import State


class TimedCheckpointer(PeerCheckpointer):
    """Of every `step`: ``stall`` (s that the program waits in it) and of that ``copy`` (into the slot),
    ``settle`` (until the checksum of the save before, in blocking mode of this one, is made), ``wait`` (until
    a slot may be overwritten, in blocking mode until this save is committed)."""

    def __init__(self, job: Any, **options: Any) -> None:
        super().__init__(job, **options)
        self._spent: dict[str, float] = {}

    def step(self, step: int, state: State) -> None:
        self._spent = dict.fromkeys(("stall", "copy", "settle", "wait"), 0.0)
        with self._timed("stall"):
            super().step(step, state)

    def told(self) -> dict[str, float]:
        """The times of the last step."""
        return dict(self._spent)

    def used(self) -> dict[str, int]:
        """Bytes of this host: ``held`` in its slots, ``own`` in one save of its rank, ``sent`` to peers
        for one checkpoint."""
        if self._plan is None or self.job.memory is None:
            return {}
        memory = LocalMemory(self.job.memory, self.job.rank, self.job.generation)
        try:
            sent = [sent for sent, _ in memory.traffic().values() if sent]
        finally:
            memory.close()
        own = sum(layout.nbytes for layout in self._plan.layouts.values())
        return {"held": self.health().nbytes, "own": own, "sent": max(sent, default=0)}

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._spent[name] = self._spent.get(name, 0.0) + time.perf_counter() - begin

    def _copy(self, tensors: snapshot.Tensors, packed: bytes, slot: int, step: int) -> None:
        with self._timed("copy"):
            super()._copy(tensors, packed, slot, step)

    def _settle(self) -> None:
        with self._timed("settle"):
            super()._settle()

    def _ready(self, step: int) -> bool:
        with self._timed("wait"):
            return super()._ready(step)

    def _wait_committed(self, step: int) -> bool:
        with self._timed("wait"):
            return super()._wait_committed(step)
