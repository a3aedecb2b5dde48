"""What of a sandbox only a process image brings back, and the error for what lacks.

Without an image a restore starts fresh shells, which take over the kept states, and the declared services.
All other processes, what is in /dev/shm, and the descriptors that a shell holds are gone then. A service is
known by a variable in its environment, which whatever it starts inherits.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace

from windtunnel.agents.sandbox.context import Context
from windtunnel.agents.sandbox.criu.failure import who
from windtunnel.agents.sandbox.errors import LessError, MachineError
from windtunnel.agents.sandbox.machine import Machine
from windtunnel.agents.sandbox.machine.state import State
from windtunnel.agents.sandbox.model import Lack, LackKind, Manifest, RestoreReport, ShellState, TurnClass
from windtunnel.agents.sandbox.policy import Less
from windtunnel.agents.sandbox.record import SandboxLog
from windtunnel.linux import processes

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
    return {pid: Lack("processes", who(pid), "") for inner, pid in there if inner and not _is_service(pid)}


def alone_beside(machine: Machine, states: Iterable[ShellState]) -> list[Lack]:
    """What of it is no process: descriptors of shells, states that cannot be replayed, files in memory."""
    shells, found = machine.shells(), []
    known = {state.name: state for state in states}
    for name in sorted(shells):
        if name not in known:
            found.append(Lack("shells", f"shell {name}: its state", ""))
            continue
        with contextlib.suppress(MachineError):
            held = State.of(known[name]).text("descriptors").splitlines()
            found += [Lack("descriptors", f"shell {name}: descriptor {one}", "") for one in held]
    with contextlib.suppress(OSError):
        count = len(os.listdir(f"/proc/{machine.pid}/root/{SHARED}"))
        if count:
            found.append(Lack("files", f"/{SHARED}: {count} name{'s' if count > 1 else ''}", ""))
    return found


def _is_service(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return any(one.startswith(f"{SERVICE}=".encode()) for one in file.read().split(b"\0"))
    except OSError:
        return False


def because(lacks: Iterable[Lack], why: str) -> tuple[Lack, ...]:
    """The same, for a reason in words."""
    return tuple(replace(one, why=why) for one in lacks)


def foreseen(context: Context, manifest: Manifest) -> tuple[Lack, ...]:
    """What a restore of ``manifest`` on this host will surely lack."""
    image = manifest.image
    gone = because(image.alone, context.no_images) if image is not None and context.criu is None else ()
    return (*manifest.lacks, *gone)


def hold(
    log: SandboxLog,
    what: str,
    lacks: Sequence[Lack],
    *,
    wanted: TurnClass,
    kept: TurnClass,
    manifest: Manifest | None = None,
    report: RestoreReport | None = None,
) -> None:
    """Raises LessError where the policy says that ``what`` must not be taken as it is."""
    if not lacks:
        return
    asked = Less(wanted, kept, kinds(lacks))
    if log.decide(asked).answer == "hold":
        more = f", and {len(lacks) - 1} more" if len(lacks) > 1 else ""
        raise LessError(
            f"{what} lacks {lacks[0].what}{more} ({lacks[0].why}); `allow_less` takes it as it is",
            lacks,
            manifest=manifest,
            report=report,
        )


def kinds(lacks: Iterable[Lack]) -> tuple[LackKind, ...]:
    """The kinds, each once."""
    return tuple(sorted({one.kind for one in lacks}))
