"""What the supervisor's log says of checkpoints: which steps are committed, and which are in storage.

Memory services post ``checkpoint/{step}/{term}`` for each rank whose copies are all complete, and
``persist/{step}/{term}`` for each whose shards are in storage; the term is the generation, and how often all
ranks went back to a checkpoint in it, since they may come to the same step again. When all ranks have posted,
the step is committed: that is in the log before anybody hears of it. A restore believes this record alone
(see `training.checkpoint.policy.restore`); nobody but the supervisor writes it.

``storage.wanted`` is the event of a step that is to go to storage, ``storage.failed`` of one that will not be
there. A run whose last wanted step is not durable has not reached what was asked for.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

COMMIT, STORED = "checkpoint/", "persist/"
RECORD = "record/checkpoints"
"""The key under which a rank asks for the record."""
STORING = "record/storage/"
"""With a step: that under which a rank asks what became of it there."""
WANTED, FAILED = "storage.wanted", "storage.failed"
DURABLE, PENDING = "durable", ""
KEPT_COMMITTED = 256
"""Of the newest steps alone there are copies in memory."""
KEPT_PERSISTED = 4096
KEPT_STORED = 64

K = TypeVar("K")
V = TypeVar("V")


@dataclass
class Checkpoints:
    """``committed``: steps with their courses (the generation that copies carry), the newest last;
    ``persisted``: by the same, the checksum of the manifest in storage. ``newest``: that
    was ever committed. ``storing``: steps whose shards are all in storage, and whose manifest may be written.
    ``due``: the last step that is to be in storage; ``failed``: why a step is not.
    """

    committed: OrderedDict[tuple[int, int], None] = field(default_factory=OrderedDict)
    persisted: OrderedDict[tuple[int, int], str] = field(default_factory=OrderedDict)
    newest: int = -1
    storing: OrderedDict[str, None] = field(default_factory=OrderedDict)
    due: int = -1
    failed: OrderedDict[int, str] = field(default_factory=OrderedDict)

    def sealed(self, key: str, values: Mapping[int, Any]) -> dict[str, Any] | None:
        """All ranks have posted ``key``: the fields of the event ``committed``, where it is one."""
        if key.startswith(STORED):
            keep(self.storing, key, None, KEPT_STORED)
        if not key.startswith(COMMIT):
            return None
        step, posts = key.split("/")[1], list(values.values())
        if not step.isdigit() or not all(isinstance(post, dict) for post in posts):
            return None
        courses = {post.get("course") for post in posts}
        course = next(iter(courses))
        if len(courses) != 1 or not isinstance(course, int):
            return None
        return {"step": int(step), "course": course}

    def written(self, key: str) -> bool:
        """Whether the step of ``key``, whose manifest is in storage now, may be believed to be: once."""
        return self.storing.pop(key, self) is None

    def apply(self, event: Mapping[str, Any]) -> None:
        """An event of the log: ``committed``, ``persisted``, `WANTED` or `FAILED`."""
        kind, step = event["kind"], int(event["step"])
        if kind == WANTED:
            self.due = step
            self.failed.pop(step, None)
            return
        if kind == FAILED:
            keep(self.failed, step, str(event.get("error", "")), KEPT_STORED)
            return
        at = step, int(event["course"])
        if kind == "committed":
            self.newest = max(self.newest, at[0])
            keep(self.committed, at, None, KEPT_COMMITTED)
        else:
            keep(self.persisted, at, str(event["check"]), KEPT_PERSISTED)

    def stored(self, step: int) -> str:
        """Of a step that was wanted in storage: `DURABLE`, `FAILED`, or `PENDING`."""
        if any(persisted == step for persisted, _ in self.persisted):
            return DURABLE
        return FAILED if step in self.failed else PENDING

    def missing(self) -> str:
        """What of storage was wanted and is not reached, in a sentence; "" where all is well."""
        if self.due < 0 or self.stored(self.due) == DURABLE:
            return ""
        why = self.failed.get(self.due, "it was not complete when the job ended")
        return f"step {self.due}, the last checkpoint that was due to storage, is not there: {why}"

    def plain(self) -> dict[str, Any]:
        """As values of JSON; fields as in `training.checkpoint.model.Log`."""
        return {
            "committed": [{"step": step, "course": course} for step, course in self.committed],
            "persisted": [
                {"step": step, "course": course, "check": check}
                for (step, course), check in self.persisted.items()
            ],
            "newest": self.newest,
            "due": self.due,
        }


def keep(where: OrderedDict[K, V], key: K, value: V, most: int) -> None:
    """Put it there as the newest of at most so many."""
    where[key] = value
    where.move_to_end(key)
    while len(where) > most:
        where.popitem(last=False)
