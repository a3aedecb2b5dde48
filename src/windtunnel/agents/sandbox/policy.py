"""What to keep after a turn, what to run first, and what may be forgotten: plain data in, plain data out.

``decide`` reads the effects of a turn. The rule for processes: a process image is out of date when processes
started or ended, when a process wrote its memory *and* received input or wrote something out since the image
was taken, or when one computed silently for longer than a threshold. Input alone is no evidence of change,
and dirty pages alone are not either: an idle event loop dirties pages at every tick, and a copy of the older
memory continues just as well.

``promote`` is the rule of the mixed restore: newer files under an older process image are sound only as long
as nothing that the image refers to was deleted, replaced or renamed.

Source: Crab (arXiv 2604.28138), sections 4 and 5: net changes, mapped-file invalidation, queues, retention.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from windtunnel.agents.sandbox.model import (
    Decision,
    Effects,
    FileChange,
    Manifest,
    ProcessEffect,
    References,
    TurnClass,
)


@dataclass(frozen=True)
class Rules:
    """The knobs of ``decide``. ``silent_cpu``: seconds of computation, without input or output, that are
    worth an image. ``strict_dirty``: any dirty page makes the turn full. ``ignored``: path prefixes inside
    that never count (the sandbox's own channel, and caches that a user names)."""

    silent_cpu: float = 2.0
    strict_dirty: bool = False
    ignored: tuple[str, ...] = ("/.windtunnel/", "/proc/", "/dev/", "/sys/")


DEFAULT = Rules()


def decide(effects: Effects, references: References, rules: Rules = DEFAULT) -> Decision:
    """The weakest class that loses nothing of the turn, with its reasons.

    ``references`` are those of the newest process image, onto which a weaker checkpoint would be restored.
    """
    full = [f"in doubt: {doubt}" for doubt in effects.doubts if not doubt.startswith("files:")]
    for process in effects.processes:
        reason = process_changed(process, rules)
        if reason:
            full.append(reason)
    files = [change for change in effects.files if not change.path.startswith(rules.ignored)]
    full.extend(promote(files, references))
    doubted = [f"in doubt: {doubt}" for doubt in effects.doubts if doubt.startswith("files:")]
    unseen = effects.files_total > len(effects.files)
    if unseen and references.paths and not full:
        # some changed paths are not listed, so none can be held against what the image refers to
        full.append(f"{effects.files_total} changed paths, more than could be held against open files")
    told = [f"{change.change} {change.path}" for change in files[:5]]
    if len(files) > 5 or unseen:
        told.append(f"{max(effects.files_total, len(files))} paths in all")
    if full:
        return Decision(TurnClass.FULL, (*full, *told))
    if files or doubted or unseen:
        return Decision(TurnClass.FILES, (*doubted, *told))
    if effects.shells:
        return Decision(TurnClass.SHELL, tuple(f"state of shell {name}" for name in effects.shells))
    return Decision(TurnClass.NONE)


def process_changed(process: ProcessEffect, rules: Rules = DEFAULT) -> str:
    """Why this process needs a newer image; empty when it needs none."""
    who = f"{process.command} ({process.pid})"
    if process.started:
        return f"{who} started"
    if process.ended:
        return f"{who} ended"
    if process.descriptors_changed:
        return f"{who} opened or closed descriptors"
    if process.shell:
        return ""
    unknown_memory = process.dirty_pages is None
    dirty = unknown_memory or bool(process.dirty_pages) or process.new_mappings > 0
    if not dirty:
        return ""
    if rules.strict_dirty:
        return f"{who} wrote memory"
    if process.inputs is None or process.writes is None:
        return f"{who} may have run, and what it received is not known"
    if process.inputs or process.writes:
        did = "received input" if process.inputs else "wrote"
        return f"{who} wrote memory and {did}"
    if process.cpu > rules.silent_cpu:
        return f"{who} computed for {process.cpu:.1f} s"
    return ""


def promote(files: Iterable[FileChange], references: References) -> list[str]:
    """Reasons why newer files do not fit the older image: something that it refers to is gone or another
    file.

    A file that only grew or changed in place is no reason: the image holds its path, not its bytes; unless it
    is mapped, or open for more than appending, where the restore insists on its size.
    """
    found = []
    for change in files:
        if change.change in ("deleted", "renamed", "created") and change.path in references.paths:
            found.append(f"{change.path}, which a process refers to, was {change.change}")
        elif change.change == "modified" and change.path in references.mapped:
            found.append(f"{change.path}, which a process has mapped or open, was modified")
        elif change.change in ("deleted", "renamed") and any(
            path.startswith(change.path + "/") for path in references.paths
        ):
            found.append(f"{change.path}, in which a process has files, was {change.change}")
    return found


@dataclass
class Queues:
    """Which job a free worker takes: urgent ones first, but after ``most_urgent`` in a row one normal one.

    A job is urgent when somebody already waits for it (the model's reply has arrived). Within a queue the
    order is that of arrival. Jobs are named by strings.
    """

    most_urgent: int = 4
    fifo: bool = False
    """One queue in the order of arrival: what the urgent queue is compared with."""

    def __post_init__(self) -> None:
        self._normal: deque[str] = deque()
        self._urgent: deque[str] = deque()
        self._in_a_row = 0

    def __len__(self) -> int:
        return len(self._normal) + len(self._urgent)

    def add(self, job: str, *, urgent: bool = False) -> None:
        (self._urgent if urgent and not self.fifo else self._normal).append(job)

    def promote(self, job: str) -> bool:
        """Make a waiting job urgent; False when it does not wait here (any more)."""
        if self.fifo or job not in self._normal:
            return False
        self._normal.remove(job)
        self._urgent.append(job)
        return True

    def remove(self, job: str) -> bool:
        """Forget a waiting job; False when it does not wait here."""
        for queue in (self._normal, self._urgent):
            if job in queue:
                queue.remove(job)
                return True
        return False

    def take(self) -> str | None:
        """The job to run next, or None."""
        turn_of_normal = self._in_a_row >= self.most_urgent and self._normal
        if self._urgent and not turn_of_normal:
            self._in_a_row += 1
            return self._urgent.popleft()
        self._in_a_row = 0
        return self._normal.popleft() if self._normal else None


@dataclass(frozen=True)
class Retention:
    """How much of the past is kept: the newest ``keep`` checkpoints of each sandbox, and every one that is
    pinned, labelled, the tip of a sandbox, or the base of a fork that lives."""

    keep: int = 20


def forgettable(
    manifests: Iterable[Manifest], tips: Mapping[str, str], retention: Retention
) -> tuple[list[str], frozenset[str]]:
    """Checkpoints to drop, oldest first, and the ids of snapshots and images that those that stay need.

    ``tips``: for every sandbox that exists, its newest checkpoint. A checkpoint that stays keeps the snapshot
    and the image that it names, even when the checkpoint that made them is dropped.
    """
    by_box: dict[str, list[Manifest]] = {}
    for manifest in manifests:
        by_box.setdefault(manifest.box, []).append(manifest)
    kept: list[Manifest] = []
    dropped: list[Manifest] = []
    live = set(tips.values())
    for box, own in by_box.items():
        # by time, not by turn: after a rollback the new branch counts from an earlier turn
        own.sort(key=lambda manifest: (manifest.created, manifest.id), reverse=True)
        for place, manifest in enumerate(own):
            recent = box in tips and place < retention.keep
            if recent or manifest.pinned or manifest.label or manifest.id in live:
                kept.append(manifest)
            else:
                dropped.append(manifest)
    needed = frozenset(
        part.id for manifest in kept for part in (manifest.files, manifest.image) if part is not None
    )
    dropped.sort(key=lambda manifest: (manifest.created, manifest.id))
    return [manifest.id for manifest in dropped], needed


def save_order(
    costs: Mapping[str, tuple[float, float]], seconds: float, workers: int
) -> list[tuple[str, TurnClass]]:
    """What to save of each sandbox, and in which order, when the host goes away in ``seconds``.

    ``costs``: seconds that a files-only and a full checkpoint of each sandbox take. Every sandbox is planned
    as files first; then, cheapest first, those are made full whose extra time still fits. Those that are
    saved whole come after the others, so that a wrong estimate costs memory images and no files.
    """
    order = sorted(costs, key=lambda box: (costs[box][1] - costs[box][0], box))
    plan = dict.fromkeys(order, TurnClass.FILES)
    for box in order:
        plan[box] = TurnClass.FULL
        if _span([(costs[one], plan[one]) for one in _save_sorted(plan, costs)], workers) > seconds:
            plan[box] = TurnClass.FILES
            break
    return [(box, plan[box]) for box in _save_sorted(plan, costs)]


def _save_sorted(plan: Mapping[str, TurnClass], costs: Mapping[str, tuple[float, float]]) -> list[str]:
    return sorted(plan, key=lambda box: (plan[box], costs[box][1], box))


def _span(jobs: Iterable[tuple[tuple[float, float], TurnClass]], workers: int) -> float:
    """Seconds until the last of the jobs ends, each given to the worker that is free first."""
    free = [0.0] * workers
    for (files, full), turn_class in jobs:
        free[free.index(min(free))] += full if turn_class is TurnClass.FULL else files
    return max(free)
