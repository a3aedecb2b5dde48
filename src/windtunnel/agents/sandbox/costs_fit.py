"""From measured seconds and bytes of sandboxes to costs: straight lines with no negative coefficient."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from windtunnel.agents.sandbox.costs import SandboxCosts
from windtunnel.agents.sandbox.model import TurnClass
from windtunnel.agents.sandbox.twin.answers import together
from windtunnel.calibration.fit import least_squares, quartile

TOGETHER = 6
"""So many full checkpoints at once show how many disk parts go on beside each other."""


@dataclass
class Seen:
    """Measured seconds and bytes of one sandbox; lists have one entry for each repetition."""

    memory: float = 0.0
    processes: int = 0
    raw: list[float] = field(default_factory=list)
    new_first: float = 0.0
    new_next: list[float] = field(default_factory=list)
    freeze: list[float] = field(default_factory=list)
    after_first: float = 0.0
    after: list[float] = field(default_factory=list)
    restore: list[float] = field(default_factory=list)
    lazy_fork: list[float] = field(default_factory=list)


@dataclass
class Basics:
    """Measured seconds of what does not depend on the sandbox's size, and shares of CPU."""

    decide: list[float] = field(default_factory=list)
    shell: list[float] = field(default_factory=list)
    files_freeze: list[float] = field(default_factory=list)
    files_after: list[float] = field(default_factory=list)
    files_new: list[float] = field(default_factory=list)
    create: list[float] = field(default_factory=list)
    fork: list[float] = field(default_factory=list)
    restore: list[float] = field(default_factory=list)
    at_once: list[float] = field(default_factory=list)
    cpu: dict[str, list[float]] = field(default_factory=dict)


def fitted(basics: Basics, seen: Sequence[Seen]) -> tuple[SandboxCosts, str]:
    """Costs from what was measured, and in words how far the lines are from the points."""
    memory = np.array([one.memory for one in seen])
    processes = np.array([float(one.processes) for one in seen])
    ones = np.ones_like(memory)
    raw = least_squares([ones, processes], np.array([quartile(one.raw) for one in seen]) - memory)
    freeze_seen = np.array([quartile(one.freeze) for one in seen])
    freeze = least_squares([ones, memory, processes], freeze_seen)
    after_seen = np.array([quartile(one.after) for one in seen])
    after = least_squares([ones, memory], after_seen)
    further = np.array([max(0.0, one.after_first - quartile(one.after)) for one in seen])
    restore_seen = np.array([quartile(one.restore) for one in seen])
    restore = least_squares([ones, memory, processes], restore_seen)
    fork = max(0.0, quartile(basics.fork) - quartile(basics.restore))
    lazy_seen = np.array([quartile(one.lazy_fork) for one in seen])
    lazy = least_squares([ones, memory], lazy_seen - fork - restore[2] * processes)
    costs = SandboxCosts(
        decide=quartile(basics.decide),
        shell=quartile(basics.shell),
        shell_cpu=_share(basics, "shell"),
        files_freeze=quartile(basics.files_freeze),
        files_after=quartile(basics.files_after),
        files_cpu=_share(basics, "files"),
        full_freeze=freeze[0],
        full_freeze_per_byte=freeze[1],
        full_freeze_per_process=freeze[2],
        full_after=after[0],
        full_after_per_byte=after[1],
        full_after_per_new_byte=least_squares([memory], further)[0],
        full_cpu=_share(basics, "full"),
        restore=restore[0],
        restore_per_byte=restore[1],
        restore_per_process=restore[2],
        restore_cpu=_share(basics, "restore"),
        lazy=lazy[0],
        lazy_per_byte=lazy[1],
        fork=fork,
        create=quartile(basics.create),
        image_base=raw[0],
        image_per_process=raw[1],
        new_base=quartile([value for one in seen for value in one.new_next]),
        new_per_byte=least_squares([memory], np.array([one.new_first for one in seen]))[0],
        files_new=quartile(basics.files_new),
        disk_lanes=1.0,
    )
    costs = replace(costs, disk_lanes=_lanes(costs, quartile(basics.at_once)))
    modelled = {
        "freeze": (freeze_seen, freeze[0] * ones + freeze[1] * memory + freeze[2] * processes),
        "after": (after_seen, after[0] * ones + after[1] * memory),
        "restore": (restore_seen, restore[0] * ones + restore[1] * memory + restore[2] * processes),
    }
    words = [
        f"{name} {float(np.median(np.abs(model / np.maximum(measured, 1e-9) - 1))):.0%}"
        for name, (measured, model) in modelled.items()
    ]
    return costs, "median error of the fits: " + ", ".join(words)


def _lanes(costs: SandboxCosts, seconds: float) -> float:
    """With how many lanes the twin says of the checkpoints that ran at once what was measured."""
    work = costs.checkpoint(TurnClass.FULL, processes=1)
    cores = os.cpu_count() or 1
    tried = [1 + step / 2 for step in range(2 * TOGETHER - 1)]
    # of those that fit alike the fewest: more was not shown
    return min(
        tried,
        key=lambda lanes: (
            round(abs(together(replace(costs, disk_lanes=lanes), work, TOGETHER, cores) - seconds), 4),
            lanes,
        ),
    )


def _share(basics: Basics, name: str) -> float:
    """Waiting for a busy CPU looks like waiting for a disk, so the upper quartile is nearest to the truth."""
    ordered = sorted(basics.cpu[name])
    return min(1.0, ordered[3 * len(ordered) // 4])
