"""The engine's scheduler: pure bookkeeping of requests from step to step, the same one live and in the twin.

``arrive`` and ``cancel`` whenever it happens; then ``next(now)`` for a step and ``done(step, now)`` when it
has been taken. The rules are `engine.policy` (admission, prefill) and `branching.policy` (extra branches).
What a caller who holds tensors must know:

- A request is a parent sequence (unit 0) and the branches of its parallel stages (units 1, 2, … through all
  stages). All positions are absolute: a branch continues the parent's.
- A unit's first token comes from the prefill chunk that ends it (`PrefillChunk.samples`), each further one
  from a row. A row feeds the unit's last token. The last token of a unit is in no KV.
- A fork (`ScheduledStep.forks`) happens where all of the parent but its last known token is in the KV. Every
  branch begins with that token and its own head, so it always has something to prefill.
- A join (`ScheduledStep.joins`) drops the branches' KV; the parent then goes on, from where it was forked,
  with the tokens of all branches (heads and decoded) and the stage's ``join`` tokens, prefilled.
- In one step joins come first, then forks, prefill chunks and rows.

`ScheduledStep.repeat` steps with the same rows may be taken at once (``done(..., count=n)``) if nobody
arrives and none begins after `ScheduledStep.until`: the outcome is that of single steps.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from itertools import chain, islice
from math import inf
from typing import Any

from windtunnel.serving.branching import policy as branching
from windtunnel.serving.engine import policy as admission
from windtunnel.serving.engine.model import InferenceRequest, Parallel, Serial, Stage, StepTime
from windtunnel.serving.engine.policy.step import (
    Depths,
    Finished,
    PrefillChunk,
    ScheduledStep,
    StepLimits,
    StepOutcome,
    Unit,
)

ALWAYS = branching.ALWAYS
PATIENCE = 16
"""Tokens that another branch must have left more before it becomes the protected one."""
NOTHING = admission.Decision()
NOWHERE: Depths = ()
FULL = "queue"
"""Why a request is not taken: its queue is full."""
LOOK = 16
"""Waiting requests that one decision sees at most."""

Candidates = tuple[branching.BranchCandidate, ...]
Log = Callable[[str, str, object, object], None]
"""(capability, policy, observation, decision)"""


class _Sequence:
    """A parent or a branch. ``depth``: tokens in the KV, from the request's first to its last; it is
    prefilled up to ``goal``, as a ``prompt`` where nothing of the request is decoded yet; ``left``: tokens
    that it may still decode in this stage. It is ``live`` from its first token on to its last. While a parent
    is, ``left`` alone counts: there are many of them in every step."""

    __slots__ = ("depth", "goal", "left", "live", "number", "prompt")

    def __init__(self, number: int, depth: int, goal: int, left: int) -> None:
        self.number, self.depth, self.goal, self.left = number, depth, goal, left
        self.live = self.prompt = False


class _Running:
    """An admitted request. ``open``: sequences of its stage that have not all their tokens: branches, or the
    parent itself. ``length``: tokens that the parent begins the stage with; ``tail``: those of this stage's
    branches that have ended; ``path`` and ``beside``: tokens at most of the stages to come, one after another
    and beside those; ``counted``: tokens emitted, and those that the parent has ``left``."""

    __slots__ = (
        "beside", "branches", "counted", "first", "length", "open", "parent", "path", "place", "protected",
        "request", "reserve", "stops", "tail",
    )  # fmt: skip

    def __init__(self, request: InferenceRequest, cached: int, stops: Depths, reserve: int) -> None:
        self.request, self.stops, self.reserve = request, stops, reserve
        self.parent, self.length = _Sequence(0, cached, cached, 0), request.prompt
        self.first = inf
        self.path, self.beside = map(sum, zip(*map(_size, request.stages), strict=True))
        self.place = self.counted = self.branches = self.protected = self.tail = 0
        self.open: dict[int, _Sequence] = {}

    @property
    def stage(self) -> Stage:
        """The one that it is in."""
        return self.request.stages[self.place]

    @property
    def emitted(self) -> int:
        """Tokens."""
        return self.counted - self.parent.left

    def suffix(self, sequence: _Sequence) -> int:
        """Tokens of its own in the KV."""
        return sequence.depth - self.parent.depth


def _size(stage: Stage) -> tuple[int, int]:
    """Tokens that it decodes one after another at most, and beside those."""
    if isinstance(stage, Serial):
        return stage.tokens, 0
    return max(stage.tokens), sum(stage.tokens) - max(stage.tokens)


def _stop(stops: Depths, begin: int, end: int) -> int:
    """How far one chunk may go from ``begin``."""
    return min((at for at in stops if begin < at < end), default=end)


class EngineScheduler:
    """See the module. ``lookup`` says of a request that might be admitted now how many tokens of its prompt
    a cache holds, and at which depths its prefill has to stop, ascending; else it is ``request.cached`` and
    nowhere. ``own``: a user's policies by capability, in place of those that ``limits`` names."""

    def __init__(
        self,
        limits: StepLimits,
        time: StepTime,
        *,
        lookup: Callable[[InferenceRequest], tuple[int, Depths]] | None = None,
        log: Log | None = None,
        own: Mapping[str, Callable[[Any], Any]] = {},
    ) -> None:
        self.limits, self.time = limits, time
        self.predictor = branching.Predictor()
        self._lookup, self._log = lookup, log
        self._admit = own.get("serving.engine") or admission.POLICIES[limits.admission]
        self._extend = own.get("serving.branching") or branching.POLICIES[limits.branching]
        # by their numbers; not a dict, whose first entries are slow to find when many before them are gone
        self._waiting: OrderedDict[int, tuple[InferenceRequest, admission.WaitingRequest]] = OrderedDict()
        self._running: dict[int, _Running] = {}
        self._serial: dict[Unit, _Sequence] = {}  # parents that decode
        self._parallel: dict[int, _Running] = {}  # with branches that decode
        self._filling: dict[Unit, _Sequence] = {}  # to be prefilled
        self._forks: dict[int, tuple[int, ...]] = {}
        self._joins: list[int] = []
        self._read = 0  # tokens that `_serial` have in the KV
        self.reserved = 0
        """KV tokens that the admitted requests may come to hold."""

    # what comes from outside

    def most(self, request: InferenceRequest) -> int:
        """KV tokens that it may come to hold, with its units' states."""
        units = max((len(stage.heads) for stage in request.stages if isinstance(stage, Parallel)), default=0)
        return request.most + (1 + units) * self.limits.state

    def arrive(self, request: InferenceRequest) -> str:
        """Why it is not taken into the queue, "" where it is: that is `FULL`, or, in a sentence, it has no
        tokens to read or to write, or can never fit."""
        sizes = [(stage.tokens,) if isinstance(stage, Serial) else stage.tokens for stage in request.stages]
        if request.prompt <= request.cached or not sizes or min(min(size, default=0) for size in sizes) < 1:
            return "a request needs a token of prompt that is not cached, and units that decode one"
        if (most := self.most(request)) > (kv := self.limits.kv):
            return f"the request may come to hold {most} tokens of KV, there is room for {kv}"
        if self.waiting >= self.limits.queue:
            return FULL
        due = request.arrival + request.objective.ttft
        self._waiting[request.id] = request, self._as_waiting(request, request.cached, (), due)
        return ""

    def cancel(self, request: int) -> None:
        """It is done with, wherever it stands, also in a step that has begun."""
        self._waiting.pop(request, None)
        if (running := self._running.get(request)) is not None:
            self._leave(running)

    @property
    def waiting(self) -> int:
        """Requests that are not admitted."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests that are admitted."""
        return len(self._running)

    def kv_used(self) -> int:
        """KV tokens that the admitted requests hold now, with what a cache lent them."""
        return self._read + sum(
            running.parent.depth + running.tail + sum(map(running.suffix, running.open.values()))
            for running in self._running.values()
            if (running.request.id, 0) not in self._serial
        )

    # a step

    def next(self, now: float) -> ScheduledStep | None:
        """The step to take now; None if there is nothing to do. It may have refusals only
        (`ScheduledStep.work`)."""
        decision, repeat = NOTHING, ALWAYS
        protected = [self._protect(running) for running in self._parallel.values()]
        if self._waiting or self._filling:
            decision = self._plan(now, len(self._serial) + len(protected))
            if decision.prefill or decision.admit or decision.refuse:  # the next step sees others
                repeat = 1
        admitted, refused = decision.admit, decision.refuse
        prefill = tuple([self._chunk(*part) for part in decision.prefill])
        parents = tuple(self._serial)
        branches: tuple[Unit, ...] = ()
        read, wide = self._read, False
        if protected:
            branches = tuple((running.request.id, branch.number) for running, branch in protected)
            read += sum(branch.depth for _, branch in protected)
            needed = self._log is not None or self._extend is not branching.off
            if needed and (candidates := self._candidates(protected)):
                wide = True
                observation = self._observe(now, len(parents) + len(branches), read, prefill, candidates)
                chosen = self._extend(observation)
                if self._log is not None:
                    self._log("serving.branching", self.limits.branching, observation, chosen)
                branches += chosen.admitted
                for number, unit in chosen.admitted:
                    running = self._running[number]
                    read += running.suffix(running.open[unit])
                repeat = min(repeat, chosen.holds)
            repeat = min(repeat, self._stays(protected, set(branches)))
        rows = parents + branches
        if not rows and not prefill:
            if admitted:  # who has nothing to prefill before his branches
                step = self.next(now) or ScheduledStep(now, ())
                step.admitted, step.refused = admitted + step.admitted, refused + step.refused
                return step
            return ScheduledStep(now, (), refused=refused) if refused else None
        if repeat > 1:
            repeat = min([repeat, *[parent.left for parent in self._serial.values()]])
        step = ScheduledStep(
            now, rows, branches, prefill, tuple(self._joins), tuple(self._forks.items()), admitted, refused,
            read, repeat=repeat, until=decision.until, measured=wide or bool(prefill),
        )  # fmt: skip
        self._joins, self._forks = [], {}
        step.modelled = step.seconds(self.time)
        return step

    def done(
        self, step: ScheduledStep, now: float, ended: Iterable[Unit] = (), count: int = 1
    ) -> StepOutcome:
        """``step`` was taken ``count`` times, until ``now``; the units in ``ended`` need no more tokens than
        they have got. What was cancelled since is no longer heard of."""
        out, early = StepOutcome(), set(ended)
        if step.measured:
            modelled = step.modelled if count == 1 else step.total(self.time, count)
            self.predictor.measured(len(step.rows), modelled, now - step.began)
        over: list[Unit] = []
        for number, unit in step.branches:
            running = self._running.get(number)
            if running is not None:
                branch = running.open[unit]
                branch.depth, branch.left = branch.depth + count, branch.left - count
                running.counted += count
                if branch.left <= 0:
                    over.append((number, unit))
        last: list[Unit] = []
        self._read += count * len(self._serial)
        for key, parent in self._serial.items():
            parent.left = left = parent.left - count
            if left <= 0:
                last.append(key)
        for number, unit in (*over, *sorted(early), *sorted(last)):
            if number in self._running:
                self._unit_ends(self._running[number], unit, out, now)
        for chunk in step.prefill:
            if chunk.request in self._running:
                self._filled(self._running[chunk.request], chunk, early, out, now)
        return out

    # admission and prefill

    def _plan(self, now: float, rows: int) -> admission.Decision:
        """What `engine.policy` decides; who is admitted is admitted, who is refused is gone."""
        limits, budget, backlog = self.limits, self.limits.chunk, 0
        filling: list[admission.Filling] = []
        for (number, unit), part in self._unfilled():
            backlog += part.goal - part.depth
            if budget > 0:
                stop = _stop(() if unit else self._running[number].stops, part.depth, part.goal) - part.depth
                filling.append(admission.Filling(number, unit, part.goal - part.depth, stop))
                budget -= stop
        free, slots = limits.kv - self.reserved, limits.rows - len(self._running)
        found = self._looked_up(budget, slots, free)
        observation = admission.Observation(
            now, rows, slots, free, limits.chunk, backlog, tuple(filling),
            tuple([waiting for waiting, *_ in found]), self.time,
        )  # fmt: skip
        decision = self._admit(observation)
        if self._log is not None:
            self._log("serving.engine", limits.admission, observation, decision)
        for number in decision.refuse:
            del self._waiting[number]
        for waiting, cached, stops in found:
            if waiting.request in decision.admit:
                request, _ = self._waiting.pop(waiting.request)
                self._running[request.id] = running = _Running(request, cached, stops, waiting.reserve)
                self.reserved += running.reserve
                self._enter(running)
        return decision

    def _unfilled(self) -> list[tuple[Unit, _Sequence]]:
        """What is to be prefilled, in its order: what running requests wait for, and then prompts."""
        return sorted(self._filling.items(), key=lambda entry: entry[1].prompt)

    def _looked_up(
        self, budget: int, slots: int, free: int
    ) -> list[tuple[admission.WaitingRequest, int, Depths]]:
        """The first of the queue; of those who might be admitted now with what a cache holds, and where their
        prefill stops."""
        found: list[tuple[admission.WaitingRequest, int, Depths]] = []
        for request, waiting in islice(self._waiting.values(), LOOK):
            cached, stops = request.cached, NOWHERE
            if budget > 0 and slots > 0 and waiting.reserve <= free and self._lookup is not None:
                cached, stops = self._lookup(request)
                waiting = self._as_waiting(request, cached, stops, waiting.due)
                budget, slots, free = budget - waiting.stop, slots - 1, free - waiting.reserve
            else:
                budget = 0
            found.append((waiting, cached, stops))
        return found

    def _as_waiting(
        self, request: InferenceRequest, cached: int, stops: Depths, due: float
    ) -> admission.WaitingRequest:
        end = self._goal(request.stages[0], request.prompt)
        stop = _stop(stops, cached, end)
        most = self.most(request)
        if self._lookup is not None:  # states are copied at the stops, and one behind them
            most = min(self.limits.kv, most + (len(stops) + 1) * self.limits.state)
        return admission.WaitingRequest(request.id, end - cached, stop - cached, most - cached, due)

    @staticmethod
    def _goal(stage: Stage, length: int) -> int:
        """Up to where a parent of ``length`` tokens is prefilled: branches begin with the last one."""
        return length if isinstance(stage, Serial) else length - 1

    def _chunk(self, number: int, unit: int, tokens: int) -> PrefillChunk:
        key, serial = (number, unit), isinstance(self._running[number].stage, Serial)
        part = self._filling[key]
        end = part.depth + tokens
        return PrefillChunk(number, unit, part.depth, end, end == part.goal and (unit > 0 or serial))

    def _filled(
        self, running: _Running, chunk: PrefillChunk, early: set[Unit], out: StepOutcome, now: float
    ) -> None:
        """A chunk is in the KV; behind a unit's last one it decodes, or the branches begin."""
        key = (chunk.request, chunk.unit)
        part = self._filling[key]
        part.depth = chunk.end
        if part.depth < part.goal:
            return
        del self._filling[key]
        if not chunk.samples:
            self._fork(running)
            return
        if running.first == inf:
            running.first = now
            out.first.append(chunk.request)
        part.live, part.left = True, part.left - 1
        if chunk.unit:
            running.counted += 1
            self._parallel[chunk.request] = running
        else:
            self._serial[key] = part
            self._read += part.depth
        if part.left <= 0 or key in early:
            self._unit_ends(running, chunk.unit, out, now)

    # stages

    def _enter(self, running: _Running) -> None:
        """A stage begins: what its parent lacks is prefilled, then its branches' heads."""
        path, beside = _size(running.stage)
        running.path, running.beside = running.path - path, running.beside - beside
        parent = running.parent
        parent.goal = self._goal(running.stage, running.length)
        if isinstance(running.stage, Serial):
            parent.left, running.open = running.stage.tokens, {0: parent}
            running.counted += parent.left
        if parent.depth < parent.goal:
            parent.prompt = running.first == inf
            self._filling[running.request.id, 0] = parent
        else:
            self._fork(running)

    def _fork(self, running: _Running) -> None:
        stage, depth = running.stage, running.parent.depth
        assert isinstance(stage, Parallel)
        for head, tokens in zip(stage.heads, stage.tokens, strict=True):
            running.branches += 1
            branch = _Sequence(running.branches, depth, depth + head + 1, tokens)
            running.open[branch.number] = self._filling[running.request.id, branch.number] = branch
        self._forks[running.request.id] = tuple(running.open)

    def _unit_ends(self, running: _Running, unit: int, out: StepOutcome, now: float) -> None:
        """It has all its tokens, if it is live; and so has its stage behind the last one."""
        sequence, number, stage = running.open.get(unit), running.request.id, running.stage
        if sequence is None or not sequence.live:
            return
        sequence.live = False
        del running.open[unit]
        out.ended.append((number, unit))
        if isinstance(stage, Serial):
            self._rest(running, stage)
            self._stage_ends(running, out, now)
            return
        running.tail += running.suffix(sequence)
        if not any(other.live for other in running.open.values()):
            del self._parallel[number]
        if not running.open:
            running.length, running.tail = running.length + running.tail + stage.join, 0
            if self._stage_ends(running, out, now):
                self._joins.append(number)

    def _rest(self, running: _Running, stage: Serial) -> None:
        """Its parent decodes no more."""
        parent = running.parent
        del self._serial[running.request.id, 0]
        parent.depth += stage.tokens - 1 - parent.left
        self._read -= parent.depth
        running.counted, parent.left, running.length = running.emitted, 0, parent.depth + 1

    def _stage_ends(self, running: _Running, out: StepOutcome, now: float) -> bool:
        """Whether another one begins."""
        running.place += 1
        if running.place < len(running.request.stages):
            self._enter(running)
            return True
        self._leave(running)
        out.finished.append(Finished(running.request, running.first, now, running.emitted))
        return False

    def _leave(self, running: _Running) -> None:
        """A request is done or cancelled: nothing of it remains."""
        number = running.request.id
        for unit in (0, *running.open):
            self._filling.pop((number, unit), None)
        if (number, 0) in self._serial:
            assert isinstance(running.stage, Serial)
            self._rest(running, running.stage)
        self._parallel.pop(number, None)
        self._forks.pop(number, None)
        if number in self._joins:
            self._joins.remove(number)
        del self._running[number]
        self.reserved -= running.reserve

    # branches

    @staticmethod
    def _protect(running: _Running) -> tuple[_Running, _Sequence]:
        """The branch with most work left; the one that it was before, until another has `PATIENCE` more."""
        most, best = -1, None
        for branch in running.open.values():
            left = branch.left + PATIENCE if branch.number == running.protected else branch.left
            if left > most and branch.live:
                most, best = left, branch
        assert best is not None
        running.protected = best.number
        return running, best

    @staticmethod
    def _candidates(protected: list[tuple[_Running, _Sequence]]) -> Candidates:
        return tuple(
            branching.BranchCandidate(running.request.id, branch.number, running.suffix(branch), branch.left)
            for running, best in protected
            if len(running.open) > 1
            for branch in running.open.values()
            if branch.live and branch is not best
        )

    @staticmethod
    def _stays(protected: list[tuple[_Running, _Sequence]], chosen: set[Unit]) -> int:
        """For how many steps in a row the same branches are protected, and none ends before the last."""
        steps = ALWAYS
        for running, best in protected:
            steps = min(steps, best.left)
            for branch in running.open.values():
                if branch.live and branch is not best:
                    decodes = (running.request.id, branch.number) in chosen
                    steps = min(steps, branch.left if decodes else best.left + PATIENCE - branch.left + 1)
        return steps

    @staticmethod
    def _due(running: _Running) -> float:
        """When its next token is."""
        objective = running.request.objective
        if running.first == inf:
            return running.request.arrival + objective.ttft
        return running.first + running.emitted * objective.tpot

    @staticmethod
    def _left(running: _Running) -> tuple[int, int]:
        """Tokens that it has to decode one after another at most, and beside those."""
        left = [sequence.left for sequence in running.open.values()]
        return running.path + max(left), running.beside + sum(left) - max(left)

    def _observe(
        self, now: float, rows: int, read: int, prefill: tuple[PrefillChunk, ...], candidates: Candidates
    ) -> branching.Observation:
        """The step as `branching.policy` sees it."""
        limits = self.limits
        slacks: list[tuple[int, float, float, int, int]] = []
        for running in chain([self._running[number] for number, _ in self._serial], self._parallel.values()):
            if (due := self._due(running)) < inf:
                slacks.append(
                    (running.request.id, due - now, running.request.objective.tpot, *self._left(running))
                )
        ahead = -sum(part.end - part.begin for part in prefill)
        for (number, _), part in self._unfilled():
            running = self._running[number]
            ahead += part.goal - part.depth
            if number not in self._parallel and (due := self._due(running)) < inf:
                needed = admission.fill_time(self.time, rows, max(0, ahead), limits.chunk)
                slacks.append((number, due - now - needed, 0.0, 0, 0))
        requests, seconds, paces, left, beside = zip(*slacks, strict=True) if slacks else ((),) * 5
        return branching.Observation(
            now, rows, read, tuple((part.end - part.begin, part.end) for part in prefill), requests, seconds,
            paces, left, beside, candidates, limits.rows - rows, self.time, self.predictor.gain,
            self.predictor.margins, self.predictor.widths, limits.rho,
        )  # fmt: skip
