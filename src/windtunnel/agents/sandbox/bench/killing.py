"""One run of a session with one kill, and what the policy brings back."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Literal

import psutil

from windtunnel.agents.sandbox.bench.harness import new_name, processes_of
from windtunnel.agents.sandbox.bench.sessions import WAIT, Seat
from windtunnel.agents.sandbox.live.checkpoint import FAULTS
from windtunnel.agents.sandbox.live.context import SandboxError
from windtunnel.agents.sandbox.live.host import Host
from windtunnel.agents.sandbox.model import TurnClass
from windtunnel.agents.sandbox.policy import PolicyName
from windtunnel.agents.sandbox.traces.observe import Observation
from windtunnel.agents.sandbox.traces.replay import Output, TraceRejected, begin, play
from windtunnel.agents.sandbox.traces.schema import Trace, TraceTurn
from windtunnel.agents.sandbox.traces.score import recovery

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
class Outcome:
    """How one kill ended. ``landed``: the kill hit what it was meant to hit. ``unreadable``: manifests and
    images that could not be read afterwards."""

    kill: Kill
    correct: bool
    differences: tuple[str, ...]
    landed: bool
    unreadable: tuple[str, ...] = ()


def killed(host: Host, policy: PolicyName, kill: Kill) -> Outcome:
    """One run with one kill; a fault of the recovery itself makes it wrong."""
    run = _Run(host, policy, kill, Seat.new(host, new_name(policy[:4])))
    trace = kill.reference.trace
    try:
        recovered = recovery(
            trace,
            run.seat,
            after=kill.after,
            reference=kill.reference.seen,
            look=lambda seat, outputs: seat.look(trace, outputs),
            kill=run.kill,
            recover=run.recover,
            on_open=Seat.save,
            end_turn=run.end_turn,
            arm=run.arm if kill.kind == "inside a turn" else None,
        )
        correct, differences = recovered.score.correct, recovered.score.differences
        run.landed = run.landed or recovered.inside
    except (*FAULTS, SandboxError, TraceRejected, TimeoutError) as error:
        correct, differences = False, (f"{type(error).__name__}: {error}",)
    finally:
        run.disarm()
        host.remove(run.seat.box.name)
    return Outcome(kill, correct, differences, run.landed, tuple(run.unreadable))


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
            programs = processes_of(self.host.home, seat.box.name) if self.of.criu else []
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
        again = self.of.kind == "inside a checkpoint" and self.landed and not self._covered(seat, after)
        if again:
            play(seat, trace.turns[after - 1])
            seat.end_turn()
        return seat

    def _covered(self, seat: Seat, after: int) -> bool:
        return seat.box.turns >= after

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
    while any(_alive(pid) for pid in pids.values()):
        if time.monotonic() > deadline:
            raise SandboxError(f"the shells of sandbox {seat.box.name} do not end")
        time.sleep(0.001)
    lines = [f"export {name}={shlex.quote(value)}" for name, value in trace.environment.items()]
    seat.run("\n".join([*lines, f"cd {shlex.quote(trace.workdir)}"]))


def _alive(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
