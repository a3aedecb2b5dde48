"""The host of sandboxes: makes, finds, forks and forgets them, and finds them again after a crash of its own.

State is on disk: each sandbox's record, its log, the checkpoints' manifests, the page store, the pool of
roots. A process that opens the home takes its lock, reads the records, and takes over every sandbox whose
init still runs; the processes never depended on the host's process. What it cannot know about the time it was
away, it doubts: the next turn of such a sandbox is full.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import IO, Literal

from windtunnel.agents.sandbox.costs import load_costs
from windtunnel.agents.sandbox.errors import PoolError, SandboxError
from windtunnel.agents.sandbox.live import checks
from windtunnel.agents.sandbox.live import machine as machines
from windtunnel.agents.sandbox.live import record as records
from windtunnel.agents.sandbox.live.box import Box
from windtunnel.agents.sandbox.live.checkpoint import FAULTS
from windtunnel.agents.sandbox.live.context import (
    NO_IMAGES,
    Context,
    admit,
    bound_by_disk,
    disk_limit_of,
    inspector_for,
    lacking,
    room_for,
)
from windtunnel.agents.sandbox.live.criu import find_criu, images_in_use
from windtunnel.agents.sandbox.live.criu.connections import leave_repair
from windtunnel.agents.sandbox.live.diff_inspector import DiffInspector
from windtunnel.agents.sandbox.live.effects import EffectError
from windtunnel.agents.sandbox.live.engine import Engine
from windtunnel.agents.sandbox.live.files import LeftOut, open_pool
from windtunnel.agents.sandbox.live.images import (
    Manifests,
    PageStore,
    destination,
    export_checkpoint,
    import_checkpoint,
)
from windtunnel.agents.sandbox.live.inspect import Inspector
from windtunnel.agents.sandbox.live.kept import Kept
from windtunnel.agents.sandbox.live.lacks import service_line
from windtunnel.agents.sandbox.live.machine import Machine, launch
from windtunnel.agents.sandbox.live.model_proxy import ProxyEvent
from windtunnel.agents.sandbox.live.model_proxy.attach import HostProxy, usable_key, with_address
from windtunnel.agents.sandbox.live.place import Home, checked_name, default_home
from windtunnel.agents.sandbox.live.probe import known as known_kinds
from windtunnel.agents.sandbox.live.record import Record
from windtunnel.agents.sandbox.live.restore import bring_back, refuse_less
from windtunnel.agents.sandbox.live.verify import verify
from windtunnel.agents.sandbox.model import (
    BoxInfo,
    Event,
    FileChange,
    GcReport,
    Manifest,
    SandboxSpec,
    Saved,
    TurnClass,
    VerifyReport,
)
from windtunnel.agents.sandbox.policy import (
    DEFAULT,
    READS_EFFECTS,
    Endangered,
    Forget,
    Notice,
    Past,
    Pick,
    PolicyName,
    Queued,
    Retention,
    Rules,
    Save,
    forgettable,
)
from windtunnel.base.errors import UserError

LOOKED_AT = 1.0
"""Seconds from one look at what the host's disk has free to the next."""


