"""How a sandbox is made, from an image or from a checkpoint, and how all of it goes.

Nothing is left of one that could not be made.
"""

from __future__ import annotations

import contextlib
import shutil
import time

from windtunnel.agents.sandbox import checks
from windtunnel.agents.sandbox import record as records
from windtunnel.agents.sandbox.box import Box
from windtunnel.agents.sandbox.checkpoint import FAULTS
from windtunnel.agents.sandbox.context import Context, disk_limit_of, room_for
from windtunnel.agents.sandbox.effects import EffectError
from windtunnel.agents.sandbox.errors import SandboxError
from windtunnel.agents.sandbox.files import LeftOut
from windtunnel.agents.sandbox.lacks import service_line
from windtunnel.agents.sandbox.machine import Machine
from windtunnel.agents.sandbox.model import Event, Manifest, SandboxSpec
from windtunnel.agents.sandbox.record import Record
from windtunnel.agents.sandbox.restore import bring_back, refuse_less
from windtunnel.base.errors import UserError


def from_image(context: Context, spec: SandboxSpec, *, rootless: bool) -> Box:
    """A new running sandbox, with its first checkpoint.

    Raises UserError for an image that cannot be imported; SandboxError when the machine refuses.
    """
    name = spec.name
    limit = disk_limit_of(context, spec)
    room_for(context, "", f"sandbox {name}")
    left_out: list[str] = []
    image = context.pool.import_image(spec.image, lambda text: _note(left_out, text))
    record = Record(spec=spec, created=time.time(), image=image)
    records.write(context.home.box(name), record)
    box = None
    try:
        context.pool.create(name, image, limit)
        root = context.pool.mount(name)
        checks.need_shell(root, spec.image)
        with context.pool.relaxed(name):
            machine = Machine.start(context.home, spec, root)
        box = Box(context, record, None)
        box.adopt(machine, None)
        box.checkpoint()
        for service, command in spec.services.items():
            started = box.run(service_line(service, command), timeout=30)
            if started.exit_code != 0:
                raise SandboxError(f"service {service} of sandbox {name} did not start: {command!r}")
        told = [*left_out, *machine.limits_missed] if rootless else []
        for words in told:
            context.report(Event("created", name, words))
    except BaseException as error:
        forget(context, name, box)
        if isinstance(error, FAULTS):
            raise SandboxError(f"sandbox {name} could not be made: {error}") from error
        raise
    return box


def from_checkpoint(
    context: Context,
    manifest: Manifest,
    spec: SandboxSpec,
    image: str,
    *,
    fresh: bool,
    allow_less: bool,
) -> Box:
    """A new sandbox in the state of ``manifest``. ``fresh``: with an identity of its own."""
    name = spec.name
    room_for(context, "", f"sandbox {name}")
    record = Record(spec=spec, created=time.time(), base=manifest.id, turns=manifest.turn, image=image)
    records.write(context.home.box(name), record)
    box, allow_less = None, allow_less or spec.allow_less
    try:
        refuse_less(context, context.log(name), manifest, allow_less=allow_less)
        if fresh:
            context.proxy.forked(manifest.box, spec, manifest.turn)
        machine, report = bring_back(context, context.log(name), spec, manifest, allow_less=allow_less)
        if fresh:
            with context.pool.relaxed(name):
                machine.freshen(spec.hostname or name)
        box = Box(context, record, None)
        box.adopt(machine, manifest, lacks=report.lacks)
    except BaseException:
        forget(context, name, box)
        raise
    return box


def forget(context: Context, name: str, box: Box | None) -> None:
    """Remove all of a sandbox but its checkpoints; never raises, what stays is found by ``gc``."""
    with contextlib.suppress(*FAULTS, EffectError, UserError):
        context.proxy.forget(name)
    with contextlib.suppress(*FAULTS):
        if box is not None:
            box.halt()
    with contextlib.suppress(*FAULTS):
        Machine.clear(context.home, name)
    with contextlib.suppress(*FAULTS):
        context.pool.unmount(name)
    with contextlib.suppress(*FAULTS):
        context.pool.drop_box(name)
    shutil.rmtree(context.home.box(name), ignore_errors=True)


def _note(left_out: list[str], text: str) -> None:
    if isinstance(text, LeftOut):
        left_out.append(text)
