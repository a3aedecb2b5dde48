"""Play a trace on a live sandbox and note what every turn took, for the twin to be held against."""

from __future__ import annotations

import time
from collections.abc import Callable

from windtunnel.agents.sandbox.live.box import Box
from windtunnel.agents.sandbox.live.engine import Pending
from windtunnel.agents.sandbox.model import TurnClass
from windtunnel.agents.sandbox.policy import Keep, Look, Occasion
from windtunnel.agents.sandbox.traces.schema import Trace
from windtunnel.agents.sandbox.twin.observed import ObservedBox, ObservedTurn


def record(
    box: Box, trace: Trace, *, epoch: float, sleep: Callable[[float], None] = time.sleep
) -> ObservedBox:
    """Play a trace that has begun (``replay.begin``) on a live sandbox, one turn a command, and note what it
    took. ``epoch``: ``time.monotonic()`` when the run of all sandboxes began."""
    before = {manifest.id for manifest in box.log()[0]}
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
    made = tuple(manifest for manifest in box.log()[0] if manifest.id not in before)
    return ObservedBox(began - epoch, seconds, tuple(turns), made)
