"""What the supervisor's log says of checkpoints: which steps are committed, and which are in storage.

Memory services post ``checkpoint/{step}/{term}`` for each rank whose copies are all complete, and
``persist/{step}/{term}`` for each whose shards are in storage; the term is the generation, and how often all
ranks went back to a checkpoint in it, since they may come to the same step again. When all ranks have posted,
the step is committed: that is in the log before anybody hears of it. A restore believes this record alone
(see `training.checkpoint.policy.restore`); nobody but the supervisor writes it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

COMMIT, STORED = "checkpoint/", "persist/"
RECORD = "record/checkpoints"
"""The key under which a rank asks for the record."""
KEPT_COMMITTED = 256
"""Of the newest steps alone there are copies in memory."""
KEPT_PERSISTED = 4096
KEPT_STORED = 64

K = TypeVar("K")
V = TypeVar("V")


@dataclass
class Checkpoints:
    """``committed``: by step and course (the generation that its copies carry), whether what all ranks should
    hold alike was so; ``persisted``: by the same, the checksum of the manifest in storage. ``newest``: that
    was ever committed. ``storing``: steps whose shards are all in storage, and whose manifest may be written.
    """

    committed: OrderedDict[tuple[int, int], bool] = field(default_factory=OrderedDict)
    persisted: OrderedDict[tuple[int, int], str] = field(default_factory=OrderedDict)
    newest: int = -1
    storing: OrderedDict[str, None] = field(default_factory=OrderedDict)

    def sealed(self, key: str, values: Mapping[int, Any]) -> dict[str, Any] | None:
        """All ranks have posted ``key``: the fields of the event ``committed``, where it is one."""
        if key.startswith(STORED):
            _keep(self.storing, key, None, KEPT_STORED)
        if not key.startswith(COMMIT):
            return None
        step, posts = key.split("/")[1], list(values.values())
        if not step.isdigit() or not all(isinstance(post, dict) for post in posts):
            return None
        courses, alike = ({post.get(name) for post in posts} for name in ("course", "alike"))
        course = next(iter(courses))
        if len(courses) != 1 or not isinstance(course, int):
            return None
        return {"step": int(step), "course": course, "alike": len(alike) == 1 and bool(alike - {"", None})}

    def written(self, key: str) -> bool:
        """Whether the step of ``key``, whose manifest is in storage now, may be believed to be: once."""
        return self.storing.pop(key, self) is None

    def apply(self, event: Mapping[str, Any]) -> None:
        """An event of the log: ``committed`` or ``persisted``."""
        at = int(event["step"]), int(event["course"])
        if event["kind"] == "committed":
            self.newest = max(self.newest, at[0])
            alike = bool(event["alike"]) or self.committed.get(at, False)  # it is saved again as it was
            _keep(self.committed, at, alike, KEPT_COMMITTED)
        else:
            _keep(self.persisted, at, str(event["check"]), KEPT_PERSISTED)

    def plain(self) -> dict[str, Any]:
        """As values of JSON; fields as in `training.checkpoint.model.Log`."""
        return {
            "committed": [
                {"step": step, "course": course, "alike": alike}
                for (step, course), alike in self.committed.items()
            ],
            "persisted": [
                {"step": step, "course": course, "check": check}
                for (step, course), check in self.persisted.items()
            ],
            "newest": self.newest,
        }


def _keep(where: OrderedDict[K, V], key: K, value: V, most: int) -> None:
    where[key] = value
    where.move_to_end(key)
    while len(where) > most:
        where.popitem(last=False)
