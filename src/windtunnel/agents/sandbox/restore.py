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
import secrets
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from windtunnel.agents.sandbox.context import FAULTS, SandboxContext, SandboxLog, disk_limit_of
from windtunnel.agents.sandbox.errors import (
    CriuError,
    IncompleteError,
    MachineError,
    SandboxError,
    disk_full,
)
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


def wipe(context: SandboxContext, name: str) -> None:
    """Remove all of a sandbox but its folder and its checkpoints; never raises, what stays is found by
    ``gc``."""
    with contextlib.suppress(*FAULTS):
        launch.clear(context.home, name)
    with contextlib.suppress(*FAULTS):
        context.pool.drop_box(name)


class _Rehearsed(Exception):
    """The processes stand as they should; they are not to run."""


@dataclass
class Restoring:
    """One restore of ``manifest`` as sandbox ``spec``: what came back so far, and what lacks.

    ``serve`` is called with its network before a process runs that could look for what is served there.
    ``rehearsal_of``: the sandbox that this is a rehearsal for, which ends, by _Rehearsed, before a process
    runs.
    """

    context: SandboxContext
    log: SandboxLog
    spec: SandboxSpec
    manifest: CheckpointManifest
    serve: Callable[[Path], None] = lambda netns: None
    rehearsal_of: str = ""

    def __post_init__(self) -> None:
        self._begin = time.monotonic()
        self._name = self.rehearsal_of or self.spec.name
        self._restored: list[str] = []
        image, self._lacks = self.manifest.image, list(self.manifest.lacks)
        if image is not None and self.context.criu is None:
            self._lacks += because(image.alone, self.context.no_images)
        self._admitted = len(self._lacks)

    def refuse_less(self) -> None:
        """Raises IncompleteError where it is known beforehand that too much would lack."""
        manifest = self.manifest
        what = f"checkpoint {manifest.id} of sandbox {manifest.box}"
        self.log.hold(what, self._lacks, manifest.required, manifest.turn_class, report=self._report())

    def rehearse(self) -> None:
        """See whether the processes come back, without touching the sandbox, which runs.

        Raises IncompleteError and SandboxError as `run` does. Does nothing where they have come back before
        on this host, or where none would; and says nothing where the disk has no room for both.
        """
        context, manifest, name = self.context, self.manifest, self.spec.name
        if manifest.image is None or context.criu is None or manifest.id in context.restorable:
            return
        trial = replace(self.spec, name=f"{name[:36]}.{secrets.token_hex(4)}")
        try:
            with contextlib.suppress(_Rehearsed):
                Restoring(context, self.log, trial, manifest, rehearsal_of=name).run()
        except SandboxError as error:
            if not disk_full(error):
                raise
        finally:
            wipe(context, trial.name)

    def run(self) -> tuple[Machine, RestoreReport]:
        """A running machine for the sandbox in the state of the checkpoint, which `refuse_less` let through.

        The caller has stopped what ran before. Raises IncompleteError when something else turned out to lack,
        and SandboxError when even the files cannot be brought back; then nothing runs, and the checkpoint is
        untouched.
        """
        with self.context.using(self.manifest.id):
            return self._run()

    def _run(self) -> tuple[Machine, RestoreReport]:
        context, spec, manifest, image = self.context, self.spec, self.manifest, self.manifest.image
        self._begin = time.monotonic()
        restore = Restore(
            has_files=manifest.files is not None,
            has_image=image is not None,
            own_image=image is not None and image.id == manifest.id,
            images_possible=context.criu is not None,
            image_bytes=image.bytes_raw if image else 0,
            processes=len(image.processes) if image else 0,
        )
        back = self.log.decide(restore, write=not self.rehearsal_of)
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
                    back = self.log.decide(
                        replace(restore, images_possible=False), write=not self.rehearsal_of
                    )
            if self.rehearsal_of:
                raise _Rehearsed
            if machine is None:
                machine = Machine.start(context.home, spec, self._files())
                self.serve(machine.externals.netns)
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
        self.log.did(restored=self._restored)
        return machine, self._report()

    def _report(self) -> RestoreReport:
        restored, lacks, seconds = self._restored, self._lacks, time.monotonic() - self._begin
        return RestoreReport(self.manifest.id, self.manifest.turn, tuple(restored), tuple(lacks), seconds)

    def _stop_for_less(self, turn_class: TurnClass) -> None:
        """Raises IncompleteError where more lacks than was admitted, and that is too much."""
        what = f"sandbox {self._name}, as restored from {self.manifest.id},"
        more = self._lacks if len(self._lacks) > self._admitted else ()
        required = max(self.manifest.required, turn_class)
        self.log.hold(what, more, required, turn_class, report=self._report())

    def _files(self) -> Path:
        pool, name, files = self.context.pool, self.spec.name, self.manifest.files
        assert files is not None
        pool.clone(name, files.id, disk_limit_of(self.context, self.spec))
        self._restored = ["files"]
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
        context, spec = self.context, self.spec
        assert context.criu is not None
        note = context.home.unverified(spec.name)
        folder = context.home.dump(f"{self.manifest.id}.{spec.name}.{secrets.token_hex(4)}.restore")
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
            self.serve(externals.netns)
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
        if self.rehearsal_of:
            raise _Rehearsed
        note.unlink()

    def _replay_shells(self, machine: Machine) -> None:
        for state in self.manifest.shells:
            try:
                machine.replay(state)
                self._restored.append(f"state of shell {state.name}")
            except MachineError as error:
                self._lacks.append(Lack("shells", f"shell {state.name}: part of its state", str(error)))

    def _start_services(self, machine: Machine) -> None:
        for name, command in self.spec.services.items():
            exit_code = machine.run(service_line(name, command), timeout=30).exit_code
            if exit_code == 0:
                self._restored.append(f"service {name}, started anew without its memory")
            else:
                why = f"it ended with {exit_code}"
                self._lacks.append(Lack("services", f"service {name}: {command}", why))
