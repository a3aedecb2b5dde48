"""What every operation on a sandbox needs: the parts that a host puts together, and what it writes down.

Snapshots or copies of files, process images or none, and three ways to look at a turn: whatever is missing to
root, a host opens with what is next below, and says so once. An ordinary user's host copies, compares, and
has no process images.

How a sandbox stands is for the next process of the host (``box.json``, written atomically). What happened to
it is in its event log: its turns, and what the policy was told beside what it answered.

The engine, one for a host, runs the checkpoint jobs of all its sandboxes.

Workers are as many as CPUs: more would only stretch the tails, because a checkpoint is bound by the CPU and
the disk. A job waits in the normal queue until somebody waits for it (the model's reply is there): then it is
promoted to the urgent one. A sandbox has at most one job at a time, since its next turn waits for the job of
the last one; that is the back-pressure, and it bounds the queue by the number of sandboxes.

Source: Crab (arXiv 2604.28138), section 5.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, cast

from windtunnel.agents.sandbox.criu import Criu
from windtunnel.agents.sandbox.errors import IncompleteError, PartError
from windtunnel.agents.sandbox.files import Pool
from windtunnel.agents.sandbox.inspect import Inspector
from windtunnel.agents.sandbox.model import (
    NO_TERMS,
    CheckpointManifest,
    Lack,
    PolicyInput,
    SandboxEvent,
    SandboxSpec,
    Terms,
    TurnClass,
    TurnRecord,
)
from windtunnel.agents.sandbox.place import Home
from windtunnel.agents.sandbox.policy import (
    CAPABILITY,
    POLICIES,
    Decision,
    Observation,
    PolicyName,
    Settle,
    Shortfall,
)
from windtunnel.agents.sandbox.policy.queues import Queues, disk_limit
from windtunnel.agents.sandbox.proxy import HostProxy
from windtunnel.agents.sandbox.store import CheckpointStore
from windtunnel.base import atomic
from windtunnel.base.errors import UserError
from windtunnel.base.plain import from_plain, to_plain
from windtunnel.base.processes import Identity
from windtunnel.store import eventlog
from windtunnel.store.objects import ObjectError

FAULTS = (PartError, ObjectError, OSError)
"""What an operation on a sandbox may meet in its parts."""
D = TypeVar("D")
T = TypeVar("T")
Status = Literal["making", "running", "stopped", "dead"]


@dataclass(frozen=True)
class Record:
    """One sandbox. ``pid`` and ``started`` (clock ticks since boot) name its init as long as ``boot`` is the
    boot id of the host; ``tip`` is its newest checkpoint; ``base`` the checkpoint that it was forked from."""

    spec: SandboxSpec
    created: float
    status: Status = "making"
    pid: int = 0
    started: int = 0
    boot: str = ""
    turns: int = 0
    tip: str = ""
    base: str = ""
    image: str = ""

    def lives(self) -> bool:
        """Whether the sandbox's init is still the one that is named here."""
        return Identity(self.pid, self.started, self.boot).lives()


def newest(record: Record, sound: Sequence[CheckpointManifest]) -> str:
    """The sandbox's newest checkpoint among those that can be read; empty where there is none."""
    ids = {manifest.id for manifest in sound}
    if not record.tip or record.tip in ids:
        return record.tip
    own = [manifest for manifest in sound if manifest.box == record.spec.name]
    if own:
        return max(own, key=lambda manifest: (manifest.turn, manifest.created)).id
    return record.base if record.base in ids else ""


def write_record(folder: Path, record: Record) -> None:
    """Replace ``box.json``; a crash leaves the old one or the new one."""
    folder.mkdir(parents=True, exist_ok=True)
    atomic.replace(folder / "box.json", json.dumps(to_plain(record), indent=1), durable=True)


def read_record(folder: Path) -> Record | None:
    """The record in ``folder``; None where there is none that can be read."""
    try:
        return from_plain(Record, json.loads((folder / "box.json").read_text()))
    except (OSError, ValueError, KeyError, TypeError):
        return None


