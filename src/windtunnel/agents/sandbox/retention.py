"""What a host lets go of: checkpoints that retention no longer keeps, and what a crash left.

Checkpoints go on being made meanwhile, and what one of them needs is never dropped.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Mapping, Set
from dataclasses import dataclass

from windtunnel.agents.sandbox import machine as machines
from windtunnel.agents.sandbox.box import Box
from windtunnel.agents.sandbox.context import FAULTS, Context
from windtunnel.agents.sandbox.model import GcReport
from windtunnel.agents.sandbox.policy import Forget, Past, forgettable


class Keeper:
    """Drops what a host need not keep. ``boxes`` and ``claims`` (names that are being made) are the host's
    own, under its ``lock``."""

    def __init__(
        self, context: Context, lock: threading.RLock, boxes: Mapping[str, Box], claims: Set[str]
    ) -> None:
        self._context = context
        self._lock = lock
        self._boxes = boxes
        self._claims = claims
        self._checkpoints_made = 0
        self._tidying = threading.Lock()

    def made(self) -> None:
        """A checkpoint was made: every so many, let go of what retention no longer keeps."""
        self._checkpoints_made += 1
        if self._checkpoints_made % self._context.retention.keep == 0:
            threading.Thread(target=self._tidy, name="sandbox-tidy", daemon=True).start()

    def drop_forgettable(self) -> None:
        """Remove the manifests that retention lets go of, then what only they needed."""
        with self._lock:
            self._drop(self._past())

    def collect(self, *, dry_run: bool) -> GcReport:
        """Drop that, and whatever a crash left: mounts, cgroups, namespaces, dumps."""
        context = self._context
        with self._lock:
            names = {*self._boxes, *self._claims}
            past = self._past(write=not dry_run)
            if dry_run:
                left = [
                    *context.pool.leftovers(names, set(past.needed)),
                    *machines.leftovers(context.home, names),
                ]
                return GcReport(past.dropped, tuple(left), 0)
            used = context.pool.usage()[0]
            self._drop(past)
            gone = [f"snapshot {one}" for one in past.snapshots if one not in past.needed]
            # snapshots are dropped already; those that are there now may be of checkpoints just being made
            gone += [*context.pool.collect(names, None), *machines.collect(context.home, names)]
            for folder in context.home.boxes.iterdir():
                if folder.name not in names:
                    shutil.rmtree(folder, ignore_errors=True)
                    gone.append(f"folder of sandbox {folder.name}")
            freed = context.pages.collect(past.needed) + max(0, used - context.pool.usage()[0])
        return GcReport(past.dropped, tuple(gone), freed)

    def _tidy(self) -> None:
        if self._tidying.acquire(blocking=False):
            try:
                with contextlib.suppress(*FAULTS):
                    self.drop_forgettable()
            finally:
                self._tidying.release()

    def _tips(self) -> dict[str, str]:
        """The newest checkpoint of each sandbox (none yet: of one that is being made), and under impossible
        names what is being restored."""
        tips = dict.fromkeys(tuple(self._claims), "")
        tips |= {name: box.tip for name, box in tuple(self._boxes.items())}
        return tips | {f"in use: {one}": one for one in tuple(self._context.in_use)}

    def _past(self, *, write: bool = True) -> _Past:
        """What may be dropped now. ``write``: it will be, so it goes into the logs.

        Checkpoints go on being made meanwhile, so the order matters: what exists is listed first, then what
        is being made, then what has been; what is finished in between is in one of the last two.
        """
        context = self._context
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
            self._context.manifests.remove(one)
        if past.dropped:
            self._context.log("").did(dropped=past.dropped)
        for snapshot in past.snapshots:
            if snapshot not in past.needed:
                self._context.pool.drop_snapshot(snapshot)
        for image in past.images:
            if image not in past.needed:
                self._context.pages.drop(image)


@dataclass(frozen=True)
class _Past:
    """Checkpoints to drop; ids of parts that stay; snapshots and images that exist."""

    dropped: tuple[str, ...]
    needed: frozenset[str]
    snapshots: tuple[str, ...]
    images: tuple[str, ...]
