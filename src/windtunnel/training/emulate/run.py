"""The whole of an emulation: capture, slice, stitch, cost, memory, replay, and the summary of it all.

`fly` does it for one script on one cluster and returns an `Outcome`; `windtunnel.training.emulate.publish`
writes it down. A captured world can be replayed on other costs, which is what a sweep over networks does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from windtunnel.base.errors import UserError
from windtunnel.cluster.model import Cluster, Device
from windtunnel.training.emulate.graph import Collective, Group
from windtunnel.training.emulate.live.session import Script, Session
from windtunnel.training.emulate.policy.classes import Classes, slice_world
from windtunnel.training.emulate.policy.stitch import World, stitch
from windtunnel.training.emulate.twin.cost.collectives import collective_seconds
from windtunnel.training.emulate.twin.cost.host import host_table
from windtunnel.training.emulate.twin.cost.operators import operator_seconds
from windtunnel.training.emulate.twin.cost.profile import Profile, find_profile
from windtunnel.training.emulate.twin.emulate import Costs, Timing, replay_world
from windtunnel.training.emulate.twin.memory import (
    CONTEXT_RESERVE,
    AllocatorConfig,
    MemoryProfile,
    emulate_memory,
)
from windtunnel.training.emulate.twin.slow import parse_slow
from windtunnel.training.emulate.workload import Work, measure

Progress = Callable[[str, float], None]
"""Called with what is being done and the fraction of it that is done."""


def no_progress(what: str, fraction: float) -> None:
    """Tell nobody."""


@dataclass(frozen=True)
class Options:
    """How to emulate.

    ``ranks``: ``auto``, ``all`` or ``0,17``. ``slow``: as in ``host=3:1.3``. ``allocator``: as
    ``PYTORCH_CUDA_ALLOC_CONF``. ``tokens``: of a step of the whole job, where they cannot be counted.
    ``reserve_bytes``: device memory that no tensor can have. ``jobs``: ranks captured at once.
    """

    ranks: str = "auto"
    slow: tuple[str, ...] = ()
    jitter: float = 0.0
    seed: int = 0
    allocator: str = ""
    tokens: int | None = None
    reserve_bytes: float = CONTEXT_RESERVE
    jobs: int = 2
    timeout: float = 900.0
    profile: str | None = None


Capture = Callable[[Script, Cluster, Options, Progress], Classes]
"""Runs the script as the ranks that are needed, and sorts all ranks into classes."""


@dataclass(frozen=True)
class Outcome:
    """What an emulation found, before it is put into words."""

    script: Script
    cluster: Cluster
    options: Options
    profile: Profile | None
    classes: Classes
    world: World
    timing: Timing
    first_iteration_s: float
    memory: list[MemoryProfile]
    work: Work
    wall_time_s: float
    capture_time_s: float
    warnings: list[str] = field(default_factory=list)


def fly(
    script: Script,
    cluster: Cluster,
    options: Options,
    progress: Progress = no_progress,
    take: Capture | None = None,
) -> Outcome:
    """Emulate ``script`` on ``cluster``. ``take`` may give an earlier capture again instead of taking one.

    Raises:
        UserError: an option, the script's path or the cluster is wrong.
        ScriptError: the script failed, hung, or would deadlock (`Deadlock`).
    """
    began = time.monotonic()
    allocator = AllocatorConfig.parse(options.allocator)
    slow = [one for text in options.slow for one in parse_slow(text, cluster)]
    profile = find_profile(options.profile or cluster.host.device.name)
    if options.profile and profile is None:
        raise UserError(
            f"--profile: there is no profile {options.profile!r}; make it with: windtunnel calibrate"
        )
    classes = (take or capture)(script, cluster, options, progress)
    captured = time.monotonic() - began
    progress("stitch", 0.0)
    world = stitch(classes)
    progress("memory", 0.0)
    memory = [
        device_memory(classes, row, cluster.host.device, allocator, options)
        for row in range(len(classes.classes))
    ]
    progress("replay", 0.0)
    costs = costs_of(classes, cluster, profile)
    timing = replay_world(world, cluster, costs, slow=slow, jitter=options.jitter, seed=options.seed)
    work = measure(classes, options.tokens)
    notes = [note for cls in classes.classes for note in cls.slice.warnings]
    return Outcome(
        script=script,
        cluster=cluster,
        options=options,
        profile=profile,
        classes=classes,
        world=world,
        timing=timing,
        first_iteration_s=first_iteration(classes, cluster, costs),
        memory=memory,
        work=work,
        wall_time_s=time.monotonic() - began,
        capture_time_s=captured,
        warnings=list(dict.fromkeys([*classes.warnings, *timing.warnings, *notes])),
    )


def capture(script: Script, cluster: Cluster, options: Options, progress: Progress = no_progress) -> Classes:
    """Run the script as the ranks that are needed, and sort all ranks into classes."""

    def tell(done: int, of: int) -> None:
        progress(f"capture ({session.total + done} ranks)", done / of)

    progress("start PyTorch", 0.0)
    with Session(script, cluster, jobs=options.jobs, timeout=options.timeout, progress=tell) as session:
        return slice_world(session.capture, cluster.world_size, options.ranks)


def costs_of(classes: Classes, cluster: Cluster, profile: Profile | None) -> Costs:
    """What the operators, the host and the collectives of all classes cost on ``cluster``."""
    device = cluster.host.device
    operators, host_operators, host_events = [], [], []
    for cls in classes.classes:
        operators.append(operator_seconds(cls.slice, cluster, profile))
        rows, others = host_table(cls.slice.operators, device, profile)
        host_operators.append(rows)
        host_events.append(others)

    def seconds(call: Collective, group: Group) -> float:
        if call.kind in ("send", "recv"):
            sender, receiver = group.ranks
            issuer, peer = (sender, receiver) if call.kind == "send" else (receiver, sender)
            call = Collective(
                call.kind, call.group, call.in_bytes, call.out_bytes, call.dtype, peer, call.backend
            )
            return collective_seconds(call, group, cluster, profile, rank=issuer)
        return collective_seconds(call, group, cluster, profile)

    return Costs(operators, host_operators, host_events, seconds)


def device_memory(
    classes: Classes, row: int, device: Device, allocator: AllocatorConfig, options: Options
) -> MemoryProfile:
    """Device memory of one class of ranks; a CPU's memory has no caching allocator and no reserve."""
    capacity = device.memory_bytes - (options.reserve_bytes if device.kind == "gpu" else 0.0)
    return emulate_memory(classes.classes[row].slice, allocator, capacity)


def first_iteration(classes: Classes, cluster: Cluster, costs: Costs) -> float:
    """Seconds of everything up to the end of the first step, set-up on the device included, replayed as the
    steady step is. Reading data, compilation, and the set-up of communicators are not in it."""
    early = [replace(cls, slice=replace(cls.slice, steps=cls.slice.steps[:1])) for cls in classes.classes]
    world = stitch(replace(classes, classes=early))
    return replay_world(world, cluster, costs).iteration_time_s
