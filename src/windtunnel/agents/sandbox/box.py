"""One sandbox: commands, turns and checkpoints.

A turn begins with the first command after the last one and ends with ``end_turn``. At its end the policy
reads the turn's effects, and the checkpoint that they call for runs in the background, while the model
thinks. The next command waits for it (the gate), so that a checkpoint never sees half of the turn that
follows.

On each failure: a checkpoint that fails leaves the earlier ones and the running sandbox as they were, and
makes the next turn full. That it failed, or lacks something, is raised to whoever waits for it; where nobody
does, to whoever calls next, once, and what was called for is not done. A sandbox that dies says so at the
next call; ``restore`` brings its newest checkpoint back.
"""

from __future__ import annotations

import contextlib
import io
import shlex
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import IO, Any, Unpack

from windtunnel.agents.sandbox.checkpoint import Taking
from windtunnel.agents.sandbox.checks import checked_label
from windtunnel.agents.sandbox.context import (
    FAULTS,
    Pending,
    Record,
    SandboxContext,
    SandboxLog,
    write_record,
)
from windtunnel.agents.sandbox.errors import IncompleteError, SandboxDied, SandboxError
from windtunnel.agents.sandbox.machine import Machine, launch, list_folder, put_file, read_file
from windtunnel.agents.sandbox.model import (
    LESS,
    NO_TERMS,
    BoxInfo,
    CheckpointManifest,
    Diff,
    FolderEntry,
    Lack,
    RestoreReport,
    SandboxEvent,
    SandboxSpec,
    Terms,
    TurnClass,
    TurnRecord,
    TurnResult,
)  # fmt: skip
from windtunnel.agents.sandbox.observe import SandboxNow
from windtunnel.agents.sandbox.policy import (
    CheckpointPlan,
    CheckpointRequest,
    Decision,
    Observation,
    Occasion,
    Shortfall,
)
from windtunnel.agents.sandbox.protocol import AnySandbox, SandboxHistory
from windtunnel.agents.sandbox.restore import Restoring
from windtunnel.agents.sandbox.store import new_id
from windtunnel.base import processes
from windtunnel.base.errors import UserError
from windtunnel.base.plain import to_plain

LARGEST = 2**30
"""Bytes that `Box.get` returns at most; larger files go to a file by `Box.get_to`."""


