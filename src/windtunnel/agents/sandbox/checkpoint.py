"""Take a checkpoint: freeze, snapshot, dump, thaw; then store, sync, and only then say that it exists.

Order, and what a failure leaves behind:

1. (running) trackers of dirty memory are put into new processes;
2. (frozen) references, snapshot of the files, dump of the processes, new baselines. A failure here drops the
   snapshot and the dump and thaws: the sandbox runs on, nothing has changed;
3. (running again) the dump goes into the page store and the snapshot to the disk;
4. the manifest is written atomically: from now on the checkpoint exists. A failure in 3 or 4 drops what was
   made.

After any failure the caller must treat the next turn as full, because the baselines may have moved.

Source: Crab (arXiv 2604.28138), section 5; the order freeze, snapshot, dump, thaw is what makes files and
processes one state.
"""

from __future__ import annotations

import contextlib
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace

from windtunnel.agents.sandbox import inventory
from windtunnel.agents.sandbox.context import FAULTS, Context, room_for
from windtunnel.agents.sandbox.criu.failure import who
from windtunnel.agents.sandbox.errors import CriuError, MachineError, SandboxError
from windtunnel.agents.sandbox.lacks import alone, alone_beside, because, kinds, processes_alone
from windtunnel.agents.sandbox.machine import CHANNEL_KEPT, Cgroup, Group, Machine
from windtunnel.agents.sandbox.model import (
    Event,
    FilesPart,
    ImagePart,
    Inventory,
    Lack,
    Manifest,
    References,
    SandboxSpec,
    ShellState,
    TurnClass,
)
from windtunnel.agents.sandbox.observe import observe, quiesce
from windtunnel.agents.sandbox.policy import Keep, Less, Look, Occasion, Settle
from windtunnel.agents.sandbox.policy.kinds import NEVER, beforehand, undumpable
from windtunnel.agents.sandbox.policy.standing import differences
from windtunnel.agents.sandbox.record import SandboxLog
from windtunnel.linux.processes import in_vfork
from windtunnel.linux.snapshot import Process, read_snapshot

FREEZE_TIMEOUT = 10.0
"""Seconds; a process in uninterruptible sleep (a hung disk) is the only thing that can hold a freeze up."""
VFORK_SECONDS = 1.0
"""For which a process may wait for its child of vfork while the sandbox stands still now and then."""
VFORK_PAUSE = 0.001
"""Seconds that it is let go on at first; twice as many each time."""
AFTERMATH = 0.1
"""Seconds after a failed dump in which a process that it damaged is seen to die."""
CONNECTED = re.compile(r"IPv[46] stream socket .* to ")


@dataclass(frozen=True)
class Order:
    """Which checkpoint is asked for: what the policy was told and has answered, of a sandbox whose newest
    checkpoint is ``parent``. ``doubt``: as of `observe`. ``log``: what decides of it."""

    id: str
    spec: SandboxSpec
    turn: int
    look: Look
    keep: Keep
    parent: Manifest | None
    doubt: str
    log: SandboxLog
    request: str = ""
    label: str = ""
    pinned: bool = False


@dataclass
class _Freeze:
    seconds: float = 0.0


@dataclass
class _Stood:
    """The processes of a sandbox at its dump, by host pid: ``all`` in words, and which of them only the image
    would bring back."""

    all: dict[int, str] = field(default_factory=dict)
    alone: dict[int, Lack] = field(default_factory=dict)
    inventory: Inventory | None = None


class _Passing(Exception):
    """Something stands there that no restore would bring back, and that may have passed after ``pause``
    seconds."""

    def __init__(self, pause: float) -> None:
        super().__init__()
        self.pause = pause


@contextlib.contextmanager
def frozen(cgroup: Cgroup | Group) -> Iterator[_Freeze]:
    """The sandbox stands still within the block, and always runs again after it."""
    freeze = _Freeze()
    begin = time.monotonic()
    with cgroup.first():
        try:
            cgroup.freeze(FREEZE_TIMEOUT)
            yield freeze
        finally:
            cgroup.thaw()
            freeze.seconds = time.monotonic() - begin


def _past_vfork(cgroup: Cgroup | Group) -> None:
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


def take(context: Context, machine: Machine, order: Order) -> Manifest:
    """Make the checkpoint that ``order`` asks for.

    A process that CRIU cannot dump does not stop the rest: files and shells are kept, and the manifest says
    what it lacks. Raises SandboxError when not even that was possible; nothing is left of the attempt then.
    """
    room_for(context, order.spec.name, f"a checkpoint of sandbox {order.spec.name}")
    try:
        return _take(context, machine, order)
    except FAULTS as error:
        drop_made(context, order.id)
        raise SandboxError(f"checkpoint of sandbox {order.spec.name}: {error}") from error


