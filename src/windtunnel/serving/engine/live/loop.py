"""The engine: the scheduler decides, the executor computes, and each step tells what came of it.

It gets `EngineJob`s, which say in tokens what `engine.model.Request` says in counts, and gives `Event`s after
each step. Nothing in it waits or listens: the server runs it in a thread, a bench or test in its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import ceil
from typing import Any

from windtunnel.base.errors import UserError
from windtunnel.base.plain import to_plain
from windtunnel.base.policyfile import Policy
from windtunnel.serving.engine.live.executor import Executor, Snapshot
from windtunnel.serving.engine.live.prefixes import Prefixes
from windtunnel.serving.engine.live.sampling import Sampled, Sampling, sample
from windtunnel.serving.engine.live.segments import Sequence as Stream
from windtunnel.serving.engine.model import InferenceRequest, Objective, Parallel, Serial, StepTime
from windtunnel.serving.engine.policies import Note, unheard
from windtunnel.serving.engine.policy.scheduler import EngineScheduler, Log
from windtunnel.serving.engine.policy.step import ScheduledStep, StepLimits, Unit
from windtunnel.serving.prefixcache.policy.changes import PrefixMatch

GREEDY, NOTHING = Sampling(), Objective()
ROUNDED, EDGES = 1.5, 64
"""What tokens take at the worst, as they lie in slots of few sizes (`segments.capacity_for`): so many times
their bytes, and so many tokens more a unit or a copied state."""


@dataclass(frozen=True, slots=True)
class Branches:
    """A parallel stage in tokens: what each branch begins with, how many it decodes at most, and what is put
    behind all of them when they are joined."""

    heads: tuple[tuple[int, ...], ...]
    tokens: tuple[int, ...]
    join: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineJob:
    """A request in tokens; a stage that is a number decodes as many. ``stop``: tokens that end a unit.
    ``arrival``: time.monotonic()."""

    id: int
    arrival: float
    prompt: tuple[int, ...]
    stages: tuple[int | Branches, ...]
    sampling: Sampling = GREEDY
    stop: frozenset[int] = frozenset()
    objective: Objective = NOTHING

    def request(self) -> InferenceRequest:
        """What the scheduler knows of it."""
        stages = tuple(
            Serial(stage)
            if isinstance(stage, int)
            else Parallel(tuple(map(len, stage.heads)), stage.tokens, len(stage.join))
            for stage in self.stages
        )
        return InferenceRequest(self.id, self.arrival, len(self.prompt), stages, self.objective)


@dataclass(frozen=True, slots=True)
class Token:
    """One more of a unit; ``ends``: "" where more may follow, "stop" where it is one of the job's ``stop``,
    else "length"."""

    job: int
    unit: int
    sampled: Sampled
    ends: str = ""


@dataclass(frozen=True, slots=True)
class Begun:
    """The job is admitted; ``cached`` tokens of its prompt need no computing."""

    job: int
    cached: int


@dataclass(frozen=True, slots=True)
class Over:
    """The job is done; or it was ``refused`` ("queue", "late", or a sentence) or ``failed`` (a sentence)."""

    job: int
    refused: str = ""
    failed: str = ""


Event = Begun | Token | Over


@dataclass(slots=True)
class _Decoding:
    """A unit: ``tokens`` of its own from position ``begin`` on, of which ``sampled`` were drawn; ``stream``
    has read all but the last."""

    tokens: list[int]
    stream: Stream
    begin: int = 0
    sampled: int = 0


@dataclass(slots=True)
class _RunningJob:
    """``stages``: the parallel ones that are not over; ``units``: none before it is admitted; ``match``: what
    a cache has of it; ``snapshots``: for that cache, by depth."""

    job: EngineJob
    stages: list[Branches]
    units: dict[int, _Decoding] = field(default_factory=dict)
    match: PrefixMatch | None = None
    snapshots: dict[int, Snapshot] = field(default_factory=dict)


class ServingEngine:
    """An executor that serves. ``kv``: bytes for the requests' keys, values and states; ``prefixes``: what
    keeps them afterwards; ``own``: a user's policies by capability. ``log`` gets every decision, ``note``
    what comes from outside and what a step did. Not for several threads at once."""

    def __init__(
        self, executor: Executor, time_of: StepTime, *, rows: int, kv: int, chunk: int = 512,
        queue: int = 1024, prefixes: Prefixes | None = None, log: Log | None = None,
        clock: Callable[[], float] = time.monotonic, note: Note | None = None, own: Mapping[str, Policy] = {},
        **policies: Any,
    ) -> None:  # fmt: skip
        self.executor, self.prefixes, self.clock = executor, prefixes, clock
        token = max(1.0, executor.token_bytes * ROUNDED)
        self.limits = StepLimits(
            rows, int(kv / token), chunk, queue,
            ceil((executor.state_bytes + executor.token_bytes * EDGES) / token), **policies,
        )  # fmt: skip
        executor.bound = kv + (prefixes.tree.capacity if prefixes is not None else 0)
        lookup = self._lookup if prefixes is not None else None
        self.scheduler = EngineScheduler(self.limits, time_of, lookup=lookup, log=log, own=own)
        self._note = note or unheard
        self._note("engine", limits=to_plain(self.limits), time=to_plain(time_of))
        self._running: dict[int, _RunningJob] = {}
        self._ending: set[Unit] = set()
        self._events: list[Event] = []
        self.last_step: ScheduledStep | None = None
        """The step that was taken last."""
        self.steps, self.seconds, self.deciding = 0, 0.0, 0.0
        """Steps taken, seconds of them, and seconds that the scheduler took of these."""

    def add(self, job: EngineJob) -> None:
        """It is refused in the next step where the queue is full or it can never be served."""
        request = job.request()
        why = self.scheduler.arrive(request)
        self._note("arrives", request=to_plain(request), refused=why)
        if why:
            self._events.append(Over(job.id, refused=why))
        else:
            stages = [stage for stage in job.stages if isinstance(stage, Branches)]
            self._running[job.id] = _RunningJob(job, stages)

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do or to tell."""
        return bool(self._running or self._events)

    def cancel(self, number: int) -> None:
        """Nobody waits for it any longer."""
        if number in self._running:
            self.scheduler.cancel(number)
            self._drop(self._running.pop(number))

    def end(self, unit: Unit) -> None:
        """It needs no more tokens than those of the next step."""
        self._ending.add(unit)

    def step(self) -> list[Event]:
        """Takes one step, if there is anything to do: what came of it, tokens in the order of their units."""
        began = self.clock()
        step = self.scheduler.next(began)
        planned = self.clock()
        events, self._events = self._events, []
        if step is None:
            return events
        for number in step.refused:
            self._drop(self._running.pop(number))
            events.append(Over(number, refused="late"))
        did: dict[str, Any] = {"began": began, "refused": [
            event.job for event in events if isinstance(event, Over) and event.refused == "late"
        ]}  # fmt: skip
        if not step.work:
            self._note("step", ended=began, **did)
            return events
        for number in step.admitted:
            entry = self._running[number].match
            events.append(Begun(number, entry.depth if entry else 0))
        sampled: dict[Unit, Sampled] = {}
        try:
            sampled = self._compute(step, did)
        except (RuntimeError, UserError, MemoryError) as error:
            units = (*step.rows, *step.forks, *((chunk.request, chunk.unit) for chunk in step.prefill))
            for number in sorted({number for number, _ in units}.union(step.admitted, step.joins)):
                self.cancel(number)
                events.append(Over(number, failed=f"the step that it took part in failed: {error}"))
        computed, self.last_step = self.clock(), step
        self._note("step", ended=computed, **did)
        stopped = {unit for unit, token in sampled.items() if token.token in self._running[unit[0]].job.stop}
        out = self.scheduler.done(step, computed, stopped | self._ending)
        self._ending = {entry for entry in self._ending if entry[0] in self._running}.difference(out.ended)
        ends = {unit: "stop" if unit in stopped else "length" for unit in out.ended}
        events += [Token(*unit, token, ends.get(unit, "")) for unit, token in sampled.items()]
        ended = self.clock()
        for done in out.finished:
            events.append(Over(done.request.id))
            running = self._running.pop(done.request.id)
            self._keep_end(running)
            self._drop(running)
        self.steps, self.seconds = self.steps + 1, self.seconds + self.clock() - began
        self.deciding += planned - began + ended - computed
        return events

    def _compute(self, step: ScheduledStep, did: dict[str, Any]) -> dict[Unit, Sampled]:
        """A token for each unit that gets one. ``did`` gets what the log says of it: ``admitted`` requests
        and the tokens that they begin with, ``computed`` (request, unit, tokens); neither where it fails."""
        jobs, begun = self._running, []
        for number in step.admitted:
            running = jobs[number]
            stream = (
                self.prefixes.take(running.match)
                if self.prefixes is not None and running.match is not None
                else self.executor.new()
            )
            running.units[0] = _Decoding(list(running.job.prompt), stream)
            begun.append((number, stream.depth))
        for number in step.joins:
            self._join(jobs[number])
        for number, branches in step.forks:
            self._fork(jobs[number], branches)
        keys = [(chunk.request, chunk.unit) for chunk in step.prefill] + list(step.rows)
        units = [jobs[number].units[unit] for number, unit in keys]
        parts = [
            (unit.stream, unit.tokens[chunk.begin - unit.begin : chunk.end - unit.begin])
            for unit, chunk in zip(units, step.prefill, strict=False)
        ]
        parts += [(unit.stream, unit.tokens[-1:]) for unit in units[len(parts) :]]
        before = [unit.stream.depth for unit in units]
        logits = self.executor.step(parts, len(step.prefill))
        computed = [
            (*key, unit.stream.depth - depth) for key, unit, depth in zip(keys, units, before, strict=True)
        ]
        # of the prefilled ones some go on to be prefilled
        places = [at for at, chunk in enumerate(step.prefill) if chunk.samples]
        places += range(len(step.prefill), len(units))
        if len(places) < len(units):
            logits, keys, units = logits[places], [keys[at] for at in places], [units[at] for at in places]
        how = [
            (jobs[number].job.sampling, unit, each.sampled)
            for (number, unit), each in zip(keys, units, strict=True)
        ]
        sampled = dict(zip(keys, sample(logits, how), strict=True))
        for unit, token in zip(units, sampled.values(), strict=True):
            unit.tokens.append(token.token)
            unit.sampled += 1
        if self.prefixes is not None:
            self._copy_states(step, self.prefixes)
        did |= {"admitted": begun, "computed": computed}
        return sampled

    # branches

    def _fork(self, running: _RunningJob, units: tuple[int, ...]) -> None:
        parent, heads = running.units[0], running.stages[0].heads
        streams = self.executor.fork(parent.stream, len(units))
        for unit, head, stream in zip(units, heads, streams, strict=True):
            running.units[unit] = _Decoding([parent.tokens[-1], *head], stream, len(parent.tokens) - 1)

    def _join(self, running: _RunningJob) -> None:
        for unit in [unit for unit in running.units if unit]:
            branch = running.units.pop(unit)
            self.executor.free(branch.stream)
            running.units[0].tokens += branch.tokens[1:]
        running.units[0].tokens += running.stages.pop(0).join

    # prefixes

    def _lookup(self, request: InferenceRequest) -> tuple[int, tuple[int, ...]]:
        running = self._running[request.id]
        assert self.prefixes is not None
        if running.match is not None:
            self.prefixes.leave(running.match)
        copies = (self.limits.kv - self.scheduler.most(request)) // self.limits.state - 1
        running.match = match = self.prefixes.look(running.job.prompt, self.clock(), copies)
        self._note("looked", request=request.id, cached=match.depth, stops=match.keep, end=match.end)
        return match.depth, match.keep

    def _copy_states(self, step: ScheduledStep, prefixes: Prefixes) -> None:
        """Of parents, where the cache wants it; a prompt that is read is put there."""
        for chunk in (chunk for chunk in step.prefill if not chunk.unit):
            running = self._running[chunk.request]
            stream, prompt = running.units[0].stream, running.job.prompt
            if running.match and chunk.end in running.match.keep:
                running.snapshots[chunk.end] = self.executor.snapshot(stream)
            if chunk.end == len(prompt):
                self._note("copied", request=chunk.request, depths=list(running.snapshots))
                prefixes.put(prompt, running.snapshots, stream, self.clock())
                running.snapshots = {}
        for number in (number for number, unit in step.rows if not unit):
            running = self._running[number]
            stream = running.units[0].stream
            if running.match and running.match.end > 1 and stream.depth % running.match.end == 0:
                for snapshot in running.snapshots.values():
                    self.executor.free(snapshot)
                running.snapshots = {stream.depth: self.executor.snapshot(stream)}

    def _keep_end(self, running: _RunningJob) -> None:
        """After the last token, for who goes on from there."""
        parent = running.units[0]
        stream = parent.stream
        if self.prefixes is None or running.match is None or not isinstance(running.job.stages[-1], int):
            return
        if running.match.end == 1:
            running.snapshots[stream.depth] = self.executor.snapshot(stream)
        if running.snapshots or not self.executor.state_bytes:
            self.prefixes.put(parent.tokens[: stream.depth], running.snapshots, stream, self.clock())
            running.snapshots = {}

    def _drop(self, running: _RunningJob) -> None:
        """Frees all that it holds."""
        for unit in running.units.values():
            self.executor.free(unit.stream)
        for snapshot in running.snapshots.values():
            self.executor.free(snapshot)
        if self.prefixes is not None and running.match is not None:
            self.prefixes.leave(running.match)

    def facts(self) -> dict[str, float]:
        """What there is to tell of it now, by any thread; counts, tokens, seconds and bytes."""
        return {
            "running": self.scheduler.running, "waiting": self.scheduler.waiting, "steps": self.steps,
            "kv_reserved": self.scheduler.reserved, "kv_tokens": self.limits.kv, "seconds": self.seconds,
            "deciding": self.deciding,
            "prefix_bytes": self.prefixes.tree.used if self.prefixes is not None else 0,
        }  # fmt: skip
