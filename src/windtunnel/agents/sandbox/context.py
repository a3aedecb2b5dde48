"""The parts that a host puts together, and what is weaker of them than it could be, in words.

Snapshots or copies of files, process images or none, and three ways to look at a turn: whatever is missing to
root, a host opens with what is next below, and says so once. An ordinary user's host copies, compares, and
has no process images.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from shutil import disk_usage

from windtunnel.agents.sandbox.criu import Criu
from windtunnel.agents.sandbox.engine import Engine
from windtunnel.agents.sandbox.errors import PartError, SandboxError
from windtunnel.agents.sandbox.files import Pool
from windtunnel.agents.sandbox.inspect import DiffInspector, Inspector
from windtunnel.agents.sandbox.model import Event, SandboxSpec
from windtunnel.agents.sandbox.place import Home
from windtunnel.agents.sandbox.policy import PolicyName, Retention, Room, Rules, disk_limit
from windtunnel.agents.sandbox.proxy.attach import HostProxy
from windtunnel.agents.sandbox.record import SandboxLog
from windtunnel.agents.sandbox.store import Store
from windtunnel.base.errors import UserError
from windtunnel.store.objects import ObjectError

FAULTS = (PartError, ObjectError, OSError)
"""What an operation on a sandbox may meet in its parts."""
NO_IMAGES = "they are not kept without root"
"""Why an ordinary user's host keeps no processes."""


@dataclass(frozen=True)
class Context:
    """What every operation on a sandbox needs; ``criu`` and ``inspector``: None where there is none."""

    home: Home
    pool: Pool
    store: Store
    criu: Criu | None
    inspector: Inspector | DiffInspector | None
    engine: Engine
    rules: Rules
    retention: Retention
    policy: PolicyName
    in_use: list[str]
    """Checkpoints that are being made or restored, once for each: nothing of them may be dropped."""
    restorable: set[str]
    """Checkpoints whose processes have come back on this host since it was opened."""
    proxy: HostProxy
    report: Callable[[Event], None]
    no_images: str
    """Why processes are not kept where ``criu`` is None."""

    def log(self, box: str) -> SandboxLog:
        """The log of that sandbox, and what decides of it; with the empty name, of the host."""
        return SandboxLog(box, self.policy, self.home.box(box) if box else self.home.path, self.report)


def room_for(context: Context, box: str, what: str) -> None:
    """Raises SandboxError where the host's disk has no room for ``what`` of sandbox ``box``."""
    disk = disk_usage(context.home.path)
    room = Room(what, disk.free, disk.total)
    log = context.log(box)
    admission = log.decide(room, write=False)
    if admission.refused:  # that there is room is no news
        log.decided(room, admission)
        raise SandboxError(admission.refused)


def disk_limit_of(context: Context, spec: SandboxSpec) -> int | None:
    """Bytes that the sandbox's root may use beyond its image. Raises UserError where it names a limit that
    cannot be held here."""
    asked, pool = spec.limits.disk, context.pool
    why = pool.unbounded(asked=bool(asked))
    if asked and why:
        raise UserError(
            f"sandbox {spec.name}: a limit of {asked >> 20} MiB of disk cannot be held here: {why}; "
            "leave `disk` away, or say `disk` none"
        )
    return disk_limit(asked, pool.usage()[1], bounded=not why)
