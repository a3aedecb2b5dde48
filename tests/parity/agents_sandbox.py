"""A live session of sandboxes, whose decisions come to be on record."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

from benchmarks.agents.sandbox.overhead import record
from support.waiting import until
from windtunnel.agents.sandbox.box import Box
from windtunnel.agents.sandbox.host import SandboxHost
from windtunnel.agents.sandbox.model import SandboxSpec, TurnClass, TurnRecord
from windtunnel.agents.sandbox.place import Home
from windtunnel.agents.sandbox.traces import Trace, TraceTurn
from windtunnel.store import eventlog

SERVICE = "sleep 1000 </dev/null >/dev/null 2>&1 & until grep -q sleep /proc/$!/comm; do :; done"
COMMANDS = (
    "true",
    "export MODE=debug",
    "echo one > /workspace/a",
    SERVICE,
    "rm /workspace/a; echo two > /workspace/b",
    "kill %1; wait %1 2>/dev/null",
    "cat /workspace/b",
)
"""A turn of every class, and of some twice."""


def play(home: Path, folder: Path) -> list[Path]:
    """A session on a host in ``home``: turns, a notice, a death and a restore, a checkpoint without time for
    processes, two sandboxes that wait for one worker, and a past that is forgotten. Their log and the host's
    come to lie in ``folder``; nothing else is left."""
    turns = tuple(TraceTurn(number, command) for number, command in enumerate(COMMANDS, 1))
    with SandboxHost(home, workers=1, retention=4) as host:
        box = host.create(SandboxSpec("recorded"))
        record(box, Trace("recorded", turns))
        box.run(f"{SERVICE}; echo three > /workspace/c")
        host.notice(60.0)
        box.machine().cgroup.kill()
        until(lambda: box.info().status == "dead")
        box.restore()
        box.run(SERVICE)
        box.save(TurnClass.FILES)
        _together(host, box, host.create(SandboxSpec("other")))
        host.gc()
        logs = []
        for name, at in (("sandbox", Home(home).box("recorded")), ("host", home)):
            logs.append(folder / name / eventlog.NAME)
            logs[-1].parent.mkdir(parents=True)
            shutil.copy(at / eventlog.NAME, logs[-1])
        host.remove("recorded")
        host.remove("other")
    return logs


def _together(host: SandboxHost, *boxes: Box) -> None:
    """Turns of all ``boxes`` end while the only worker of ``host`` is busy."""
    go = threading.Event()

    def busy() -> TurnRecord:
        go.wait(60)
        return TurnRecord(0, TurnClass.NONE, TurnClass.NONE, (), "", 0.0, 0.0, 0.0, 0)

    host.context.engine.submit("busy", busy)
    try:
        for box in boxes:
            box.run("echo four > /workspace/d")
            box.end_turn()
        assert len(host.context.engine._queues) >= len(boxes)
    finally:
        go.set()
    for box in boxes:
        box.wait(60)
