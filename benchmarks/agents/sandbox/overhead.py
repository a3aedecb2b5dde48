"""Many sandboxes on one machine: what checkpoints add to their time, and how close the twin comes to it.

``overhead``: eight sandboxes play eight sessions at once, with the think times of the sessions,
under each policy in turn, several times over. A turn's checkpoint starts with the request to the model and
the next turn begins when the reply has come *and* the checkpoint is safe; what it waits beyond the reply is
the gate. The figure is, for each sandbox, its time over that of the same session without checkpoints in the
same repeat; the median over sandboxes and repeats. Crab (arXiv 2604.28138) publishes 1.9 %.

``twin``: the same under two policies, beside the twin. The costs are measured in the same run, so that the
machine's load is the same for both. The twin gets the commands' own seconds and CPU, the think times and what
the inspector saw of each turn; what it must find by itself is what is kept, how long checkpoints take when
they share the machine, and what of that somebody waited for.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from statistics import fmean

from benchmarks.agents.sandbox.harness import SOURCE, Seat, new_name, open_host, own_home
from benchmarks.agents.sandbox.sessions import begin, shipped
from benchmarks.harness.measure import in_turn, ratios, side_by_side
from benchmarks.harness.rows import Row, figure
from windtunnel.agents.sandbox.box import Box
from windtunnel.agents.sandbox.calibrate import calibrate_here
from windtunnel.agents.sandbox.context import Pending
from windtunnel.agents.sandbox.costs import SandboxCosts, load_costs
from windtunnel.agents.sandbox.host import SandboxHost
from windtunnel.agents.sandbox.model import CheckpointManifest, TurnClass, TurnEffects, TurnRecord
from windtunnel.agents.sandbox.policy import CheckpointPlan, CheckpointRequest, Occasion, PolicyName
from windtunnel.agents.sandbox.policy.queues import RETENTION
from windtunnel.agents.sandbox.traces import Trace
from windtunnel.agents.sandbox.twin import TurnLoad
from windtunnel.agents.sandbox.twin.questions import quantile
from windtunnel.agents.sandbox.twin.world import EmulatedHost, SandboxWorld, SessionsOutcome


@dataclass(frozen=True)
class ObservedTurn:
    """What one turn took, in seconds, and what was seen and decided at its end. ``gate``: how long the next
    turn waited for this one's checkpoint (None after the last). ``checkpoint``: the id of the manifest, where
    the turn made one; ``safe``: from the turn's end until it was, 0 for none."""

    run: float
    cpu: float
    think: float
    look: CheckpointRequest
    keep: CheckpointPlan
    gate: float | None
    checkpoint: str = ""
    safe: float = 0.0


@dataclass(frozen=True)
class ObservedBox:
    """One sandbox's run, and how long it took."""

    seconds: float
    turns: tuple[ObservedTurn, ...]
    manifests: tuple[CheckpointManifest, ...]


@dataclass(frozen=True)
class ObservedRun:
    """Sandboxes that began together on one host."""

    cores: int
    workers: int
    policy: PolicyName
    boxes: tuple[ObservedBox, ...]


def observed_from(box: ObservedBox, costs: SandboxCosts) -> tuple[TurnLoad, ...]:
    """The load of what was observed. Memory and processes are those of the newest image; what a turn changed
    of them is what its image added to the page store."""
    manifests = {manifest.id: manifest for manifest in box.manifests}
    memory, processes = 0.0, 0
    loads = []
    for turn in box.turns:
        manifest, decided = manifests.get(turn.checkpoint), turn.keep.content
        dirty = files = 0.0
        if manifest is not None and decided is TurnClass.FULL and manifest.image is not None:
            image = manifest.image
            processes = max(0, len(image.processes) - 2)
            memory = max(0.0, image.bytes_raw - costs.image_bytes(0, processes))
            dirty = max(0.0, image.bytes_new - costs.new_base) / max(costs.new_per_byte, 1e-6)
        if manifest is not None and decided >= TurnClass.FILES and manifest.files is not None:
            files = max(0.0, manifest.files.bytes_new - costs.files_new)
        loads.append(
            TurnLoad(
                run_wall=turn.run,
                run_cpu=turn.cpu,
                think=turn.think,
                # what nobody looked at is nothing, and the policy that ran did not ask
                effects=turn.look.effects or TurnEffects(),
                references=turn.look.references,
                cumulative=True,
                memory=memory,
                processes=processes,
                dirty=dirty,
                files=files,
            )
        )
    return tuple(loads)


