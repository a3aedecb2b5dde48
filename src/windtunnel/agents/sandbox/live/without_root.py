"""What is other in an ordinary user's host than in root's: what watches, what guards, what is refused."""

from __future__ import annotations

import os
from collections.abc import Callable

from windtunnel.agents.sandbox.live.diff_inspector import Onlooker
from windtunnel.agents.sandbox.live.guard import CONTINUE, Guard
from windtunnel.agents.sandbox.live.machine import Cgroup, Group, rootless
from windtunnel.agents.sandbox.live.place import Home
from windtunnel.agents.sandbox.model import FileChange
from windtunnel.base.errors import UserError

NO_IMAGES = "they are not kept without root"


def admit(home: Home, pool_kind: str, inspector_kind: str) -> None:
    """Raises UserError where this user cannot have a host of sandboxes in ``home``, or not of these kinds."""
    rootless.demand()
    for what, kind, accepted in (
        ("pool", pool_kind, ("auto", "copy")),
        ("inspector", inspector_kind, ("auto",)),
    ):
        if kind not in accepted:
            raise UserError(
                f"sandbox: {what} kind {kind!r} is not accepted without root; use {' or '.join(accepted)}"
            )
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


def onlooker(home: Home, changed: Callable[[str], list[FileChange]]) -> Onlooker:
    """What judges turns. ``changed``: what differs from a sandbox's newest snapshot."""
    return Onlooker(lambda box: Group(home, box).pids(), changed)


def guard(home: Home) -> Guard:
    """What lets sandboxes go on when the host dies while they stand still, for this user."""
    if rootless.rootless():
        return Guard(home.boxes, CONTINUE)
    return Guard(Cgroup(home.tag, "any").path.parent)
