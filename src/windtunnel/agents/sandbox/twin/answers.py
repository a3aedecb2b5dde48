"""All questions asked of one setting, and their answers together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from windtunnel.agents.sandbox.policy import Retention
from windtunnel.agents.sandbox.twin.fanout import Fanout, fanout
from windtunnel.agents.sandbox.twin.growth import Growth, growth
from windtunnel.agents.sandbox.twin.questions import (
    Break,
    Density,
    Setting,
    Spot,
    Urgent,
    breaking,
    class_shares,
    densities,
    powers,
    spot,
    urgent,
)
from windtunnel.agents.sandbox.twin.setup import ARMS, Arm

MOST = 512
"""Sandboxes on one host up to which a policy's break is searched."""
WORKERS = (1, 4)
"""Engines so narrow that jobs queue, beside one as wide as the host."""


@dataclass(frozen=True)
class Answers:
    """What was asked and found. ``assumed`` and ``origin`` say in words what the figures rest on."""

    setting: str
    assumed: str
    origin: str
    classes: dict[str, float]
    densities: tuple[Density, ...]
    breaks: tuple[Break, ...]
    spots: tuple[Spot, ...]
    fanouts: tuple[Fanout, ...]
    urgents: tuple[Urgent, ...]
    growths: tuple[Growth, ...]


def answer(
    setting: Setting,
    origin: str,
    *,
    policies: Sequence[Arm],
    numbers: Sequence[int],
    notices: Sequence[float],
    forks: int,
    retention: Retention | None = None,
    progress: Callable[[str], None] = lambda question: None,
) -> Answers:
    """Ask everything. Breaks, notices and queues are asked of one host: hosts share nothing there."""
    one = replace(setting, hosts=1)
    middle = numbers[len(numbers) // 2]
    progress("density")
    rows = densities(setting, policies, numbers)
    progress("break")
    breaks = [breaking(one, policy, MOST) for policy in policies if policy.name != "conversation"]
    progress("notice")
    spots = spot(one, [policy for policy in policies if not policy.fifo], (0.0, *notices), max(numbers))
    progress("forks")
    shape = setting.shape
    fans = [
        fanout(
            setting.machine,
            setting.costs,
            count,
            setting.hosts,
            memory=shape.memory,
            processes=shape.processes,
            lazy=lazy,
        )
        for lazy in (False, True)
        for count in powers(forks)
    ]
    progress("queue")
    lanes = sorted({*WORKERS, setting.machine.lanes})
    queues = urgent(one, sorted({middle, max(numbers)}), lanes)
    progress("store")
    grown = [
        row
        for policy in policies
        if policy.name in ("full", "semantic", "files")
        for row in growth(
            policy.name,
            one.world(ARMS[policy.name], middle).run().made,
            setting.costs,
            retention or Retention(),
        )
    ]
    machine = setting.machine
    played = (
        f"{len(setting.traces)} given traces"
        if setting.traces
        else f"generated sessions of {setting.turns} turns"
    )
    return Answers(
        setting=(
            f"{setting.hosts} hosts of {machine.cores} cores, {machine.memory / 1e9:g} GB, disk "
            f"{machine.disk / 1e9:g} GB/s, network {machine.network / 1e9:g} GB/s, {machine.lanes} workers; "
            f"{played}, seed {setting.seed}; store, queue and notices: one such host, "
            f"{middle} or {max(numbers)} sandboxes"
        ),
        assumed=shape.words,
        origin=origin,
        classes=class_shares(one, max(numbers)),
        densities=tuple(rows),
        breaks=tuple(breaks),
        spots=tuple(spots),
        fanouts=tuple(fans),
        urgents=tuple(queues),
        growths=tuple(grown),
    )
