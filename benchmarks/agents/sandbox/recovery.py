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

import contextlib
import os
import shlex
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Literal

import psutil

from benchmarks.agents.sandbox import harness
from benchmarks.agents.sandbox.harness import SOURCE, WAIT, Seat, new_name, opened, own_home
from benchmarks.figures import figure
from benchmarks.harness.measure import side_by_side
from benchmarks.harness.rows import Row, left_out
from windtunnel.agents.sandbox.errors import SandboxError
from windtunnel.agents.sandbox.live.checkpoint import FAULTS
from windtunnel.agents.sandbox.live.host import Host
from windtunnel.agents.sandbox.model import TurnClass
from windtunnel.agents.sandbox.policy import PolicyName
from windtunnel.agents.sandbox.traces.observe import Observation
from windtunnel.agents.sandbox.traces.replay import Output, TraceRejected, begin, play, replay
from windtunnel.agents.sandbox.traces.schema import Trace, TraceTurn
from windtunnel.agents.sandbox.traces.score import agreed, recovery
from windtunnel.linux import processes

Kind = Literal["end of turn", "inside a turn", "inside a checkpoint"]
KINDS: tuple[Kind, ...] = ("end of turn", "inside a turn", "inside a checkpoint")


@dataclass(frozen=True)
class Reference:
    """A session, and what its fault-free run shows."""

    trace: Trace
    seen: Observation


@dataclass(frozen=True)
class Kill:
    """One kill: after which turn of which session, of which kind; ``seed`` draws the instant."""

    reference: Reference
    kind: Kind
    after: int
    seed: int
    criu: bool = False

    @property
    def words(self) -> str:
        return f"{self.reference.trace.name}, {self.kind}, turn {self.after}"


@dataclass(frozen=True)
class KillOutcome:
    """How one kill ended. ``landed``: the kill hit what it was meant to hit. ``unreadable``: manifests and
    images that could not be read afterwards."""

    kill: Kill
    correct: bool
    differences: tuple[str, ...]
    landed: bool
    unreadable: tuple[str, ...] = ()


def killed(host: Host, policy: PolicyName, kill: Kill) -> KillOutcome:
    """One run with one kill; a fault of the recovery itself makes it wrong."""
    run = _Run(host, policy, kill, Seat.new(host, new_name(policy[:4])))
    trace = kill.reference.trace
    try:
        recovered = recovery(
            trace, run.seat, after=kill.after, reference=kill.reference.seen,
            look=lambda seat, outputs: seat.look(trace, outputs), kill=run.kill, recover=run.recover,
            on_open=Seat.save, end_turn=run.end_turn,
            arm=run.arm if kill.kind == "inside a turn" else None,
        )  # fmt: skip
        correct, differences = recovered.score.correct, recovered.score.differences
        run.landed = run.landed or recovered.inside
    except (*FAULTS, SandboxError, TraceRejected, TimeoutError) as error:
        correct, differences = False, (f"{type(error).__name__}: {error}",)
    finally:
        run.disarm()
        host.remove(run.seat.box.name)
    return KillOutcome(kill, correct, differences, run.landed, tuple(run.unreadable))


