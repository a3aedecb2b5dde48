"""A client: it has splits streamed from workers, and hands their batches to a trainer, each exactly once.

Threads, one for each split that it has at a time, read ahead into short queues; another one tells the master
that the client is there, what the trainer has consumed, and how long it waited. Of every split the client
knows the next batch it expects: an earlier one is dropped (a second worker sends it again), a later one would
be a gap, and is refused. A batch counts as consumed when the next one is asked for.

Towards its epoch's end the master has a client read the first splits of the next one ahead, from threads and
into queues like the others, whose batches wait there until `begin` begins that epoch and the master gives it
those splits. One that it does not give is dropped; so is one of which the stream breaks before.

A client that could not tell the master of itself for most of its lease hands nothing out before it has: it
may have been stopped, and others may have its splits. Those that it lost it drops; had it handed batches out
that it could not report any more, others get these, too: then it refuses to go on.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import secrets
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa

from windtunnel.base.errors import HostError, UserError
from windtunnel.base.keys import Keys
from windtunnel.data.ingest.live import ledger, protocol
from windtunnel.data.ingest.live.ledger import DONE
from windtunnel.data.ingest.live.protocol import CallRefused, FlightLink, ServerLost
from windtunnel.data.ingest.live.worker import STAMP

CERTAIN = 0.7
"""Of its lease: so long after it last told the master of itself a client is certain to have its splits."""
ALONE = 5.0
"""Seconds after which a client that waits for others says so."""
ENDS = 6.0
"""Seconds in which threads end: longer than a call takes."""
_used_in = 0
"""The process in which Flight was used first: a fork of it cannot use it."""


class Replaced(HostError):
    """Another process has the name of this client, or its splits."""


@dataclass(frozen=True)
class _ReadyBatch:
    """``content``: what it is handed out as."""

    rows: int
    nbytes: int
    content: Any


@dataclass
class _Stream:
    """A split that is being read, in ``epoch``. ``next``: the number of the batch that is expected."""

    epoch: int
    split: dict[str, Any]
    next: int
    worker: str
    address: str
    reader: Any = None
    queue: deque[tuple[int, bool, _ReadyBatch]] = field(default_factory=deque)
    ended: bool = False
    lost: bool = False
    empty: bool = False
    thread: threading.Thread | None = None
    """Which reads it ahead."""

    @property
    def number(self) -> int:
        return int(self.split["number"])


@dataclass
class EpochCounts:
    """Of one epoch. ``steps``: batches handed out; ``stalled``: seconds waited for them; ``duplicates``:
    batches that came a second time, and were dropped; ``padded``: handed out again at the end; ``dropped``:
    those ready that other ranks had none for, at the end."""

    steps: int = 0
    rows: int = 0
    bytes: int = 0
    stalled: float = 0.0
    duplicates: int = 0
    padded: int = 0
    dropped: int = 0
    breaks: int = 0
    first: float = 0.0
    """Seconds until the first batch, which are in ``stalled``, too."""


class IngestClient:
    """Client ``name`` of ``world`` that share the session of the master at ``address``; `next` gives its
    batches until its epoch is over, None then; `begin` begins the next epoch (or, where this one is not over,
    goes on with it).

    ``buffer``: batches read ahead of each split that is being sent. ``ordered``: batches come in the order of
    splits, not of arrival. ``resume``: what `state` said, to go on there. ``patience``: seconds for which a
    master that does not answer is waited for. ``convert``: what batches are handed out as, ahead of time.

    Raises:
        UserError: the master refuses the secret or the state, or all epochs are over.
        ServerLost: no master answers.
    """

    def __init__(
        self, address: str, keys: Keys, name: str = "0", world: int = 1, *, buffer: int = 4,
        ordered: bool = False, resume: dict[str, Any] | None = None, patience: float = 60.0,
        convert: Callable[[pa.RecordBatch], Any] = lambda batch: batch,
    ) -> None:  # fmt: skip
        self.name, self._convert, self._world = name, convert, world
        self._keys, self._buffer, self._ordered, self._patience = keys, buffer, ordered, patience
        self._link = FlightLink(address, keys)
        self._links: dict[str, FlightLink] = {}
        self._turn = threading.Condition()
        self._ahead: list[_Stream] = []
        """Of the epoch after this one, or of this one and not yet given to it."""
        self._asking = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()
        self.turn = 0
        """How often it has begun."""
        self._begin(resume)

    def begin(self) -> None:
        """Begin the next epoch, or go on with this one.

        Raises:
            UserError, ServerLost: as the constructor. HostError: the epoch before does not end."""
        self.end()
        if any(thread.is_alive() for thread in self._threads):
            raise HostError(f"client {self.name}: a thread of epoch {self.epoch} did not end in {ENDS:g} s")
        self._threads.clear()
        self._begin(None)

    def _begin(self, resume: dict[str, Any] | None) -> None:
        _once_in_this_process()
        self.turn += 1
        self._resumed = resume is not None
        self.counts = EpochCounts()
        self._key = secrets.token_hex(8)
        self._stop = threading.Event()
        self._streams: list[_Stream] = []
        self._marks: dict[int, int] = ledger.unpacked(resume["marks"]) if resume else {}
        """What the trainer has been given, of this epoch."""
        self._progress: dict[int, int] = {}
        """What it has consumed, and the master may not know yet."""
        self._handed: tuple[int, int] | None = None
        self._last: _ReadyBatch | None = None
        self._waits = 0.0
        """Since when the trainer waits; 0: it does not."""
        self._pads = self._until = 0
        self._over = self._late = self._warned = False
        self._error: BaseException | None = None
        self._poke = threading.Event()
        self._allowed, self._readers = 1, 0
        response = self._register(resume)
        with self._turn:
            self.epoch: int = response["epoch"]
            self._drop_ahead([stream for stream in self._ahead if stream.epoch != self.epoch])
        self._every, self._lease, self._ends = response["every"], response["lease"], response["ends"]
        self._certain = time.monotonic() + CERTAIN * self._lease
        self._began = time.monotonic()
        atexit.register(self.close)  # Flight's threads do not survive the interpreter's end
        self._threads.append(self._started(self._tell))
        if self._ends == "drop":
            self._threads.append(self._started(self._keep_pace))
        self._grow()

    def _register(self, resume: dict[str, Any] | None) -> dict[str, Any]:
        last = time.monotonic() + self._patience
        resumption = {} if resume is None else {"resume": resume["marks"], "epoch": resume["epoch"]}
        while True:
            try:
                response = self._link.persist(
                    "register", self._patience, self._stop, role="client", client=self.name, key=self._key,
                    world=self._world, **resumption,
                )  # fmt: skip
            except CallRefused as error:
                raise UserError(f"{self._link.address}: {error}") from error
            if "over" in response:
                raise UserError(
                    f"{self._link.address}: all epochs of the session are over; it has {response['over']}"
                    " (field epochs of its file)"
                )
            if not response.get("wait"):
                return response
            if time.monotonic() > last + self._patience:
                raise ServerLost(
                    f"client {self.name}: others did not end the epoch in {2 * self._patience:g} s"
                )
            self._stop.wait(0.05)

    # --- for the trainer

    def next(self) -> Any:
        """The next batch; None when the epoch is over.

        Raises:
            HostError, UserError: the session failed, the master is gone, or see `Replaced`.
        """
        began = time.monotonic()
        with self._turn:
            self._consumed()
            self._waits = began
            self._poke_if(self._late)
            try:
                while True:
                    if self._error is not None:
                        raise self._error
                    if time.monotonic() > self._certain:
                        self._poke.set()  # it is told, and tells what was lost, before anything goes on
                    elif self._ends == "drop" and self.counts.steps >= self._until:
                        if self._over:
                            if not self._until and not self._resumed:
                                raise UserError(self._too_few("its first step"))
                            self.counts.dropped = sum(len(stream.queue) for stream in self._streams)
                            return None
                    elif (stream := self._pick()) is not None:
                        return self._hand(stream, began)
                    elif self._pads:
                        self._pads -= 1
                        return self._pad(began)
                    elif self._over:
                        return None
                    self._turn.wait(0.5)
            finally:
                self._waits = 0.0

    def state(self) -> dict[str, Any]:
        """Where the trainer is, with the batch that it was given last."""
        with self._turn:
            return {"epoch": self.epoch, "marks": ledger.packed(self._marks)}

    def close(self) -> None:
        """Give back what was not consumed. The batch that was handed out last counts as consumed."""
        with self._turn:
            ahead = [stream.thread for stream in self._ahead if stream.thread is not None]
            self._drop_ahead(list(self._ahead))
        self.end()
        for thread in ahead:
            thread.join(ENDS)
        self._let_go()

    def end(self) -> None:
        """`close`, but what was read ahead stays, for `begin`."""
        with self._turn:
            if self._stop.is_set():
                return
            self._stop.set()
            self._consumed()
            marks, failed = list(self._progress.items()), self._error is not None
            self._error = self._error or HostError(f"client {self.name} is closed")
            for stream in self._streams:
                stream.lost = True
                _cancel(stream)
            self._poke.set()
            self._turn.notify_all()
        who = {"client": self.name, "key": self._key, "epoch": self.epoch}
        with contextlib.suppress(HostError, UserError):
            if not failed:
                self._link.call("ack", **who, marks=marks)
            self._link.call("leave", **who)
        for thread in self._threads:
            thread.join(ENDS)
        if not self._ahead:
            self._let_go()

    def _let_go(self) -> None:
        """Connections are made anew where they are used again."""
        atexit.unregister(self.close)
        for link in (self._link, *self._links.values()):
            link.close()

    def _drop_ahead(self, streams: list[_Stream]) -> None:
        """The lock is held."""
        for stream in streams:
            stream.lost = True
            _cancel(stream)
            self._ahead.remove(stream)
        self._turn.notify_all()

    def _pick(self) -> _Stream | None:
        for stream in self._streams:
            if stream.queue:
                return stream
            if self._ordered:
                return None
        return None

    def _hand(self, stream: _Stream, began: float) -> Any:
        number, last, batch = stream.queue.popleft()
        self._marks[stream.number] = DONE if last else number + 1
        self._handed = (stream.number, self._marks[stream.number])
        if last:
            self._streams.remove(stream)
        elif not self._ordered:
            # the next split has its turn: no queue is full while another one is emptied
            self._streams.remove(stream)
            self._streams.append(stream)
        self._last = batch if self._ends == "pad" else None
        self._turn.notify_all()
        return self._hand_out(batch, began)

    def _pad(self, began: float) -> Any:
        if self._last is None:
            raise UserError(self._too_few("a step that others take"))
        self.counts.padded += 1
        return self._hand_out(self._last, began)

    def _too_few(self, what: str) -> str:
        return (
            f"client {self.name} had no batch for {what} in epoch {self.epoch}: there are more clients "
            f"({self._world}) than splits; give the session a smaller split_rows"
        )

    def _hand_out(self, batch: _ReadyBatch, began: float) -> Any:
        counts, now = self.counts, time.monotonic()
        if not counts.steps:
            counts.first = now - self._began
        counts.steps += 1
        counts.rows += batch.rows
        counts.bytes += batch.nbytes
        counts.stalled += now - began
        self._poke_if(self._late)
        return batch.content

    def _consumed(self) -> None:
        if self._handed is not None:
            split, mark = self._handed
            self._progress[split] = mark
            self._handed = None
            # where nothing comes, the next split may wait for this to be told, or the epoch for its end
            self._poke_if(mark == DONE and all(stream.ended for stream in self._streams))

    def _poke_if(self, soon: bool) -> None:
        if soon:
            self._poke.set()

    # --- threads

    def _guarded(self, work: Callable[[], None]) -> None:
        """A thread's errors are the trainer's."""
        try:
            work()
        except Exception as error:  # whatever it is, nobody else would see it
            with self._turn:
                self._error = self._error or error
                self._turn.notify_all()

    def _started(self, work: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=self._guarded, args=(work,), daemon=True)
        thread.start()
        return thread

    def _grow(self) -> None:
        while self._readers < self._allowed:
            self._readers += 1
            self._threads.append(self._started(self._read))

    def _call(self, op: str, **fields: Any) -> dict[str, Any]:
        """A call of the epoch; registers anew with a master that was away."""
        who = {"client": self.name, "key": self._key, "epoch": self.epoch}
        while True:
            answer = self._link.persist(op, self._patience, self._stop, **who, **fields)
            if answer.get("replaced"):
                raise Replaced(f"client {self.name}: another process has taken this name")
            if answer.get("rewound"):
                if self._stop.is_set() or self._over:
                    return {"over": True}
                raise Replaced(
                    f"client {self.name}: the session is not in epoch {self.epoch} any more: another client "
                    "took it to its checkpoint; restart this one from the same"
                )
            if answer.get("failed"):
                raise UserError(answer["failed"])
            if not answer.get("unknown"):
                return answer
            if self._stop.is_set():
                return {"over": True}
            with self._turn:
                marks = ledger.packed(self._progress)
            response = self._link.persist(
                "register", self._patience, self._stop, role="client", client=self.name, key=self._key,
                world=self._world, again=marks, epoch=self.epoch,
            )  # fmt: skip
            if response.get("rewound") or response.get("replaced"):
                raise Replaced(f"client {self.name}: the session went on without it; restart it")

    def _state(self) -> dict[str, Any]:
        """What every call says of this client. The lock is held."""
        handed = () if self._handed is None else (self._handed[0],)
        dry = bool(self._waits) and not self._streams and self._handed is None
        splits = {*self._progress, *handed, *(stream.number for stream in self._streams)}
        return {
            "held": sorted(splits), "steps": self.counts.steps,
            "ready": sum(len(stream.queue) for stream in self._streams), "dry": dry and not self._progress,
            "reading": sorted(stream.number for stream in self._streams if not stream.ended),
        }  # fmt: skip

    def _tell(self) -> None:
        """That we are here, and what is consumed."""
        while not self._stop.is_set():
            self._report()
            with self._turn:
                began, state = time.monotonic(), self._state()
                uses = sorted({stream.worker for stream in self._streams if not stream.ended})
                fill = state["ready"] / (self._buffer * self._allowed)
            response = self._call(
                "heartbeat", role="client", stalled=self._stalled(), fill=min(1.0, fill), uses=uses, **state
            )
            if "over" in response:
                return
            with self._turn:
                self._lose(response["lost"], state["held"])
                for stream in self._streams:
                    if stream.worker in response["gone"] and not stream.ended:
                        _cancel(stream)
                self._late, self._allowed = response["late"], response["streams"]
                self._certain = began + CERTAIN * self._lease
                self._turn.notify_all()
                self._grow()
            self._poke.wait(self._every)
            self._poke.clear()

    def _keep_pace(self) -> None:
        """How many steps ranks take together."""
        while not self._stop.is_set() and not self._over:
            response = self._call("go", until=self._until)
            with self._turn:
                self._until = max(self._until, response.get("until", 0))
                self._over = self._over or response.get("last", False)
                self._turn.notify_all()

    def _stalled(self) -> float:
        """Seconds, with those of the wait that is under way."""
        with self._turn:
            return self.counts.stalled + (time.monotonic() - self._waits if self._waits else 0.0)

    def _report(self) -> None:
        """What is consumed."""
        with self._turn:
            marks = list(self._progress.items())
        if marks:
            response = self._call("ack", marks=marks)
            if "over" in response:
                return
            with self._turn:
                for split, mark in marks:
                    if self._progress.get(split) == mark:
                        del self._progress[split]
                if response.get("lost"):
                    raise Replaced(
                        f"client {self.name} stood still for longer than its lease: batches of split"
                        f" {response['lost'][0]} that it had handed out went to others, too; restart it from"
                        " its checkpoint"
                    )
                self._turn.notify_all()

    def _lose(self, lost: list[int], reported: list[int]) -> None:
        for lost_stream in [
            stream for stream in self._streams if stream.number in lost and stream.number in reported
        ]:
            lost_stream.lost = True
            lost_stream.queue.clear()
            self._streams.remove(lost_stream)
            _cancel(lost_stream)
            if self._marks.get(lost_stream.number, DONE) != DONE and lost_stream.number in self._progress:
                raise Replaced(f"client {self.name} stood still for longer than its lease; restart it")
        left = sum(len(stream.queue) for stream in self._streams)
        if lost and self.counts.steps + left < self._until:
            raise Replaced(
                f"client {self.name} lost batches that other ranks begin steps with; restart all from a "
                "checkpoint"
            )

    def _read(self) -> None:
        """One split after the other."""
        while not self._stop.is_set() and not self._over:
            with self._turn:
                if self._readers > self._allowed:
                    self._readers -= 1
                    return
            # One asks at a time, so that splits are in the order in which they were given.
            with self._asking:
                with self._turn:
                    self._turn.wait_for(lambda: self._room() or self._stop.is_set() or self._over)
                    state = self._state()
                answer = {"over": True} if self._over else self._call("lease", **state)
                stream = self._answered(answer, state)
            if stream is not None:
                self._follow(stream)
            elif answer.get("over"):
                return

    def _room(self) -> bool:
        """For one more split. One that has come whole is no reason to wait for the trainer: small splits
        would be asked for only when nothing lies ready any more. The lock is held."""
        coming = sum(len(stream.queue) + (not stream.ended) for stream in self._streams)
        return coming < self._buffer * self._allowed

    def _answered(self, answer: dict[str, Any], state: dict[str, Any]) -> _Stream | None:
        """The split that it was given, if any."""
        with self._turn:
            if "split" in answer and not self._stop.is_set():
                stream = _Stream(
                    answer["epoch"], answer["split"], answer["first"], answer["worker"], answer["address"]
                )
                if stream.epoch != self.epoch:
                    self._ahead.append(stream)
                    stream.thread = self._started(partial(self._follow, stream))
                    return None
                if (stream_ahead := self._stream_ahead(stream)) is not None:
                    self._streams.append(stream_ahead)
                    if stream_ahead.empty:
                        self._empty(stream_ahead)
                    self._turn.notify_all()
                    return None
                self._streams.append(stream)
                return stream
            self._late = True  # or nothing can be had now: what is consumed is told at once
            if answer.get("missing") and not self._warned and time.monotonic() > self._began + ALONE:
                self._warned = True
                warnings.warn(self._alone(answer["missing"]), stacklevel=1)
            if answer.get("end"):
                self._over = True
            if answer.get("pad") and self._waits and state["dry"] and self.counts.steps == state["steps"]:
                self._pads = 1
                self._turn.notify_all()
                self._turn.wait_for(lambda: not self._pads or self._stop.is_set(), 1.0)
            self._turn.notify_all()
            return None

    def _alone(self, missing: int) -> str:
        back = self._resumed or self.counts.steps
        return f"client {self.name} waits for {missing} of {self._world} ranks to " + (
            "come back: all ranks go back to a checkpoint together" if back else "come"
        )

    def _stream_ahead(self, answer: _Stream) -> _Stream | None:
        """The stream of a split that was read ahead, if it is as it was given. The lock is held."""
        for stream in [candidate for candidate in self._ahead if candidate.number == answer.number]:
            if stream.worker != answer.worker or answer.next:
                self._drop_ahead([stream])
                return None
            self._ahead.remove(stream)
            assert stream.thread is not None
            self._threads.append(stream.thread)
            return stream
        return None

    def _follow(self, stream: _Stream) -> None:
        """A split to its end, from one worker after the other."""
        while not (stream.lost or stream.ended):
            error = ""
            try:
                self._receive(stream)
                continue
            except Exception as reply:
                with self._turn:
                    if stream in self._ahead:
                        # it is not ours yet: what is wrong shows when it is read for its epoch
                        self._drop_ahead([stream])
                        return
                if not isinstance(reply, (ServerLost, CallRefused)):
                    raise
                error = str(reply) if isinstance(reply, CallRefused) else ""
            if stream.ended or stream.lost:
                return
            self.counts.breaks += 1
            answer: dict[str, Any] = {"wait": True}
            while answer.get("wait") and not stream.lost:
                permanent = protocol.PERMANENT in error
                answer = self._call(
                    "again", split=stream.number, worker=stream.worker, permanent=permanent,
                    error=error.rpartition(protocol.PERMANENT)[2],
                )  # fmt: skip
                error = ""  # it is told once
                if answer.get("wait"):
                    self._stop.wait(0.05)
            with self._turn:
                if answer.get("lost") or answer.get("skipped"):
                    self._lose([stream.number] if answer.get("lost") else [], [stream.number])
                    if answer.get("skipped"):
                        self._skip(stream)
                    return
                if "split" in answer:
                    stream.worker, stream.address = answer["worker"], answer["address"]

    def _skip(self, stream: _Stream) -> None:
        """What came of it before the error is handed out, and no more."""
        stream.ended = True
        if stream.queue:
            number, _, batch = stream.queue.pop()
            stream.queue.append((number, True, batch))
        elif stream in self._streams:
            self._streams.remove(stream)
        self._turn.notify_all()

    def _receive(self, stream: _Stream) -> None:
        link = self._to(stream.address)
        ticket = {
            "split": stream.split, "epoch": stream.epoch, "first": stream.next, "client": self.name
        }  # fmt: skip
        with link.errors():
            reader = link.stream(ticket)
            with self._turn:
                stream.reader = reader
                if stream.lost:
                    _cancel(stream)
                    return
            while not stream.ended:
                try:
                    chunk = reader.read_chunk()
                except StopIteration:
                    raise ServerLost("the stream ended early") from None
                if not self._take(stream, reader, chunk.data, chunk.app_metadata):
                    return

    def _take(self, stream: _Stream, reader: Any, batch: pa.RecordBatch, stamp: Any) -> bool:
        """Into the queue, where it is the batch that is expected. False: this reader is not wanted."""
        if stamp is None or stamp.size != STAMP.size:
            raise CallRefused(f"worker {stream.worker} sent a batch without its number")
        epoch, split, number, last = STAMP.unpack(stamp.to_pybytes())
        fresh = number >= stream.next and batch.num_columns
        ready = _ReadyBatch(batch.num_rows, batch.nbytes, self._convert(batch) if fresh else None)
        with self._turn:
            if stream.reader is not reader or stream.lost:
                return False
            if (epoch, split) != (stream.epoch, stream.number) or number > stream.next:
                raise CallRefused(
                    f"worker {stream.worker} sent batch {number} of split {split}, epoch {epoch}; expected "
                    f"was {stream.next} of {stream.number}, epoch {stream.epoch}"
                )
            if number < stream.next:
                self.counts.duplicates += 1
                return True
            stream.next = number + 1
            stream.ended = bool(last)
            self._poke_if(stream.ended)  # who asks for the next split waits until the master knows
            if last and not batch.num_columns:
                self._empty(stream)
                return False
            # where others wait for this batch, or for nothing to come behind it, they are told
            ready_ = self.counts.steps + sum(len(stream.queue) for stream in self._streams)
            self._poke_if(self._ends == "drop" and (ready_ <= self._until or bool(last)))
            stream.queue.append((number, bool(last), ready))
            self._turn.notify_all()
            while len(stream.queue) >= self._buffer and not last:
                if stream.lost or stream.reader is not reader:
                    break
                self._turn.wait(1.0)
        return not last

    def _empty(self, stream: _Stream) -> None:
        """No row of the split meets the filter."""
        stream.empty = True
        if stream in self._ahead:
            return
        self._streams.remove(stream)
        self._marks[stream.number] = self._progress[stream.number] = DONE
        self._poke.set()
        self._turn.notify_all()

    def _to(self, address: str) -> FlightLink:
        with self._turn:
            return self._links.setdefault(address, FlightLink(address, self._keys))


def _cancel(stream: _Stream) -> None:
    if stream.reader is not None:
        with contextlib.suppress(Exception):
            stream.reader.cancel()


def _once_in_this_process() -> None:
    """Raises UserError in a fork of a process that used Flight: its threads are not there any more."""
    global _used_in
    if _used_in not in (0, os.getpid()):
        raise UserError(
            "IngestDataset: the process that forked this one has read batches itself; give the DataLoader "
            "multiprocessing_context='spawn'"
        )
    _used_in = os.getpid()