class Box(AnySandbox):
    """A sandbox of a host. Made by ``SandboxHost``; every method may be called from any thread."""

    def __init__(
        self, context: SandboxContext, record: Record, machine: Machine | None, *, doubt: str = ""
    ) -> None:
        self._context = context
        self._record = record
        self._log = context.log(record.spec.name)
        self._tip: CheckpointManifest | None = context.store.load(record.tip) if record.tip else None
        self._doubt = doubt
        """Why the inspector cannot know what happened since the newest checkpoint; empty where it can."""
        self._lacks: tuple[Lack, ...] = self._tip.lacks if self._tip else ()
        self._accepted: tuple[int, Terms] = (-1, {})
        """What somebody who asked accepts, of which turn."""
        self._machine = machine
        self._lock = threading.RLock()
        self._pending: Pending[TurnRecord] | None = None
        self._turn_began = 0.0

    # --- what it is

    @property
    def name(self) -> str:
        return self._record.spec.name

    @property
    def spec(self) -> SandboxSpec:
        return self._record.spec

    @property
    def tip(self) -> str:
        """Id of the newest checkpoint; empty before the first."""
        return self._tip.id if self._tip else ""

    @property
    def snapshot(self) -> str:
        """The newest snapshot of its files; empty before the first."""
        return self._tip.files.id if self._tip and self._tip.files else ""

    @property
    def image(self) -> str:
        """The image that it, or what it was forked from, was made of."""
        return self._record.image

    @property
    def turns(self) -> int:
        return self._record.turns

    def info(self) -> BoxInfo:
        record, machine = self._record, self._machine
        machine = machine if machine is not None and machine.alive() else None
        status = "running" if machine else "dead" if record.status == "running" else record.status
        return BoxInfo(
            name=self.name,
            status=status,
            pid=machine.pid if machine else 0,
            turns=record.turns,
            tip=self.tip,
            image=record.image,
            network=record.spec.network,
            created=record.created,
            processes=machine.commands() if machine else (),
            base=record.base,
            lacks=self._lacks,
        )

    def machine(self) -> Machine:
        """The running machine, or SandboxDied in words."""
        machine = self._machine
        if machine is None or not machine.alive():
            stopped = self._record.status == "stopped"
            raise SandboxDied(
                f"sandbox {self.name} is {'stopped' if stopped else 'dead: its processes are gone'}; "
                f"'windtunnel sandbox restore {self.name}' brings its newest checkpoint back"
            )
        return machine

    # --- commands

    def run(
        self,
        command: str | Sequence[str],
        *,
        shell: str = "main",
        timeout: float | None = None,
        cancel: threading.Event | None = None,
        on_output: Callable[[str, bytes], None] | None = None,
        stdin: bytes | IO[bytes] | None = None,
    ) -> TurnResult:
        """Run ``command`` (shell text, or arguments) in a persistent shell and wait for its end.

        ``timeout`` in seconds. ``on_output`` gets the output's name and bytes as they come.
        ``stdin`` is its standard input, which is empty without.
        Raises SandboxDied when the sandbox does not run, UserError for a command that no shell can be given,
        and what the last turn's checkpoint failed with, where nobody was told yet: IncompleteError where it
        lacks something. The command has not run then.
        """
        text = command if isinstance(command, str) else shlex.join(command)
        with self._lock:
            machine = self._begin()
        # not under the lock: an agent that runs in this command ends its turns through the model proxy
        result = machine.run(
            text, shell=shell, timeout=timeout, cancel=cancel, on_output=on_output, stdin=stdin
        )
        if result.ended == "sandbox-died":
            self._context.report(SandboxEvent("died", self.name, text[:80]))
        return result

    def put(self, path: str, data: bytes | IO[bytes], mode: int = 0o644) -> None:
        """Write a file of the sandbox, atomically. It counts as a change of the turn."""
        with self._lock:
            machine = self._begin()
            put_file(machine.root, path, data, mode)
            if self._context.inspector is not None:
                self._context.inspector.touched(self.name, path)

    def get(self, path: str) -> bytes:
        """The bytes of a regular file of the sandbox; links are followed inside of it only."""
        out = io.BytesIO()
        read_file(self.machine().root, path, out, LARGEST)
        return out.getvalue()

    def get_to(self, path: str, out: IO[bytes]) -> None:
        """Stream a file of the sandbox into ``out``."""
        read_file(self.machine().root, path, out)

    def listdir(self, path: str) -> list[FolderEntry]:
        return list_folder(self.machine().root, path)

    def port(self, port: int) -> str:
        """The URL of this host's loopback that leads to a TCP port inside; a restore leaves it as it is."""
        with self._lock:
            self.machine()
            return self._context.proxy.ports.open(self.name, port)

    # --- turns

    def end_turn(self, request: str = "", *, urgent: bool = False) -> Pending[TurnRecord]:
        """End the turn: decide what it needs, and start that. A turn that needs nothing is done at once."""
        with self._lock:
            self._gate()
            begin = time.monotonic()
            look = self._now().observe(Occasion.TURN)
            keep = self._log.decide(look)
            seconds = time.monotonic() - begin
            number, began = self._record.turns + 1, self._turn_began or time.time()
            try:
                self._save(turns=number)
            except SandboxError as error:
                # the number is known here, and the next record that can be written has it
                self._context.report(SandboxEvent("failed", self.name, str(error)))
            turn = TurnRecord(
                number, TurnClass.NONE, keep.turn_class, keep.reasons[:20], self.tip, began, 0.0, seconds, 0,
                request,
            )  # fmt: skip
            self._turn_began = 0.0
            if keep.content is TurnClass.NONE:
                turn = self._end(turn)
                return Pending(self.name, lambda: turn).run()
            work = partial(self._cover_turn, turn, look, keep)
            self._pending = self._context.engine.submit(self.name, work, urgent=urgent)
            return self._pending

    def _cover_turn(self, turn: TurnRecord, look: CheckpointRequest, keep: CheckpointPlan) -> TurnRecord:
        """The turn's checkpoint, made by a worker; the turn with what became of it."""
        try:
            manifest = self._cover(self._under(), turn.number, look, keep, request=turn.request)
        except (SandboxError, *FAULTS) as error:
            lack = Lack("files", f"turn {turn.number}", f"its checkpoint failed: {error}")
            turn = self._end(replace(turn, lacks=(lack,)))
            if self.passes():
                return turn
            raise
        parts = [part for part in (manifest.image, manifest.files) if part and part.id == manifest.id]
        turn = replace(
            turn, turn_class=manifest.turn_class, checkpoint=manifest.id, lacks=manifest.lacks,
            bytes_new=sum(part.bytes_new for part in parts),
        )  # fmt: skip
        turn = self._end(turn)
        self._hold(manifest, self._under())
        return turn

    def _end(self, turn: TurnRecord) -> TurnRecord:
        """Write the turn's line of the log."""
        turn = replace(turn, seconds=time.time() - turn.started)
        self._log.turn(turn)
        return turn

    def wait(self, timeout: float | None = None) -> None:
        """Until the checkpoint under way, if any, is safe. Raises TimeoutError, or what it failed with."""
        if (pending := self._pending) is not None:
            pending.promote()
            pending.wait(timeout)

    # --- checkpoints

    def checkpoint(
        self,
        label: str = "",
        *,
        full: bool = False,
        pin: bool = False,
        **terms: Unpack[Terms],
    ) -> CheckpointManifest:
        """A checkpoint of the state now, safe on return.

        It costs what changed since the last one: where nothing did, the newest checkpoint is labelled anew.
        ``full``: dump the processes in any case. Raises IncompleteError where it lacks something that was
        there: it is kept all the same, and is the error's ``manifest``. ``terms`` may allow that, of this
        checkpoint and of a reply of this turn that was held for it.
        """
        checked_label(label)
        named = bool(label) or pin
        return self._checkpoint(Occasion.REQUESTED, label, pin, terms, full=full, named=named)

    def save(self, most: TurnClass) -> CheckpointManifest:
        """A checkpoint because the host goes away. ``most``: the strongest class for which there is time.
        What it lacks is told by its manifest."""
        return self._checkpoint(Occasion.NOTICE, "notice", False, LESS, most=most, named=True)

    def _checkpoint(
        self, occasion: Occasion, label: str, pin: bool, terms: Terms, **more: Any
    ) -> CheckpointManifest:
        """``more``: as of `observe`."""
        with self._lock:
            with contextlib.suppress(SandboxError, *FAULTS):
                self._gate()  # what the turn's own checkpoint lacks, this one may have
            if occasion is Occasion.REQUESTED and any(terms.values()):
                self._accepted = self._record.turns, terms
            look, log = self._now().observe(occasion, **more), self._under(terms)
            keep = log.decide(look)
            if keep.content > TurnClass.NONE:
                work = partial(self._cover, log, self._record.turns, look, keep, label=label, pin=pin)
                self._context.engine.submit(self.name, work, urgent=True).wait()
            assert self._tip is not None
            self._hold(self._tip, log)
            return self._tip

    def _cover(
        self, log: SandboxLog, number: int, look: CheckpointRequest, keep: CheckpointPlan, *,
        request: str = "", label: str = "", pin: bool = False,
    ) -> CheckpointManifest:  # fmt: skip
        """Take the checkpoint that ``keep`` calls for: from then on it is the newest one."""
        taking = Taking(**vars(self._now()), log=log, id=new_id(), turn=number, look=look, keep=keep,
                        request=request, label=label, pinned=pin)  # fmt: skip
        try:
            with self._context.using(taking.id):
                manifest = taking.run()
        except SandboxError as error:
            self._doubt = f"the last checkpoint failed: {error}"
            raise
        self._doubt = ""
        self._log.did(content=to_plain(manifest.content), image=manifest.image is not None)
        self._tip, self._lacks = manifest, manifest.lacks
        self._save(tip=manifest.id)
        self._context.made()
        return manifest

    def restore(self, checkpoint: str = "", **terms: Unpack[Terms]) -> RestoreReport:
        """Bring a checkpoint of this sandbox (or of what it was forked from) back; empty: the newest.

        What runs of the sandbox is killed, once it is known that the checkpoint comes back.
        What an agent inside asks the model again, because it is set back, is answered from the record.
        Raises IncompleteError where something would not come back, unless that is allowed; what runs is left
        alone.
        """
        return self._back(checkpoint, terms, on_purpose=False)

    def rollback(self, checkpoint: str, **terms: Unpack[Terms]) -> RestoreReport:
        """Go back to an earlier checkpoint. Later ones stay: they are another branch of the tree.

        An agent inside asks the model anew. Raises IncompleteError as `restore` does.
        """
        return self._back(checkpoint, terms, on_purpose=True)

    def _back(self, checkpoint: str, terms: Terms, *, on_purpose: bool) -> RestoreReport:
        inspector = self._context.inspector
        with self._lock, inspector.holding() if inspector is not None else contextlib.nullcontext():
            with contextlib.suppress(Exception):
                self._gate()
            manifest = self._own(checkpoint) if checkpoint else self._tip
            if manifest is None:
                raise SandboxError(f"sandbox {self.name} has no checkpoint to restore")
            restoring = self.restoring(manifest, terms)
            try:
                if self._machine is not None and self._machine.alive():
                    restoring.rehearse()
                self.halt()
                self._context.proxy.restored(self.name, manifest.turn, on_purpose=on_purpose)
                return self.revive(restoring, fresh=manifest.box != self.name)
            except IncompleteError:
                if self._machine is None:
                    self.halt()
                    self._save(status="stopped", pid=0, started=0)
                raise
            except (SandboxError, *FAULTS) as error:
                if self._machine is None:
                    with contextlib.suppress(*FAULTS):
                        self.halt()
                    self._save(status="dead", pid=0, started=0)
                words = f"'windtunnel sandbox log {self.name}' lists other checkpoints"
                raise SandboxError(f"{error}; {words}") from error

    # --- the past

    def log(self) -> SandboxHistory:
        """Checkpoints of this sandbox and of those it was forked from, oldest first; and its turns."""
        return SandboxHistory(self._checkpoints(), self._log.turns())

    def decisions(self) -> list[tuple[Observation, Decision]]:
        """What the policy was asked of this sandbox, and what it answered, in order."""
        return self._log.decisions()

    def diff(self, older: str, newer: str = "") -> Diff:
        """What changed from checkpoint ``older`` to ``newer`` (empty: to the sandbox as it is now)."""
        first, second, pool = self._own(older), self._own(newer) if newer else None, self._context.pool
        if first.files is None or (second is not None and second.files is None):
            raise UserError(f"diff: checkpoint {older if first.files is None else newer} holds no files")
        if second is None or second.files is None:
            files = pool.changed(first.files.id, None, box=self.name)
            after = Counter(self.machine().commands())
        else:
            files = pool.changed(first.files.id, second.files.id)
            after = Counter(second.image.processes if second.image else ())
        before = Counter(first.image.processes if first.image else ())
        return Diff(tuple(files), tuple((after - before).elements()), tuple((before - after).elements()))

    def _checkpoints(self) -> tuple[CheckpointManifest, ...]:
        """Those of this sandbox and of what it was forked from, oldest first."""
        manifests, _ = self._context.store.all()
        by_id = {manifest.id: manifest for manifest in manifests}
        chain = {manifest.id for manifest in manifests if manifest.box == self.name}
        for start in (*chain, self._record.base):
            at: str | None = start
            while at and at in by_id:
                chain.add(at)
                at = by_id[at].parent
        return tuple(
            sorted((by_id[number] for number in chain if number in by_id), key=lambda m: (m.created, m.id))
        )

    def _own(self, checkpoint: str) -> CheckpointManifest:
        """One of its checkpoints; UserError where it is another sandbox's."""
        manifest = self._context.store.load(self._context.store.named(checkpoint))
        if manifest.id not in {checkpoint.id for checkpoint in self._checkpoints()}:
            raise UserError(
                f"sandbox {self.name}: checkpoint {manifest.id} is one of sandbox {manifest.box}; "
                f"'windtunnel sandbox fork {manifest.id}' starts a sandbox from it"
            )
        return manifest

    # --- end

    def stop(self) -> None:
        """Kill all its processes. Files and checkpoints stay; ``restore`` brings it back."""
        with self._lock:
            with contextlib.suppress(Exception):
                self._gate()
            self.halt()
            self._save(status="stopped", pid=0, started=0)

    # --- for the host

    def halt(self) -> None:
        """Kill whatever is left of it, and let go of its root."""
        if self._context.inspector is not None:
            self._context.inspector.unwatch(self.name)
        machine, self._machine = self._machine, None
        launch.clear(self._context.home, self.name)
        if machine is not None:  # after its end, which whoever waits for a command there sees
            machine.close()
        self._context.pool.unmount(self.name)

    def restoring(self, manifest: CheckpointManifest, terms: Terms) -> Restoring:
        """A restore of ``manifest`` into it. Raises IncompleteError where it is known beforehand that too
        much would lack; nothing was touched."""
        log = self._log.under(terms, self.spec.terms)
        serve = partial(self._context.proxy.serve, self, self.spec)
        restoring = Restoring(self._context, log, self.spec, manifest, serve)
        restoring.refuse_less()
        return restoring

    def revive(self, restoring: Restoring, *, fresh: bool) -> RestoreReport:
        """Carry the restore out, where nothing runs any more. ``fresh``: with an identity of its own."""
        machine, report = restoring.run()
        if fresh:
            machine.freshen(self.spec.hostname or self.name)
        self.adopt(machine, restoring.manifest, lacks=report.lacks)
        return report

    def adopt(
        self, machine: Machine, manifest: CheckpointManifest | None, lacks: tuple[Lack, ...] = ()
    ) -> None:
        """Go on with ``machine``, which is in the state of ``manifest`` but for ``lacks``."""
        others = machine.cgroup.pids() - {machine.pid, *machine.shells().values()}
        self._doubt = "processes ran before they were watched" if manifest is not None and others else ""
        self._machine, self._tip, self._lacks = machine, manifest, lacks
        self._accepted = -1, {}
        self._pending = None
        self._save(
            status="running",
            pid=machine.pid,
            started=processes.start_time(machine.pid) or 0,
            boot=processes.boot_id(),
            tip=manifest.id if manifest else "",
            turns=manifest.turn if manifest else self._record.turns,
        )
        self.watch()

    def watch(self) -> None:
        """Have the inspector look at it from now on; what was before is covered by the newest checkpoint."""
        inspector, machine = self._context.inspector, self._machine
        if inspector is None or machine is None:
            return
        inspector.watch(
            self.name,
            cgroup=machine.cgroup.path,
            members=machine.cgroup.pids,
            root=machine.externals.root,
            init=machine.pid,
            shells=machine.shells,
        )

    def detach(self) -> None:
        """Let the sandbox run on without this process."""
        with contextlib.suppress(Exception):
            self.wait()
        if self._machine is not None:
            self._machine.close()

    def _gate(self) -> None:
        pending, self._pending = self._pending, None
        if pending is None:
            return
        reported = pending.reported
        pending.promote()
        try:
            pending.wait()
        except (SandboxError, *FAULTS) as error:
            self._context.report(SandboxEvent("failed", self.name, str(error)))
            if not reported:
                raise

    def passes(self) -> bool:
        """Whether the policy lets a turn's reply out though nothing of the turn may be kept."""
        less = Shortfall(TurnClass.FULL, TurnClass.NONE, ("files",))
        return self._under().decide(less).answer == "deliver"

    def refuses(self, manifest: CheckpointManifest) -> bool:
        """Whether the policy says that what a checkpoint lacks is an error."""
        settle = self._under().settle(manifest.required, manifest.turn_class, manifest.lacks)
        return settle.answer == "hold"

    def _now(self) -> SandboxNow:
        return SandboxNow(self._context, self.spec, self.machine(), self._tip, self._doubt)

    def _begin(self) -> Machine:
        """Something is about to be done in it: a turn has begun, where none had."""
        self._gate()
        machine = self.machine()
        self._turn_began = self._turn_began or time.time()
        return machine

    def _save(self, **changes: object) -> None:
        """Change the record, on the disk too."""
        self._record = replace(self._record, **changes)  # type: ignore[arg-type]
        try:
            write_record(self._context.home.box(self.name), self._record)
        except OSError as error:
            raise SandboxError(
                f"the record of sandbox {self.name} could not be written: {error.strerror}"
            ) from error

    def _under(self, terms: Terms = NO_TERMS) -> SandboxLog:
        """The log that decides, knowing what somebody accepts of this turn."""
        turn, accepted = self._accepted
        return self._log.under(terms, self.spec.terms, accepted if turn == self._record.turns else NO_TERMS)

    def _hold(self, manifest: CheckpointManifest, log: SandboxLog) -> None:
        """Raises IncompleteError where the policy says that the checkpoint must not be taken as it is."""
        what = f"checkpoint {manifest.id} of sandbox {self.name}"
        log.hold(what, manifest.lacks, manifest.required, manifest.turn_class, manifest=manifest)
