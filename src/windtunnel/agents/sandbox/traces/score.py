"""Did a recovery lose anything, and is a class too weak? Runs and looks against each other, part by part.

Protocol of a recovery: run the trace twice without a fault and reject it unless both runs agree; then kill at
a turn, recover, play the remaining turns, and compare later outputs, files, processes, and live services. A
recovery is correct when all four are equal.

The *referee* tells the least class of a turn that two full looks at the sandbox, before and after it, allow.
It is independent of the inspector: it re-reads every file and every descriptor. It sees less than the truth
in one place, the memory of processes: there it sees only what a probe tells. So a class that it calls too
weak *is* too weak; that it objects to none does not prove a class (the kills do that).

Source: Crab (arXiv 2604.28138), evaluation of recovery correctness.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from windtunnel.agents.sandbox.model import TurnClass
from windtunnel.agents.sandbox.traces.observe import Observation
from windtunnel.agents.sandbox.traces.replay import Output, TraceRejected, begin, play
from windtunnel.agents.sandbox.traces.schema import Trace, TraceTurn

DIED = frozenset({"shell-died", "sandbox-died"})


@dataclass(frozen=True)
class RecoveryScore:
    """Which parts agree with the fault-free run, and in words what does not."""

    outputs: bool
    files: bool
    processes: bool
    probes: bool
    """Answers of live services, and open ports."""
    differences: tuple[str, ...] = ()

    @property
    def correct(self) -> bool:
        return self.outputs and self.files and self.processes and self.probes


@dataclass(frozen=True)
class Recovered:
    """A run with one kill: its score, what was seen at its end, and the sandbox that played it to the end."""

    score: RecoveryScore
    seen: Observation
    box: Any
    inside: bool
    """The kill landed inside a turn."""


def compare(reference: Observation, seen: Observation, after: int = 0) -> RecoveryScore:
    """Score ``seen`` against a fault-free run; outputs count from the turn after ``after`` on."""
    outputs = _outputs(reference.outputs[after:], seen.outputs[after:])
    files = _mapping("file", reference.tree, seen.tree)
    processes = _processes(reference.processes, seen.processes)
    probes = _mapping("probe", reference.probes, seen.probes)
    if reference.ports != seen.ports:
        probes.append(f"open ports {list(seen.ports)}, {list(reference.ports)} in the fault-free run")
    return RecoveryScore(
        outputs=not outputs,
        files=not files,
        processes=not processes,
        probes=not probes,
        differences=(*outputs, *files, *processes, *probes),
    )


def agreed(trace: Trace, first: Observation, second: Observation) -> Observation:
    """The reference of a trace: what two fault-free runs both showed. TraceRejected when they differ."""
    score = compare(first, second)
    if not score.correct:
        raise TraceRejected(
            f"trace {trace.name}: two fault-free runs differ, so no recovery can be judged by it: "
            f"{score.differences[0]}"
        )
    return first


def recovery(
    trace: Trace,
    box: Any,
    *,
    after: int,
    reference: Observation,
    look: Callable[[Any, tuple[Output, ...]], Observation],
    kill: Callable[[Any, int], None],
    recover: Callable[[Any, int], Any],
    on_open: Callable[[Any], None] | None = None,
    end_turn: Callable[[Any, TraceTurn, Output], None] | None = None,
    arm: Callable[[Any, int], None] | None = None,
) -> Recovered:
    """Play the trace with one kill after turn ``after``, and score it.

    ``on_open`` and ``end_turn`` are where a policy takes its checkpoints. ``kill`` ends everything that runs;
    ``recover`` brings back what it can and returns the sandbox to go on with. With ``arm``, the kill is meant
    to land *inside* turn ``after + 1``: it is armed just before that turn. If it comes too late for that,
    ``kill`` follows the turn, before its checkpoint. Either way the turn is run again after the recovery.
    """
    if not 1 <= after <= len(trace.turns) - (arm is not None):
        raise ValueError(f"kill after turn {after}: the trace has {len(trace.turns)} turns")
    begin(trace, box)
    if on_open is not None:
        on_open(box)
    outputs: list[Output] = []
    inside = False
    for turn in trace.turns:
        armed = arm is not None and turn.turn == after + 1
        if armed and arm is not None:
            arm(box, after)
        output = play(box, turn)
        if armed:
            inside = output.ended in DIED
            if not inside:
                kill(box, after)
            box = recover(box, after)
            output = play(box, turn)
        outputs.append(output)
        if end_turn is not None:
            end_turn(box, turn, output)
        if arm is None and turn.turn == after:
            kill(box, after)
            box = recover(box, after)
    seen = look(box, tuple(outputs))
    return Recovered(compare(reference, seen, after), seen, box, inside)


def _outputs(reference: tuple[Output, ...], seen: tuple[Output, ...]) -> list[str]:
    found = []
    for wanted, got in zip(reference, seen, strict=False):
        if wanted.shown != got.shown:
            found.append(
                f"turn {wanted.turn}: {got.stdout[-80:]!r} ({got.ended} {got.exit_code}), "
                f"{wanted.stdout[-80:]!r} ({wanted.ended} {wanted.exit_code}) in the fault-free run"
            )
    if len(reference) != len(seen):
        found.append(f"{len(seen)} turns played, {len(reference)} in the fault-free run")
    return found


def _mapping(what: str, reference: Mapping[str, str], seen: Mapping[str, str]) -> list[str]:
    found = []
    for name in sorted(reference.keys() | seen.keys()):
        wanted, got = reference.get(name), seen.get(name)
        if wanted != got:
            found.append(f"{what} {name}: {got or 'absent'}, {wanted or 'absent'} in the fault-free run")
    return found


def _processes(reference: tuple[str, ...], seen: tuple[str, ...]) -> list[str]:
    left = list(seen)
    found = []
    for command in reference:
        if command in left:
            left.remove(command)
        else:
            found.append(f"process {command} is gone")
    return found + [f"process {command} is too many" for command in left]


def least(before: Observation, after: Observation) -> tuple[TurnClass, tuple[str, ...]]:
    """The weakest class that loses nothing of what differs, with its reasons."""
    full = [f"{one} started" for one in sorted(after.pids - before.pids)]
    full += [f"{one} ended" for one in sorted(before.pids - after.pids)]
    if before.processes != after.processes and not full:
        full.append("the command lines differ")
    for one in sorted(before.pids & after.pids):
        if before.descriptors.get(one) != after.descriptors.get(one):
            full.append(f"{one} has other descriptors")
    full += [
        f"service {name} answers otherwise"
        for name in sorted(before.probes.keys() & after.probes.keys())
        if before.probes[name] != after.probes[name]
    ]
    if before.ports != after.ports:
        full.append(f"open ports were {list(before.ports)}, are {list(after.ports)}")
    if full:
        return TurnClass.FULL, tuple(full)
    paths = before.tree.keys() | after.tree.keys()
    files = [path for path in sorted(paths) if before.tree.get(path) != after.tree.get(path)]
    if files:
        return TurnClass.FILES, tuple(f"{path} differs" for path in files)
    shells = sorted(
        name
        for name in before.shells.keys() | after.shells.keys()
        if before.shells.get(name) != after.shells.get(name)
    )
    if shells:
        return TurnClass.SHELL, tuple(f"state of shell {name} differs" for name in shells)
    return TurnClass.NONE, ()


def weaker(decided: TurnClass, before: Observation, after: Observation) -> str:
    """Why ``decided`` is too weak, in words; empty when the two looks do not contradict it."""
    truth, reasons = least(before, after)
    if decided >= truth:
        return ""
    return f"class {decided.word} was decided, but at least {truth.word} is needed: {reasons[0]}"
