"""The least class of a turn that two full looks at the sandbox, before and after it, allow.

The referee is independent of the inspector: it re-reads every file and every descriptor. It sees less than
the truth in one place, the memory of processes: there it sees only what a probe tells. So a class that it
calls too weak *is* too weak; that it objects to none does not prove a class (the kills do that).
"""

from __future__ import annotations

from windtunnel.agents.sandbox.model import TurnClass
from windtunnel.agents.sandbox.traces.observe import Observation


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
