"""Scrub checkpoints: is what lies on the disk still what was kept, and what can be restored where it is not?

Everything is read past the page cache: manifests, every page of process images, and files (see
``Pool.verify``). A damaged page serves no restore from then on, and the next checkpoint that needs it stores
it anew.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from windtunnel.agents.sandbox.context import Context
from windtunnel.agents.sandbox.model import Damage, Manifest, VerifyReport
from windtunnel.store.objects import ObjectError


def verify(context: Context, ids: Iterable[str]) -> VerifyReport:
    """Look at these checkpoints, and at those before damaged ones until a whole one is found."""
    begin = time.monotonic()
    wanted = list(ids)
    # what is looked at is not dropped meanwhile, as what is being restored is not
    context.in_use.extend(wanted)
    try:
        known, unreadable = _manifests(context)
        chosen = [known[id] for id in wanted if id in known]
        right, scrubbed = context.pool.scrubbed()
        damage, read = _damage(context, chosen, files=not right)
        damaged = []
        for id in wanted:
            words = [unreadable[id]] if id in unreadable else damage.get(id, [])
            if words:
                manifest = known.get(id)
                box, turn = (manifest.box, manifest.turn) if manifest else ("", 0)
                instead = whole_before(context, manifest, known, damage, files=not right) if manifest else ""
                damaged.append(Damage(id, box, turn, tuple(words), instead))
    finally:
        for id in wanted:
            context.in_use.remove(id)
    seconds = time.monotonic() - begin
    looked_at = tuple(id for id in wanted if id in known or id in unreadable)
    return VerifyReport(looked_at, tuple(damaged), scrubbed + read, context.pool.vouched, seconds)


def whole_before(
    context: Context,
    damaged: Manifest,
    known: Mapping[str, Manifest],
    damage: dict[str, list[str]] | None = None,
    *,
    files: bool = False,
) -> str:
    """Id of the newest checkpoint before ``damaged`` that is whole; empty where there is none.

    ``damage``: damage that is known already; what is looked at is added. ``files``: read them, too; else they
    only have to be there.
    """
    damage = {} if damage is None else damage
    at = known.get(damaged.parent or "")
    while at is not None:
        if at.id not in damage:
            damage.update(_damage(context, [at], files=files)[0])
        if not damage[at.id]:
            return at.id
        at = known.get(at.parent or "")
    return ""


def _manifests(context: Context) -> tuple[dict[str, Manifest], dict[str, str]]:
    """All manifests as they are on the disk, and of those that cannot be read, why."""
    known, unreadable = {}, {}
    context.store.forget()
    for id in context.store.ids():
        try:
            known[id] = context.store.load(id)
        except ObjectError as error:
            if id in context.store.ids():  # else it was dropped just now
                unreadable[id] = str(error)
    return known, unreadable


def _damage(context: Context, manifests: list[Manifest], *, files: bool) -> tuple[dict[str, list[str]], int]:
    """What of each checkpoint is damaged, in words, and bytes read. ``files``: read them, too."""
    images = {manifest.image.id for manifest in manifests if manifest.image}
    snapshots = {manifest.files.id for manifest in manifests if manifest.files}
    pages = context.store.scrub(sorted(images))
    there, read = set(context.pool.snapshots()), 0
    trees: dict[str, list[str]] = {snapshot: [] for snapshot in snapshots if snapshot in there}
    if files and trees:
        trees, read = context.pool.verify(sorted(trees))
    damaged = {
        manifest.id: [
            *(pages.damage[manifest.image.id] if manifest.image else ()),
            *(trees.get(manifest.files.id, ["its snapshot of files is missing"]) if manifest.files else ()),
        ]
        for manifest in manifests
    }
    return damaged, pages.bytes + read
