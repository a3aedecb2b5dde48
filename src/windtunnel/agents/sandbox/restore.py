"""Bring a checkpoint back: files, then processes, then the state of shells where it is newer than the
processes.

Whatever still lives of the sandbox is killed first; its files are set aside and dropped later, so that
nothing of the checkpoint depends on what is there. Where the process image is older than the files (a *mixed
restore*), the policy has seen to it that nothing which the image refers to has changed. Where processes
cannot come back, fresh shells take over the kept state and the declared services start again. What lacks
then is an error, unless it is allowed: what is known to lack is told before anything is touched
(`refuse_less`), what turns out to, afterwards; then nothing runs.

Before a sandbox that runs is killed for a checkpoint whose processes have not come back yet, these are
brought back once beside it, under another name, and ended before they run (`rehearse`): a restore that fails
leaves what runs as it was.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

from windtunnel.agents.sandbox.context import FAULTS, SandboxContext, SandboxLog, disk_limit_of
from windtunnel.agents.sandbox.errors import CriuError, IncompleteError, MachineError, SandboxError
from windtunnel.agents.sandbox.inventory.mend import put_right
from windtunnel.agents.sandbox.machine import Machine, launch, walls
from windtunnel.agents.sandbox.machine.channel import CHANNEL_TAR, lay_channel
from windtunnel.agents.sandbox.model import (
    CheckpointManifest,
    ImagePart,
    Lack,
    RestoreReport,
    SandboxSpec,
    TurnClass,
)
from windtunnel.agents.sandbox.observe import because, service_line
from windtunnel.agents.sandbox.policy import Restore
from windtunnel.agents.sandbox.store import StaleCopy

FULL = (errno.ENOSPC, errno.EDQUOT)


def foreseen(context: SandboxContext, manifest: CheckpointManifest) -> tuple[Lack, ...]:
    """What a restore of ``manifest`` on this host will surely lack."""
    image = manifest.image
    gone = because(image.alone, context.no_images) if image is not None and context.criu is None else ()
    return (*manifest.lacks, *gone)


def refuse_less(context: SandboxContext, log: SandboxLog, manifest: CheckpointManifest) -> None:
    """Raises IncompleteError where it is known beforehand that too much would lack; nothing was touched."""
    lacks = foreseen(context, manifest)
    log.hold(
        f"checkpoint {manifest.id} of sandbox {manifest.box}",
        lacks,
        required=manifest.required,
        reached=manifest.turn_class,
        report=RestoreReport(manifest.id, manifest.turn, (), lacks, 0.0),
    )


def bring_back(
    context: SandboxContext,
    log: SandboxLog,
    spec: SandboxSpec,
    manifest: CheckpointManifest,
    serve: Callable[[Path], None],
) -> tuple[Machine, RestoreReport]:
    """A running machine for sandbox ``spec`` in the state of ``manifest``, which `refuse_less` let through.

    ``serve`` is called with its network before a process runs that could look for what is served there. The
    caller has stopped what ran before. Raises IncompleteError when something else turned out to lack, and
    SandboxError when even the files cannot be brought back; then nothing runs, and the checkpoint is
    untouched.
    """
    with context.using(manifest.id):
        return _Restoring(context, log, spec, manifest, serve).run()


def rehearse(
    context: SandboxContext, log: SandboxLog, spec: SandboxSpec, manifest: CheckpointManifest
) -> None:
    """See whether the processes of ``manifest`` come back, without touching sandbox ``spec``, which runs.

    Raises IncompleteError and SandboxError as `bring_back` does. Does nothing where they have come back
    before on this host, or where none would; and says nothing where the disk has no room for both.
    """
    if manifest.image is None or context.criu is None or manifest.id in context.restorable:
        return
    trial = replace(spec, name=f"{spec.name[:36]}.{secrets.token_hex(4)}")
    try:
        with context.using(manifest.id), contextlib.suppress(_Rehearsed):
            _Restoring(context, log, trial, manifest, lambda netns: None, rehearsal_of=spec.name).run()
    except SandboxError as error:
        if not _is_full(error):
            raise
    finally:
        wipe(context, trial.name)


def wipe(context: SandboxContext, name: str) -> None:
    """Remove all of a sandbox but its folder and its checkpoints; never raises, what stays is found by
    ``gc``."""
    steps: list[Callable[[str], None]] = [partial(launch.clear, context.home), context.pool.drop_box]
    for step in steps:
        with contextlib.suppress(*FAULTS):
            step(name)


def _is_full(error: BaseException | None) -> bool:
    """Whether it comes of a disk, or a bound of one, that is full."""
    while error is not None and not (isinstance(error, OSError) and error.errno in FULL):
        error = error.__cause__
    return error is not None


class _Rehearsed(Exception):
    """The processes stand as they should; they are not to run."""


class _Restoring:
    """One restore of ``manifest`` as sandbox ``spec``: what came back so far, and what lacks. As a
    rehearsal (``rehearsal_of``: the sandbox) it ends, by _Rehearsed, before a process runs."""

    def __init__(
        self, context: SandboxContext, log: SandboxLog, spec: SandboxSpec, manifest: CheckpointManifest,
        serve: Callable[[Path], None], *, rehearsal_of: str = "",
    ) -> None:  # fmt: skip
        self._context, self._log, self._spec, self._manifest = context, log, spec, manifest
        self._serve = serve
        self._rehearsal, self._name = bool(rehearsal_of), rehearsal_of or spec.name
        self._begin = time.monotonic()
        self._restored = ["files"]
        self._lacks = list(foreseen(context, manifest))
        self._admitted = len(self._lacks)

    def run(self) -> tuple[Machine, RestoreReport]:
        context, spec, manifest, image = self._context, self._spec, self._manifest, self._manifest.image
        restore = Restore(
            has_files=manifest.files is not None,
            has_image=image is not None,
            own_image=image is not None and image.id == manifest.id,
            images_possible=context.criu is not None,
            image_bytes=image.bytes_raw if image else 0,
            processes=len(image.processes) if image else 0,
        )
        back = self._log.decide(restore, write=not self._rehearsal)
        if manifest.files is None or not back.files:
            raise SandboxError(f"checkpoint {manifest.id} holds no files, so nothing can be restored from it")
        try:
            machine = None
            if back.processes and image is not None:
                try:
                    machine = self._with_processes(image)
                except CriuError as error:
                    self._lacks += because(image.alone, str(error))
                    self._stop_for_less(TurnClass.FILES)
                    back = self._log.decide(
                        replace(restore, images_possible=False), write=not self._rehearsal
                    )
            if self._rehearsal:
                raise _Rehearsed
            if machine is None:
                machine = Machine.start(context.home, spec, self._files())
                self._serve(machine.externals.netns)
            if back.shells:
                self._replay_shells(machine)
            if back.services:
                self._start_services(machine)
            self._stop_for_less(TurnClass.FULL if back.processes else TurnClass.FILES)
        except (IncompleteError, *FAULTS) as error:
            with contextlib.suppress(*FAULTS):
                launch.clear(context.home, spec.name)
            if isinstance(error, IncompleteError):
                raise
            words = f"sandbox {self._name} could not be restored from {manifest.id}: {error}"
            raise SandboxError(words) from error
        if back.processes:
            context.restorable.add(manifest.id)
        self._log.did(restored=self._restored)
        return machine, self._report()

    def _report(self) -> RestoreReport:
        restored, lacks, seconds = self._restored, self._lacks, time.monotonic() - self._begin
        return RestoreReport(self._manifest.id, self._manifest.turn, tuple(restored), tuple(lacks), seconds)

    def _stop_for_less(self, turn_class: TurnClass) -> None:
        """Raises IncompleteError where more lacks than was admitted, and that is too much."""
        self._log.hold(
            f"sandbox {self._name}, as restored from {self._manifest.id},",
            self._lacks if len(self._lacks) > self._admitted else (),
            required=max(self._manifest.required, turn_class),
            reached=turn_class,
            report=self._report(),
        )

    def _files(self) -> Path:
        pool, name, files = self._context.pool, self._spec.name, self._manifest.files
        assert files is not None
        pool.clone(name, files.id, disk_limit_of(self._context, self._spec))
        return pool.mount(name)

    def _with_processes(self, image: ImagePart) -> Machine:
        try:
            machine = self._from_image(image)
        except StaleCopy:
            # the image was a copy of the cache that is wrong: nothing has run on it, and it is dropped
            machine = self._from_image(image)
        self._restored.append(f"{len(image.processes)} processes with memory and open files")
        return machine

    def _from_image(self, image: ImagePart) -> Machine:
        """Raises StaleCopy when the image was a copy of the cache that turned out to be wrong."""
        context, spec = self._context, self._spec
        assert context.criu is not None
        note = context.home.unverified(spec.name)
        folder = context.home.dump(f"{self._manifest.id}.{spec.name}.{secrets.token_hex(4)}.restore")
        try:
            # files, image, and what there is before the first process have nothing to do with one another
            with ThreadPoolExecutor(2, "sandbox-restore") as beside:
                begun = beside.submit(context.store.begin, image.id, folder)
                # without the root, of which there is none yet
                prepared = beside.submit(launch.prepare, context.home, spec, Path())
                root = self._files()
                confirm = begun.result()
                externals = replace(prepared.result()[0], root=root)
                lay_channel(folder / CHANNEL_TAR, externals.of("channel"))
            self._serve(externals.netns)
            note.touch()
            group = launch.group(context.home, spec.name)
            with group.first(), group.roomy():
                verified = partial(self._verify, image, externals.freezer, confirm, note)
                pid = context.criu.restore(folder, externals, meanwhile=verified, permit=note)
            return Machine.adopt(context.home, spec, root, pid)
        except BaseException:
            with contextlib.suppress(*FAULTS):
                launch.clear(context.home, spec.name)
            raise
        finally:
            note.unlink(missing_ok=True)
            shutil.rmtree(folder, ignore_errors=True)

    def _verify(
        self, image: ImagePart, freezer: Path, confirm: Callable[[], None], note: Path, first: int
    ) -> None:
        """All stands still: what CRIU does not bring back as it was is put right here, and nowhere else; what
        this raises keeps the processes from running."""
        walls.seal(first)
        if image.inventory is not None:
            earlier = {lack.what for lack in self._lacks}
            different = put_right(image.inventory, freezer, first)
            self._lacks += [lack for lack in different if lack.what not in earlier]
        confirm()
        self._stop_for_less(TurnClass.FULL)
        if self._rehearsal:
            raise _Rehearsed
        note.unlink()

    def _replay_shells(self, machine: Machine) -> None:
        for state in self._manifest.shells:
            try:
                machine.replay(state)
                self._restored.append(f"state of shell {state.name}")
            except MachineError as error:
                self._lacks.append(Lack("shells", f"shell {state.name}: part of its state", str(error)))

    def _start_services(self, machine: Machine) -> None:
        for name, command in self._spec.services.items():
            exit_code = machine.run(service_line(name, command), timeout=30).exit_code
            if exit_code == 0:
                self._restored.append(f"service {name}, started anew without its memory")
            else:
                why = f"it ended with {exit_code}"
                self._lacks.append(Lack("services", f"service {name}: {command}", why))
