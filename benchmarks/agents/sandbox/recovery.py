"""Does a recovery lose anything? Kills at the end of a turn under each policy, each one a run of its own.

A session is played twice without a fault, for reference, and left out unless both runs agree. Then, for each
kill: play, SIGKILL every process of the sandbox, bring back what the policy has kept, play on, and compare
later outputs, files, processes and live services with the reference: all four are to be equal. Kills inside
turns, checkpoints and restores are tests of conformance.

What the baselines bring back: *conversation* starts the session's image anew (with the session's opening,
that is what an image would hold) and goes on; *files* brings back the files of the last turn under fresh
shells; *full* and *semantic* bring back what their last checkpoint holds.

What checkpoints hold, in bytes: process images (raw as CRIU writes them, or what they added to the page
store), file data that a snapshot holds and the one before does not, and manifests. The first image of each
session counts, for every policy.
"""

from __future__ import annotations

import os
import shlex
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

from benchmarks.agents.sandbox.harness import SOURCE, Seat, new_name, open_host, own_home, sessions
from benchmarks.agents.sandbox.sessions import (
    Observation,
    Output,
    TraceRejected,
    agreed,
    begin,
    compare,
    replay,
)
from benchmarks.harness.measure import side_by_side
from benchmarks.harness.rows import Row, figure, left_out
from windtunnel.agents.sandbox.context import FAULTS
from windtunnel.agents.sandbox.errors import SandboxError
from windtunnel.agents.sandbox.host import SandboxHost
from windtunnel.agents.sandbox.policy import PolicyName
from windtunnel.agents.sandbox.traces import Trace, TraceTurn
from windtunnel.linux import processes
from windtunnel.store.objects import ObjectError

KILLS, QUICK_KILLS = 36, 6
POLICIES: dict[PolicyName, tuple[str, float | None]] = {
    "conversation": ("conversation only", 0.08), "files": ("files every turn", 0.42),
    "full": ("full every turn", None), "semantic": ("semantic", 1.0),
}  # fmt: skip
"""Words, and the share that is published as correct (28 to 42 % for files)."""


@dataclass(frozen=True)
class Reference:
    """A session, and what its fault-free run shows."""

    trace: Trace
    observation: Observation


@dataclass(frozen=True)
class Kill:
    """After which turn of which session."""

    reference: Reference
    after: int


@dataclass(frozen=True)
class KillOutcome:
    """How one kill ended. ``unreadable``: manifests and images that could not be read afterwards."""

    kill: Kill
    differences: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()


def recovery_rows(quick: bool) -> Iterator[Row]:
    with own_home() as home:
        references, refused = _references(home, quick)
        yield from (left_out("a session was left out", words) for words in refused)
        kills = plan(references, QUICK_KILLS if quick else KILLS)
        unreadable: list[str] = []
        for policy, (words, published) in POLICIES.items():
            with open_host(home, policy=policy) as host:
                jobs = [partial(killed, host, policy, kill) for kill in kills]
                outcomes = side_by_side(jobs, os.cpu_count() or 1)
            yield correct_row(policy, words, published, outcomes)
            unreadable += [each for outcome in outcomes for each in outcome.unreadable]
    note = "; ".join(unreadable[:5])
    yield figure("manifests or images damaged by a kill", "found", len(unreadable), "0", note=note)


def correct_row(
    policy: PolicyName, words: str, published: float | None, outcomes: Sequence[KillOutcome]
) -> Row:
    """The share of kills after which nothing was lost; what was lost is told in the note."""
    wrong = [outcome for outcome in outcomes if outcome.differences]
    losses = [
        f"WRONG ({outcome.kill.reference.trace.name}, turn {outcome.kill.after}):"
        f" {', '.join(each[:160] for each in outcome.differences[:3])}"
        for outcome in (wrong if policy in ("semantic", "full") else wrong[:1])
    ]
    return figure(
        f"correct after {len(outcomes)} kills, {words}", "", 1 - len(wrong) / len(outcomes),
        "100 %" if policy == "semantic" else "", published=published,
        source=f"{SOURCE}{': 28 to 42 %' if policy == 'files' else ''}", note="; ".join(losses),
    )  # fmt: skip


def plan(references: Sequence[Reference], kills: int, seed: int = 1) -> list[Kill]:
    """So many kills, over the sessions in turn, at turns drawn by chance."""
    random = Random(seed)
    chosen = [references[number % len(references)] for number in range(kills)]
    return [Kill(reference, random.randint(1, len(reference.trace.turns))) for reference in chosen]


