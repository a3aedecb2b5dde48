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
import shlex
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO

from windtunnel.agents.sandbox.checkpoint import FAULTS
from windtunnel.agents.sandbox.checks import checked_label
from windtunnel.agents.sandbox.context import Context
from windtunnel.agents.sandbox.engine import Pending, settled
from windtunnel.agents.sandbox.errors import LessError, SandboxDied, SandboxError
from windtunnel.agents.sandbox.lineage import Lineage
from windtunnel.agents.sandbox.machine import Machine
from windtunnel.agents.sandbox.model import (
    BoxInfo,
    Diff,
    Entry,
    Event,
    Lack,
    Manifest,
    RestoreReport,
    SandboxSpec,
    Turn,
    TurnClass,
    TurnResult,
)
from windtunnel.agents.sandbox.policy import Decision, Less, Observation, Occasion
from windtunnel.agents.sandbox.protocol import Log
from windtunnel.agents.sandbox.record import Record
from windtunnel.agents.sandbox.restore import bring_back, refuse_less
from windtunnel.base import processes
from windtunnel.base.errors import UserError


class Box:
    """A sandbox of a host. Made by ``Host``; every method may be called from any thread."""

    def __init__(self, context: Context, record: Record, machine: Machine | None, *, doubt: str = "") -> None:
        self._context = context
        self._line = Lineage(context, record, doubt)
        self._machine = machine
        self._lock = threading.RLock()
        self._pending: Pending | None = None
        self._turn_began = 0.0

    # --- what it is

    @property
    def name(self) -> str:
        return self._line.record.spec.name

    @property
    def spec(self) -> SandboxSpec:
        return self._line.record.spec

    @property
    def tip(self) -> str:
        """Id of the newest checkpoint; empty before the first."""
        return self._line.tip.id if self._line.tip else ""

    @property
    def snapshot(self) -> str:
        """The newest snapshot of its files; empty before the first."""
        return self._line.tip.files.id if self._line.tip and self._line.tip.files else ""

    @property
    def image(self) -> str:
        """The image that it, or what it was forked from, was made of."""
        return self._line.record.image

    @property
    def turns(self) -> int:
        return self._line.record.turns

    def info(self) -> BoxInfo:
        record, machine = self._line.record, self._machine
        alive = machine is not None and machine.alive()
        status = "running" if alive else "dead" if record.status == "running" else record.status
        return BoxInfo(
            name=self.name,
            status=status,
            pid=machine.pid if machine is not None and alive else 0,
            turns=record.turns,
            tip=self.tip,
            image=record.image,
            network=record.spec.network,
            created=record.created,
            processes=machine.commands() if machine is not None and alive else (),
            base=record.base,
            lacks=self._line.lacks,
        )

    def shells(self) -> list[str]:
        """Names of its persistent shells."""
        return sorted(self.machine().shells())

    def machine(self) -> Machine:
        """The running machine, or SandboxDied in words."""
        machine = self._machine
        if machine is None or not machine.alive():
            stopped = self._line.record.status == "stopped"
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
    ) -> TurnResult:
        """Run ``command`` (shell text, or arguments) in a persistent shell and wait for its end.

        ``timeout`` in seconds. ``on_output`` gets the output's name and bytes as they come.
        Raises SandboxDied when the sandbox does not run, UserError for a command that no shell can be given,
        and what the last turn's checkpoint failed with, where nobody was told yet: LessError where it lacks
        something. The command has not run then.
        """
        text = command if isinstance(command, str) else shlex.join(command)
        if "\0" in text:
            raise UserError("sandbox: a command must not contain the NUL character")
        with self._lock:
            self._gate()
            machine = self.machine()
            self._begin()
        # not under the lock: an agent that runs in this command ends its turns through the model proxy
        result = machine.run(text, shell=shell, timeout=timeout, cancel=cancel, on_output=on_output)
        if result.ended == "sandbox-died":
            self._context.report(Event("died", self.name, text[:80]))
        return result

    def put(self, path: str, data: bytes | IO[bytes], mode: int = 0o644) -> None:
        """Write a file of the sandbox, atomically. It counts as a change of the turn."""
        with self._lock:
            self._gate()
            machine = self.machine()
            self._begin()
            machine.put(path, data, mode)
            if self._context.inspector is not None:
                self._context.inspector.touched(self.name, path)

    def get(self, path: str) -> bytes:
        """The bytes of a regular file of the sandbox; links are followed inside of it only."""
        return self.machine().get(path)

    def get_to(self, path: str, out: IO[bytes]) -> None:
        """Stream a file of the sandbox into ``out``."""
        self.machine().get_to(path, out)

    def listdir(self, path: str) -> list[Entry]:
        return self.machine().listdir(path)

    def port(self, port: int) -> str:
        """The URL of this host's loopback that leads to a TCP port inside; a restore leaves it as it is."""
        with self._lock:
            self.machine()
            return self._context.proxy.ports.open(self.name, port)

    # --- turns

    @contextlib.contextmanager
    def turn(self, request: str = "") -> Iterator[None]:
        """A turn: at the end of the block it is classified and its checkpoint starts."""
        yield
        self.end_turn(request)

    def end_turn(self, request: str = "", *, urgent: bool = False) -> Pending:
        """End the turn: decide what it needs, and start that. A turn that needs nothing is done at once."""
        with self._lock:
            self._gate()
            machine = self.machine()
            begin = time.monotonic()
            look = self._line.look(machine, Occasion.TURN)
            keep = self._line.log.decide(look)
            seconds = time.monotonic() - begin
            number = self._line.record.turns + 1
            try:
                self._line.save(turns=number)
            except SandboxError as error:
                # the number is known here, and the next record that can be written has it
                self._context.report(Event("failed", self.name, str(error)))
            began = self._turn_began or time.time()
            self._turn_began = 0.0

            def line(manifest: Manifest | None, lacks: tuple[Lack, ...] = ()) -> Turn:
                image, files = (manifest.image, manifest.files) if manifest else (None, None)
                made = manifest.id if manifest else ""
                added = sum(part.bytes_new for part in (image, files) if part and part.id == made)
                turn = Turn(
                    number=number,
                    turn_class=manifest.turn_class if manifest else TurnClass.NONE,
                    wanted=keep.turn_class,
                    reasons=keep.reasons[:20],
                    checkpoint=self.tip,
                    started=began,
                    seconds=time.time() - began,
                    decide_seconds=seconds,
                    bytes_new=added,
                    request=request,
                    lacks=manifest.lacks if manifest else lacks,
                )
                self._line.log.turn(turn)
                self._context.report(
                    Event("turn", self.name, f"{number}: {turn.turn_class.word}", turn.seconds)
                )
                return turn

            if keep.made is TurnClass.NONE:
                return settled(self.name, line(None))

            def work() -> Turn:
                try:
                    manifest = self._line.cover(self.machine(), number, look, keep, request=request)
                except (SandboxError, *FAULTS) as error:
                    turn = line(None, (Lack("files", f"turn {number}", f"its checkpoint failed: {error}"),))
                    if self.passes():
                        return turn
                    raise
                turn = line(manifest)
                self._line.held(manifest, allow_less=False)
                return turn

            self._pending = self._context.engine.submit(self.name, work, urgent=urgent)
            return self._pending

    def wait(self, timeout: float | None = None) -> None:
        """Until the checkpoint under way, if any, is safe. Raises TimeoutError, or what it failed with."""
        pending = self._pending
        if pending is not None:
            pending.promote()
            pending.wait(timeout)

    # --- checkpoints

    def checkpoint(
        self,
        label: str = "",
        *,
        full: bool = False,
        pin: bool = False,
        allow_less: bool = False,
    ) -> Manifest:
        """A checkpoint of the state now, safe on return.

        It costs what changed since the last one: where nothing did, the newest checkpoint is labelled anew.
        ``full``: dump the processes in any case. Raises LessError where it lacks something that was there: it
        is kept all the same, and is the error's ``manifest``. ``allow_less``: that is no error, of this
        checkpoint or of a reply of this turn that was held for it.
        """
        checked_label(label)
        return self._checkpoint(Occasion.ASKED, TurnClass.FULL, full, label, pin, allow_less)

    def save(self, most: TurnClass) -> Manifest:
        """A checkpoint because the host goes away. ``most``: the strongest class for which there is time.
        What it lacks is told by its manifest."""
        return self._checkpoint(Occasion.NOTICE, most, False, "notice", False, True)

    def _checkpoint(
        self, occasion: Occasion, most: TurnClass, full: bool, label: str, pin: bool, allow_less: bool
    ) -> Manifest:
        with self._lock:
            with contextlib.suppress(SandboxError, *FAULTS):
                self._gate()  # what the turn's own checkpoint lacks, this one may have
            if allow_less and occasion is Occasion.ASKED:
                self._line.allowed = self._line.record.turns
            named = bool(label) or pin
            look = self._line.look(self.machine(), occasion, full=full, named=named, most=most)
            keep = self._line.log.decide(look)

            def work() -> Turn:
                number = self._line.record.turns
                manifest = self._line.tip
                if keep.made > TurnClass.NONE:
                    manifest = self._line.cover(
                        self.machine(), number, look, keep, label=label, pin=pin, allow_less=allow_less
                    )
                assert manifest is not None
                kept, made = manifest.turn_class, manifest.id
                return Turn(number, kept, keep.turn_class, keep.reasons, made, time.time(), 0.0, 0.0, 0)

            self._context.engine.submit(self.name, work, urgent=True).wait()
            assert self._line.tip is not None
            self._line.held(self._line.tip, allow_less=allow_less)
            return self._line.tip

    def restore(self, checkpoint: str = "", *, allow_less: bool = False) -> RestoreReport:
        """Bring a checkpoint of this sandbox (or of what it was forked from) back; empty: the newest.

        Whatever runs of the sandbox is killed.
        What an agent inside asks the model again, because it is set back, is answered from the record.
        Raises LessError where something would not come back, unless ``allow_less``: what runs is left alone
        where that is known beforehand, and the sandbox is stopped where it turned out.
        """
        return self._back(checkpoint, on_purpose=False, allow_less=allow_less)

    def rollback(self, checkpoint: str, *, allow_less: bool = False) -> RestoreReport:
        """Go back to an earlier checkpoint. Later ones stay: they are another branch of the tree.

        An agent inside asks the model anew. Raises LessError as `restore` does.
        """
        return self._back(checkpoint, on_purpose=True, allow_less=allow_less)

    def _back(self, checkpoint: str, *, on_purpose: bool, allow_less: bool) -> RestoreReport:
        inspector = self._context.inspector
        with self._lock, inspector.kept() if inspector is not None else contextlib.nullcontext():
            with contextlib.suppress(Exception):
                self._gate()
            manifest = self._line.own(checkpoint) if checkpoint else self._line.tip
            if manifest is None:
                raise SandboxError(f"sandbox {self.name} has no checkpoint to restore")
            allow_less = allow_less or self.spec.allow_less
            refuse_less(self._context, self._line.log, manifest, allow_less=allow_less)
            self.halt()
            self._context.proxy.restored(self.spec, manifest.turn, on_purpose=on_purpose)
            try:
                machine, report = bring_back(
                    self._context, self._line.log, self.spec, manifest, allow_less=allow_less
                )
            except LessError:
                self.halt()
                self._line.save(status="stopped", pid=0, started=0)
                raise
            except SandboxError as error:
                self._line.save(status="dead", pid=0, started=0)
                raise SandboxError(f"{error}; {self._line.instead(manifest)}") from error
            if manifest.box != self.name:
                with self._context.pool.relaxed(self.name):
                    machine.freshen(self.spec.hostname or self.name)
            self.adopt(machine, manifest, lacks=report.lacks)
            self._context.report(Event("restored", self.name, manifest.id, report.seconds))
            return report

    def log(self) -> Log:
        """Checkpoints of this sandbox and of those it was forked from, oldest first; and its turns."""
        return Log(self._line.checkpoints(), self._line.log.turns())

    def decisions(self) -> list[tuple[Observation, Decision]]:
        """What the policy was asked of this sandbox, and what it answered, in order."""
        return self._line.log.decisions()

    def diff(self, older: str, newer: str = "") -> Diff:
        """What changed from checkpoint ``older`` to ``newer`` (empty: to the sandbox as it is now)."""
        return self._line.diff(older, newer, lambda: self.machine().commands())

    # --- end

    def stop(self) -> None:
        """Kill all its processes. Files and checkpoints stay; ``restore`` brings it back."""
        with self._lock:
            with contextlib.suppress(Exception):
                self._gate()
            self.halt()
            self._line.save(status="stopped", pid=0, started=0)
            self._context.report(Event("stopped", self.name))

    # --- for the host

    def halt(self) -> None:
        """Kill whatever is left of it, and let go of its root."""
        if self._context.inspector is not None:
            self._context.inspector.unwatch(self.name)
        machine, self._machine = self._machine, None
        if machine is not None:
            machine.stop()
        Machine.clear(self._context.home, self.name)
        self._context.pool.unmount(self.name)

    def adopt(
        self, machine: Machine, manifest: Manifest | None, *, doubt: str = "", lacks: tuple[Lack, ...] = ()
    ) -> None:
        """Go on with ``machine``, which is in the state of ``manifest`` but for ``lacks``."""
        others = machine.cgroup.pids() - {machine.pid, *machine.shells().values()}
        if manifest is not None and others and not doubt:
            doubt = "processes ran before they were watched"
        self._machine, self._line.tip, self._line.doubt, self._line.lacks = machine, manifest, doubt, lacks
        self._line.allowed = -1
        self._pending = None
        self._line.save(
            status="running",
            pid=machine.pid,
            started=processes.start_time(machine.pid) or 0,
            boot=processes.boot_id(),
            tip=manifest.id if manifest else "",
            turns=manifest.turn if manifest else self._line.record.turns,
        )
        self.watch()
        self._context.proxy.serve(self, self.spec, machine.externals.netns)

    def watch(self) -> None:
        """Have the inspector look at it from now on; what was before is covered by the newest checkpoint."""
        inspector, machine = self._context.inspector, self._machine
        if inspector is None or machine is None:
            return
        inspector.watch(
            self.name,
            cgroup=machine.cgroup.path,
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
        told = pending.told
        pending.promote()
        try:
            pending.wait()
        except (SandboxError, *FAULTS) as error:
            self._context.report(Event("failed", self.name, str(error)))
            if not told:
                raise

    def passes(self) -> bool:
        """Whether the policy lets a turn's reply out though nothing of the turn may be kept."""
        asked = Less(TurnClass.FULL, TurnClass.NONE, ("files",), allow_less=self._line.allows())
        return self._line.log.decide(asked).answer == "deliver"

    def refuses(self, manifest: Manifest) -> bool:
        """Whether the policy says that what a checkpoint lacks is an error."""
        try:
            self._line.held(manifest, allow_less=False)
        except LessError:
            return True
        return False

    def _begin(self) -> None:
        if not self._turn_began:
            self._turn_began = time.time()
