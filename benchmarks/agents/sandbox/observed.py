"""Runs that were measured, played again by the twin.

The twin gets the commands' own seconds and CPU, the think times and what the inspector saw of each turn; what
it must find by itself is what is kept, how long checkpoints take when they share the machine, and what of
that somebody waited for.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from windtunnel.agents.sandbox.costs import SandboxCosts
from windtunnel.agents.sandbox.model import Effects, Manifest, TurnClass
from windtunnel.agents.sandbox.policy import Keep, Look, Occasion, PolicyName
from windtunnel.agents.sandbox.twin import TurnLoad
from windtunnel.agents.sandbox.twin.questions import quantile
from windtunnel.agents.sandbox.twin.world import EmulatedHost, SandboxWorld, SessionsOutcome


@dataclass(frozen=True)
class ObservedTurn:
    """What one turn took, in seconds, and what was seen and decided at its end. ``gate``: how long the next
    turn waited for this one's checkpoint (None after the last). ``checkpoint``: the id of the manifest, where
    the turn made one."""

    run: float
    cpu: float
    think: float
    look: Look
    keep: Keep
    gate: float | None
    checkpoint: str = ""


@dataclass(frozen=True)
class ObservedBox:
    """One sandbox's run: when it began (seconds after the first of the run) and how long it took."""

    began: float
    seconds: float
    turns: tuple[ObservedTurn, ...]
    manifests: tuple[Manifest, ...]


@dataclass(frozen=True)
class ObservedRun:
    """Sandboxes that ran together on one host."""

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
        manifest, made = manifests.get(turn.checkpoint), turn.keep.made
        dirty = files = 0.0
        if manifest is not None and made is TurnClass.FULL and manifest.image is not None:
            image = manifest.image
            processes = max(0, len(image.processes) - 2)
            memory = max(0.0, image.bytes_raw - costs.image_bytes(0, processes))
            dirty = max(0.0, image.bytes_new - costs.new_base) / max(costs.new_per_byte, 1e-6)
        if manifest is not None and made >= TurnClass.FILES and manifest.files is not None:
            files = max(0.0, manifest.files.bytes_new - costs.files_new)
        loads.append(
            TurnLoad(
                run_wall=turn.run,
                run_cpu=turn.cpu,
                think=turn.think,
                # what nobody looked at is nothing, and the policy that ran did not ask
                effects=turn.look.effects or Effects(),
                references=turn.look.references,
                seen_whole=True,
                memory=memory,
                processes=processes,
                dirty=dirty,
                files=files,
            )
        )
    return tuple(loads)


def emulated(run: ObservedRun, costs: SandboxCosts, *, disk: float = 1e9) -> SessionsOutcome:
    """The same run on the twin. Commands were measured where they shared the CPUs with one another, so their
    seconds hold that already: the twin adds only what checkpoints take."""
    looks = [turn.look for box in run.boxes for turn in box.turns] or [Look(Occasion.TURN)]
    machine = EmulatedHost(cores=run.cores, disk=disk, workers=run.workers, images=looks[0].images_possible)
    world = SandboxWorld(
        machine,
        costs,
        run.policy,
        [observed_from(box, costs) for box in run.boxes],
        [box.began for box in run.boxes],
    )
    return world.run()


def compared(run: ObservedRun, costs: SandboxCosts) -> dict[str, tuple[float, float]]:
    """Totals, gate waits and freezes of a measured run, in seconds, beside the twin's."""
    outcome = emulated(run, costs)
    manifests = {manifest.id: manifest for box in run.boxes for manifest in box.manifests}
    turns = [turn for box in run.boxes for turn in box.turns if turn.keep.made >= TurnClass.FILES]
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
