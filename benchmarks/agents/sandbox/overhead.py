"""Many sandboxes on one machine: what checkpoints add to their time, and how close the twin comes to it.

``overhead``: eight sandboxes play eight sessions at once, with the think times of the sessions,
under each policy in turn, several times over. A turn's checkpoint starts with the request to the model and
the next turn begins when the reply has come *and* the checkpoint is safe; what it waits beyond the reply is
the gate. The figure is, for each sandbox, its time over that of the same session without checkpoints in the
same repeat; the median over sandboxes and repeats. Crab (arXiv 2604.28138) publishes 1.9 %.

``thinking``: the same for eight and for sixteen with half of the think time, as the policy decides alone: how
many checkpoints are safe before the model has thought, and what they add.

``twin``: the same under two policies, beside the twin. The costs are measured in the same run, so that the
machine's load is the same for both; the twin gets the commands, think times and what was seen of each turn,
and has to find what checkpoints add.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from benchmarks.agents.sandbox.generate import generate
from benchmarks.agents.sandbox.harness import SOURCE, WAIT, Seat, new_name, opened, own_home
from benchmarks.agents.sandbox.observed import ObservedBox, ObservedRun, ObservedTurn, compared
from benchmarks.agents.sandbox.sessions import begin, play, shipped
from benchmarks.harness.measure import conditions, in_turn, side_by_side, spread
from benchmarks.harness.rows import Row, figure
from windtunnel.agents.sandbox.box import Box
from windtunnel.agents.sandbox.calibrate import calibrate
from windtunnel.agents.sandbox.context import Pending
from windtunnel.agents.sandbox.errors import SandboxError
from windtunnel.agents.sandbox.host import Host
from windtunnel.agents.sandbox.model import TurnClass
from windtunnel.agents.sandbox.policy import Keep, Look, Occasion, PolicyName, Retention
from windtunnel.agents.sandbox.traces import Trace

SANDBOXES, THINKING = 8, (8, 16)
THINK, QUICK_THINK = 48.0, 12.0
"""Seconds of think time that are played of each session."""
FREE = "no checkpoints"
POLICIES: dict[str, PolicyName] = {
    FREE: "conversation", "semantic": "semantic", "full every turn": "full",
}  # fmt: skip
BOUND, FLOOR = 0.20, 0.002
"""How far the twin may be off before its larger figures are to be trusted; and seconds that no measurement
here resolves."""
TWIN_POLICIES: tuple[PolicyName, ...] = ("semantic", "full")
Batch = list["Ran"]
"""All sandboxes of one policy in one repeat."""


@dataclass
class Ran:
    """One session under one policy. ``waits``: seconds at the gate after the reply, of every turn;
    ``covered``: for each turn with a checkpoint, whether it was safe when the reply came; ``jobs``: seconds
    from the request to the safe checkpoint."""

    seconds: float = 0.0
    waits: list[float] = field(default_factory=list)
    covered: list[bool] = field(default_factory=list)
    jobs: list[float] = field(default_factory=list)


def overhead_rows(quick: bool) -> Iterator[Row]:
    busy = conditions()
    batches = measured(loads(QUICK_THINK if quick else THINK), POLICIES, 1 if quick else 3)
    yield from rows(batches, busy)


def thinking_rows(quick: bool) -> Iterator[Row]:
    for sandboxes in THINKING:
        traces, busy = loads((QUICK_THINK if quick else THINK) / 2, sandboxes), conditions()
        batches = measured(traces, {FREE: POLICIES[FREE], "semantic": "semantic"}, 1 if quick else 2)
        yield from rows(batches, busy)


def rows(batches: dict[str, list[Batch]], remark: str) -> Iterator[Row]:
    """What of the checkpoints of each policy hid behind the think times, and what they add."""
    free = batches[FREE]
    for policy, found in batches.items():
        if policy == FREE:
            continue
        runs, words = [run for batch in found for run in batch], f"{len(free[0])} sandboxes, {policy}"
        covered = [one for run in runs for one in run.covered]
        jobs, waits = (
            spread(j for run in runs for j in run.jobs),
            spread(w for run in runs for w in run.waits),
        )
        part = sum(covered) / len(covered) if covered else None
        yield figure(
            f"checkpoints done inside the think time, {words}", "", part,
            note=f"{remark}; {len(covered)} checkpoints, from request to safe: median"
            f" {jobs.median * 1e3:.0f} ms, 95th percentile {jobs.p95 * 1e3:.0f} ms; wait at the gate, 95th"
            f" percentile {waits.p95 * 1e3:.0f} ms",
        )  # fmt: skip
        more = ratios(free, found)
        yield figure(
            f"run time over fault-free, {words}", "", statistics.median(more),
            "<= 1.9 %" if policy == "semantic" else "", published=0.019, source=SOURCE,
            note=f"median of {len(more)} sandboxes; least {min(more):.2%}, most {max(more):.2%}",
        )  # fmt: skip


def ratios(free: Sequence[Batch], found: Sequence[Batch]) -> list[float]:
    """Of each sandbox in each repeat: its time over that of the same session without checkpoints, less 1."""
    return [
        run.seconds / base.seconds - 1
        for bases, batch in zip(free, found, strict=True)
        for base, run in zip(bases, batch, strict=True)
    ]


def measured(
    traces: Sequence[Trace], policies: dict[str, PolicyName], repeats: int
) -> dict[str, list[Batch]]:
    """Batches of each policy; in every repeat the policies come in another order."""
    with own_home() as home:
        _batch(home, "semantic", [part(trace, 0.2) for trace in traces])
        arms = {name: partial(_batch, home, policy, traces) for name, policy in policies.items()}
        return in_turn(arms, repeats)


def loads(think: float = THINK, sandboxes: int = SANDBOXES) -> list[Trace]:
    """Sessions of equal length: as many turns of each as ``think`` seconds of thinking hold."""
    traces = [*shipped(), *(generate(32, seed=seed) for seed in range(sandboxes))]
    return [part(trace, think) for trace in traces[:sandboxes]]


def part(trace: Trace, think: float) -> Trace:
    """The turns from the first on, as far as their think times fit; the last one thinks for what is left."""
    turns, left = [], think
    for turn in trace.turns:
        if turn.think >= left or turn is trace.turns[-1]:
            turns.append(replace(turn, think=left))
            break
        turns.append(turn)
        left -= turn.think
    return replace(trace, turns=tuple(turns))


def _batch(home: Path, policy: PolicyName, traces: Sequence[Trace]) -> Batch:
    start = Start(len(traces))
    with opened(home, retention=Retention(), policy=policy) as host:
        jobs = [partial(_session, host, trace, policy == "conversation", start) for trace in traces]
        return side_by_side(jobs, len(traces), start.give_up)


class Start:
    """Where sessions wait for one another, so that all begin at once; and how they are told to end."""

    def __init__(self, sessions: int) -> None:
        self._barrier = threading.Barrier(sessions)
        self._end = threading.Event()

    def give_up(self) -> None:
        self._end.set()
        self._barrier.abort()

    def wait(self) -> None:
        self._barrier.wait()

    def sleep(self, seconds: float) -> None:
        """Raises SandboxError when the run was given up meanwhile."""
        if self._end.wait(seconds):
            raise SandboxError("the run was given up")


def _session(host: Host, trace: Trace, free: bool, start: Start) -> Ran:
    seat = Seat.new(host, new_name("busy"))
    begin(trace, seat)
    if not free:
        seat.save()
    ran = Ran()
    start.wait()
    began = time.monotonic()
    for turn in trace.turns:
        play(seat, turn)
        asked = time.monotonic()
        reply = asked + turn.think
        pending = None if free else seat.box.end_turn()
        start.sleep(max(0.0, reply - time.monotonic()))
        if pending is None:
            continue
        if pending.job:
            ran.covered.append(pending.done)
        arrived = time.monotonic()
        pending.promote()
        pending.wait(WAIT)
        ran.waits.append(time.monotonic() - arrived)
        if pending.job:
            ran.jobs.append(pending.finished - asked)
    ran.seconds = time.monotonic() - began
    return ran


def twin_rows(quick: bool) -> Iterator[Row]:
    with own_home() as home:
        costs = calibrate(home / "costs.json", quick=quick, home=home / "calibration").costs
        traces = loads((QUICK_THINK if quick else THINK) / 2)
        runs = [_observed(home, policy, traces) for policy in TWIN_POLICIES]
    for run in runs:
        for what, (seconds, twin) in compared(run, costs).items():
            words = f"{what}, {len(run.boxes)} sandboxes, {run.policy}"
            met = abs(twin - seconds) <= BOUND * seconds or max(seconds, twin) <= FLOOR
            yield figure(words, "s", seconds, f"<= {BOUND:.0%}", emulated=twin, met=met)


def _observed(home: Path, policy: PolicyName, traces: Sequence[Trace]) -> ObservedRun:
    start = Start(len(traces))
    with opened(home, policy=policy) as host:
        jobs = [partial(_recorded, host, trace, start) for trace in traces]
        boxes = side_by_side(jobs, len(traces), start.give_up)
        workers = host.context.engine.workers
    return ObservedRun(os.cpu_count() or 1, workers, policy, tuple(boxes))


def _recorded(host: Host, trace: Trace, start: Start) -> ObservedBox:
    seat = Seat.new(host, new_name("twin"))
    begin(trace, seat)
    seat.save()
    start.wait()
    return record(seat.box, trace, epoch=time.monotonic(), sleep=start.sleep)


def record(
    box: Box, trace: Trace, *, epoch: float, sleep: Callable[[float], None] = time.sleep
) -> ObservedBox:
    """Play a trace that has begun (``replay.begin``) on a live sandbox, one turn a command, and note what it
    took. ``epoch``: ``time.monotonic()`` when the run of all sandboxes began."""
    before = {manifest.id for manifest in box.log().checkpoints}
    known = len(box.decisions())
    began = time.monotonic()
    rows: list[tuple[float, float, float, Pending]] = []
    gates: list[float] = []
    for turn in trace.turns:
        asked, cpu = time.monotonic(), box.machine().cgroup.usage()[0]
        result = box.run(turn.command, shell=turn.shell, timeout=turn.timeout)
        took = time.monotonic() - asked
        if rows:
            # the gate is what the pending checkpoint still needed when the command was asked for
            gates.append(max(0.0, min(took, rows[-1][3].finished - asked)))
        used = box.machine().cgroup.usage()[0] - cpu
        pending = box.end_turn()
        rows.append((result.seconds, min(used, result.seconds), turn.think, pending))
        sleep(turn.think)
    seconds = time.monotonic() - began
    lines = [pending.wait() for *_, pending in rows]
    ends = [
        (look, keep)
        for look, keep in box.decisions()[known:]
        if isinstance(look, Look) and isinstance(keep, Keep) and look.occasion is Occasion.TURN
    ]
    turns = []
    for place, ((run, used, think, _), (look, keep)) in enumerate(zip(rows, ends, strict=True)):
        gate = gates[place] if place < len(gates) else None
        kept = lines[place].checkpoint if keep.made > TurnClass.NONE else ""
        turns.append(ObservedTurn(run, used, think, look, keep, gate, kept))
    made = tuple(manifest for manifest in box.log().checkpoints if manifest.id not in before)
    return ObservedBox(began - epoch, seconds, tuple(turns), made)
