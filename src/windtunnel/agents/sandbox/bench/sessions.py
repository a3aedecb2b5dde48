"""The sessions that are measured, and how one is played on a sandbox turn by turn.

The shipped sessions were written by hand; the generated ones are seeded, and the true class of each of their
turns is known. Where a section does not measure time, the model thinks in no time.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from windtunnel.agents.sandbox.errors import MachineError, SandboxDied
from windtunnel.agents.sandbox.live.box import Box
from windtunnel.agents.sandbox.live.checkpoint import quiesce
from windtunnel.agents.sandbox.live.host import Host
from windtunnel.agents.sandbox.model import Manifest, SandboxSpec, Turn, TurnResult
from windtunnel.agents.sandbox.traces import shipped
from windtunnel.agents.sandbox.traces.generate import generate
from windtunnel.agents.sandbox.traces.observe import Observation, digest, listening, observe, tree
from windtunnel.agents.sandbox.traces.replay import Output, replay
from windtunnel.agents.sandbox.traces.schema import Trace
from windtunnel.agents.sandbox.views import BoxInfo

PROGRAMS = "usr"
WAIT = 120.0
"""Seconds that a checkpoint may take before the run is given up."""


def sessions(quick: bool, generated: int = 4, turns: int = 16) -> list[Trace]:
    """The shipped sessions, longest first, then generated ones. ``quick``: the longest shipped one
    and one generated."""
    own = sorted(shipped(), key=lambda trace: -len(trace.turns))
    if quick:
        return [own[0], generate(turns, seed=0)]
    return [*own, *(generate(turns, seed=seed) for seed in range(generated))]


@dataclass
class Seat:
    """A sandbox as a session sees it: when it is dead, a command tells so instead of raising."""

    host: Host
    box: Box

    @classmethod
    def new(cls, host: Host, name: str) -> Seat:
        return cls(host, host.create(SandboxSpec(name)))

    def run(self, command: str, *, shell: str = "main", timeout: float | None = None) -> TurnResult:
        try:
            return self.box.run(command, shell=shell, timeout=timeout)
        except (SandboxDied, MachineError) as error:
            return TurnResult(b"", b"", None, 0.0, "sandbox-died", str(error))

    def info(self) -> BoxInfo:
        return self.box.info()

    @property
    def root(self) -> Path:
        return self.box.machine().externals.root

    def save(self) -> None:
        """A checkpoint, so that the first turn is not charged with what was before it."""
        self.box.checkpoint()

    def end_turn(self) -> Turn:
        return self.box.end_turn().wait(WAIT)

    def look(self, trace: Trace, outputs: tuple[Output, ...]) -> Observation:
        """What the end of a session shows; the probes run commands."""
        return observe(self, self.root, outputs=outputs, probes=trace.probes, only=self._written())

    def _written(self) -> list[str]:
        """Top-level folders that a session may write to: all but those of programs, which are the bulk."""
        return [name for name in os.listdir(self.root) if name != PROGRAMS]

    def programs(self) -> str:
        """A hash over the folder that looks leave out."""
        return digest(tree(self.root, (PROGRAMS,)))

    def watch(self) -> Observation:
        """All that can be seen from the host without running anything inside, for the referee."""
        machine = self.box.machine()
        quiesce(machine.shells())
        pids = {pid: _command(pid) for pid in machine.cgroup.pids()}
        seen = observe(
            self,
            self.root,
            processes=machine.commands,
            pids={pid: command for pid, command in pids.items() if command},
            shells={state.name: state.fingerprint for state in machine.shell_states()},
            ports=False,
            only=self._written(),
        )
        tables = [Path(f"/proc/{machine.pid}/net/{name}") for name in ("tcp", "tcp6")]
        text = "\n".join(table.read_text() for table in tables if table.exists())
        return replace(seen, ports=listening(text))


def _command(pid: int) -> str:
    """Command line of a host pid; empty for one that is gone or is a zombie."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


@dataclass(frozen=True)
class Played:
    """A session that was played to its end, with its log and all its checkpoints."""

    trace: Trace
    turns: tuple[Turn, ...]
    manifests: tuple[Manifest, ...]


def played(host: Host, trace: Trace, name: str, sizes: dict[str, int] | None = None) -> Played:
    """Play ``trace`` on a new sandbox with a checkpoint after the opening and after every turn that needs
    one. ``sizes`` is filled with the bytes of each manifest. The sandbox is removed, its checkpoints with
    it."""
    seat = Seat.new(host, name)
    lines: list[Turn] = []
    try:
        replay(
            trace,
            seat,
            on_open=seat.save,
            on_turn=lambda *_: lines.append(seat.end_turn()),
        )
        manifests = [one for one in seat.box.log().checkpoints if one.box == name]
        if sizes is not None:
            for one in manifests:
                folder = host.home.checkpoints / one.id
                sizes[one.id] = sum(file.stat().st_size for file in folder.iterdir())
    finally:
        host.remove(name)
    return Played(trace, tuple(lines), tuple(manifests))
