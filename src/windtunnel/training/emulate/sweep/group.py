"""Emulates the points of one group: those that look the same to the script, so that one capture does for all.

What a script sees of a cluster is the kind and number of devices in a host and the size of the world. Points
that differ only in what lies between the hosts, or in prices, have the same execution graph; it is captured
for the first of them, and for the others only costed and replayed again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from windtunnel.base.errors import ScriptError, UserError
from windtunnel.cluster.model import Cluster
from windtunnel.store.eventlog import EventLog
from windtunnel.training.emulate.emulation import Options, Progress, capture, no_progress
from windtunnel.training.emulate.live.session import Program
from windtunnel.training.emulate.policy.classes import Classes
from windtunnel.training.emulate.run import emulate
from windtunnel.training.emulate.summary import Summary
from windtunnel.training.emulate.sweep.folder import Row
from windtunnel.training.emulate.sweep.plan import Point


def groups(points: Iterable[Point]) -> list[list[Point]]:
    """The points that share a capture, in the order of their first."""
    found: dict[Any, list[Point]] = {}
    for point in points:
        found.setdefault(point.seen_by_script, []).append(point)
    return list(found.values())


def emulate_group(
    points: list[Point], capture_jobs: int, pictures: bool, progress: Progress = no_progress
) -> Iterator[Row]:
    """Emulate points that share a capture, each a run in the store; yields the outcome of each as it ends.

    A script that fails is an outcome too, with the sentence that says why.
    """
    once = _Once()
    for point in points:
        options = replace(point.options, jobs=capture_jobs)
        try:
            done = emulate(
                point.script, (), point.cluster, options, pictures=pictures, progress=progress, take=once
            )
        except (UserError, ScriptError) as error:
            yield _head(point) | {"status": "failed", "error": _sentence(error)}
        else:
            yield _head(point) | {"status": "done"} | _figures(done.summary)


class _Once:
    """Captures at the first call, and gives the same classes, or the same failure, at every later one."""

    def __init__(self) -> None:
        self.classes: Classes | None = None
        self.failure: ScriptError | None = None

    def __call__(
        self,
        program: Program,
        cluster: Cluster,
        options: Options,
        progress: Progress,
        log: EventLog | None = None,
    ) -> Classes:
        if self.failure is not None:
            raise self.failure
        if self.classes is None:
            try:
                self.classes = capture(program, cluster, options, progress, log)
            except ScriptError as error:
                self.failure = error
                raise
        return self.classes


def _head(point: Point) -> Row:
    return {
        "point": point.index, "cluster": point.cluster.name, "chosen": point.chosen,
        "args": list(point.script.arguments), "world_size": point.cluster.world_size,
    }  # fmt: skip


def _sentence(error: UserError | ScriptError) -> str:
    """What went wrong; of a failed script also the last line that it wrote, which mostly says why."""
    last = getattr(error, "details", "").strip().rpartition("\n")[2].strip()
    return str(error) if last in str(error) else f"{error}: {last}"


def _figures(summary: Summary) -> Row:
    """The figures of a summary that points are compared by; of the ranks, the worst.

    ``cost_per_iteration`` is in the currency of the price; without one it is in device hours.
    """
    ranks = summary.ranks
    seconds, tokens = summary.iteration_time_s, summary.tokens_per_iteration
    priced = summary.cost_per_iteration
    cost = summary.world_size * seconds / 3600 if priced is None else priced
    return {
        "run_id": summary.run_id,
        "directory": summary.directory,
        "iteration_time_s": seconds,
        "tokens_per_iteration": tokens,
        "tokens_per_second_per_device": summary.tokens_per_second_per_device,
        "mfu": summary.mfu,
        "peak_reserved_bytes": max(rank.peak_reserved_bytes for rank in ranks),
        "memory_bytes": max(rank.memory_bytes for rank in ranks),
        "headroom_bytes": min(rank.headroom_bytes for rank in ranks),
        "fits": all(rank.fits for rank in ranks),
        "cost_per_iteration": cost,
        "cost_per_million_tokens": cost / tokens * 1e6 if tokens else None,
        "cost_unit": "device-hours" if priced is None else "price",
        "wall_time_s": summary.wall_time_s,
    }