class SandboxLog:
    """The event log of sandbox ``box`` in ``folder`` (empty: of the host), and the policy that decides there.

    What cannot be written (the disk is full, say) holds all the same: it is reported as an event of kind
    failed, and only the log or a replay will miss it.
    """

    def __init__(
        self, box: str, policy: PolicyName, folder: Path, report: Callable[[SandboxEvent], None]
    ) -> None:
        self._box, self._policy, self._path, self._report = box, policy, folder / eventlog.NAME, report
        self._terms = NO_TERMS

    def under(self, *requests: Terms) -> SandboxLog:
        """The same log; whoever decides by it is told what these requests accept. Raises TypeError for terms
        that are none."""
        other = copy(self)
        for terms in requests:
            if unknown := terms.keys() - Terms.__annotations__.keys():
                raise TypeError(f"{min(unknown)!r} is none of the terms of a request")
            other._terms = other._terms | cast(Terms, {name: value for name, value in terms.items() if value})
        return other

    def decide(self, observation: PolicyInput[D], *, write: bool = True) -> D:
        """Ask the policy. ``write``: at once; otherwise the caller does (`decided`), or it never mattered."""
        observed = cast(Observation, observation)
        if isinstance(observed, Shortfall):
            observed = replace(observed, **self._terms)
        decision = POLICIES[self._policy](observed)
        if write:
            self.decided(observed, decision)
        return cast(D, decision)

    def settle(
        self, required: TurnClass, reached: TurnClass, lacks: Sequence[Lack], tries: int = 0
    ) -> Settle:
        """What is done about what would be lacking. ``tries``: how often that was tried which may be tried
        again."""
        kinds = tuple(sorted({lack.kind for lack in lacks}))
        return self.decide(Shortfall(required, reached, kinds, tries or 1, again=tries > 0))

    def hold(
        self, what: str, lacks: Sequence[Lack], required: TurnClass, reached: TurnClass, **all_the_same: Any
    ) -> None:
        """Raises IncompleteError, with what there is all the same, where the policy says that ``what`` must
        not be taken as it is."""
        if lacks and self.settle(required, reached, lacks).answer == "hold":
            more = f", and {len(lacks) - 1} more" if len(lacks) > 1 else ""
            words = f"{what} lacks {lacks[0].what}{more} ({lacks[0].why}); `allow_less` takes it as it is"
            raise IncompleteError(words, lacks, **all_the_same)

    def decided(self, observation: Observation, decision: Decision) -> None:
        """The policy has answered so."""
        fields = eventlog.decided(CAPABILITY, self._policy, observation, decision)
        self._append("a decision", "decision", fields)

    def did(self, **what: Any) -> None:
        """What became of a decision."""
        self._append("an effect", "effect", what)

    def turn(self, turn: TurnRecord) -> None:
        """A turn has ended, and its checkpoint, if any, is safe or has failed."""
        self._append(f"turn {turn.number}", "turn", {"turn": to_plain(turn)})

    def turns(self) -> tuple[TurnRecord, ...]:
        """The turns so far, in order; those on damaged lines are reported instead."""
        turns = (event for event in self._events() if event["kind"] == "turn")
        return tuple(from_plain(TurnRecord, event["turn"]) for event in turns)

    def decisions(self) -> list[tuple[Observation, Decision]]:
        """What was seen and decided so far, in order."""
        return [
            (from_plain(Observation, event["observation"]), from_plain(Decision, event["decision"]))
            for event in self._events()
            if event["kind"] == "decision"
        ]

    def _events(self) -> list[eventlog.Event]:
        return eventlog.read(
            self._path, damaged=lambda why: self._report(SandboxEvent("failed", self._box, why))
        )

    def _append(self, what: str, kind: str, fields: dict[str, Any]) -> None:
        try:
            # opened each time: sandboxes are many, and a folder may be removed and made again
            with contextlib.closing(eventlog.EventLog(self._path)) as log:
                log.append(kind, **fields)
        except eventlog.LogFailed as error:
            self._report(SandboxEvent("failed", self._box, f"{what} is not in the log: {error}"))


@dataclass(frozen=True)
class SandboxContext:
    """What every operation on a sandbox needs; ``criu`` and ``inspector``: None where there is none."""

    home: Home
    pool: Pool
    store: CheckpointStore
    criu: Criu | None
    inspector: Inspector | None
    engine: JobEngine
    retention: int
    policy: PolicyName
    in_use: list[str]
    """Checkpoints that are being made or restored, once for each."""
    restorable: set[str]
    """Checkpoints whose processes have come back on this host since it was opened."""
    proxy: HostProxy
    report: Callable[[SandboxEvent], None]
    made: Callable[[], None]
    """Called when a checkpoint has been made."""
    no_images: str
    """Why processes are not kept where ``criu`` is None."""

    @contextlib.contextmanager
    def using(self, checkpoint: str) -> Iterator[None]:
        """Within the block nothing of that checkpoint is dropped."""
        self.in_use.append(checkpoint)
        try:
            yield
        finally:
            self.in_use.remove(checkpoint)

    def log(self, box: str) -> SandboxLog:
        """The log of that sandbox, and what decides of it; with the empty name, of the host."""
        return SandboxLog(box, self.policy, self.home.box(box) if box else self.home.path, self.report)


