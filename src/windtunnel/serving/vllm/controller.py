"""The engine's scheduler beside vLLM's: sequences of vLLM become requests of the policies, and what the
policies decide for a step becomes a token count for each sequence.

vLLM knows sequences only. Those that belong together (the ``n`` answers of a request, or sequences whose
client names one family) are one request with branches: the blocks with which all their prompts begin are its
parent, which one sequence computes for all, and what each prompt has behind them begins a branch. So the
policies' positions are vLLM's: a chunk ends at the same token in both.

vLLM may compute less than was decided (blocks of hybrid models, a lack of memory): `Controller.scheduled` is
told how far each sequence got, and the policies' step is cut to that. Nothing here imports vLLM.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from windtunnel.base.plain import to_plain
from windtunnel.base.policyfile import Policy
from windtunnel.serving.engine.model import InferenceRequest, Objective, Parallel, Serial, StepTime
from windtunnel.serving.engine.policies import Note, unheard
from windtunnel.serving.engine.policy.scheduler import EngineScheduler, Log
from windtunnel.serving.engine.policy.step import Depths, PrefillChunk, ScheduledStep, StepLimits, Unit
from windtunnel.serving.engine.profile import Point, fit
from windtunnel.serving.prefixcache.policy import POLICIES, Lookup, Retention
from windtunnel.serving.prefixcache.policy.rules import RULES

GATHER = 0.005
"""Seconds after which no further sequence of a family is waited for: the front sends them one by one."""
REFIT, WINDOW, STALLED = 32, 512, 2.0
"""Where no step model was given: after so many steps, and a quarter of those known, it is fitted anew, to so
many recent ones. How fast a host is changes. A step that takes so many times what the others say stood still,
as the first ones of a server do, and tells nothing of those to come: a forecast is of what they take at the
least."""
NOTHING = Objective()


@dataclass(frozen=True, slots=True)
class Arrival:
    """A sequence as it comes. ``name``: vLLM's; ``tokens``: of its prompt; ``most``: that it may decode;
    ``arrival``: seconds on the controller's clock; ``family``: what its branches have in common ("": it has
    none)."""

    name: str
    tokens: Sequence[int]
    most: int
    arrival: float
    objective: Objective = NOTHING
    family: str = ""


@dataclass(slots=True)
class SequenceGroup:
    """A request of the policies and its sequences' names, the first of which computes the parent."""

    request: InferenceRequest
    names: list[str]
    lengths: list[int]

    def name(self, unit: int) -> str:
        return self.names[max(0, unit - 1)]


@dataclass(slots=True)
class StepPlan:
    """One step for vLLM. ``ends``: up to which position a sequence's prompt is computed; ``rows``: sequences
    that decode; ``refused``: those that are gone. Other regulated sequences do nothing in this step."""

    ends: dict[str, int] = field(default_factory=dict)
    rows: set[str] = field(default_factory=set)
    refused: list[str] = field(default_factory=list)