@dataclass
class _Run:
    """The hooks of one run with a kill."""

    host: Host
    policy: PolicyName
    of: Kill
    seat: Seat
    landed: bool = False
    unreadable: list[str] = field(default_factory=list)
    _armed: threading.Thread | None = None
    _cancelled: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._random = Random(self.of.seed)

    def end_turn(self, seat: Seat, turn: TraceTurn, _: Output) -> None:
        if self.policy == "conversation":
            return
        pending = seat.box.end_turn()
        if self.of.kind != "inside a checkpoint" or turn.turn != self.of.after or pending.done:
            pending.wait(WAIT)
            return
        programs: list[psutil.Process] = []
        while not pending.done and not (programs if self.of.criu else pending.started):
            programs = harness.processes_of(self.host.home, seat.box.name) if self.of.criu else []
            time.sleep(0.0005)
        whole = self.policy == "full" or turn.true_class is TurnClass.FULL
        time.sleep(self._random.random() * (0.03 if self.of.criu else 0.12 if whole else 0.012))
        self.landed = not pending.done
        for program in programs:
            with contextlib.suppress(ProcessLookupError):
                os.kill(program.pid, signal.SIGKILL)
        self.seat.box.machine().cgroup.kill()
        # the job may have failed by the kill, or ended before it
        with contextlib.suppress(SandboxError, *FAULTS):
            pending.wait(WAIT)
        self.unreadable += self._damage()

    def arm(self, seat: Seat, after: int) -> None:
        """Kill everything at some instant of the next turn, as long as it took without a fault."""
        cgroup = seat.box.machine().cgroup
        usual = self.of.reference.seen.outputs[after].seconds
        delay = self._random.random() * usual

        def strike() -> None:
            if not self._cancelled.wait(delay):
                cgroup.kill()

        self._armed = threading.Thread(target=strike, name="bench-kill", daemon=True)
        self._armed.start()

    def disarm(self) -> None:
        self._cancelled.set()
        if self._armed is not None:
            self._armed.join()

    def kill(self, seat: Seat, _: int) -> None:
        self.disarm()
        if seat.box.info().status == "running":
            seat.box.machine().cgroup.kill()

    def recover(self, seat: Seat, after: int) -> Seat:
        """Bring back what the policy has kept. A turn that no checkpoint covers yet is asked again."""
        self.disarm()
        trace = self.of.reference.trace
        seat.box.restore()
        if self.policy == "conversation":
            begin(trace, seat)
            return seat
        if self.policy == "files":
            fresh_shells(seat, trace)
        if self.of.kind == "inside a checkpoint" and self.landed and seat.box.turns < after:
            play(seat, trace.turns[after - 1])
            seat.end_turn()
        return seat

    def _damage(self) -> list[str]:
        """Manifests that cannot be read, and images of this sandbox with damaged pages."""
        parts = self.host.context
        manifests, problems = parts.manifests.all()
        if problems:
            # a sandbox beside this one may just have been removed
            time.sleep(0.5)
            problems = [words for words in parts.manifests.all()[1] if words in problems]
        for manifest in manifests:
            if manifest.box == self.seat.box.name and manifest.image is not None:
                problems = [*problems, *parts.pages.verify(manifest.image.id)]
        return list(dict.fromkeys(problems))


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


SECTION = "recovery"
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
    hits = [f"kills that hit the {kind}: {landed[kind]} of {meant[kind]}" for kind in KINDS[1:]]
    note = "; ".join(hits + unreadable[:5])
    yield figure(SECTION, "manifests or images damaged by a kill", "found", len(unreadable), "0", note=note)


def correct_row(
    policy: PolicyName, words: str, published: float | None, outcomes: Sequence[KillOutcome]
) -> Row:
    """The share of kills after which nothing was lost; what was lost is told in the note."""
    wrong = [outcome for outcome in outcomes if not outcome.correct]
    told = [
        f"{sum(one.correct for one in outcomes if one.kill.kind == kind)} of "
        f"{sum(one.kill.kind == kind for one in outcomes)} {kind}"
        for kind in KINDS
    ]
    shown = wrong if policy in ("semantic", "full") else wrong[:1]
    told += [
        f"WRONG ({one.kill.words}): {', '.join(each[:160] for each in one.differences[:3])}" for one in shown
    ]
    return figure(
        SECTION, f"correct after {len(outcomes)} kills, {words}", "", 1 - len(wrong) / len(outcomes),
        "100 %" if policy == "semantic" else "", published=published,
        source=f"{SOURCE}{': 28 to 42 %' if policy == 'files' else ''}", note="; ".join(told),
    )  # fmt: skip


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
        for trace in harness.sessions(quick):
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
