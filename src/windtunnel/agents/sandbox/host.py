"""The host of sandboxes: makes, finds, forks and forgets them, and finds them again after a crash of its own.

State is on disk: each sandbox's record, its log, the checkpoints' manifests, the page store, the pool of
roots. A process that opens the home takes its lock, reads the records, and takes over every sandbox whose
init still runs: the processes never depended on the host's process. What it cannot know about the time when
nobody watched, it doubts: the next turn of such a sandbox is full.

Nothing is left of a sandbox that could not be made. Checkpoints that retention no longer keeps are dropped
while others go on being made, and what one of those needs is never dropped.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Set
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, NamedTuple, Unpack

from windtunnel.agents.sandbox import checks
from windtunnel.agents.sandbox.box import Box
from windtunnel.agents.sandbox.context import (
    FAULTS,
    JobEngine,
    Record,
    SandboxContext,
    disk_limit_of,
    newest,
    read_record,
    write_record,
)
from windtunnel.agents.sandbox.costs import load_costs
from windtunnel.agents.sandbox.criu.program import find_criu
from windtunnel.agents.sandbox.errors import PartError, PoolError, SandboxError
from windtunnel.agents.sandbox.files import btrfs, open_pool
from windtunnel.agents.sandbox.inspect import DiffInspector, Inspector, kernel
from windtunnel.agents.sandbox.inventory.sockets import leave_repair
from windtunnel.agents.sandbox.machine import Machine, launch
from windtunnel.agents.sandbox.model import (
    BoxInfo,
    CheckpointManifest,
    FileChange,
    GcReport,
    SandboxEvent,
    SandboxSpec,
    Saved,
    Terms,
    TurnClass,
)  # fmt: skip
from windtunnel.agents.sandbox.observe import service_line
from windtunnel.agents.sandbox.place import Home, Unclaimed, checked_name, default_home
from windtunnel.agents.sandbox.policy import READS_EFFECTS, Endangered, Notice, PolicyName, Save
from windtunnel.agents.sandbox.policy.queues import (
    RETENTION,
    CheckpointHistory,
    Forget,
    forgettable,
)
from windtunnel.agents.sandbox.protocol import Closing
from windtunnel.agents.sandbox.proxy import HostProxy, usable_key, with_address
from windtunnel.agents.sandbox.restore import wipe
from windtunnel.agents.sandbox.side_effects import SideEffectError
from windtunnel.agents.sandbox.store import CheckpointStore
from windtunnel.agents.sandbox.store.export import destination, export_checkpoint, import_checkpoint
from windtunnel.base.errors import UserError

NO_TIME = "no time is left"


class StoredParts(NamedTuple):
    """What lies in pool and store. ``forgettable``: checkpoints that nobody needs; ``needed``: ids of parts
    that stay; ``snapshots`` and ``images``: those that exist."""

    forgettable: tuple[str, ...]
    needed: Set[str]
    snapshots: tuple[str, ...]
    images: tuple[str, ...]


class SandboxHost(Closing):
    """All sandboxes of one home folder. One process at a time holds a home; the sandboxes outlive it.

    ``policy`` chooses what a turn's end keeps; ``retention``: as `RETENTION`. ``lock``: that of the home,
    where the caller has it. Raises UserError when another process holds the home.
    """

    def __init__(
        self,
        home: Path | None = None,
        *,
        workers: int | None = None,
        policy: PolicyName = "semantic",
        retention: int = RETENTION,
        pool_size: int | None = None,
        on_event: Callable[[SandboxEvent], None] | None = None,
        lock: IO[str] | None = None,
    ) -> None:
        self.home = Home((home or default_home()).absolute())
        self._rootless = launch.rootless()
        if self._rootless:
            _admit(self.home)
        for folder in (self.home.path, self.home.boxes):
            folder.mkdir(parents=True, exist_ok=True)
        self.home.path.chmod(0o700)
        self._lock_file = lock or self.home.lock()
        launch.wait_for_guard(self.home)
        self.home.clear_dumps()
        self._on_event = on_event
        with_images = policy not in ("files", "conversation") and not self._rootless
        inspector: Inspector | None = None
        try:
            pool, program = open_pool(self.home.pool, size=pool_size), find_criu() if with_images else None
            if policy in READS_EFFECTS:
                inspector = (
                    DiffInspector(self._changed, images=program is not None)
                    if self._rootless or kernel.missing()
                    else Inspector()
                )
            self.context = SandboxContext(
                home=self.home,
                pool=pool,
                store=CheckpointStore(self.home.pages),
                criu=program,
                inspector=inspector,
                engine=JobEngine(workers, lambda box: self.context.log(box)),
                retention=retention,
                policy=policy,
                in_use=[],
                restorable=set(),
                proxy=HostProxy(self.home),
                report=self._report,
                made=self._made,
                no_images="they are not kept without root" if self._rootless else "CRIU is missing",
            )
        except BaseException:
            self._lock_file.close()
            raise
        self._guard = launch.Guard(self.home)
        self._boxes: dict[str, Box] = {}
        self._claims: set[str] = set()
        self._lock = threading.RLock()
        self._created = 0
        self._tidying = threading.Lock()
        if not self._rootless:
            for words in _lacking(self.context, images=with_images):
                self._report(SandboxEvent("weaker", "", words))
        self._take_over()

    # --- sandboxes

    def create(self, spec: SandboxSpec) -> Box:
        """A new running sandbox, with its first checkpoint.

        Raises UserError for a name that is taken or an image that cannot be imported; SandboxError when the
        machine refuses. Nothing is left of a sandbox that could not be made.
        """
        checks.checked_spec(spec)
        spec = with_address(spec)
        context, name = self.context, spec.name
        left_out: list[str] = []
        with self._claimed(name):
            limit = disk_limit_of(context, spec)
            image = context.pool.import_image(spec.image, left_out)
            with self._making(Record(spec=spec, created=time.time(), image=image)) as box:
                context.pool.create(name, image, limit)
                root = context.pool.mount(name)
                checks.need_shell(root, spec.image)
                machine = Machine.start(context.home, spec, root)
                box.adopt(machine, None)
                context.proxy.serve(box, spec, machine.externals.netns)
                box.checkpoint()
                for service, command in spec.services.items():
                    if box.run(service_line(service, command), timeout=30).exit_code != 0:
                        raise SandboxError(f"service {service} of sandbox {name} did not start: {command!r}")
        for words in (*left_out, *machine.limits_missed):
            context.report(SandboxEvent("weaker", name, words))
        return box

    def get(self, name: str) -> Box:
        """The sandbox of that name; UserError where there is none."""
        with self._lock:
            box = self._boxes.get(name)
            if box is None:
                existing = ", ".join(sorted(self._boxes)) or "none yet"
                raise UserError(f"sandbox: {name!r} is unknown; there are: {existing}")
            return box

    def boxes(self) -> list[BoxInfo]:
        with self._lock:
            boxes = [self._boxes[name] for name in sorted(self._boxes)]
        return [box.info() for box in boxes]

    def fork(self, checkpoint: str, count: int = 1, *, name: str = "", **terms: Unpack[Terms]) -> list[Box]:
        """``count`` new running sandboxes that go on from one checkpoint.

        ``checkpoint``: an id, a prefix of one that is unique, or the name of a sandbox (its state now: a
        checkpoint is taken if something changed). ``name``: of a single one, or what their names begin with,
        before a number that is free. Each has a hostname, network and random seeds of its own.
        Raises IncompleteError, and none is left, where one would lack something, unless that is allowed.
        """
        if count < 1:
            raise UserError(f"fork: count {count} is not accepted; at least 1")
        if name:
            checked_name(name)
        manifest = self._checkpoint_of(checkpoint, terms)
        names = [name] if name and count == 1 else self._free_names(name or manifest.box[:40], count)
        jobs: list[Future[Box]] = []
        try:
            with ThreadPoolExecutor(min(count, self.context.engine.workers)) as pool:
                jobs += [pool.submit(self._fork_one, manifest, name, terms) for name in names]
                wait(jobs)  # an interrupt ends this; what has begun is still waited for, at the block's end
            return [job.result() for job in jobs]
        except BaseException:
            for job in jobs:
                if job.exception() is None:
                    self.remove(job.result().name)
            raise

    def remove(self, name: str) -> None:
        """Kill a sandbox and forget it, with all checkpoints that no other sandbox rests on."""
        box = self.get(name)
        with self._lock:
            self._boxes.pop(name, None)
        with contextlib.suppress(Exception):
            box.wait()
        self._forget(name, box)
        self._drop_forgettable()

    def import_(self, url: str, name: str, *, key_file: str = "", **terms: Unpack[Terms]) -> Box:
        """A sandbox from a checkpoint that was exported to ``url``, here or on another host. Raises
        IncompleteError where it would lack something, unless that is allowed. ``key_file``: where this host
        has the key of its model API; what the export says of that is not followed."""
        checked_name(name)
        if key_file:
            usable_key(name, key_file)
        if not url.strip():
            raise UserError("import: no place is given; give a folder, or a URL such as s3://bucket/path")
        context = self.context
        with self._claimed(name):
            manifest = import_checkpoint(
                url,
                pool=context.pool,
                store=context.store,
                name=name,
                key_file=key_file,
            )
            spec = replace(manifest.spec, name=name)
            return self._from(manifest, spec, terms, fresh=False)

    def export(self, checkpoint: str, url: str, **terms: Unpack[Terms]) -> CheckpointManifest:
        """Write a checkpoint, complete in itself, to a directory or an fsspec URL.

        Of a sandbox that is named, its state now; raises IncompleteError as `Box.checkpoint` does.
        """
        place = destination(url)
        manifest = self._checkpoint_of(checkpoint, terms)
        export_checkpoint(manifest, pool=self.context.pool, store=self.context.store, url=place)
        return manifest

    def notice(self, seconds: float) -> dict[str, Saved]:
        """The machine will be taken in ``seconds``: save what runs, in the order that saves most.

        Of a sandbox that would need a whole image, and for which the time does not suffice, the files are
        saved; its newest whole checkpoint stays. Nothing is raised for what lacks: it is told of each.
        """
        if not 0 <= seconds < float("inf"):
            raise UserError(f"notice: {seconds} seconds are not accepted; give a number from 0 on")
        begin, context, log = time.monotonic(), self.context, self.context.log("")
        with self._lock:
            boxes = {name: box for name, box in self._boxes.items() if box.info().status == "running"}
        costs = load_costs().costs
        endangered = {}
        for name, box in boxes.items():
            memory, processes = box.machine().cgroup.usage()[1], len(box.machine().cgroup.pids())
            files = costs.checkpoint(TurnClass.FILES).seconds
            # where it is not known what changed, all memory may have
            full = costs.checkpoint(TurnClass.FULL, memory=memory, processes=processes, dirty=memory).seconds
            # what it needs is seen when its turn comes: to look now would hold the first ones up
            endangered[name] = Endangered(name, TurnClass.FULL, files, full)
        workers = context.engine.workers
        order = log.decide(Notice(float(seconds), workers, tuple(endangered.values())))
        saved: list[str] = []

        def save(planned: Save) -> Saved:
            box, before = boxes[planned.name], boxes[planned.name].tip
            saved.append(planned.name)
            late = Notice(begin + seconds - time.monotonic(), 1, (endangered[planned.name],))
            if not (answer := log.decide(late, write=False)).saves:  # that there is time is no news
                log.decided(late, answer)
                return Saved(before, fault=NO_TIME)
            try:
                manifest = box.save(planned.most)
            except Exception as error:
                return Saved(box.tip, fault=str(error))
            whole = before if manifest.lacks and manifest.id != before else ""
            return Saved(manifest.id, manifest.lacks, box.refuses(manifest), whole)

        with ThreadPoolExecutor(workers) as pool:
            names = [planned.name for planned in order.saves]
            outcome = dict(zip(names, pool.map(save, order.saves), strict=True))
        log.did(saved=saved)
        return {name: outcome.get(name, Saved(box.tip, fault=NO_TIME)) for name, box in boxes.items()}

    # --- the past

    def gc(self, *, dry_run: bool = False) -> GcReport:
        """Drop what retention lets go of, and whatever a crash left: mounts, cgroups, namespaces, dumps."""
        context = self.context
        with self._lock:
            names = {*self._boxes, *self._claims}
            parts = self._parts(write=not dry_run)
            # snapshots go by `_drop`; others that come to be there are of checkpoints just being made
            left = context.pool.unclaimed(names, set(parts.needed) if dry_run else None)
            left += launch.unclaimed(context.home, names)
            left += [
                (f"folder of sandbox {folder.name}", partial(shutil.rmtree, folder, ignore_errors=True))
                for folder in context.home.boxes.iterdir()
                if folder.name not in names
            ]
            if dry_run:
                return GcReport(parts.forgettable, tuple(words for words, _ in left), 0)
            used = context.pool.usage()[0]
            self._drop(parts)
            gone = [f"snapshot {snapshot}" for snapshot in parts.snapshots if snapshot not in parts.needed]
            gone += removed(left)
            freed = context.store.collect() + max(0, used - context.pool.usage()[0])
        return GcReport(parts.forgettable, tuple(gone), freed)

    def close(self) -> None:
        """Let go of the home. Checkpoints under way are finished; the sandboxes run on.

        Where none runs, the pool is unmounted too.
        """
        with self._lock:
            runs = any(info.status == "running" for info in self.boxes())
            for box in self._boxes.values():
                box.detach()
            self.context.engine.close()
            self.context.proxy.close()
            if self.context.inspector is not None:
                self.context.inspector.close()
            self.context.pool.close(unmount=not runs)
            self.context.store.close()
            self._boxes.clear()
            self._guard.close()
            self._lock_file.close()

    # --- inside

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

    def _checkpoint_of(self, name: str, terms: Terms) -> CheckpointManifest:
        with self._lock:
            box = self._boxes.get(name)
        if box is None:
            return self.context.store.load(self.context.store.named(name))
        if box.info().status == "running":
            return box.checkpoint(**terms)
        if not box.tip:
            raise UserError(f"sandbox {name} has no checkpoint")
        return self.context.store.load(box.tip)

    def _free_names(self, stem: str, count: int) -> list[str]:
        with self._lock:
            used_names = set(self._boxes)
        names = (checked_name(f"{stem}-{number}") for number in itertools.count(1))
        return list(itertools.islice((name for name in names if name not in used_names), count))

    def _fork_one(self, manifest: CheckpointManifest, name: str, terms: Terms) -> Box:
        with self._claimed(name):
            spec = replace(manifest.spec, name=name, hostname="")
            return self._from(manifest, spec, terms, fresh=True)

    def _from(self, manifest: CheckpointManifest, spec: SandboxSpec, terms: Terms, *, fresh: bool) -> Box:
        """A new sandbox in the state of ``manifest``. ``fresh``: with an identity of its own."""
        context, name = self.context, spec.name
        with self._lock:
            origin = self._boxes.get(manifest.box)
        image = origin.image if origin is not None else manifest.spec.image
        record = Record(spec=spec, created=time.time(), base=manifest.id, turns=manifest.turn, image=image)
        with self._making(record) as box:
            restoring = box.restoring(manifest, terms)
            if fresh:
                context.proxy.forked(manifest.box, name, manifest.turn)
            box.revive(restoring, fresh=fresh)
        return box

    @contextlib.contextmanager
    def _making(self, record: Record) -> Iterator[Box]:
        """A new sandbox, the host's after the block; where that fails, nothing is left of it."""
        name, box = record.spec.name, Box(self.context, record, None)
        try:
            write_record(self.context.home.box(name), record)
            yield box
        except BaseException as error:
            self._forget(name, box)
            if isinstance(error, FAULTS):
                raise SandboxError(f"sandbox {name} could not be made: {error}") from error
            raise
        with self._lock:
            self._boxes[name] = box

    def _forget(self, name: str, box: Box) -> None:
        """Remove all of a sandbox but its checkpoints; never raises, what stays is found by ``gc``."""
        with contextlib.suppress(*FAULTS, SideEffectError, UserError):
            self.context.proxy.forget(name)
        with contextlib.suppress(*FAULTS):
            box.halt()
        wipe(self.context, name)
        shutil.rmtree(self.context.home.box(name), ignore_errors=True)

    def _take_over(self) -> None:
        """Find the sandboxes of the home: watch those that still run, and note which do not.

        Where a sandbox's newest checkpoint is damaged, the one before it takes its place.
        """
        context = self.context
        sound, problems = context.store.all()
        for problem in problems:
            context.report(SandboxEvent("failed", "", problem))
        for folder in sorted(context.home.boxes.iterdir()):
            record = read_record(folder)
            # without a checkpoint it was about to get its first, and nobody was told that it exists
            if record is None or record.status == "making" or not record.tip:
                launch.clear(context.home, folder.name)
                context.pool.unmount(folder.name)
                continue
            name, tip = record.spec.name, newest(record, sound)
            if tip != record.tip:
                words = f"checkpoint {record.tip} cannot be read; {tip} is"
                context.report(SandboxEvent("failed", name, words))
                record = replace(record, tip=tip)
            if record.status == "running" and record.lives():
                root = context.pool.mount(name)
                machine = Machine.adopt(context.home, record.spec, root, record.pid)
                box = Box(context, record, machine, doubt="nobody watched while the host was away")
                box.watch()
                leave_repair(machine.cgroup.pids())  # the host may have ended in a dump
                machine.cgroup.thaw()
                context.proxy.serve(box, box.spec, machine.externals.netns)
            else:
                box = Box(context, record, None)
                launch.clear(context.home, name)
                if record.status == "running":
                    context.report(SandboxEvent("died", name, "while the host was away"))
            self._boxes[name] = box

    def _changed(self, name: str) -> list[FileChange]:
        """What differs between a sandbox now and its newest snapshot of files."""
        box = self._boxes.get(name)
        if box is None or not box.snapshot:
            raise PoolError(f"sandbox {name} has no snapshot to compare with")
        return self.context.pool.changed(box.snapshot, None, box=name)

    def _report(self, event: SandboxEvent) -> None:
        if self._on_event is not None:
            self._on_event(event)

    def _made(self) -> None:
        self._created += 1
        if self._created % self.context.retention == 0:
            threading.Thread(target=self._tidy, name="sandbox-tidy", daemon=True).start()

    def _tidy(self) -> None:
        if self._tidying.acquire(blocking=False):
            try:
                with contextlib.suppress(*FAULTS):
                    self._drop_forgettable()
            finally:
                self._tidying.release()

    def _drop_forgettable(self) -> None:
        """Remove the manifests that retention lets go of, then what only they needed."""
        with self._lock:
            self._drop(self._parts())

    def _parts(self, *, write: bool = True) -> StoredParts:
        """What there is, and may be dropped now. ``write``: it will be, so it goes into the logs.

        Checkpoints go on being made meanwhile, so the order matters: what exists is listed first, then what
        is being made, then what has been; what is finished in between is in one of the last two.
        """
        context = self.context
        snapshots, images = tuple(context.pool.snapshots()), tuple(context.store.images())
        making = frozenset(context.in_use)
        manifests, problems = context.store.all()
        # the newest checkpoint of each sandbox (none yet: of one that is being made), and under impossible
        # names what is being restored
        tips = dict.fromkeys(tuple(self._claims), "")
        tips |= {name: box.tip for name, box in tuple(self._boxes.items())}
        tips |= {f"in use: {used}": used for used in tuple(context.in_use)}

        def decide(box: str, past: CheckpointHistory) -> Forget:
            log = context.log(box if box in self._boxes else "")
            forget = log.decide(past, write=False)
            if write and forget.checkpoints:  # asked again and again, it is news only where something goes
                log.decided(past, forget)
            return forget

        dropped, needed = forgettable(manifests, tips, context.retention, decide)
        if problems:
            # what a manifest that cannot be read needs is not known, and it may be readable again
            needed |= {*snapshots, *images}
        return StoredParts(tuple(dropped), needed | making, snapshots, images)

    def _drop(self, parts: StoredParts) -> None:
        self.context.store.drop(parts.forgettable, set(parts.images) - parts.needed)
        if parts.forgettable:
            self.context.log("").did(dropped=parts.forgettable)
        for snapshot in set(parts.snapshots) - parts.needed:
            self.context.pool.drop_snapshot(snapshot)