def _take(context: Context, machine: Machine, order: Order) -> Manifest:
    begin = time.monotonic()
    name = order.spec.name
    quiesce(machine.shells())
    shells = machine.shell_states()
    keep, parent = order.keep, order.parent
    files, image = (parent.files, parent.image) if parent else (None, None)
    freeze = 0.0
    ended: tuple[Lack, ...] = ()
    left: tuple[Lack, ...] | None = None
    if keep.made is TurnClass.FILES:
        keep, files, freeze, left = _files(context, machine, order, shells)
    tries = 0
    while keep.made is TurnClass.FULL:
        tries += 1
        stood = _Stood()
        try:
            files, image, freeze = _full(context, machine, order, shells, stood, tries)
            break
        except _Passing as passing:
            time.sleep(passing.pause)
        except CriuError as error:
            why = str(error)
            context.report(Event("failed", name, f"no image of the processes: {why}"))
            gone = _ended(machine, stood.all)
            if gone:
                words = ", ".join(stood.all[pid] for pid in gone)
                context.report(Event("failed", name, f"ended by the failed dump: {words}"))
            killed = [stood.alone[pid] for pid in gone if pid in stood.alone]
            ended += because(killed, f"a dump that failed ended it: {why}")
            how = "may have broken" if error.interrupted else "broke"
            broken = _broken(machine, stood.inventory, doubtful=error.interrupted)
            ended += because(broken, f"a dump that failed {how} it: {why}")
            if not machine.alive():
                # a checkpoint without the processes would stand in for the earlier one that has them
                raise MachineError(f"the sandbox died meanwhile: {error}") from error
            settle = _refused(order, tries, (*ended, *because(alone(machine, shells), why)))
            if settle.answer == "retry":
                time.sleep(settle.pause)
                continue
            undumped = replace(order.look, occasion=Occasion.UNDUMPED, images_possible=False, no_images=why)
            keep = order.log.decide(undumped)
            keep, files, freeze, left = _files(context, machine, replace(order, keep=keep), shells)
    lacks = ended
    if not keep.image:
        image = None
        lacks += because(alone(machine, shells) if left is None else left, keep.lost)
    elif image is not None and image.inventory is not None:
        lacks += beforehand(image.inventory)
    manifest = Manifest(
        id=order.id,
        box=name,
        turn=order.turn,
        parent=parent.id if parent else None,
        turn_class=min(keep.turn_class, keep.made),
        wanted=keep.turn_class,
        reasons=keep.reasons[:20],
        created=time.time(),
        files=files,
        image=image,
        shells=shells,
        spec=order.spec,
        kept=in_words(files, image, shells),
        lacks=lacks,
        never=NEVER if image is not None else (),
        freeze_seconds=freeze,
        total_seconds=time.monotonic() - begin,
        request=order.request,
        label=order.label,
        pinned=order.pinned,
    )
    context.manifests.write(manifest)
    return manifest


def in_words(
    files: FilesPart | None, image: ImagePart | None, shells: tuple[ShellState, ...]
) -> tuple[str, ...]:
    """What a restore brings back."""
    words = ["files"] if files else []
    if image:
        words.append(f"{len(image.processes)} processes with memory and open files")
    words.extend(f"state of shell {shell.name}" for shell in shells)
    return tuple(words)


def drop_made(context: Context, checkpoint: str) -> None:
    """Undo what a checkpoint that will not exist has made; what cannot be undone now is left for ``gc``."""
    try:
        # a manifest that is there but not surely on the disk must not outlive what it names
        context.manifests.remove(checkpoint)
    except FAULTS:
        return
    with contextlib.suppress(*FAULTS):
        context.pool.drop_snapshot(checkpoint)
    with contextlib.suppress(*FAULTS):
        context.pages.drop(checkpoint)
    shutil.rmtree(context.home.dump(checkpoint), ignore_errors=True)


def _files(
    context: Context, machine: Machine, order: Order, shells: tuple[ShellState, ...]
) -> tuple[Keep, FilesPart | None, float, tuple[Lack, ...]]:
    """What is to be kept after all (where that is everything, nothing was made yet), the files, the seconds
    that the sandbox stood still, and what stood there that only an image would bring back."""
    name, keep = order.spec.name, order.keep
    # what is written already goes to the disk now, so that the snapshot has little left to write
    context.pool.flush(name)
    with frozen(machine.cgroup) as freeze:
        # what runs in the background may have gone on since the decision, and newer files of its making would
        # not fit the older image of it
        if keep.again:
            most, least = order.look.most, keep.turn_class
            look = observe(
                context, name, machine, order.parent, order.doubt, Occasion.FROZEN, most=most, least=least
            )
            keep = order.log.decide(look)
            if keep.made is TurnClass.FULL:
                return keep, None, 0.0, ()
        context.pool.snapshot(name, order.id)
        left = () if keep.image else alone(machine, shells)
        if context.inspector is not None:
            context.inspector.rebase(name, files=True, processes=False)
    return keep, _synced(context, order), freeze.seconds, left


