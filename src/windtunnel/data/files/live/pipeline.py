"""The stages through which the log of a host passes, beside the applications (LineFS, section 3.3).

On every host: fetch a chunk of the log, validate it, publish it. On the primary a second branch of the same
chunks: compress, transfer along the chain, acknowledge. The queues between stages are bounded, and chunks
pass them in the order of the log: where several threads compress, their results are taken in turn. ``serial``
does one chunk at a time, one stage after another.

Nothing tells the pipeline that the log has grown: it looks, more seldom the longer nothing comes. A host that
only follows finds in its ring what the chain has put there, in the same way.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from queue import Empty, Full, Queue
from typing import Any, TypeVar

import zstandard

from windtunnel.data.files.live.area import PublicArea
from windtunnel.data.files.log import LogFrame, LogRing, parse
from windtunnel.data.files.model import CHUNK, Position
from windtunnel.data.files.policy import STAGES, WIDEST, PipelineSchedule
from windtunnel.data.group.policy import SLOT

T = TypeVar("T")
Message = tuple[int, bytes, bytes | None]  # place in the ring, bytes, the same compressed
DEPTH = 4  # chunks that wait before a stage
_LOOKS = (0.0005, 0.02)  # seconds between two looks for more of the log, at first and at last
_IDLE = 0.5  # seconds after which what was applied is published
_SHARE = 8  # at the latest when so much of the ring (one eighth) was
_TICK = 0.2  # seconds after which whoever waits looks whether all of it has ended


@dataclass(frozen=True)
class LogChunk:
    """A part of the log that is passed on whole: its frames, and their bytes."""

    begin: Position
    entries: Sequence[LogFrame]
    data: bytes

    @property
    def end(self) -> Position:
        return self.entries[-1].after


class PipelineClosed(Exception):
    """The pipeline was closed."""


class PublishingPipeline:
    """``group``: of the other hosts (`data.group`), on the primary. ``start``: where the log is read from;
    what the public area has already is passed on again, not published again. ``failed``: is told what ended
    it.

    Sequence numbers that only grow: ``written`` is behind the last whole frame, ``transferred`` behind what
    all hosts have in their rings, ``synced`` behind what all have on their disks.
    """

    def __init__(
        self, ring: LogRing, area: PublicArea, flow: PipelineSchedule, start: Position,
        failed: Callable[[Exception], None], *, primary: bool = False, group: Any = None,
    ) -> None:  # fmt: skip
        self.ring, self.area, self.flow, self.primary, self.group = ring, area, flow, primary, group
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self.written = self.transferred = start
        self.synced = start.sequence
        self._failed = failed
        self._pool = ThreadPoolExecutor(WIDEST, "compress")
        self._publish: Queue[LogChunk] = Queue(DEPTH)
        self._send: Queue[tuple[LogChunk, Future[list[Message]]]] = Queue(DEPTH)
        self._sent: Queue[tuple[Position, list[Future[Any]]]] = Queue(DEPTH)
        self._ended = threading.Event()
        self._changed = threading.Condition()
        self._target = 0
        pipelined = (self._fetching, self._publishing, self._sending, self._acknowledging)
        works = (*(pipelined if flow.pipelined else (self._in_turn,)), self._syncing)
        self._threads = [threading.Thread(target=self._guarded, args=(work,)) for work in works]
        for thread in self._threads:
            thread.start()

    @property
    def queued(self) -> float:
        """Share of the queue before the stage that compresses that waits."""
        return self._send.qsize() / DEPTH

    def sync(self, sequence: int, timeout: float) -> int:
        """Wait until all before ``sequence`` is on all disks. Returns `synced`.

        Raises:
            TimeoutError: it is not yet.
            Ended: this pipeline will not do it.
        """
        with self._changed:
            self._target = max(self._target, sequence)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self.synced >= sequence or self._ended.is_set(), timeout)
            if self.synced >= sequence:
                return self.synced
        raise PipelineClosed if self._ended.is_set() else TimeoutError

    def close(self) -> None:
        """All threads have ended; what is applied stays for the next pipeline."""
        self._end()
        for thread in self._threads:
            thread.join()
        self._pool.shutdown()

    def _end(self) -> None:
        with self._changed:
            self._ended.set()
            self._changed.notify_all()

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            with contextlib.suppress(PipelineClosed):
                work()
        except Exception as error:
            self._end()
            self._failed(error)

    # -- the stages

    @contextlib.contextmanager
    def _at(self, stage: str) -> Iterator[None]:
        begun = time.thread_time()
        try:
            yield
        finally:
            self.seconds[stage] += time.thread_time() - begun

    def _fetch(self) -> LogChunk | None:
        """The next chunk, validated: what is still being written is none yet."""
        begin = self.written
        with self._at("fetch"):
            data = self.ring.fetch(begin, CHUNK)
        with self._at("validate"):
            entries = list(parse(data, begin))
        if not entries:
            return None
        self.written = entries[-1].after
        return LogChunk(begin, entries, data[: self.written.offset - begin.offset])

    def _apply(self, chunk: LogChunk) -> None:
        with self._at("publish"):
            done = self.area.applied.sequence
            self.area.apply(entry for entry in chunk.entries if entry.sequence >= done)
            if self.area.applied.offset - self.area.published.offset > self.ring.size // _SHARE:
                self.area.checkpoint()

    def _pack(self, chunk: LogChunk) -> list[Message]:
        """What the group is to write, compressed where that saves a tenth."""
        messages = []
        with self._at("compress"):
            codec = zstandard.ZstdCompressor(1)
            for place, part in self.ring.pieces(chunk.begin.offset, len(chunk.data)):
                for first in range(part.start, part.stop, SLOT):
                    data = chunk.data[first : min(first + SLOT, part.stop)]
                    packed = codec.compress(data)
                    small = packed if len(packed) < 0.9 * len(data) else None
                    messages.append((place + first - part.start, data, small))
        return messages

    def _transfer(self, messages: list[Message]) -> list[Future[Any]]:
        if self.group is None:
            return []
        with self._at("transfer"):
            return [self.group.write(at, data, packed=packed) for at, data, packed in messages]

    def _acknowledge(self, end: Position, results: Sequence[Future[Any]]) -> None:
        for result in results:
            self._result(result)
        with self._changed:
            self.transferred = end
            self._changed.notify_all()

    # -- one after another, or each beside the others

    def _in_turn(self) -> None:
        look = idle = 0.0
        while not self._ended.is_set():
            chunk = self._fetch()
            if chunk is None:
                look, idle = self._pause(look, idle)
                if idle > _IDLE:
                    self.area.checkpoint()
                continue
            self._apply(chunk)
            if self.primary:
                self._acknowledge(chunk.end, self._transfer(self._pack(chunk)))
            look = idle = 0.0

    def _fetching(self) -> None:
        look = idle = 0.0
        packing = deque[Future[list[Message]]]()
        while not self._ended.is_set():
            chunk = self._fetch()
            if chunk is None:
                look, idle = self._pause(look, idle)
                continue
            look = idle = 0.0
            if self.primary:
                while len(packing) >= self.flow.width:
                    self._result(packing.popleft())
                packing.append(self._pool.submit(self._pack, chunk))
                self._put(self._send, (chunk, packing[-1]))
            self._put(self._publish, chunk)

    def _publishing(self) -> None:
        while not self._ended.is_set():
            try:
                self._apply(self._publish.get(timeout=_IDLE))
            except Empty:
                with self._at("publish"):
                    self.area.checkpoint()

    def _sending(self) -> None:
        while True:
            chunk, packed = self._get(self._send)
            self._put(self._sent, (chunk.end, self._transfer(self._result(packed))))

    def _acknowledging(self) -> None:
        while True:
            self._acknowledge(*self._get(self._sent))

    def _syncing(self) -> None:
        """Whoever waits for a sync waits for the same one: it covers all that was transferred by then."""
        while self.primary:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._ended.is_set() or self.synced < self._target <= self.transferred.sequence
                )
                if self._ended.is_set():
                    return
                target = self.transferred.sequence
            flushed = None if self.group is None else self.group.flush()
            with self._at("acknowledge"):
                self.ring.sync()
            if flushed is not None:
                self._result(flushed)
            with self._changed:
                self.synced = target
                self._changed.notify_all()

    def _pause(self, look: float, idle: float) -> tuple[float, float]:
        """Wait for more of the log, twice as long each time: the pause, and the sum since the last chunk."""
        look = min(_LOOKS[1], max(_LOOKS[0], 2 * look))
        self._ended.wait(look)
        return look, idle + look

    def _put(self, queue: Queue[T], item: T) -> None:
        while not self._ended.is_set():
            with contextlib.suppress(Full):
                return queue.put(item, timeout=_TICK)
        raise PipelineClosed

    def _get(self, queue: Queue[T]) -> T:
        while not self._ended.is_set():
            with contextlib.suppress(Empty):
                return queue.get(timeout=_TICK)
        raise PipelineClosed

    def _result(self, future: Future[T]) -> T:
        while not self._ended.is_set():
            with contextlib.suppress(TimeoutError):
                return future.result(timeout=_TICK)
        raise PipelineClosed
