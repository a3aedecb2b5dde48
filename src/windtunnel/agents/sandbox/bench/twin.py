"""How close the twin comes to measured runs: eight sandboxes at once, under two policies.

The costs are measured in the same run, so that the machine's load is the same for both; the twin gets the
commands, think times and classes of the measured run and has to find what checkpoints add.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from windtunnel.agents.sandbox.bench.harness import new_name, opened, own_home
from windtunnel.agents.sandbox.bench.overhead import Start, loads
from windtunnel.agents.sandbox.bench.sessions import Seat
from windtunnel.agents.sandbox.calibrate import calibrate
from windtunnel.agents.sandbox.live.box import Box
from windtunnel.agents.sandbox.live.engine import Pending
from windtunnel.agents.sandbox.live.host import Host
from windtunnel.agents.sandbox.model import TurnClass
from windtunnel.agents.sandbox.policy import Keep, Look, Occasion, PolicyName
from windtunnel.agents.sandbox.traces.replay import begin
from windtunnel.agents.sandbox.traces.schema import Trace
from windtunnel.agents.sandbox.twin.observed import BOUND, ObservedBox, ObservedRun, ObservedTurn, validate
from windtunnel.bench.measure import side_by_side
from windtunnel.bench.rows import Row

THINK, QUICK_THINK = 24.0, 8.0
POLICIES: tuple[PolicyName, ...] = ("semantic", "full")


def twin_rows(quick: bool) -> Iterator[Row]:
    with own_home() as home:
        costs = calibrate(home / "costs.json", quick=quick, home=home / "calibration").costs
        traces = loads(QUICK_THINK if quick else THINK)
        runs = [_observed(home, policy, traces) for policy in POLICIES]
    for one in validate(runs, costs):
        yield Row(
            "twin",
            f"{one.what}, {one.sandboxes} sandboxes, {one.policy}",
            "s",
            measured=one.measured,
            emulated=one.emulated,
            target=f"<= {BOUND:.0%}",
            met=one.holds,
        )


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