def _full(
    context: Context,
    machine: Machine,
    order: Order,
    shells: tuple[ShellState, ...],
    stood: _Stood,
    tries: int,
) -> tuple[FilesPart, ImagePart, float]:
    """Raises CriuError when the processes cannot be dumped, and _Passing when they are to be dumped a little
    later; nothing is left of the attempt then, and ``stood`` tells what there was."""
    name, folder = order.spec.name, context.home.dump(order.id)
    criu, inspector = context.criu, context.inspector
    assert criu is not None
    if inspector is not None:
        inspector.arm(name)
    try:
        with ThreadPoolExecutor(1) as beside, frozen(machine.cgroup) as freeze:
            _past_vfork(machine.cgroup)
            before = machine.cgroup.pids()
            snapshot = read_snapshot(before)
            found = inventory.inventory(snapshot, machine.pid)
            if why := undumpable(found):
                raise CriuError(f"process image: {why}")
            lacking = beforehand(found)
            if lacking and (settle := _refused(order, tries, lacking)).answer == "retry":
                raise _Passing(settle.pause)
            stood.alone = processes_alone(machine)
            only = (*stood.alone.values(), *alone_beside(machine, shells))
            # both only read what stands still, so the snapshot is made while CRIU works
            looked = beside.submit(_beside_dump, context, machine, order, snapshot)
            try:
                try:
                    criu.dump(machine.pid, folder, machine.externals)
                except CriuError:
                    stood.all = {pid: who(pid) for pid in before}
                    stood.inventory = found
                    raise
            finally:
                # before the thaw, whatever happened: what it reads must stand still
                wait((looked,))
            references, channel = looked.result()
            found = replace(found, alarms=inventory.alarms(before))
            if inspector is not None:
                inspector.rebase(name, files=True, processes=True)
    except (CriuError, _Passing):
        drop_made(context, order.id)
        raise
    (folder / CHANNEL_KEPT).write_bytes(channel)
    files = _synced(context, order)
    last = order.parent.image.id if order.parent and order.parent.image else ""
    kept = context.pages.keep(order.id, folder, like=last)
    shutil.rmtree(folder, ignore_errors=True)
    image = ImagePart(
        id=order.id,
        pid=machine.pid,
        processes=tuple(each.command for each in found.processes if each.command),
        references=tuple(sorted(references.paths)),
        mapped=tuple(sorted(references.mapped)),
        bytes_raw=kept.bytes_raw,
        bytes_new=kept.bytes_new,
        alone=only,
        inventory=found,
    )
    return files, image, freeze.seconds


def _beside_dump(
    context: Context, machine: Machine, order: Order, snapshot: Sequence[Process]
) -> tuple[References, bytes]:
    """The snapshot of the files, what the processes refer to of them, and what the channel holds."""
    name, inspector = order.spec.name, context.inspector
    references = inspector.references(name, snapshot) if inspector is not None else References()
    context.pool.snapshot(name, order.id)
    return references, machine.kept_channel()


def _refused(order: Order, tries: int, lacks: tuple[Lack, ...]) -> Settle:
    """What is done, after so many tries, about what would be lacking."""
    less = Less(order.keep.turn_class, TurnClass.FILES, kinds(lacks), tries, again=True)
    return order.log.decide(less)


def _ended(machine: Machine, seen: Iterable[int]) -> list[int]:
    """Which of the processes ``seen`` are gone: a CRIU that is killed may leave one unable to go on, and it
    dies as soon as it runs."""
    time.sleep(AFTERMATH)
    left = machine.cgroup.pids()
    return [pid for pid in sorted(seen) if pid not in left]


def _broken(machine: Machine, stood: Inventory | None, *, doubtful: bool) -> list[Lack]:
    """Connections inside that were there at a dump that failed and are not now: a read from one that CRIU
    was looking at when it was killed fails, and the program gives it up. ``doubtful``: all that were there,
    because a program that has met such a failure may give its connection up later."""
    if stood is None or not machine.alive():
        return []
    if doubtful:
        now = replace(stood, processes=tuple(replace(one, facts={}) for one in stood.processes))
    else:
        now = inventory.inventory(read_snapshot(machine.cgroup.pids()), machine.pid)
    lost = differences(stood, now)
    return [one for one in lost if one.kind == "sockets" and CONNECTED.search(one.what)]


def _synced(context: Context, order: Order) -> FilesPart:
    """The snapshot is on the disk, what it added is known, and what it no longer has is given back."""
    context.pool.sync(order.id)
    context.pool.settle(order.spec.name, order.id)
    before = order.parent.files.id if order.parent and order.parent.files else ""
    return FilesPart(order.id, context.pool.kind, context.pool.bytes_new(order.id, before))