class Host:
    """All sandboxes of one home folder. One process at a time holds a home; the sandboxes outlive it.

    ``policy`` chooses what a turn's end keeps; ``fifo`` takes the urgent queue away; ``pool_kind`` and
    ``inspector_kind`` force a kind. Raises UserError when another process holds the home.
    """

    def __init__(
        self,
        home: Path | None = None,
        *,
        workers: int | None = None,
        policy: PolicyName = "semantic",
        rules: Rules = DEFAULT,
        retention: Retention | None = None,
        fifo: bool = False,
        pool_kind: Literal["auto", "btrfs", "copy"] = "auto",
        pool_size: int | None = None,
        inspector_kind: Literal["auto", "ebpf", "fanotify", "activity"] = "auto",
        criu: bool = True,
        on_event: Callable[[Event], None] | None = None,
        on_request: Callable[[ProxyEvent], None] | None = None,
        kept: Kept | None = None,
    ) -> None:
        self.home = Home((home or default_home()).absolute())
        self._rootless = launch.rootless()
        if self._rootless:
            admit(self.home, pool_kind, inspector_kind)
        for folder in (self.home.path, self.home.boxes, self.home.checkpoints):
            folder.mkdir(parents=True, exist_ok=True)
        self.home.path.chmod(0o700)
        self._lock_file = _locked(self.home)
        machines.wait_for_guard(self.home)
        _clear_dumps(self.home)
        self._on_event = on_event
        self._checkpoints_made = 0
        self._tidying = threading.Lock()
        with_images = criu and policy not in ("files", "conversation") and not self._rootless
        inspector: Inspector | DiffInspector | None = None
        try:
            pool = open_pool(self.home.pool, kind=pool_kind, size=pool_size)
            if policy in READS_EFFECTS:
                inspector = (
                    DiffInspector(lambda box: machines.Group(self.home, box).pids(), self._changed)
                    if self._rootless
                    else inspector_for(inspector_kind, pool)
                )
            self.context = Context(
                home=self.home,
                pool=pool,
                pages=PageStore(self.home.pages),
                manifests=Manifests(self.home.checkpoints),
                criu=find_criu() if with_images else None,
                inspector=inspector,
                engine=Engine(workers, fifo=fifo, decide=self._pick, chosen=self._picked),
                rules=rules,
                retention=retention or Retention(),
                policy=policy,
                in_use=[],
                proxy=HostProxy(self.home, on_request, kept or Kept(self.home.path)),
                report=self._report,
                no_images=NO_IMAGES if self._rootless else "CRIU is missing",
                kinds=cache(lambda: tuple(known_kinds()) if with_images else ()),
            )
        except BaseException:
            self._lock_file.close()
            raise
        self._guard = machines.Guard(self.home)
        self._boxes: dict[str, Box] = {}
        self._claims: set[str] = set()
        self._lock = threading.RLock()
        if not self._rootless:
            seen = inspector if isinstance(inspector, Inspector) else None
            asked = (pool_kind == "auto", with_images, inspector_kind == "auto")
            for words in lacking(self.home, pool, self.context.criu, seen, asked=asked):
                self._report(Event("weaker", "", words))
        with contextlib.suppress(*FAULTS):
            bound_by_disk(self.context)
        self._recover()
        self._closed = threading.Event()
        self._watch = threading.Thread(target=self._watch_disk, name="sandbox-disk", daemon=True)
        self._watch.start()

    # --- sandboxes

    def create(self, spec: SandboxSpec) -> Box:
        """A new running sandbox, with its first checkpoint.

        Raises UserError for a name that is taken or an image that cannot be imported; SandboxError when the
        machine refuses. Nothing is left of a sandbox that could not be made.
        """
        checks.checked_spec(spec)
        spec = with_address(spec)
        if self._rootless:
            launch.check(spec)
        context, name = self.context, spec.name
        limit = disk_limit_of(context, spec)
        room_for(context, "", f"sandbox {name}")
        left_out: list[str] = []
        image = context.pool.import_image(spec.image, lambda text: _note(left_out, text))
        with self._claimed(name):
            record = Record(spec=spec, created=time.time(), image=image)
            records.write(self.home.box(name), record)
            box = None
            try:
                context.pool.create(name, image, limit)
                root = context.pool.mount(name)
                checks.need_shell(root, spec.image)
                with context.pool.relaxed(name):
                    machine = Machine.start(self.home, spec, root)
                box = Box(context, record, None)
                box.adopt(machine, None)
                box.checkpoint()
                for service, command in spec.services.items():
                    started = box.run(service_line(service, command), timeout=30)
                    if started.exit_code != 0:
                        raise SandboxError(f"service {service} of sandbox {name} did not start: {command!r}")
                told = [*left_out, *machine.limits_missed] if self._rootless else []
                for words in told:
                    context.report(Event("created", name, words))
            except BaseException as error:
                self._forget(name, box)
                if isinstance(error, FAULTS):
                    raise SandboxError(f"sandbox {name} could not be made: {error}") from error
                raise
            self._boxes[name] = box
        context.report(Event("created", name, image))
        return box

    def get(self, name: str) -> Box:
        """The sandbox of that name; UserError where there is none."""
        with self._lock:
            box = self._boxes.get(name)
            if box is None:
                known = ", ".join(sorted(self._boxes)) or "none yet"
                raise UserError(f"sandbox: {name!r} is unknown; there are: {known}")
            return box

    def boxes(self) -> list[BoxInfo]:
        with self._lock:
            boxes = [self._boxes[name] for name in sorted(self._boxes)]
        return [box.info() for box in boxes]

    def fork(
        self,
        checkpoint: str,
        count: int = 1,
        *,
        names: Sequence[str] | None = None,
        lazy: bool = False,
        allow_less: bool = False,
    ) -> list[Box]:
        """``count`` new running sandboxes that go on from one checkpoint.

        ``checkpoint``: an id, a prefix of one that is unique, or the name of a sandbox (its state now: a
        checkpoint is taken if something changed). Each has a hostname, network and random seeds of its own.
        Raises LessError, and none is left, where one would lack something, unless ``allow_less``.
        """
        if count < 1:
            raise UserError(f"fork: count {count} is not accepted; at least 1")
        if names:
            checks.checked_names(names, count)
        manifest = self._checkpoint_of(checkpoint, allow_less)
        wanted = list(names) if names else self._free_names(manifest.box, count)
        made: list[Box] = []
        try:
            with ThreadPoolExecutor(min(count, self.context.engine.workers)) as pool:
                jobs = [pool.submit(self._fork_one, manifest, name, lazy, allow_less) for name in wanted]
                failed = None
                for job in jobs:
                    try:
                        made.append(job.result())
                    except Exception as error:
                        failed = failed or error
                if failed is not None:
                    raise failed
        except BaseException:
            for box in made:
                self.remove(box.name)
            raise
        return made

    def remove(self, name: str) -> None:
        """Kill a sandbox and forget it, with all checkpoints that no other sandbox rests on."""
        box = self.get(name)
        with self._lock:
            self._boxes.pop(name, None)
        with contextlib.suppress(Exception):
            box.wait()
        self._forget(name, box)
        self._drop_forgettable()
        self.context.report(Event("removed", name))

    def import_(self, url: str, name: str, *, key_file: str = "", allow_less: bool = False) -> Box:
        """A sandbox from a checkpoint that was exported to ``url``, here or on another host. Raises LessError
        where it would lack something, unless ``allow_less``. ``key_file``: where this host has the key of its
        model API; what the export says of that is not followed."""
        checked_name(name)
        if key_file:
            usable_key(name, key_file)
        if not url.strip():
            raise UserError("import: no place is given; give a folder, or a URL such as s3://bucket/path")
        context = self.context
        room_for(context, "", f"the import of sandbox {name}")
        with self._claimed(name):
            manifest = import_checkpoint(
                url,
                pool=context.pool,
                pages=context.pages,
                manifests=context.manifests,
                name=name,
                key_file=key_file,
            )
            spec = replace(manifest.spec, name=name)
            return self._from(manifest, spec, lazy=False, fresh=False, allow_less=allow_less)

    def export(self, checkpoint: str, url: str, *, allow_less: bool = False) -> Manifest:
        """Write a checkpoint, complete in itself, to a directory or an fsspec URL.

        Of a sandbox that is named, its state now; raises LessError as `Box.checkpoint` does.
        """
        place = destination(url)
        manifest = self._checkpoint_of(checkpoint, allow_less)
        export_checkpoint(manifest, pool=self.context.pool, pages=self.context.pages, url=place)
        return manifest

    def notice(self, seconds: float) -> dict[str, Saved]:
        """The machine will be taken in ``seconds``: save what runs, in the order that saves most.

        Of a sandbox that would need a whole image, and for which the time does not suffice, the files are
        saved; its newest whole checkpoint stays. Nothing is raised for what lacks: it is told of each.
        """
        if not 0 <= seconds < float("inf"):
            raise UserError(f"notice: {seconds} seconds are not accepted; give a number from 0 on")
        begin = time.monotonic()
        with self._lock:
            boxes = {name: box for name, box in self._boxes.items() if box.info().status == "running"}
        costs = load_costs().costs
        endangered = []
        for name, box in boxes.items():
            memory, processes = box.machine().cgroup.usage()[1], len(box.machine().cgroup.pids())
            times = costs.estimate_files(), costs.estimate_full(memory, processes)
            # what it needs is seen when its turn comes: to look now would hold the first ones up
            endangered.append(Endangered(name, TurnClass.FULL, *times))
        outcome: dict[str, Saved] = {}

        def save(planned: Save) -> None:
            box = boxes[planned.name]
            before = box.tip
            try:
                if time.monotonic() - begin >= seconds:
                    raise SandboxError("no time is left")
                made = box.save(planned.most)
                whole = before if made.lacks and made.id != before else ""
                outcome[box.name] = Saved(made.id, made.lacks, box.refuses(made), whole)
            except Exception as error:
                outcome[box.name] = Saved(box.tip, fault=str(error))

        workers = self.context.engine.workers
        order = self.context.log("").decide(Notice(float(seconds), workers, tuple(endangered)))
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(save, order.saves))
        return outcome

    # --- the past

    def verify(self, what: str = "") -> VerifyReport:
        """Read a checkpoint (an id or a prefix), all of a sandbox (its name), or all there are (empty)
        from the disk, and check every byte that has a checksum.

        A damaged checkpoint can no longer be restored, and later ones rest on nothing of it.
        """
        with self._lock:
            box = self._boxes.get(what)
        if not what:
            ids = self.context.manifests.ids()
        elif box is not None:
            ids = [manifest.id for manifest in box.log().checkpoints]
        else:
            ids = [self.context.manifests.named(what)]
        report = verify(self.context, ids)
        for damage in report.damaged:
            self.context.report(Event("failed", damage.box, f"{damage.checkpoint}: {'; '.join(damage.what)}"))
        return report

    def gc(self, *, dry_run: bool = False) -> GcReport:
        """Drop what retention lets go of, and whatever a crash left: mounts, cgroups, namespaces, dumps."""
        context = self.context
        with self._lock:
            names = {*self._boxes, *self._claims}
            past = self._past(write=not dry_run)
            if dry_run:
                left = [
                    *context.pool.leftovers(names, set(past.needed)),
                    *machines.leftovers(self.home, names),
                ]
                return GcReport(past.dropped, tuple(left), 0)
            used = context.pool.usage()[0]
            self._drop(past)
            gone = [f"snapshot {one}" for one in past.snapshots if one not in past.needed]
            # snapshots are dropped already; those that are there now may be of checkpoints just being made
            gone += [*context.pool.collect(names, None), *machines.collect(self.home, names)]
            for folder in self.home.boxes.iterdir():
                if folder.name not in names:
                    shutil.rmtree(folder, ignore_errors=True)
                    gone.append(f"folder of sandbox {folder.name}")
            freed = context.pages.collect(past.needed) + max(0, used - context.pool.usage()[0])
        context.report(Event("collected", "", f"{len(past.dropped)} checkpoints, {len(gone)} leftovers"))
        return GcReport(past.dropped, tuple(gone), freed)

    def close(self) -> None:
        """Let go of the home. Checkpoints under way are finished; the sandboxes run on.

        Where none runs, the pool is unmounted too.
        """
        self._closed.set()
        self._watch.join()
        with self._lock:
            runs = any(info.status == "running" for info in self.boxes())
            for box in self._boxes.values():
                box.detach()
            self.context.engine.close()
            self.context.proxy.close()
            if self.context.inspector is not None:
                self.context.inspector.close()
            self.context.pool.close(unmount=not runs)
            self._boxes = {}
            self._guard.close()
            self._lock_file.close()

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- inside

    def _recover(self) -> None:
        """Take over the sandboxes that still run, and note which do not.

        Where a sandbox's newest checkpoint is damaged, the one before it takes its place.
        """
        sound, problems = self.context.manifests.all()
        for problem in problems:
            self.context.report(Event("failed", "", problem))
        for folder in sorted(self.home.boxes.iterdir()):
            record = records.read(folder)
            # without a checkpoint it was about to get its first, and nobody was told that it exists
            if record is None or record.status == "making" or not record.tip:
                Machine.clear(self.home, folder.name)
                self.context.pool.unmount(folder.name)
                continue
            name = record.spec.name
            tip = _newest(record, sound)
            if tip != record.tip:
                self.context.report(
                    Event("failed", name, f"checkpoint {record.tip} cannot be read; {tip} is")
                )
                record = replace(record, tip=tip)
            if record.status == "running" and records.is_alive(record):
                root = self.context.pool.mount(name)
                machine = Machine.adopt(self.home, record.spec, root, record.pid)
                box = Box(self.context, record, machine, doubt="nobody watched while the host was away")
                box.watch()
                leave_repair(machine.cgroup.pids())  # the host may have ended in a dump
                machine.cgroup.thaw()
                self.context.proxy.serve(box, box.spec, machine.externals.netns)
            else:
                box = Box(self.context, record, None)
                Machine.clear(self.home, name)
                if record.status == "running":
                    self.context.report(Event("died", name, "while the host was away"))
            self._boxes[name] = box

    @contextlib.contextmanager
    def _claimed(self, name: str) -> Iterator[None]:
        """Nobody else makes a sandbox of that name within the block."""
        with self._lock:
            if name in self._boxes or name in self._claims:
                raise UserError(
                    f"sandbox: {name!r} exists already; 'windtunnel sandbox rm {name}' removes it"
                )
            self._claims.add(name)
        try:
            yield
        finally:
            with self._lock:
                self._claims.discard(name)

    def _checkpoint_of(self, given: str, allow_less: bool) -> Manifest:
        with self._lock:
            box = self._boxes.get(given)
        if box is None:
            return self.context.manifests.find(given)
        if box.info().status == "running":
            return box.checkpoint(allow_less=allow_less)
        if not box.tip:
            raise UserError(f"sandbox {given} has no checkpoint")
        return self.context.manifests.load(box.tip)

    def _free_names(self, stem: str, count: int) -> list[str]:
        with self._lock:
            taken = set(self._boxes)
        names: list[str] = []
        number = 0
        while len(names) < count:
            number += 1
            name = f"{stem[:40]}-{number}"
            if name not in taken:
                names.append(name)
        return names

    def _fork_one(self, manifest: Manifest, name: str, lazy: bool, allow_less: bool) -> Box:
        with self._claimed(name):
            spec = replace(manifest.spec, name=name, hostname="")
            return self._from(manifest, spec, lazy=lazy, fresh=True, allow_less=allow_less)

    def _from(
        self, manifest: Manifest, spec: SandboxSpec, *, lazy: bool, fresh: bool, allow_less: bool
    ) -> Box:
        """A new sandbox in the state of ``manifest``. ``fresh``: with an identity of its own."""
        begin = time.monotonic()
        name = spec.name
        room_for(self.context, "", f"sandbox {name}")
        with self._lock:
            origin = self._boxes.get(manifest.box)
        image = origin.info().image if origin is not None else manifest.spec.image
        record = Record(spec=spec, created=time.time(), base=manifest.id, turns=manifest.turn, image=image)
        records.write(self.home.box(name), record)
        box, context, allow_less = None, self.context, allow_less or spec.allow_less
        try:
            refuse_less(context, context.log(name), manifest, allow_less=allow_less)
            if fresh:
                context.proxy.forked(manifest.box, spec, manifest.turn)
            machine, report = bring_back(
                context, context.log(name), spec, manifest, lazy=lazy, allow_less=allow_less
            )
            if fresh:
                with context.pool.relaxed(name):
                    machine.freshen(spec.hostname or name)
            box = Box(context, record, None)
            box.adopt(machine, manifest, lacks=report.lacks)
        except BaseException:
            self._forget(name, box)
            raise
        with self._lock:
            self._boxes[name] = box
        self.context.report(Event("forked", name, manifest.id, time.monotonic() - begin))
        return box

    def _forget(self, name: str, box: Box | None) -> None:
        """Remove all of a sandbox but its checkpoints; never raises, what stays is found by ``gc``."""
        with contextlib.suppress(*FAULTS, EffectError, UserError):
            self.context.proxy.forget(name)
        with contextlib.suppress(*FAULTS):
            if box is not None:
                box.halt()
        with contextlib.suppress(*FAULTS):
            Machine.clear(self.home, name)
        with contextlib.suppress(*FAULTS):
            self.context.pool.unmount(name)
        with contextlib.suppress(*FAULTS):
            self.context.pool.drop_box(name)
        shutil.rmtree(self.home.box(name), ignore_errors=True)

    def _tips(self) -> dict[str, str]:
        """The newest checkpoint of each sandbox (none yet: of one that is being made), and under impossible
        names what is being restored."""
        tips = dict.fromkeys(tuple(self._claims), "")
        tips |= {name: box.tip for name, box in tuple(self._boxes.items())}
        return tips | {f"in use: {one}": one for one in tuple(self.context.in_use)}

    def _changed(self, name: str) -> list[FileChange]:
        """What differs between a sandbox now and its newest snapshot of files."""
        box = self._boxes.get(name)
        if box is None or not box.snapshot:
            raise PoolError(f"sandbox {name} has no snapshot to compare with")
        return self.context.pool.changed(box.snapshot, None, box=name)

    def _report(self, event: Event) -> None:
        """Pass an event on; every so many checkpoints, let go of what retention no longer keeps."""
        if self._on_event is not None:
            self._on_event(event)
        if event.kind == "checkpoint":
            self._checkpoints_made += 1
            if self._checkpoints_made % self.context.retention.keep == 0:
                threading.Thread(target=self._tidy, name="sandbox-tidy", daemon=True).start()

    def _watch_disk(self) -> None:
        while not self._closed.wait(LOOKED_AT):
            with contextlib.suppress(*FAULTS):
                near = bound_by_disk(self.context)
                if self.context.pool.common is not None:
                    self.context.pool.common.spare(near)

    def _tidy(self) -> None:
        if self._tidying.acquire(blocking=False):
            try:
                with contextlib.suppress(*FAULTS):
                    self._drop_forgettable()
            finally:
                self._tidying.release()

    def _pick(self, queued: Queued) -> Pick:
        return self.context.log("").decide(queued, write=False)

    def _picked(self, box: str, queued: Queued, pick: Pick) -> None:
        self.context.log(box).decided(queued, pick)

    def _past(self, *, write: bool = True) -> _Past:
        """What may be dropped now. ``write``: it will be, so it goes into the logs.

        Checkpoints go on being made meanwhile, so the order matters: what exists is listed first, then what
        is being made, then what has been; what is finished in between is in one of the last two.
        """
        context = self.context
        snapshots, images = tuple(context.pool.snapshots()), tuple(context.pages.ids())
        making = frozenset(context.in_use)
        manifests, problems = context.manifests.all()

        def decide(box: str, past: Past) -> Forget:
            log = context.log(box if box in self._boxes else "")
            forget = log.decide(past, write=False)
            if write and forget.checkpoints:  # asked again and again, it is news only where something goes
                log.decided(past, forget)
            return forget

        dropped, needed = forgettable(manifests, self._tips(), context.retention, decide)
        if problems:
            # what a manifest that cannot be read needs is not known, and it may be readable again
            needed |= {*snapshots, *images}
        return _Past(tuple(dropped), needed | making, snapshots, images)

    def _drop(self, past: _Past) -> None:
        for one in past.dropped:
            self.context.manifests.remove(one)
        for snapshot in past.snapshots:
            if snapshot not in past.needed:
                self.context.pool.drop_snapshot(snapshot)
        for image in past.images:
            if image not in past.needed:
                self.context.pages.drop(image)

    def _drop_forgettable(self) -> None:
        """Remove the manifests that retention lets go of, then what only they needed."""
        with self._lock:
            self._drop(self._past())


@dataclass(frozen=True)
class _Past:
    """Checkpoints to drop; ids of parts that stay; snapshots and images that exist."""

    dropped: tuple[str, ...]
    needed: frozenset[str]
    snapshots: tuple[str, ...]
    images: tuple[str, ...]


def _note(left_out: list[str], text: str) -> None:
    if isinstance(text, LeftOut):
        left_out.append(text)


def _clear_dumps(home: Home) -> None:
    """Drop images that a crash left on the way to the page store; a lazy restore may still read its own."""
    folder = home.path / "dumps"
    if folder.is_dir():
        used = images_in_use()
        for left in folder.iterdir():
            if left in used:
                continue
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)


def _newest(record: Record, sound: Sequence[Manifest]) -> str:
    """The sandbox's newest checkpoint that can be read; empty where there is none."""
    ids = {manifest.id for manifest in sound}
    if not record.tip or record.tip in ids:
        return record.tip
    own = [manifest for manifest in sound if manifest.box == record.spec.name]
    if own:
        return max(own, key=lambda manifest: (manifest.turn, manifest.created)).id
    return record.base if record.base in ids else ""


def _locked(home: Home) -> IO[str]:
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
