"""How a process takes a home over: it alone holds it, and it finds the sandboxes that still run.

State is on disk, and the processes never depended on the host's process. What it cannot know about the time
when nobody watched, it doubts: the next turn of such a sandbox is full.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from typing import IO

from windtunnel.agents.sandbox import record as records
from windtunnel.agents.sandbox.box import Box
from windtunnel.agents.sandbox.context import Context
from windtunnel.agents.sandbox.criu.connections import leave_repair
from windtunnel.agents.sandbox.machine import Machine
from windtunnel.agents.sandbox.model import Event, Manifest
from windtunnel.agents.sandbox.place import Home
from windtunnel.agents.sandbox.record import Record
from windtunnel.base.errors import UserError


def locked(home: Home) -> IO[str]:
    """The lock of ``home``, held until it is closed; UserError where another process has it."""
    file = (home.path / "lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise UserError(
            f"sandbox: home {home.path} is held by process {holder}; use its daemon, or another home "
            "(WINDTUNNEL_SANDBOX_HOME)"
        ) from None
    file.truncate(0)
    file.write(str(os.getpid()))
    file.flush()
    return file


def clear_dumps(home: Home) -> None:
    """Drop images that a crash left on the way to the page store."""
    folder = home.path / "dumps"
    if folder.is_dir():
        for left in folder.iterdir():
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)


def take_over(context: Context, boxes: dict[str, Box]) -> None:
    """Add to ``boxes`` those of the home: watch the ones that still run, and note which do not.

    Where a sandbox's newest checkpoint is damaged, the one before it takes its place.
    """
    sound, problems = context.manifests.all()
    for problem in problems:
        context.report(Event("failed", "", problem))
    for folder in sorted(context.home.boxes.iterdir()):
        record = records.read(folder)
        # without a checkpoint it was about to get its first, and nobody was told that it exists
        if record is None or record.status == "making" or not record.tip:
            Machine.clear(context.home, folder.name)
            context.pool.unmount(folder.name)
            continue
        name = record.spec.name
        tip = _newest(record, sound)
        if tip != record.tip:
            context.report(Event("failed", name, f"checkpoint {record.tip} cannot be read; {tip} is"))
            record = replace(record, tip=tip)
        if record.status == "running" and records.is_alive(record):
            root = context.pool.mount(name)
            machine = Machine.adopt(context.home, record.spec, root, record.pid)
            box = Box(context, record, machine, doubt="nobody watched while the host was away")
            box.watch()
            leave_repair(machine.cgroup.pids())  # the host may have ended in a dump
            machine.cgroup.thaw()
            context.proxy.serve(box, box.spec, machine.externals.netns)
        else:
            box = Box(context, record, None)
            Machine.clear(context.home, name)
            if record.status == "running":
                context.report(Event("died", name, "while the host was away"))
        boxes[name] = box


def _newest(record: Record, sound: Sequence[Manifest]) -> str:
    """The sandbox's newest checkpoint that can be read; empty where there is none."""
    ids = {manifest.id for manifest in sound}
    if not record.tip or record.tip in ids:
        return record.tip
    own = [manifest for manifest in sound if manifest.box == record.spec.name]
    if own:
        return max(own, key=lambda manifest: (manifest.turn, manifest.created)).id
    return record.base if record.base in ids else ""