def disk_limit_of(context: SandboxContext, spec: SandboxSpec) -> int | None:
    """Bytes that the sandbox's root may hold beyond its image. Raises UserError where it names a limit that
    cannot be held here."""
    limit, pool = spec.limits.disk, context.pool
    why = pool.unbounded(limited=bool(limit))
    if limit and why:
        raise UserError(
            f"sandbox {spec.name}: a limit of {limit >> 20} MiB of disk cannot be held here: {why}; "
            "leave `disk` away, or say `disk` none"
        )
    return disk_limit(limit, pool.usage()[1], bounded=not why)


class Pending(Generic[T]):
    """A checkpoint under way, whose end gives a ``T``. ``finished``: when it was settled, by the monotonic
    clock; ``reported``: its fault was raised to somebody."""

    def __init__(
        self, box: str, work: Callable[[], T], job: str = "", engine: JobEngine | None = None
    ) -> None:
        self.box, self.job, self.finished, self.reported = box, job, 0.0, False
        self._work, self._engine = work, engine
        self._outcome: Future[T] = Future()

    @property
    def done(self) -> bool:
        return self._outcome.done()

    def wait(self, timeout: float | None = None) -> T:
        """Of a turn its line of the log, once its checkpoint is safe.

        Raises TimeoutError when it is not after ``timeout`` seconds, and whatever the checkpoint failed with.
        """
        if not wait((self._outcome,), timeout).done:
            raise TimeoutError(f"the checkpoint of sandbox {self.box} is not done after {timeout} s")
        self.reported |= self._outcome.exception() is not None
        return self._outcome.result()

    def promote(self) -> None:
        """Somebody waits for this job now."""
        if self._engine is not None and not self.done:
            self._engine.promote(self)

    def run(self, before: Callable[[], object] = lambda: None) -> Pending[T]:
        """Do the work, after ``before``, and end with what it gives, or with the fault of either."""
        try:
            before()
            settle = partial(self._outcome.set_result, self._work())
        except BaseException as error:  # it belongs to whoever waits
            settle = partial(self._outcome.set_exception, error)
        del self._work  # with all that it holds
        self.finished = time.monotonic()
        settle()
        return self


class JobEngine:
    """Runs jobs on a few threads, in the order that the host's log decides; a choice among several jobs is
    written to that of the sandbox that comes next (``log``: by the sandbox's name)."""

    def __init__(self, workers: int | None, log: Callable[[str], SandboxLog]) -> None:
        self._log = log
        self.workers = workers or os.cpu_count() or 1
        self._threads = ThreadPoolExecutor(self.workers, "sandbox-engine")
        self._queues = Queues()
        self._jobs: dict[str, Pending[Any]] = {}
        self._lock = threading.Lock()
        self._count = 0

    def submit(self, box: str, work: Callable[[], T], *, urgent: bool = False) -> Pending[T]:
        """Queue ``work``; what it returns or raises settles the pending checkpoint. Raises RuntimeError once
        the engine is closed."""
        with self._lock:
            self._threads.submit(self._work)
            self._count += 1
            pending = self._jobs[f"{box}/{self._count}"] = Pending(box, work, f"{box}/{self._count}", self)
            self._queues.add(pending.job, urgent=urgent)
        return pending

    def promote(self, pending: Pending[Any]) -> None:
        with self._lock:
            self._queues.promote(pending.job)

    def close(self) -> None:
        """Finish what is queued, then end the workers."""
        self._threads.shutdown()

    def _work(self) -> None:
        """Do one of the jobs that wait: as often as jobs were submitted, so each is done."""
        with self._lock:
            queued = self._queues.queued()
            assert queued is not None
            pick = self._log("").decide(queued, write=False)
            pending = self._jobs.pop(self._queues.take(pick))
        if len(queued.urgent) + len(queued.normal) > 1:
            pending.run(lambda: self._log(pending.box).decided(queued, pick))
        else:
            pending.run()
