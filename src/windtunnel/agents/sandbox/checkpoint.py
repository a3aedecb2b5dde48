"""Take a checkpoint: freeze, snapshot, dump, thaw; then store, sync, and only then say that it exists.

Order, and what a failure leaves behind:

1. (running) trackers of dirty memory are put into new processes;
2. (frozen) references, snapshot of the files, dump of the processes, new baselines. A failure here drops the
   snapshot and the dump and thaws: the sandbox runs on, nothing has changed;
3. (running again) the snapshot goes to the disk;
4. the dump goes into the store, and the manifest, in one transaction: from now on the checkpoint exists. A
   failure in 3 or 4 drops what was made.

After any failure the caller must treat the next turn as full, because the baselines may have moved.

Source: Crab (arXiv 2604.28138), section 5; the order freeze, snapshot, dump, thaw is what makes files and
processes one state.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace

from windtunnel.agents.sandbox import inventory
from windtunnel.agents.sandbox.context import FAULTS, SandboxLog
from windtunnel.agents.sandbox.errors import CriuError, MachineError, SandboxError
from windtunnel.agents.sandbox.machine.channel import CHANNEL_TAR, pack_channel
from windtunnel.agents.sandbox.machine.group import Cgroup, UserProcesses
from windtunnel.agents.sandbox.model import (
    CheckpointManifest,
    FilesPart,
    ImagePart,
    Lack,
    ProcessInventory,
    References,
    SandboxEvent,
    ShellState,
    TurnClass,
)
from windtunnel.agents.sandbox.observe import (
    SandboxNow,
    alone,
    alone_beside,
    because,
    processes_alone,
    quiesce,
)
from windtunnel.agents.sandbox.policy import CheckpointPlan, CheckpointRequest, Occasion, Settle
from windtunnel.agents.sandbox.policy.standing import NEVER, beforehand, differences, undumpable
from windtunnel.linux.processes import in_vfork, who
from windtunnel.linux.snapshot import SnapshotProcess, read_snapshot

FREEZE_TIMEOUT = 10.0
"""Seconds; a process in uninterruptible sleep (a hung disk) is the only thing that can hold a freeze up."""
VFORK_SECONDS = 1.0
"""For which a process may wait for its child of vfork while the sandbox stands still now and then."""
VFORK_PAUSE = 0.001
"""Seconds that it is let go on at first; twice as many each time."""
AFTERMATH = 0.1
"""Seconds after a failed dump in which a process that it damaged is seen to die."""
CONNECTED = re.compile(r"IPv[46] stream socket .* to ")


def _past_vfork(cgroup: Cgroup | UserProcesses) -> None:
    """Of a frozen sandbox: let those processes go on a little that wait for a child of vfork(2) to start its
    program. They count as frozen, and CRIU would try for ten seconds to stop one. Frozen again on return.

    Raises CriuError where a child takes longer.
    """
    deadline, pause = time.monotonic() + VFORK_SECONDS, VFORK_PAUSE
    while waiting := sorted(pid for pid in cgroup.pids() if in_vfork(pid)):
        if time.monotonic() > deadline:
            raise CriuError(
                f"process image: {who(waiting[0])} waits for a child of vfork that starts no program; try "
                "again when it has"
            )
        cgroup.thaw()
        time.sleep(pause)
        pause *= 2
        cgroup.freeze(FREEZE_TIMEOUT)


class _TransientState(Exception):
    """Something stands there that no restore would bring back; ``args``: in how many seconds it may have
    passed."""


@dataclass
class Taking(SandboxNow):
    """One checkpoint, as it is made: what the policy was told and has answered, and what there is of it so
    far. ``log``: what decides of it."""

    log: SandboxLog
    id: str
    turn: int
    look: CheckpointRequest
    keep: CheckpointPlan
    request: str = ""
    label: str = ""
    pinned: bool = False

    shells: tuple[ShellState, ...] = ()
    files: FilesPart | None = None
    image: ImagePart | None = None
    freeze: float = 0.0
    lacks: tuple[Lack, ...] = ()
    tries: int = 0
    words: dict[int, str] = field(default_factory=dict)
    """All processes that stood at a dump that failed, by host pid."""
    alone: dict[int, Lack] = field(default_factory=dict)
    """Those of them that only the image would bring back."""
    stood: ProcessInventory | None = None

    def run(self) -> CheckpointManifest:
        """Make it. A process that CRIU cannot dump does not stop the rest: files and shells are kept, and the
        manifest says what it lacks. Raises SandboxError when not even that was possible; nothing is left of
        the attempt then.
        """
        try:
            return self._run()
        except FAULTS as error:
            self._drop()
            raise SandboxError(f"checkpoint of sandbox {self.spec.name}: {error}") from error

    def _run(self) -> CheckpointManifest:
        begin = time.monotonic()
        quiesce(self.machine.shells())
        self.shells = self.machine.shell_states()
        if self.tip is not None:
            self.files, self.image = self.tip.files, self.tip.image
        if self.keep.content is TurnClass.FILES:
            self._keep_files()
        while self.keep.content is TurnClass.FULL:
            self.tries += 1
            try:
                self._keep_all()
                break
            except _TransientState as passing:
                time.sleep(*passing.args)
            except CriuError as error:
                self._without_image(error)
        if self.keep.image and self.image is not None and self.image.inventory is not None:
            self.lacks += beforehand(self.image.inventory)
        elif not self.keep.image:
            self.image = None
            if self.keep.content < TurnClass.FILES:
                self._left_alone()
        folder, keep = self.context.home.dump(self.id), self.keep
        manifest = CheckpointManifest(
            id=self.id,
            box=self.spec.name,
            turn=self.turn,
            parent=self.tip.id if self.tip else None,
            turn_class=min(keep.turn_class, keep.content),
            required=keep.turn_class,
            reasons=keep.reasons[:20],
            created=time.time(),
            files=self.files,
            image=self.image,
            shells=self.shells,
            spec=self.spec,
            restorable=in_words(self.files, self.image, self.shells),
            lacks=self.lacks,
            never=NEVER if self.image is not None else (),
            freeze_seconds=self.freeze,
            request=self.request,
            label=self.label,
            pinned=self.pinned,
        )
        images = folder if self.image is not None and self.image.id == self.id else None
        last = self.tip.image.id if self.tip and self.tip.image else ""
        manifest = self.context.store.add(manifest, images, like=last, begin=begin)
        shutil.rmtree(folder, ignore_errors=True)
        return manifest

    @contextlib.contextmanager
    def _frozen(self) -> Iterator[None]:
        """The sandbox stands still within the block, and always runs again after it."""
        begin, cgroup = time.monotonic(), self.machine.cgroup
        with cgroup.first():
            try:
                cgroup.freeze(FREEZE_TIMEOUT)
                yield
            finally:
                cgroup.thaw()
                self.freeze = time.monotonic() - begin

    def _keep_files(self) -> None:
        """Where it shows that everything is to be kept after all, nothing was made yet."""
        context, name, keep = self.context, self.spec.name, self.keep
        # what is written already goes to the disk now, so that the snapshot has little left to write
        context.pool.flush(name)
        with self._frozen():
            # what runs in the background may have gone on since the decision, and newer files of its making
            # would not fit the older image of it
            if keep.again:
                look = self.observe(Occasion.FROZEN, most=self.look.most, least=keep.turn_class)
                self.keep = self.log.decide(look)
                if self.keep.content is TurnClass.FULL:
                    return
            context.pool.snapshot(name, self.id)
            if not self.keep.image:
                self._left_alone()
            if context.inspector is not None:
                context.inspector.rebase(name)
        self.files = self._synced()

    def _left_alone(self) -> None:
        """What stands there that only an image would bring back is lacking."""
        self.lacks += because(alone(self.machine, self.shells), self.keep.lost)

    def _keep_all(self) -> None:
        """Files and processes. Raises CriuError when the processes cannot be dumped, and _TransientState when
        they are to be dumped a little later; nothing is left of the attempt then."""
        context, machine, name = self.context, self.machine, self.spec.name
        folder, criu, inspector = context.home.dump(self.id), context.criu, context.inspector
        assert criu is not None
        if inspector is not None:
            inspector.arm(name)
        self.words, self.stood = {}, None
        try:
            with ThreadPoolExecutor(1) as beside, self._frozen():
                _past_vfork(machine.cgroup)
                before = machine.cgroup.pids()
                snapshot = read_snapshot(before)
                stood = inventory.take_inventory(snapshot, machine.pid)
                if why := undumpable(stood):
                    raise CriuError(f"process image: {why}")
                lacking = beforehand(stood)
                if lacking and (settle := self._settle(lacking)).answer == "retry":
                    raise _TransientState(settle.pause)
                self.alone = processes_alone(machine)
                only = (*self.alone.values(), *alone_beside(machine, self.shells))
                # both only read what stands still, so the snapshot is made while CRIU works
                snapshot_job = beside.submit(self._beside_dump, snapshot)
                try:
                    criu.dump(machine.pid, folder, machine.externals)
                except CriuError:
                    self.words, self.stood = {pid: who(pid) for pid in before}, stood
                    raise
                finally:
                    # before the thaw, whatever happened: what it reads must stand still
                    wait((snapshot_job,))
                references, channel = snapshot_job.result()
                stood = replace(stood, alarms=inventory.find_alarms(before))
                if inspector is not None:
                    inspector.rebase(name, snapshot)
        except (CriuError, _TransientState):
            self._drop()
            raise
        (folder / CHANNEL_TAR).write_bytes(channel)
        self.files = self._synced()
        self.image = ImagePart(
            id=self.id,
            pid=machine.pid,
            processes=tuple(each.command for each in stood.processes if each.command),
            references=tuple(sorted(references.paths)),
            mapped=tuple(sorted(references.mapped)),
            alone=only,
            inventory=stood,
        )

    def _beside_dump(self, snapshot: Sequence[SnapshotProcess]) -> tuple[References, bytes]:
        """The snapshot of the files, what the processes refer to of them, and what the channel holds."""
        name, inspector = self.spec.name, self.context.inspector
        references = inspector.references(name, snapshot) if inspector is not None else References()
        self.context.pool.snapshot(name, self.id)
        return references, pack_channel(self.machine.externals.of("channel"))

    def _without_image(self, error: CriuError) -> None:
        """After a dump that failed: what it broke is told, and it is tried again, or the files are kept."""
        context, machine, why = self.context, self.machine, str(error)
        context.report(SandboxEvent("failed", self.spec.name, f"no image of the processes: {why}"))
        if gone := self._ended():
            words = ", ".join(self.words[pid] for pid in gone)
            context.report(SandboxEvent("failed", self.spec.name, f"ended by the failed dump: {words}"))
        killed = [self.alone[pid] for pid in gone if pid in self.alone]
        # an image that is made now has no shell, and its restore replays none
        shells = {
            pid: Lack("shells", f"shell {name}: its process", "") for name, pid in machine.shells().items()
        }
        killed += [shells[pid] for pid in gone if pid in shells]
        self.lacks += because(killed, f"a dump that failed ended it: {why}")
        how = "may have broken" if error.interrupted else "broke"
        broken = self._broken(doubtful=error.interrupted)
        self.lacks += because(broken, f"a dump that failed {how} it: {why}")
        if not machine.alive():
            # a checkpoint without the processes would stand in for the earlier one that has them
            raise MachineError(f"the sandbox died meanwhile: {error}") from error
        settle = self._settle((*self.lacks, *because(alone(machine, self.shells), why)))
        if settle.answer == "retry":
            time.sleep(settle.pause)
            return
        undumped = replace(self.look, occasion=Occasion.UNDUMPED, images_possible=False, no_images=why)
        self.keep = self.log.decide(undumped)
        self._keep_files()

    def _settle(self, lacks: tuple[Lack, ...]) -> Settle:
        """What is done, after so many tries, about what would be lacking."""
        return self.log.settle(self.keep.turn_class, TurnClass.FILES, lacks, self.tries)

    def _ended(self) -> list[int]:
        """Which processes are gone: a CRIU that is killed may leave one unable to go on, and it dies as soon
        as it runs."""
        time.sleep(AFTERMATH)
        left = self.machine.cgroup.pids()
        return [pid for pid in sorted(self.words) if pid not in left]

    def _broken(self, *, doubtful: bool) -> list[Lack]:
        """Connections inside that were there at a dump that failed and are not now: a read from one that CRIU
        was looking at when it was killed fails, and the program gives it up. ``doubtful``: all that were
        there, because a program that has met such a failure may give its connection up later."""
        stood = self.stood
        if stood is None or not self.machine.alive():
            return []
        if doubtful:
            now = replace(stood, processes=tuple(replace(process, facts={}) for process in stood.processes))
        else:
            now = inventory.take_inventory(read_snapshot(self.machine.cgroup.pids()), self.machine.pid)
        lost = differences(stood, now)
        return [lack for lack in lost if lack.kind == "sockets" and CONNECTED.search(lack.what)]

    def _synced(self) -> FilesPart:
        """The snapshot is on the disk, and what it added is known."""
        pool = self.context.pool
        pool.sync(self.id)
        before = self.tip.files.id if self.tip and self.tip.files else ""
        return FilesPart(self.id, pool.kind, pool.bytes_new(self.id, before))

    def _drop(self) -> None:
        """Undo what a checkpoint that will not exist has made; what cannot be undone is left for ``gc``."""
        context = self.context
        try:
            # a manifest that is there but not surely on the disk must not outlive what it names
            context.store.drop([self.id], [self.id])
        except FAULTS:
            return
        with contextlib.suppress(*FAULTS):
            context.pool.drop_snapshot(self.id)
        shutil.rmtree(context.home.dump(self.id), ignore_errors=True)


def in_words(
    files: FilesPart | None, image: ImagePart | None, shells: tuple[ShellState, ...]
) -> tuple[str, ...]:
    """What a restore brings back."""
    words = ["files"] if files else []
    if image:
        words.append(f"{len(image.processes)} processes with memory and open files")
    words.extend(f"state of shell {shell.name}" for shell in shells)
    return tuple(words)