class Controller:
    """``block``: tokens that sequences share as a whole. ``cached``: how many tokens of a sequence's prompt
    vLLM has, and at which depths its prefill must stop. ``time``: None to learn it. ``overlaps``: a step is
    planned when the one before begins to be computed, not when it ends. ``log`` gets every decision, ``note``
    what came and what was done."""

    def __init__(
        self, limits: StepLimits, time: StepTime | None, *, block: int, overlaps: bool = False,
        cached: Callable[[str], tuple[int, Depths]], log: Log | None = None, note: Note | None = None,
        own: Mapping[str, Policy] = {},
    ) -> None:  # fmt: skip
        self.limits, self.block, self._cached, self._note = limits, block, cached, note or unheard
        self._overlaps = overlaps
        self._before: ScheduledStep | None = None  # of overlapping steps the one that is computed
        self._learns = time is None
        first = time or StepTime(0.0, 0.0, 0.0, 0.0, 0.0)
        self.policies = EngineScheduler(limits, first, lookup=self._lookup, log=log, own=own)
        self._groups: dict[int, SequenceGroup] = {}
        self._units: dict[str, tuple[int, int]] = {}  # of each regulated sequence: request, its place there
        self._gathering: dict[str, tuple[float, list[Arrival]]] = {}
        self._gathered: dict[str, None] = {}  # sequences that are still being gathered
        self._ended: set[Unit] = set()
        self._steps: deque[tuple[Point, float]] = deque(maxlen=WINDOW)  # steps and their seconds
        self._unfitted = 0
        self._next = 0
        self._computed: list[tuple[int, int, int]] = []
        self._began: list[tuple[int, int]] = []
        self._depths: dict[int, int] = {}
        self.step: ScheduledStep | None = None
        """The step that vLLM takes now."""
        self._note("engine", limits=to_plain(limits), time=to_plain(first))

    def regulates(self, name: str) -> bool:
        """Whether the policies decide what this sequence does."""
        return name in self._units or name in self._gathered

    # what comes from outside

    def arrive(self, sequence: Arrival, now: float) -> None:
        """It is there from the next `plan` on."""
        family = sequence.family or sequence.name
        _, gathered = self._gathering.get(family, (now, []))
        self._gathering[family] = (now, [*gathered, sequence])
        self._gathered[sequence.name] = None

    def leave(self, name: str) -> None:
        """Nobody waits for the sequence any longer, or vLLM is done with it."""
        if name in self._gathered:
            del self._gathered[name]
            for family, (since, gathered) in list(self._gathering.items()):
                rest = [sequence for sequence in gathered if sequence.name != name]
                self._gathering[family] = (since, rest)
                if not rest:
                    del self._gathering[family]
        if name not in self._units:
            return
        number, place = self._units.pop(name)
        group = self._groups[number]
        if all(other not in self._units for other in group.names):
            self._forget(number)
            self.policies.cancel(number)
        else:
            self._ended.add((number, place + 1))

    def finish(self, name: str) -> None:
        """The sequence has all its tokens: the step that is under way was its last."""
        if name in self._units:
            number, place = self._units.pop(name)
            branches = isinstance(self._groups[number].request.stages[0], Parallel)
            self._ended.add((number, place + 1 if branches else 0))

    # a step

    def plan(self, now: float) -> StepPlan:
        """The next step; `step` is None where the policies have nothing to do."""
        for family, (since, gathered) in list(self._gathering.items()):
            if not gathered[0].family or now - since >= GATHER:
                del self._gathering[family]
                for sequence in gathered:
                    self._gathered.pop(sequence.name, None)
                self._enter(gathered, now)
        self.step = step = self.policies.next(now)
        plan = StepPlan()
        if step is None:
            return plan
        for number in step.refused:
            names = [name for name in self._groups[number].names if name in self._units]
            plan.refused += names
            self._forget(number)
        for chunk in step.prefill:
            plan.ends[self._groups[chunk.request].name(chunk.unit)] = chunk.end
        plan.rows.update(self._groups[number].name(unit) for number, unit in step.rows)
        return plan

    def scheduled(self, counts: Mapping[str, int], reached: Callable[[str], int | None]) -> None:
        """vLLM computes ``counts`` tokens of each sequence in this step, which then has ``reached`` tokens
        computed (None: it is gone). Where that is less than was decided, so is the policies' step."""
        step = self.step
        if step is None:
            return
        chunks: list[PrefillChunk] = []
        self._computed = []
        for chunk in step.prefill:
            name = self._groups[chunk.request].name(chunk.unit)
            if (depth := reached(name)) is None:
                chunks.append(chunk)
                self._ended.add((chunk.request, chunk.unit))
                continue
            end = min(chunk.end, depth)
            if end > chunk.begin:
                chunks.append(chunk if end == chunk.end else replace(chunk, end=end, samples=False))
                self._computed.append((chunk.request, chunk.unit, end - chunk.begin))
        for number, unit in step.rows:
            if count := counts.get(self._groups[number].name(unit), 0):
                self._computed.append((number, unit, count))
        begun: list[tuple[int, int]] = []
        for number in step.admitted:
            name = self._groups[number].names[0]
            computed = counts.get(name, 0)
            begun.append((number, (reached(name) or 0) - computed if computed else self._depths[number]))
        self._began = begun
        step.prefill = tuple(chunks)
        step.__post_init__()

    def done(self, now: float) -> None:
        """The step was taken; what follows is planned next."""
        step, self.step = self.step, None
        if step is None:
            self._before = None
            return
        computed = self._before if self._overlaps else step
        self._before = step if step.work else None
        took = (len(computed.rows), computed.read, computed.chunks, now - step.began) if computed else None
        self._note(
            "step", began=step.began, ended=now, refused=list(step.refused), admitted=self._began,
            computed=self._computed, took=took,
        )  # fmt: skip
        if not step.work:
            return
        if self._overlaps:
            step.measured = False
            if computed is not None:
                self.policies.predictor.measured(len(computed.rows), computed.modelled, now - step.began)
        out = self.policies.done(step, now, self._ended)
        for finished in out.finished:
            self._forget(finished.request.id)
        self._ended = {unit for unit in self._ended.difference(out.ended) if unit[0] in self._groups}
        if self._learns and computed is not None:
            self._learn(computed, now - step.began)

    # sequences and requests

    def _enter(self, sequences: list[Arrival], now: float) -> None:
        """They are a request of the policies from now on; if they can never be served beside others, vLLM
        alone decides on them."""
        self._next += 1
        group = group_sequences(self._next, sequences, self.block)
        why = self.policies.arrive(group.request)
        self._note("arrives", request=to_plain(group.request), refused=why, now=now)
        if not why:
            self._groups[self._next] = group
            self._units |= {name: (self._next, place) for place, name in enumerate(group.names)}

    def _forget(self, number: int) -> None:
        for name in self._groups.pop(number).names:
            self._units.pop(name, None)

    def _lookup(self, request: InferenceRequest) -> tuple[int, Depths]:
        depth, stops = self._cached(self._groups[request.id].names[0])
        depth = min(depth, request.prompt - 1)
        self._note("looked", request=request.id, cached=depth, stops=stops, end=0)
        self._depths[request.id] = depth
        return depth, stops

    def _learn(self, step: ScheduledStep, seconds: float) -> None:
        self._steps.append(((len(step.rows), step.read, step.chunks), seconds))
        self._unfitted += 1
        if self._unfitted >= max(REFIT, len(self._steps) // 4):
            self._unfitted = 0
            points, times = zip(*self._steps, strict=True)
            time, _ = fit(points, times, fused=True)
            usual = [timed for timed in self._steps if timed[1] <= STALLED * time.of(*timed[0])]
            points, times = zip(*(usual or self._steps), strict=True)
            self.policies.time, _ = fit(points, times, fused=True)
            self._note("time", time=to_plain(self.policies.time))


def group_sequences(number: int, sequences: Sequence[Arrival], block: int) -> SequenceGroup:
    """The request that ``sequences`` are to the policies."""
    first, lengths = sequences[0], [len(sequence.tokens) for sequence in sequences]
    stage: Serial | Parallel = Serial(first.most)
    prompt = lengths[0]
    if len(sequences) > 1:
        parent = min(common_length(first.tokens, sequence.tokens) for sequence in sequences) // block * block
        parent = min(parent, (min(lengths) - 1) // block * block)
        prompt = parent + 1
        heads = tuple(length - prompt for length in lengths)
        stage = Parallel(heads, tuple(sequence.most for sequence in sequences))
    request = InferenceRequest(number, first.arrival, prompt, (stage,), first.objective)
    return SequenceGroup(request, [sequence.name for sequence in sequences], lengths)


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens both begin with."""
    if first == second:
        return len(first)
    return next(
        (place for place, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]),
        min(len(first), len(second)),
    )


def limit_tokens(plan: StepPlan, name: str, start: int, count: int) -> int:
    """Of ``count`` tokens that vLLM would compute of a regulated sequence from ``start`` on, those of this
    step. Where vLLM is ahead of the policies, one: a step without it would come again."""
    if name in plan.rows:
        return count
    return min(count, max(1, plan.ends[name] - start)) if name in plan.ends else 0


def choose_depths(rules: str, block: int, prompt: int, depth: int, shared: int) -> tuple[Lookup, Retention]:
    """At which depths, in blocks, a hybrid model's states are kept of a ``prompt`` whose first ``depth``
    tokens are used from a cache that knows ``shared`` (0: no more than those)."""
    # the last block may be a part of one
    length, matched = -(-prompt // block), max(shared, depth) // block
    observation = Lookup(RULES[rules], block, length, matched, depth // block)
    decision = POLICIES[rules](observation)
    assert isinstance(decision, Retention)
    return observation, decision
