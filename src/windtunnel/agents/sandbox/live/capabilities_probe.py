"""On which rungs of the ladder a host of root's stands, and what it lacks, in words.

Snapshots or copies of files, process images or none, and three ways to look at a turn: whatever is missing,
a host opens with the next rung below, and says so once.
"""

from __future__ import annotations

from windtunnel.agents.sandbox.live.criu import Criu
from windtunnel.agents.sandbox.live.files import Pool, loop
from windtunnel.agents.sandbox.live.inspect import Inspector, open_inspector
from windtunnel.agents.sandbox.live.place import Home


def inspector_for(kind: str, pool: Pool) -> Inspector:
    """The strongest inspector that can look at roots of this pool, or the one of that kind."""
    found = open_inspector(kind)
    if kind == "auto" and found.kind == "fanotify" and pool.kind == "copy":
        # an overlay has no handles of files that fanotify could report
        found.close()
        return open_inspector("activity")
    return found


def lacking(
    home: Home, pool: Pool, criu: Criu | None, inspector: Inspector | None, *, asked: tuple[bool, bool, bool]
) -> list[str]:
    """What is weaker here than it could be, and why. ``asked``: whether the best pool, process images and
    the best inspector were asked for."""
    best_pool, images, best_inspector = asked
    words = []
    if best_pool and pool.kind == "copy":
        why = loop.usable(home.pool) or "the pool was made so"
        words.append(f"files are kept by copies instead of snapshots: {why}")
    if images and criu is None:
        words.append(
            "processes and their memory are not kept: CRIU is missing; 'windtunnel sandbox setup' installs it"
        )
    if best_inspector and inspector is not None and inspector.kind != "ebpf":
        words.append(f"turns are looked at by {inspector.kind}, which misses {'; '.join(inspector.misses)}")
    return words