def killed(host: SandboxHost, policy: PolicyName, kill: Kill) -> KillOutcome:
    """One run with one kill; a fault of the recovery itself makes it wrong."""
    seat, trace = Seat.new(host, new_name(policy[:4])), kill.reference.trace
    unreadable: list[str] = []

    def on_turn(turn: TraceTurn, _: Output) -> None:
        """Kill all after that turn, and bring back what the policy has kept."""
        if policy != "conversation":
            seat.end_turn()
        if turn.turn != kill.after:
            return
        seat.box.machine().cgroup.kill()
        unreadable.extend(_damage(host, seat.box.name))
        seat.box.restore()
        if policy == "conversation":
            begin(trace, seat)
        elif policy == "files":
            fresh_shells(seat, trace)

    try:
        outputs = replay(trace, seat, on_open=seat.save, on_turn=on_turn)
        observed = seat.look(trace, tuple(outputs))
        differences = compare(kill.reference.observation, observed, kill.after)
    except (*FAULTS, SandboxError, TraceRejected, TimeoutError) as error:
        differences = (f"{type(error).__name__}: {error}",)
    finally:
        host.remove(seat.box.name)
    return KillOutcome(kill, differences, tuple(unreadable))


def _damage(host: SandboxHost, name: str) -> list[str]:
    """Manifests that cannot be read, and images of a sandbox with damaged pages."""
    store = host.context.store
    manifests, problems = store.all()
    if problems:
        # a sandbox beside this one may just have been removed
        time.sleep(0.5)
        problems = [words for words in store.all()[1] if words in problems]
    for manifest in manifests:
        if manifest.box == name and manifest.image is not None:
            try:
                with store.scratch() as work:
                    store.materialise(manifest.image.id, work / "image")
            except ObjectError as error:
                problems.append(str(error))
    return problems


def fresh_shells(seat: Seat, trace: Trace) -> None:
    """What keeps files only has no shells: new ones, with the session's environment and working directory."""
    pids = seat.box.machine().shells()
    for pid in pids.values():
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while any(processes.state(pid) not in ("", "Z") for pid in pids.values()):
        if time.monotonic() > deadline:
            raise SandboxError(f"the shells of sandbox {seat.box.name} do not end")
        time.sleep(0.001)
    lines = [f"export {name}={shlex.quote(value)}" for name, value in trace.environment.items()]
    seat.run("\n".join([*lines, f"cd {shlex.quote(trace.workdir)}"]))


def _references(home: Path, quick: bool) -> tuple[list[Reference], list[str]]:
    """Each session with its fault-free run; and, in words, those that do not run twice the same."""
    references, refused = [], []
    with open_host(home, policy="conversation") as host:
        for trace in sessions(quick):
            try:
                first, second = (faultless(host, trace) for _ in range(2))
                references.append(Reference(trace, agreed(trace, first, second)))
            except TraceRejected as error:
                refused.append(str(error))
    if not references:
        raise SandboxError("no session ran twice the same: " + "; ".join(refused))
    return references, refused


def faultless(host: SandboxHost, trace: Trace) -> Observation:
    """What a run of ``trace`` without a fault shows."""
    seat = Seat.new(host, new_name("free"))
    try:
        return seat.look(trace, tuple(replay(trace, seat)))
    finally:
        host.remove(seat.box.name)


def bytes_rows(quick: bool) -> Iterator[Row]:
    traces = sessions(quick)
    with own_home() as home:
        (semantic, semantic_raw), (full, full_raw) = (
            _all(home, policy, traces) for policy in ("semantic", "full")
        )
    of = f"{len(traces)} sessions, {sum(len(trace.turns) for trace in traces)} turns"
    for name, amount, goal in (
        ("semantic: classes, page store, class shell", semantic, ">= 95%"),
        ("full every turn, with the page store", full, ""),
        ("semantic without the page store", semantic_raw, ""),
    ):
        yield figure(
            f"bytes less than full every turn, {name}", "", 1 - amount / full_raw, goal,
            published=0.87 if goal else None, source=SOURCE,
            note=f"{amount / len(traces):,.0f} B of {full_raw / len(traces):,.0f} B a session; {of}",
        )  # fmt: skip


def _all(home: Path, policy: PolicyName, traces: Sequence[Trace]) -> tuple[int, int]:
    """What the checkpoints of all sessions wrote, with the page store and without. Each session has a host of
    its own, so that none finds another's pages in the store."""
    stored = raw = 0
    for trace in traces:
        with open_host(home / policy / trace.name, policy=policy) as host:
            seat = Seat.new(host, new_name("bytes"))
            replay(trace, seat, on_open=seat.save, on_turn=lambda *_, seat=seat: seat.end_turn())
            for manifest in seat.box.log().checkpoints:
                image, files = manifest.image, manifest.files
                rest = _bytes_of(host, manifest.id)
                # a part that it takes over from an earlier one costs nothing
                if files and files.id == manifest.id:
                    rest += files.bytes_new
                if image and image.id == manifest.id:
                    stored, raw = stored + image.bytes_new, raw + image.bytes_raw
                stored, raw = stored + rest, raw + rest
    return stored, raw


def _bytes_of(host: SandboxHost, id: str) -> int:
    """Of a manifest on the disk."""
    with host.context.store.reading() as db:
        (count,) = db.execute("SELECT length(data) FROM manifest WHERE id=?", (id,)).fetchone()
    return int(count)