def removed(parts: Unclaimed) -> list[str]:
    """Remove these; what was removed, in words. Raises PartError for what could not be, when all else is."""
    failed = []
    for _, remove in parts:
        try:
            with contextlib.suppress(FileNotFoundError):  # gone meanwhile
                remove()
        except FAULTS as error:
            failed.append(str(error))
    if failed:
        raise PartError("; ".join(failed))
    return [words for words, _ in parts]


def _lacking(context: SandboxContext, *, images: bool) -> list[str]:
    """What is weaker here than it could be, and why. ``images``: those of processes were asked for."""
    words, inspector = [], context.inspector
    if context.pool.kind == "copy":
        why = btrfs.usable(context.home.pool) or "the pool was made so"
        words.append(f"files are kept by copies instead of snapshots, and no disk limit holds: {why}")
    if images and context.criu is None:
        words.append(
            "processes and their memory are not kept: CRIU is missing; 'windtunnel sandbox setup' installs it"
        )
    if inspector is not None and inspector.misses:
        words.append(f"turns are looked at by {inspector.kind}, which misses {'; '.join(inspector.misses)}")
    return words


def _admit(home: Home) -> None:
    """Raises UserError where this user cannot have a host of sandboxes in ``home``."""
    launch.demand()
    nearest = home.path
    while not os.path.exists(nearest):  # false, too, where this user may not look
        nearest = nearest.parent
    if not os.access(nearest, os.W_OK | os.X_OK) or (
        nearest == home.path and nearest.stat().st_uid != os.geteuid()
    ):
        raise UserError(
            f"sandbox: home {home.path} cannot be used by user {os.geteuid()}; name a folder of your own "
            "(WINDTUNNEL_SANDBOX_HOME)"
        )
