"""Bring a checkpoint back: files, then processes, then the state of shells where it is newer than the
processes.

Whatever still lives of the sandbox is killed first; its files are set aside and dropped later, so that
nothing of the checkpoint depends on what is there. Where the process image is older than the files (a *mixed
restore*), the policy has seen to it that nothing which the image refers to has changed. Where processes
cannot come back, fresh shells take over the kept state and the declared services start again. What lacks
then is an error, unless it is allowed: what is known to lack is told before anything is touched
(`refuse_less`), what turns out to, afterwards; then nothing runs.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from windtunnel.agents.sandbox import inventory
from windtunnel.agents.sandbox.checkpoint import FAULTS
from windtunnel.agents.sandbox.context import Context, disk_limit_of
from windtunnel.agents.sandbox.errors import CriuError, LessError, MachineError, SandboxError
from windtunnel.agents.sandbox.lacks import because, foreseen, hold, service_line
from windtunnel.agents.sandbox.machine import CHANNEL_KEPT, Machine, launch, walls
from windtunnel.agents.sandbox.model import ImagePart, Lack, Manifest, RestoreReport, SandboxSpec, TurnClass
from windtunnel.agents.sandbox.policy import Restore
from windtunnel.agents.sandbox.record import SandboxLog
from windtunnel.agents.sandbox.store import StaleCopy


def refuse_less(context: Context, log: SandboxLog, manifest: Manifest, *, allow_less: bool) -> None:
    """Raises LessError where it is known beforehand that too much would lack; nothing was touched then."""
    lacks = foreseen(context, manifest)
    hold(
        log,
        f"checkpoint {manifest.id} of sandbox {manifest.box}",
        lacks,
        wanted=manifest.wanted,
        kept=manifest.turn_class,
        allow_less=allow_less,
        report=RestoreReport(manifest.id, manifest.turn, (), lacks, 0.0),
    )


def bring_back(
    context: Context,
    log: SandboxLog,
    spec: SandboxSpec,
    manifest: Manifest,
    *,
    allow_less: bool = False,
) -> tuple[Machine, RestoreReport]:
    """A running machine for sandbox ``spec`` in the state of ``manifest``, which `refuse_less` let through.

    The caller has stopped what ran before. Raises LessError when something else turned out to lack, and
    SandboxError when even the files cannot be brought back; then nothing runs, and the checkpoint is
    untouched.
    """
    with _in_use(context, manifest.id):
        return _bring_back(context, log, spec, manifest, allow_less)


@contextlib.contextmanager
def _in_use(context: Context, checkpoint: str) -> Iterator[None]:
    context.in_use.append(checkpoint)
    try:
        yield
    finally:
        context.in_use.remove(checkpoint)


def _bring_back(
    context: Context, log: SandboxLog, spec: SandboxSpec, manifest: Manifest, allow_less: bool
) -> tuple[Machine, RestoreReport]:
    begin = time.monotonic()
    name = spec.name
    image = manifest.image
    asked = Restore(
        has_files=manifest.files is not None,
        has_image=image is not None,
        own_image=image is not None and image.id == manifest.id,
        images_possible=context.criu is not None,
        image_bytes=image.bytes_raw if image else 0,
        processes=len(image.processes) if image else 0,
    )
    back = log.decide(asked)
    if manifest.files is None or not back.files:
        raise SandboxError(f"checkpoint {manifest.id} holds no files, so nothing can be restored from it")
    limit = disk_limit_of(context, spec)
    restored, lacks = ["files"], list(foreseen(context, manifest))
    told = len(lacks)

    def stop_for_less(kept: TurnClass) -> None:
        """Raises LessError where more lacks than was admitted, and that is too much."""
        seconds = time.monotonic() - begin
        report = RestoreReport(manifest.id, manifest.turn, tuple(restored), tuple(lacks), seconds)
        what = f"sandbox {name}, as restored from {manifest.id},"
        more = lacks if len(lacks) > told else ()
        wanted = max(manifest.wanted, kept)
        hold(log, what, more, wanted=wanted, kept=kept, allow_less=allow_less, report=report)

    def differs(found: tuple[Lack, ...]) -> None:
        known = {one.what for one in lacks}
        lacks.extend(one for one in found if one.what not in known)
        stop_for_less(TurnClass.FULL)

    def files(id: str = manifest.files.id) -> Path:
        context.pool.clone(name, id, limit)
        return context.pool.mount(name)

    try:
        machine = None
        if back.processes and image is not None:
            try:
                restored.append(f"{len(image.processes)} processes with memory and open files")
                machine = _processes(context, spec, image, manifest.id, files, differs)
            except CriuError as error:
                restored.pop()
                lacks += because(image.alone, str(error))
                stop_for_less(TurnClass.FILES)
                back = log.decide(replace(asked, images_possible=False))
        if machine is None:
            machine = Machine.start(context.home, spec, files())
        if back.shells:
            _shells(machine, manifest, restored, lacks)
        if back.services:
            _services(machine, spec, restored, lacks)
        stop_for_less(TurnClass.FULL if back.processes else TurnClass.FILES)
    except LessError:
        with contextlib.suppress(*FAULTS):
            Machine.clear(context.home, name)
        raise
    except FAULTS as error:
        with contextlib.suppress(*FAULTS):
            Machine.clear(context.home, name)
        raise SandboxError(f"sandbox {name} could not be restored from {manifest.id}: {error}") from error
    log.did(restored=restored)
    seconds = time.monotonic() - begin
    return machine, RestoreReport(manifest.id, manifest.turn, tuple(restored), tuple(lacks), seconds)


def _processes(
    context: Context,
    spec: SandboxSpec,
    image: ImagePart,
    checkpoint: str,
    files: Callable[[], Path],
    differs: Callable[[tuple[Lack, ...]], None],
) -> Machine:
    """The processes run, on the root that ``files`` makes. ``differs`` is told, before they do, what of them
    is not as it was; what it raises keeps them from running."""

    def attempt() -> Machine:
        folder = context.home.dump(f"{checkpoint}.{spec.name}.{secrets.token_hex(4)}.restore")
        return _restored(context, spec, image, folder, files, differs)

    try:
        return attempt()
    except StaleCopy:
        # the image was a copy of the cache that is wrong: nothing has run on it, and it is dropped
        return attempt()


def _restored(
    context: Context,
    spec: SandboxSpec,
    image: ImagePart,
    folder: Path,
    files: Callable[[], Path],
    differs: Callable[[tuple[Lack, ...]], None],
) -> Machine:
    """``folder``: where the image lies meanwhile. Raises StaleCopy when it was a copy of the cache that
    turned out to be wrong."""
    assert context.criu is not None
    note = context.home.unverified(spec.name)

    def look(first: int) -> None:
        """All stands still: what CRIU does not bring back as it was is put right here, and nowhere else."""
        walls.seal(first)
        found: tuple[Lack, ...] = ()
        if image.inventory is not None:
            found = inventory.put_right(image.inventory, externals.freezer, first)
        confirm()
        differs(found)
        note.unlink()

    try:
        # files, image, and what there is before the first process have nothing to do with one another
        with ThreadPoolExecutor(2, "sandbox-restore") as beside:
            begun = beside.submit(context.pages.begin, image.id, folder)
            # without the root, of which there is none yet
            prepared = beside.submit(Machine.prepare, context.home, spec, Path())
            root = files()
            confirm = begun.result()
            externals = replace(prepared.result(), root=root)
            Machine.lay_channel(externals, folder / CHANNEL_KEPT)
        note.touch()
        group = launch.group(context.home, spec.name)
        with group.first(), group.roomy():
            pid = context.criu.restore(folder, externals, meanwhile=look, wanted=note)
        return Machine.adopt(context.home, spec, root, pid)
    except BaseException:
        with contextlib.suppress(*FAULTS):
            Machine.clear(context.home, spec.name)
        raise
    finally:
        note.unlink(missing_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def _shells(machine: Machine, manifest: Manifest, restored: list[str], lacks: list[Lack]) -> None:
    for state in manifest.shells:
        try:
            machine.replay(state)
            restored.append(f"state of shell {state.name}")
        except MachineError as error:
            lacks.append(Lack("shells", f"shell {state.name}: part of its state", str(error)))


def _services(machine: Machine, spec: SandboxSpec, restored: list[str], lacks: list[Lack]) -> None:
    for name, command in spec.services.items():
        started = machine.run(service_line(name, command), timeout=30)
        if started.exit_code == 0:
            restored.append(f"service {name}, started anew without its memory")
        else:
            lacks.append(Lack("services", f"service {name}: {command}", f"it ended with {started.exit_code}"))
