"""Sandboxes: a real session (turns, a notice, a death and a restore, sandboxes that wait for one worker, a
past that is forgotten), and drawn observations for the rules that it does not reach.

A decision to try again or to refuse for want of room has no effect here: those are drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from agents.sandbox.conftest import fresh_home
from benchmarks.agents.sandbox.overhead import ObservedBox, ObservedRun, ObservedTurn, emulated
from parity import Event, Mutant, Parity, agents_sandbox, drawn
from windtunnel.agents.sandbox.costs import load_costs
from windtunnel.agents.sandbox.model import (
    EffectDoubt,
    FileChange,
    ProcessEffect,
    References,
    SandboxPart,
    ShellEffect,
    TurnClass,
    TurnEffects,
)
from windtunnel.agents.sandbox.policy import (
    CAPABILITY,
    POLICIES,
    BringBack,
    CheckpointPlan,
    CheckpointRequest,
    Decision,
    Endangered,
    Notice,
    Observation,
    Occasion,
    Restore,
    SaveOrder,
    Shortfall,
)
from windtunnel.agents.sandbox.policy.queues import CheckpointHistory, Forget, Queued, StoredCheckpoint
from windtunnel.base.plain import from_plain, to_plain

Draw = np.random.Generator


def play(folder: Path) -> list[Path]:
    with fresh_home() as home:
        logs = agents_sandbox.play(home, folder)
    return [*logs, drawn(folder, CAPABILITY, _questions(np.random.default_rng(6)))]


def _of(draw: Draw, *values: Any) -> Any:
    return values[int(draw.integers(len(values)))]


def _questions(draw: Draw) -> Iterator[tuple[str, Observation]]:
    def chance(often: float) -> bool:
        return bool(draw.random() < often)

    for number in range(900):
        yield "semantic" if number % 6 else _of(draw, *POLICIES), _look(draw)
    for _ in range(60):
        names = "abcdef"[: int(draw.integers(1, 7))]
        endangered = tuple(
            Endangered(name, _of(draw, *TurnClass), 1.0, float(draw.integers(2, 6))) for name in names
        )
        policy = _of(draw, "semantic", "files")
        yield policy, Notice(float(draw.integers(0, 16)), int(draw.integers(1, 3)), endangered)
        yield "semantic", Restore(chance(0.9), chance(0.8), chance(0.5), chance(0.8))
        lacks = _of(draw, (), ("processes",), ("sockets", "timers"))
        less = Shortfall(
            TurnClass.FULL, TurnClass.FILES, lacks, int(draw.integers(1, 4)), chance(0.6), chance(0.3)
        )
        yield _of(draw, "semantic", "semantic", "files", "conversation"), less
        urgent, normal = (tuple(f"{kind}/{n}" for n in range(int(draw.integers(0, 3)))) for kind in "un")
        yield "semantic", Queued(urgent, (*normal, "n/9"), int(draw.integers(0, 7)), 4)
        checkpoints = tuple(
            StoredCheckpoint(f"c{n}", float(draw.integers(0, 9)), chance(0.2), chance(0.2)) for n in range(6)
        )
        yield "semantic", CheckpointHistory(checkpoints, chance(0.8), int(draw.integers(0, 5)))


def _look(draw: Draw) -> CheckpointRequest:
    def chance(often: float) -> bool:
        return bool(draw.random() < often)

    def process() -> ProcessEffect:
        return ProcessEffect(
            7, "python3", chance(0.03), chance(0.03), chance(0.3), _of(draw, 0, 0, 3, None),
            int(chance(0.1)), _of(draw, 0, 0, 0, 2, None), _of(draw, 0, 0, 0, 1, None),
            float(_of(draw, 0, 2, 2.5)), chance(0.03), chance(0.03),
        )  # fmt: skip

    def shell() -> ShellEffect:
        held, lost = (tuple(["descriptor 5"] * chance(often)) for often in (0.2, 0.1))
        return ShellEffect("main", chance(0.1), chance(0.1), held, lost)

    paths = ("/a", "/a/b", "/c", "/proc/1")
    files = tuple(
        FileChange(_of(draw, *paths), _of(draw, "created", "modified", "deleted", "renamed", "metadata"))
        for _ in range(int(_of(draw, 0, 0, 1, 2, 7)))
    )
    doubt = EffectDoubt(_of(draw, *SandboxPart), "the queue overflowed")
    effects = TurnEffects(
        files, len(files) + 3 * chance(0.1), tuple(process() for _ in range(int(draw.integers(0, 3)))),
        tuple(shell() for _ in range(int(draw.integers(0, 2)))), (doubt,) * chance(0.1),
    )  # fmt: skip
    referred = frozenset(path for path in paths if chance(0.3))
    return CheckpointRequest(
        _of(draw, *Occasion), None if chance(0.03) else effects,
        References(referred, frozenset(path for path in referred if chance(0.5))),
        chance(0.95), chance(0.95), has_image=chance(0.8), images_possible=(possible := chance(0.8)),
        no_images="" if possible else "no CRIU", full=chance(0.03), named=chance(0.2),
        most=_of(draw, TurnClass.FULL, TurnClass.FULL, TurnClass.FILES),
        least=_of(draw, TurnClass.NONE, TurnClass.FILES), has_lacks=chance(0.2),
    )  # fmt: skip


def decisions(events: Sequence[Event]) -> Iterator[tuple[Any, Any, int]]:
    """What live saw and decided, and the place of that in the log."""
    for place, event in enumerate(events):
        if event["kind"] == "decision" and "drawn" not in event:
            yield (
                from_plain(Observation, event["observation"]),
                from_plain(Decision, event["decision"]),
                place,
            )


def done(events: Sequence[Event]) -> list[str]:
    """Of each checkpoint what was made, of each turn the class that it was given and that was kept, of a
    restore what came back, the order in which a host that goes away saved, and what was forgotten."""
    faults: list[str] = []
    forgotten: list[str] = []
    dropped: list[str] = []
    by_place = {place: (observation, decision) for observation, decision, place in decisions(events)}
    last: dict[type, Any] = {}
    wanted, open_ = TurnClass.NONE, False

    def compare(what: str, did: Any, decided: Any) -> None:
        if did != decided:
            faults.append(f"{what}: decided was {decided}, done {did}")

    for place, event in enumerate(events):
        if place in by_place:
            observation, decision = by_place[place]
            if isinstance(decision, CheckpointPlan) and observation.occasion not in (
                Occasion.FROZEN,
                Occasion.UNDUMPED,
            ):
                if open_:
                    faults.append(f"{last[CheckpointPlan]} was not done")
                wanted = decision.turn_class
                open_ = decision.content > TurnClass.NONE
            if isinstance(decision, Forget):
                forgotten += decision.checkpoints
            if decision != SaveOrder():  # of one sandbox whose turn came too late
                last[type(decision)] = decision
        elif event["kind"] == "turn":
            turn, keep = event["turn"], last[CheckpointPlan]
            compare(f"turn {turn['number']}", turn["required"], to_plain(wanted))
            kept = to_plain(min(keep.turn_class, keep.content))
            compare(f"turn {turn['number']}, kept", turn["turn_class"], kept)
        elif event["kind"] == "effect" and "content" in event:
            keep, open_ = last[CheckpointPlan], False
            compare("a checkpoint", [event["content"], event["image"]], [to_plain(keep.content), keep.image])
        elif event["kind"] == "effect" and "restored" in event:
            back = last[BringBack]
            words = " ".join(event["restored"])
            compare("a restore", "processes with" in words, back.processes)
            compare("states of shells", "state of shell" in words, back.shells)
        elif event["kind"] == "effect" and "saved" in event:
            compare("a notice", event["saved"], [save.name for save in last[SaveOrder].saves])
        elif event["kind"] == "effect":
            dropped += event["dropped"]
    compare("the past", sorted(dropped), sorted(forgotten))
    return faults + [f"{last[CheckpointPlan]} was not done"] * open_


def in_twin(events: Sequence[Event]) -> list[tuple[Any, Any]]:
    """What is kept of each turn up to the first restore, by the twin that is given what was seen of them."""
    turns = []
    for observation, decision, _ in decisions(events):
        if isinstance(observation, Restore):
            break
        if isinstance(observation, CheckpointRequest) and observation.occasion is Occasion.TURN:
            turns.append(ObservedTurn(0.1, 0.1, 1.0, observation, decision, None))
    run = ObservedRun(1, 1, "semantic", (ObservedBox(1.1 * len(turns), tuple(turns), ()),))
    outcome = emulated(run, load_costs().costs)
    return list(zip([turn.keep for turn in turns], [keep for *_, keep in outcome.decided], strict=True))


PARITY = {"agents.sandbox": Parity(play, done, in_twin, root=True)}


def _mutant(file: str, rule: str, other: str, *, live: bool = False) -> Mutant:
    return Mutant("agents.sandbox", f"agents/sandbox/{file}", rule, other, live)


MUTANTS = (
    _mutant("policy/effects.py", "process.cpu > SILENT_CPU", "process.cpu >= SILENT_CPU"),
    _mutant("policy/queues.py", "in_a_row >= queued.most_urgent", "in_a_row > queued.most_urgent"),
    _mutant("policy/__init__.py", "max(turn_class, request.least), reasons", "turn_class, reasons"),
    _mutant("checkpoint.py", "keep.content is TurnClass.FILES", "keep.content is TurnClass.NONE", live=True),
)  # fmt: skip