def emulated(run: ObservedRun, costs: SandboxCosts) -> SessionsOutcome:
    """The same run on the twin. Commands were measured where they shared the CPUs with one another, so their
    seconds hold that already: the twin adds only what checkpoints take."""
    looks = [turn.look for box in run.boxes for turn in box.turns] or [CheckpointRequest(Occasion.TURN)]
    machine = EmulatedHost(cores=run.cores, workers=run.workers, images=looks[0].images_possible)
    sessions = [observed_from(box, costs) for box in run.boxes]
    return SandboxWorld(machine, costs, run.policy, sessions, [0.0] * len(sessions)).run()


def compared(run: ObservedRun, costs: SandboxCosts) -> dict[str, tuple[float, float]]:
    """Totals, gate waits and freezes of a measured run, in seconds, beside the twin's."""
    outcome = emulated(run, costs)
    manifests = {manifest.id: manifest for box in run.boxes for manifest in box.manifests}
    turns = [turn for box in run.boxes for turn in box.turns if turn.keep.content >= TurnClass.FILES]
    freezes = [manifests[turn.checkpoint].freeze_seconds for turn in turns if turn.checkpoint in manifests]
    gates = [turn.gate for box in run.boxes for turn in box.turns if turn.gate is not None]
    frozen = [each.freeze for each in outcome.checkpoints if each.turn_class >= TurnClass.FILES]
    totals = [box.seconds for box in run.boxes]
    return {
        "total seconds, mean": (fmean(totals), fmean(outcome.ends)),
        "gate wait, mean": (fmean(gates or [0.0]), fmean(outcome.gates or [0.0])),
        "gate wait, p95": (quantile(gates, 0.95), quantile(outcome.gates, 0.95)),
        "freeze, p95": (quantile(freezes, 0.95), quantile(frozen, 0.95)),
    }


SANDBOXES = 8
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


def overhead_rows(quick: bool) -> Iterator[Row]:
    """What of the checkpoints of each policy hid behind the think times, and what they add to the time of a
    session without, in the same repeat."""
    traces = loads(QUICK_THINK if quick else THINK)
    with own_home() as home:
        _observed(home, "semantic", [part(trace, 0.2) for trace in traces])  # warm
        arms = {name: partial(_observed, home, policy, traces) for name, policy in POLICIES.items()}
        runs = in_turn(arms, 1 if quick else 3)
    free = [box.seconds for run in runs[FREE] for box in run.boxes]
    for policy in [*runs][1:]:
        boxes = [box for run in runs[policy] for box in run.boxes]
        turns = [turn for box in boxes for turn in box.turns]
        words = f"{len(runs[policy][0].boxes)} sandboxes, {policy}"
        jobs = [turn for turn in turns if turn.safe]
        covered = sum(turn.safe <= turn.think for turn in jobs) / len(jobs) if jobs else None
        seconds, waits = [turn.safe for turn in jobs], [max(0.0, turn.safe - turn.think) for turn in turns]
        late, gate = (1e3 * quantile(each, 0.95) for each in (seconds, waits))
        note = f"{len(jobs)} checkpoints; 95th percentile {late:.0f} ms, of waits at the gate {gate:.0f} ms"
        yield figure(f"checkpoints done inside the think time, {words}", "", covered)
        yield figure(f"from request to safe, {words}", "s", seconds, note=note)
        more = [over - 1 for over in ratios((box.seconds for box in boxes), free)]
        goal = "<= 1.9 %" if policy == "semantic" else ""
        name = f"run time over fault-free, {words}"
        yield figure(name, "", more, goal, published=0.019, source=SOURCE)


