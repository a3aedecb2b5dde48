"""Does a recovery lose anything? Kills of three kinds under each policy, each one a run of its own.

A session is played twice without a fault, for reference. Then, for each kill: play, SIGKILL every process of
the sandbox, bring back what the policy has kept, play on, and compare later outputs, files, processes and
live services with the reference. A kill comes at the end of a turn, while a command runs, or while a
checkpoint is made (for every second one of these CRIU is killed first). A turn whose checkpoint did not
become safe is asked again, because its model's reply was not released.

What the baselines bring back: *conversation* starts the session's image anew (with the session's opening,
that is what an image would hold) and goes on; *files* brings back the files of the last turn under fresh
shells; *full* and *semantic* bring back what their last checkpoint holds.

Source: Crab (arXiv 2604.28138), evaluation of recovery correctness; kills inside turns and checkpoints are
ours.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from random import Random

from windtunnel.agents.sandbox.bench.harness import new_name, opened, own_home, side_by_side
from windtunnel.agents.sandbox.bench.killing import KINDS, Kill, Kind, Outcome, Reference, killed
from windtunnel.agents.sandbox.bench.sessions import Seat, sessions
from windtunnel.agents.sandbox.live.context import SandboxError
from windtunnel.agents.sandbox.live.host import Host
from windtunnel.agents.sandbox.model import TurnClass
from windtunnel.agents.sandbox.policy import PolicyName
from windtunnel.agents.sandbox.traces.observe import Observation
from windtunnel.agents.sandbox.traces.replay import TraceRejected, replay
from windtunnel.agents.sandbox.traces.schema import Trace
from windtunnel.agents.sandbox.traces.score import agreed
from windtunnel.bench.rows import Row, left_out

SECTION = "recovery"
SOURCE = "arXiv 2604.28138"
KILLS, QUICK_KILLS = 36, 6
POLICIES: dict[PolicyName, tuple[str, float | None]] = {
    "conversation": ("conversation only", 0.08),
    "files": ("files every turn", 0.42),
    "full": ("full every turn", None),
    "semantic": ("semantic", 1.0),
}
"""Words, and the share that is published as correct (28 to 42 % for files)."""


def recovery_rows(quick: bool) -> Iterator[Row]:
    with own_home() as home:
        references, refused = _references(home, quick)
        yield from (left_out(SECTION, "a session was left out", words) for words in refused)
        kills = plan(references, QUICK_KILLS if quick else KILLS)
        landed: dict[Kind, int] = dict.fromkeys(KINDS, 0)
        unreadable: list[str] = []
        for policy, (words, published) in POLICIES.items():
            with opened(home, policy=policy) as host:
                outcomes = side_by_side(
                    [partial(killed, host, policy, kill) for kill in kills], os.cpu_count() or 1
                )
            yield correct_row(policy, words, published, outcomes)
            for outcome in outcomes:
                landed[outcome.kill.kind] += outcome.landed
                unreadable += outcome.unreadable
    meant = {kind: len(POLICIES) * sum(kill.kind == kind for kill in kills) for kind in KINDS}
    # without checkpoints there is none to be killed
    meant["inside a checkpoint"] -= sum(kill.kind == "inside a checkpoint" for kill in kills)
    yield Row(
        SECTION,
        "manifests or images damaged by a kill",
        "found",
        measured=len(unreadable),
        target="0",
        met=not unreadable,
        note="; ".join(
            [f"kills that hit the {kind}: {landed[kind]} of {meant[kind]}" for kind in KINDS[1:]]
            + unreadable[:5]
        ),
    )


def correct_row(policy: PolicyName, words: str, published: float | None, outcomes: Sequence[Outcome]) -> Row:
    """The share of kills after which nothing was lost; what was lost is told in the note."""
    wrong = [outcome for outcome in outcomes if not outcome.correct]
    told = [
        f"{sum(one.correct for one in outcomes if one.kill.kind == kind)} of "
        f"{sum(one.kill.kind == kind for one in outcomes)} {kind}"
        for kind in KINDS
    ]
    shown = wrong if policy in ("semantic", "full") else wrong[:1]
    told += [f"WRONG ({one.kill.words}): {', '.join(_short(one.differences))}" for one in shown]
    must = policy == "semantic"
    return Row(
        SECTION,
        f"correct after {len(outcomes)} kills, {words}",
        "",
        measured=1 - len(wrong) / len(outcomes),
        published=published,
        source=f"{SOURCE}: 28 to 42 %" if policy == "files" else SOURCE if published is not None else "",
        target="100 %" if must else "",
        met=not wrong if must else None,
        note="; ".join(told),
    )


def _short(differences: Sequence[str]) -> list[str]:
    return [one if len(one) <= 160 else one[:159] + "…" for one in differences[:3]]


def plan(references: Sequence[Reference], kills: int, seed: int = 1) -> list[Kill]:
    """So many kills, of the three kinds in turn, over the sessions in turn, at turns drawn by chance. Kills
    inside a checkpoint come at turns that need one."""
    random = Random(seed)
    made = []
    for number in range(kills):
        kind = KINDS[number % len(KINDS)]
        reference = references[number // len(KINDS) % len(references)]
        turns = reference.trace.turns
        if kind == "inside a checkpoint":
            needing = [turn.turn for turn in turns if turn.true_class not in (None, TurnClass.NONE)]
            after = random.choice(needing or [turn.turn for turn in turns])
        else:
            after = random.randint(1, len(turns) - (kind == "inside a turn"))
        criu = kind == "inside a checkpoint" and number // len(KINDS) % 2 == 1
        made.append(Kill(reference, kind, after, random.randrange(2**32), criu))
    return made


def _references(home: Path, quick: bool) -> tuple[list[Reference], list[str]]:
    """Each session with its fault-free run; and, in words, those that do not run twice the same."""
    found, refused = [], []
    with opened(home, policy="conversation") as host:
        for trace in sessions(quick):
            try:
                first, second = (faultless(host, trace) for _ in range(2))
                found.append(Reference(trace, agreed(trace, first, second)))
            except TraceRejected as error:
                refused.append(str(error))
    if not found:
        raise SandboxError("no session ran twice the same: " + "; ".join(refused))
    return found, refused


def faultless(host: Host, trace: Trace) -> Observation:
    """What a run of ``trace`` without a fault shows."""
    seat = Seat.new(host, new_name("free"))
    try:
        return seat.look(trace, tuple(replay(trace, seat)))
    finally:
        host.remove(seat.box.name)
