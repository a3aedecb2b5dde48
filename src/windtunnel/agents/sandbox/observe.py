"""What the policy is told of a sandbox: its effects since the newest checkpoint, what is in doubt, and what
only a process image would bring back.

Without an image a restore starts fresh shells, which take over the kept states, and the declared services.
All other processes, what is in /dev/shm, and the descriptors that a shell holds are gone then. A service is
known by a variable in its environment, which whatever it starts inherits.
"""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from windtunnel.agents.sandbox.context import FAULTS, SandboxContext
from windtunnel.agents.sandbox.errors import MachineError
from windtunnel.agents.sandbox.machine import Machine
from windtunnel.agents.sandbox.machine.state import ShellSections, shell_effect
from windtunnel.agents.sandbox.model import (
    CheckpointManifest,
    EffectDoubt,
    Lack,
    References,
    SandboxPart,
    SandboxSpec,
    ShellEffect,
    ShellState,
    TurnClass,
    TurnEffects,
)  # fmt: skip
from windtunnel.agents.sandbox.policy import READS_EFFECTS, CheckpointRequest, Occasion
from windtunnel.linux import processes
from windtunnel.linux.snapshot import read_file

WAITS = {"x86_64": (b"0 ", b"61 "), "aarch64": (b"63 ", b"260 ")}.get(platform.machine(), ())
"""What /proc/PID/syscall begins with in read(2), at the prompt, and in wait4(2), while a command runs."""


@dataclass
class SandboxNow:
    """A sandbox that runs on ``machine``, and its newest checkpoint, ``tip``. ``doubt``: why it cannot be
    known what it did since then, or empty."""

    context: SandboxContext
    spec: SandboxSpec
    machine: Machine
    tip: CheckpointManifest | None
    doubt: str

    def observe(
        self, occasion: Occasion, *, full: bool = False, named: bool = False,
        most: TurnClass = TurnClass.FULL, least: TurnClass = TurnClass.NONE,
    ) -> CheckpointRequest:  # fmt: skip
        """What the policy has to know; what the sandbox did, only where the answer can depend on that."""
        context, tip, image = self.context, self.tip, self.tip.image if self.tip else None
        reads = context.policy in READS_EFFECTS and not full
        return CheckpointRequest(
            occasion=occasion,
            effects=self._effects(tip, occasion) if reads and tip is not None else None,
            references=(
                References(frozenset(image.references), frozenset(image.mapped)) if image else References()
            ),
            has_parent=tip is not None,
            has_files=tip is not None and tip.files is not None,
            has_image=image is not None,
            images_possible=context.criu is not None,
            no_images=context.no_images,
            full=full,
            named=named,
            most=most,
            least=least,
            has_lacks=tip is not None and bool(tip.lacks),
            memory=self.machine.cgroup.usage()[1],
            processes=len(self.machine.cgroup.pids()),
        )

    def _effects(self, tip: CheckpointManifest, occasion: Occasion) -> TurnEffects:
        inspector = self.context.inspector
        busy = () if occasion is Occasion.FROZEN else quiesce(self.machine.shells())
        doubted = [self.doubt] if self.doubt else []
        effects = TurnEffects()
        try:
            if inspector is not None:
                effects = inspector.effects(self.spec.name)
            else:
                doubted.append("no inspector")
        except FAULTS as error:
            doubted.append(f"the inspector failed: {error}")
        doubts = tuple(EffectDoubt(SandboxPart.PROCESSES, why) for why in doubted)
        fingerprints = {state.name: state.fingerprint for state in tip.shells}
        states = {state.name: state for state in self.machine.shell_states()}
        shells = []
        for shell in sorted(fingerprints.keys() | states.keys() | set(busy)):
            state = states.get(shell)
            if state is None:
                shells.append(ShellEffect(shell, busy=shell in busy, gone=shell in fingerprints))
            elif fingerprints.get(shell) != state.fingerprint:
                shells.append(replace(shell_effect(state), busy=shell in busy))
            elif shell in busy:
                shells.append(ShellEffect(shell, busy=True))
        return replace(effects, shells=tuple(shells), doubts=doubts + effects.doubts)


def quiesce(shells: Mapping[str, int], timeout: float = 0.25) -> tuple[str, ...]:
    """Wait until shells (name to host pid) stand at their prompt; names of those that did not come to wait
    for input in ``timeout`` seconds.

    One that has answered may still be putting its descriptors back: what is read of it (or dumped) between
    the answer and the next read would show descriptors that are none of the command's doing. Such a shell
    needs microseconds; on a busy host, until it gets a CPU.
    """
    deadline = time.monotonic() + timeout
    busy = dict(shells)
    while True:
        busy = {name: pid for name, pid in busy.items() if not _waits(pid)}
        if not busy or time.monotonic() > deadline:
            return tuple(sorted(busy))
        time.sleep(0.0002)


def _waits(pid: int) -> bool:
    call = read_file(f"/proc/{pid}/syscall", short=True)
    return not call or call.startswith(WAITS)


SERVICE = "WINDTUNNEL_SERVICE"
"""Variable in the environment of a declared service: its name."""
SHARED = "dev/shm"
"""The one place for files that lies in memory."""


def service_line(name: str, command: str) -> str:
    """The shell text that starts the declared service ``name`` in the background."""
    # one program for the whole command, so that the variable holds for all of it
    return (
        f"{SERVICE}={shlex.quote(name)} ${{BASH:-sh}} -c {shlex.quote(command)} </dev/null >/dev/null 2>&1 &"
    )


def alone(machine: Machine, states: Iterable[ShellState]) -> tuple[Lack, ...]:
    """What only an image of ``machine`` as it stands would bring back; ``why`` is left empty."""
    return (*processes_alone(machine).values(), *alone_beside(machine, states))


def processes_alone(machine: Machine) -> dict[int, Lack]:
    """The processes among it, by their pids on the host, in the order of those inside."""
    others = machine.cgroup.pids() - {machine.pid, *machine.shells().values()}
    there = sorted((processes.inner_pid(pid), pid) for pid in others if processes.state(pid) not in "ZX")
    return {
        pid: Lack("processes", processes.who(pid), "")
        for inner, pid in there
        if inner and not _is_service(pid)
    }


def alone_beside(machine: Machine, states: Iterable[ShellState]) -> list[Lack]:
    """What of it is no process: descriptors of shells, states that cannot be replayed, files in memory."""
    shells, lacks = machine.shells(), []
    by_name = {state.name: state for state in states}
    for name in sorted(shells):
        if name not in by_name:
            lacks.append(Lack("shells", f"shell {name}: its state", ""))
            continue
        with contextlib.suppress(MachineError):
            descriptors = ShellSections.of(by_name[name]).text("descriptors").splitlines()
            lacks += [
                Lack("descriptors", f"shell {name}: descriptor {descriptor}", "")
                for descriptor in descriptors
            ]
    with contextlib.suppress(OSError):
        count = len(os.listdir(f"/proc/{machine.pid}/root/{SHARED}"))
        if count:
            lacks.append(Lack("files", f"/{SHARED}: {count} name{'s' if count > 1 else ''}", ""))
    return lacks


def _is_service(pid: int) -> bool:
    environment = read_file(f"/proc/{pid}/environ").split(b"\0")
    return any(variable.startswith(f"{SERVICE}=".encode()) for variable in environment)


def because(lacks: Iterable[Lack], why: str) -> tuple[Lack, ...]:
    """The same, for a reason in words."""
    return tuple(replace(lack, why=why) for lack in lacks)
