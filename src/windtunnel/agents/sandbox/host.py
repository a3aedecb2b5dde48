"""The host of sandboxes: makes, finds, forks and forgets them, and finds them again after a crash of its own.

State is on disk: each sandbox's record, its log, the checkpoints' manifests, the page store, the pool of
roots. A process that opens the home takes its lock, reads the records, and takes over every sandbox whose
init still runs (see ``takeover``).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from windtunnel.agents.sandbox import checks
from windtunnel.agents.sandbox import machine as machines
from windtunnel.agents.sandbox.box import Box
from windtunnel.agents.sandbox.checkpoint import FAULTS
from windtunnel.agents.sandbox.context import (
    NO_IMAGES,
    Context,
    admit,
    bound_by_disk,
    lacking,
    room_for,
)
from windtunnel.agents.sandbox.criu import find_criu
from windtunnel.agents.sandbox.engine import Engine
from windtunnel.agents.sandbox.errors import PoolError
from windtunnel.agents.sandbox.files import open_pool
from windtunnel.agents.sandbox.inspect import DiffInspector, Inspector, kernel
from windtunnel.agents.sandbox.machine import launch
from windtunnel.agents.sandbox.making import forget, from_checkpoint, from_image
from windtunnel.agents.sandbox.model import (
    BoxInfo,
    Event,
    FileChange,
    GcReport,
    Manifest,
    SandboxSpec,
    Saved,
    VerifyReport,
)
from windtunnel.agents.sandbox.notice import save_all
from windtunnel.agents.sandbox.place import Home, checked_name, default_home
from windtunnel.agents.sandbox.policy import (
    DEFAULT,
    READS_EFFECTS,
    Pick,
    PolicyName,
    Queued,
    Retention,
    Rules,
)
from windtunnel.agents.sandbox.proxy.attach import HostProxy, usable_key, with_address
from windtunnel.agents.sandbox.retention import Keeper
from windtunnel.agents.sandbox.store import (
    Manifests,
    PageStore,
    destination,
    export_checkpoint,
    import_checkpoint,
)
from windtunnel.agents.sandbox.takeover import clear_dumps, locked, take_over
from windtunnel.agents.sandbox.verify import verify
from windtunnel.base.errors import UserError

LOOKED_AT = 1.0
"""Seconds from one look at what the host's disk has free to the next."""


class Host:
    """All sandboxes of one home folder. One process at a time holds a home; the sandboxes outlive it.

    ``policy`` chooses what a turn's end keeps. Raises UserError when another process holds the home.
    """

    def __init__(
        self,
        home: Path | None = None,
        *,
        workers: int | None = None,
        policy: PolicyName = "semantic",
        rules: Rules = DEFAULT,
        retention: Retention | None = None,
        pool_size: int | None = None,
        criu: bool = True,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self.home = Home((home or default_home()).absolute())
        self._rootless = launch.rootless()
        if self._rootless:
            admit(self.home)
        for folder in (self.home.path, self.home.boxes):
            folder.mkdir(parents=True, exist_ok=True)
        self.home.path.chmod(0o700)
        self._lock_file = locked(self.home)
        machines.wait_for_guard(self.home)
        clear_dumps(self.home)
        self._on_event = on_event
        with_images = criu and policy not in ("files", "conversation") and not self._rootless
        inspector: Inspector | DiffInspector | None = None
        try:
            pool, found = open_pool(self.home.pool, size=pool_size), find_criu() if with_images else None
            if policy in READS_EFFECTS:
                inspector = (
                    DiffInspector(self._pids, self._changed, images=found is not None)
                    if self._rootless or kernel.missing()
                    else Inspector()
                )
            pages = PageStore(self.home.pages)
            self.context = Context(
                home=self.home,
                pool=pool,
                pages=pages,
                manifests=Manifests(pages.database),
                criu=found,
                inspector=inspector,
                engine=Engine(workers, decide=self._pick, chosen=self._picked),
                rules=rules,
                retention=retention or Retention(),
                policy=policy,
                in_use=[],
                proxy=HostProxy(self.home),
                report=self._report,
                no_images=NO_IMAGES if self._rootless else "CRIU is missing",
            )
        except BaseException:
            self._lock_file.close()
            raise
        self._guard = machines.Guard(self.home)
        self._boxes: dict[str, Box] = {}
        self._claims: set[str] = set()
        self._lock = threading.RLock()
        self._keeper = Keeper(self.context, self._lock, self._boxes, self._claims)
        if not self._rootless:
            for words in lacking(self.home, pool, self.context.criu, inspector, images=with_images):
                self._report(Event("weaker", "", words))
        with contextlib.suppress(*FAULTS):
            bound_by_disk(self.context)
        take_over(self.context, self._boxes)
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
        with self._claimed(spec.name):
            box = from_image(self.context, spec, rootless=self._rootless)
            self._boxes[spec.name] = box
        self.context.report(Event("created", spec.name, box.image))
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
                jobs = [pool.submit(self._fork_one, manifest, name, allow_less) for name in wanted]
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
        forget(self.context, name, box)
        self._keeper.drop_forgettable()
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
            return self._from(manifest, spec, fresh=False, allow_less=allow_less)

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
        with self._lock:
            boxes = {name: box for name, box in self._boxes.items() if box.info().status == "running"}
        return save_all(self.context, boxes, seconds)

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
        report = self._keeper.collect(dry_run=dry_run)
        if not dry_run:
            words = f"{len(report.checkpoints)} checkpoints, {len(report.leftovers)} leftovers"
            self.context.report(Event("collected", "", words))
        return report

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
            self.context.pages.close()
            self._boxes.clear()
            self._guard.close()
            self._lock_file.close()

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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

    def _fork_one(self, manifest: Manifest, name: str, allow_less: bool) -> Box:
        with self._claimed(name):
            spec = replace(manifest.spec, name=name, hostname="")
            return self._from(manifest, spec, fresh=True, allow_less=allow_less)

    def _from(self, manifest: Manifest, spec: SandboxSpec, *, fresh: bool, allow_less: bool) -> Box:
        """A new sandbox in the state of ``manifest``. ``fresh``: with an identity of its own."""
        begin = time.monotonic()
        with self._lock:
            origin = self._boxes.get(manifest.box)
        image = origin.image if origin is not None else manifest.spec.image
        box = from_checkpoint(self.context, manifest, spec, image, fresh=fresh, allow_less=allow_less)
        with self._lock:
            self._boxes[spec.name] = box
        self.context.report(Event("forked", spec.name, manifest.id, time.monotonic() - begin))
        return box

    def _pids(self, name: str) -> set[int]:
        return set(launch.group(self.home, name).pids())

    def _changed(self, name: str) -> list[FileChange]:
        """What differs between a sandbox now and its newest snapshot of files."""
        box = self._boxes.get(name)
        if box is None or not box.snapshot:
            raise PoolError(f"sandbox {name} has no snapshot to compare with")
        return self.context.pool.changed(box.snapshot, None, box=name)

    def _report(self, event: Event) -> None:
        if self._on_event is not None:
            self._on_event(event)
        if event.kind == "checkpoint":
            self._keeper.made()

    def _watch_disk(self) -> None:
        while not self._closed.wait(LOOKED_AT):
            with contextlib.suppress(*FAULTS):
                near = bound_by_disk(self.context)
                if self.context.pool.common is not None:
                    self.context.pool.common.spare(near)

    def _pick(self, queued: Queued) -> Pick:
        return self.context.log("").decide(queued, write=False)

    def _picked(self, box: str, queued: Queued, pick: Pick) -> None:
        self.context.log(box).decided(queued, pick)