def loads(think: float) -> list[Trace]:
    """Sessions of equal length: as many turns of each as ``think`` seconds of thinking hold."""
    return [part(trace, think) for trace in islice(cycle(shipped()), SANDBOXES)]


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


def twin_rows(quick: bool) -> Iterator[Row]:
    with own_home() as home:
        measured = calibrate_here(quick, lambda *_: None, path=home / "costs.json", home=home / "calibration")
        costs = load_costs(measured.path).costs
        traces = loads((QUICK_THINK if quick else THINK) / 2)
        runs = [_observed(home, policy, traces) for policy in TWIN_POLICIES]
    for run in runs:
        for quantity, (seconds, twin) in compared(run, costs).items():
            words = f"{quantity}, {len(run.boxes)} sandboxes, {run.policy}"
            close = abs(twin - seconds) <= BOUND * seconds or max(seconds, twin) <= FLOOR
            yield figure(words, "s", seconds, f"<= {BOUND:.0%}", emulated=twin, passed=close)


def _observed(home: Path, policy: PolicyName, traces: Sequence[Trace]) -> ObservedRun:
    start, end = threading.Barrier(len(traces)), threading.Event()

    def give_up() -> None:
        end.set()
        start.abort()

    with open_host(home, retention=RETENTION, policy=policy) as host:
        jobs = [partial(_recorded, host, trace, start, end) for trace in traces]
        boxes = side_by_side(jobs, len(traces), give_up)
        workers = host.context.engine.workers
    return ObservedRun(os.cpu_count() or 1, workers, policy, tuple(boxes))


def _recorded(host: SandboxHost, trace: Trace, start: threading.Barrier, end: threading.Event) -> ObservedBox:
    """Of one session; all begin at once. With ``end`` the model thinks no longer."""
    seat = Seat.new(host, new_name("twin"))
    begin(trace, seat)
    seat.save()
    start.wait()
    return record(seat.box, trace, end.wait)


def record(box: Box, trace: Trace, sleep: Callable[[float], object] = time.sleep) -> ObservedBox:
    """Play a trace that has begun (`sessions.begin`) on a live sandbox, one turn a command, and note what it
    took."""
    before = {manifest.id for manifest in box.log().checkpoints}
    earlier = len(box.decisions())
    began = time.monotonic()
    ended: list[tuple[float, float, float, Pending[TurnRecord]]] = []
    gates: list[float | None] = []
    for turn in trace.turns:
        began_at, cpu = time.monotonic(), box.machine().cgroup.usage()[0]
        result = box.run(turn.command, shell=turn.shell, timeout=turn.timeout)
        took = time.monotonic() - began_at
        if ended:
            # the gate is what the pending checkpoint still needed when the command was asked for
            gates.append(max(0.0, min(took, ended[-1][3].finished - began_at)))
        used = min(box.machine().cgroup.usage()[0] - cpu, result.seconds)
        ended.append((result.seconds, used, time.monotonic(), box.end_turn()))
        sleep(turn.think)
    seconds = time.monotonic() - began
    lines = [pending.wait() for *_, pending in ended]
    turn_ends = [
        (look, keep)
        for look, keep in box.decisions()[earlier:]
        if isinstance(look, CheckpointRequest)
        and isinstance(keep, CheckpointPlan)
        and look.occasion is Occasion.TURN
    ]
    turns = tuple(
        ObservedTurn(
            run, used, turn.think, look, keep, gate, line.checkpoint if keep.content > TurnClass.NONE else "",
            pending.finished - done if pending.job else 0.0,
        )
        for turn, (run, used, done, pending), gate, line, (look, keep) in zip(
            trace.turns, ended, [*gates, None], lines, turn_ends, strict=True
        )
    )  # fmt: skip
    manifests = tuple(manifest for manifest in box.log().checkpoints if manifest.id not in before)
    return ObservedBox(seconds, turns, manifests)
