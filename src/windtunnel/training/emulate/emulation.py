"""The whole of an emulation: capture, slice, stitch, cost, memory, replay, and how much work a step is.

`simulate` does it for one program on one cluster and returns an `EmulationResult`, all graphs and arrays;
`windtunnel.training.emulate.summarise` puts it into figures, `windtunnel.training.emulate.run` keeps them. A
captured world can be replayed on other costs, which is what a sweep over networks does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from windtunnel.base.errors import UserError
from windtunnel.cluster.model import Cluster, Device
from windtunnel.store.eventlog import EventLog
from windtunnel.training.emulate.graph import (
    Alternative,
    Collective,
    Group,
    Note,
    NoteKind,
    Operator,
    Slice,
)
from windtunnel.training.emulate.live import native_library
from windtunnel.training.emulate.live.conditions import conditions
from windtunnel.training.emulate.live.session import Session
from windtunnel.training.emulate.options import Options
from windtunnel.training.emulate.policy import Decision, Observation, decide
from windtunnel.training.emulate.policy.classes import Classes, slice_world
from windtunnel.training.emulate.policy.search import name_of
from windtunnel.training.emulate.policy.stitch import StitchedWorld, stitch
from windtunnel.training.emulate.program import Program
from windtunnel.training.emulate.twin.costs.collectives import call_cost, full_bytes
from windtunnel.training.emulate.twin.costs.profile import (
    DeviceProfile,
    find_profile,
    host_table,
    operator_seconds,
)
from windtunnel.training.emulate.twin.costs.roofline import GPU, host_copy_bytes
from windtunnel.training.emulate.twin.costs.work import (
    kind_of,
)
from windtunnel.training.emulate.twin.emulate import Timing, WorldCosts, replay_world
from windtunnel.training.emulate.twin.job import Slow, parse_slow
from windtunnel.training.emulate.twin.memory.config import AllocatorConfig
from windtunnel.training.emulate.twin.memory.profile import MemoryProfile, emulate_memory
from windtunnel.training.emulate.utilisation import StepWork, measure

if TYPE_CHECKING:
    from windtunnel.trust.gpu.schemes import ProtectionScheme

Progress = Callable[[str, float], None]
"""Called with what is being done and the fraction of it that is done."""


def no_progress(what: str, fraction: float) -> None:
    """Tell nobody."""


CAPABILITY = "training.emulate"

Capturing = Callable[[Program, Cluster, Options, Progress, EventLog | None], Classes]
"""Runs the program as the ranks that are needed, and sorts all ranks into classes."""


@dataclass(frozen=True)
class EmulationResult:
    """What an emulation found, before it is put into words."""

    program: Program
    cluster: Cluster
    options: Options
    profile: DeviceProfile | None
    classes: Classes
    world: StitchedWorld
    timing: Timing
    first_iteration_s: float
    memory: list[MemoryProfile]
    work: StepWork
    wall_time_s: float
    capture_time_s: float
    notes: list[Note] = field(default_factory=list)
    alternatives: Sequence[Alternative] = ()
    scheme: ProtectionScheme | None = None


def simulate(
    program: Program, cluster: Cluster, options: Options, progress: Progress = no_progress,
    log: EventLog | None = None, take: Capturing | None = None, alternatives: Sequence[Alternative] = (),
) -> EmulationResult:  # fmt: skip
    """Emulate ``program`` on ``cluster``.

    ``log``: gets the decisions which ranks to capture. ``take`` may give an earlier capture again instead of
    taking one. ``alternatives``: other ways than NCCL's, of which each call takes the cheapest.

    Raises:
        UserError: an option, the script's path or the cluster is wrong, or the cluster has a fabric that none
            of the ``alternatives`` is.
        ScriptError: the script failed, hung, or would deadlock (`Deadlock`).
    """
    began = time.monotonic()
    for fabric in set(cluster.fabrics) - {alternative.name for alternative in alternatives}:
        raise UserError(f"{cluster.name}: {fabric} is not priced here, accepted with `emulate` and `sweep`")
    allocator = AllocatorConfig.parse(options.alloc_conf)
    slow = [slow for text in options.slow for slow in parse_slow(text, cluster)]
    profile = find_profile(options.profile or cluster.host.device.name)
    if options.profile and profile is None:
        raise UserError(
            f"`profile`: there is no profile {options.profile!r}; make it with: windtunnel calibrate"
        )
    scheme = None
    if options.confidential != "none":
        from windtunnel.trust.gpu.schemes import scheme_of

        scheme = scheme_of(options.confidential, cluster.host.device.kind, bool(alternatives))
        cluster = replace(cluster, host=replace(cluster.host, nvls=False))
    classes = (take or capture)(program, cluster, options, progress, log)
    captured = time.monotonic() - began
    progress("stitch", 0.0)
    world = stitch(classes)
    progress("memory", 0.0)
    memory = [
        device_memory(classes, row, cluster.host.device, allocator, options)
        for row in range(len(classes.classes))
    ]
    progress("replay", 0.0)
    costs = costs_of(classes, cluster, profile, alternatives, scheme)
    timing = replay_world(world, cluster, costs, slow=slow, jitter=options.jitter, seed=options.seed)
    notes = [note for cls in classes.classes for note in cls.slice.notes]
    notes += [used_by(alternative, timing, cluster) for alternative in alternatives]
    if returns := max(memory_profile.returns for memory_profile in memory):
        notes.append(Note(RETURNS.format(returns, "" if returns == 1 else "s")))
    if allocator.garbage_collection_threshold and not allocator.collects:
        notes.append(Note(UNHEEDED))
    return EmulationResult(
        program=program, cluster=cluster, options=options, profile=profile, classes=classes, world=world,
        timing=timing, first_iteration_s=first_iteration(classes, cluster, costs, slow), memory=memory,
        work=measure(classes, options.tokens),
        wall_time_s=time.monotonic() - began, capture_time_s=captured,
        notes=list(dict.fromkeys([*classes.notes, *timing.notes, *notes])), alternatives=alternatives,
        scheme=scheme,
    )  # fmt: skip


RETURNS = (
    "the allocator runs short and gives its cache back to the device {} time{} a step: what that takes,"
    " the wait for the device included, is not in the iteration"
)
UNHEEDED = (
    "garbage_collection_threshold does nothing, as in PyTorch, which collects only where"
    " per_process_memory_fraction is set below 1"
)


def used_by(alternative: Alternative, timing: Timing, cluster: Cluster) -> Note:
    """Which kinds of calls an alternative is there for, and how many of them it carries, by what they cost
    alone."""
    eligible, carried, count = [], 0, 0
    for use in timing.collectives:
        if use.call.backend == "nccl" and alternative.seconds(use.call, use.group) is not None:
            eligible.append(f"{use.call.kind} over {use.group.label}")
            count += use.count
            without = call_cost(use.call, use.group, cluster)
            if call_cost(use.call, use.group, cluster, alternatives=[alternative]).seconds < without.seconds:
                carried += use.count
    text = "of no use"
    if eligible:
        text = f"for {', '.join(dict.fromkeys(eligible))}, where it is the cheapest ({carried} of {count})"
    return Note(f"{alternative.name} is {text}: it takes {alternative.takes}", NoteKind.APPROXIMATION)


def capture(
    program: Program, cluster: Cluster, options: Options, progress: Progress = no_progress,
    log: EventLog | None = None,
) -> Classes:  # fmt: skip
    """Run the program as the ranks that are needed, and sort all ranks into classes."""

    def tell(done: int, of: int) -> None:
        progress(f"run ({len(session.captured) + len(session.checked) + done} ranks)", done / of)

    def choose(observation: Observation) -> Decision:
        each = statistics.fmean(session.seconds) if session.seconds else None
        read, sources = (
            conditions(session.rank_answers, session.files, cluster.world_size, cluster.devices_per_host)
            if options.ranks == "auto" and observation.captured
            else ((), ())
        )
        observation = replace(
            observation, jobs=options.jobs, seconds_each=each, devices_per_host=cluster.devices_per_host,
            conditions=read, sources=sources,
        )  # fmt: skip
        decision = decide(observation)
        if log is not None:
            log.decision(CAPABILITY, name_of(options.ranks), observation, decision)
        return decision

    ready = native_library.is_at_hand()
    progress("start PyTorch" if ready else f"build for torch {native_library.torch_version()}, once", 0.0)
    with Session(
        program, cluster, jobs=options.jobs, timeout=options.timeout, progress=tell,
        steps=options.steps,
    ) as session:  # fmt: skip

        def was_run(slices: Sequence[Slice | None]) -> None:
            if log is not None:
                log.append("run", ranks=sorted(slice_.rank for slice_ in slices if slice_ is not None))

        def take(ranks: Sequence[int]) -> list[Slice]:
            slices = session.capture(ranks)
            was_run(slices)
            if any(len(slice_.flow) for slice_ in slices):
                from windtunnel.training.emulate.twin.compiler import compiled  # only torch.compile needs it

                slices = [compiled(slice_) for slice_ in slices]
            return slices

        def check(ranks: Sequence[int]) -> list[Slice | None]:
            slices = session.check(ranks)
            was_run(slices)
            return slices

        classes = slice_world(take, cluster.world_size, options.ranks, choose=choose, check=check)
        refused = [
            Note(f"rank {rank} could not be checked and is assumed to do what its class does: {why}")
            for rank, why in sorted(session.refused.items())
        ]
        messages = session.messages() if options.live else {}
        return replace(classes, notes=[*classes.notes, *refused], messages=messages)


def costs_of(
    classes: Classes, cluster: Cluster, profile: DeviceProfile | None,
    alternatives: Sequence[Alternative] = (), scheme: ProtectionScheme | None = None,
) -> WorldCosts:  # fmt: skip
    """What the operators, the host and the collectives of all classes cost on ``cluster``, with what
    ``scheme`` adds."""
    device = cluster.host.device
    operators, host_operators, host_events = [], [], []
    for cls in classes.classes:
        operators.append(operator_seconds(cls.slice, cluster, profile))
        if scheme is not None:
            operators[-1] = operators[-1] + [added_to_copy(op, scheme) for op in cls.slice.operators]
        rows, others = host_table(cls.slice.operators, device, profile)
        host_operators.append(rows)
        host_events.append(others)

    def seconds(call: Collective, group: Group) -> float:
        ranks = len(group.ranks)
        added = scheme.collective(call.kind, full_bytes(call, ranks), ranks) if scheme else 0.0
        return added + call_cost(call, group, cluster, profile, alternatives).seconds

    beside = GPU.beside_collectives if device.kind == "gpu" else 0.0
    return WorldCosts(operators, host_operators, host_events, seconds, beside)


@dataclass(frozen=True)
class EmulationChanges:
    """What is otherwise than in the emulation. ``cluster``: another one of as many ranks. ``instant``:
    collectives and messages take no time. ``compute``: so many times as fast are operators. ``ratio``: by
    which the bytes of sums (all_reduce, reduce_scatter) that leave a host are divided, as compressed
    gradients are; ``passes``: over the device's memory for that, each of all bytes that are summed."""

    cluster: Cluster
    instant: bool = False
    compute: float = 1.0
    ratio: float = 1.0
    passes: float = 0.0


SUMS = ("all_reduce", "reduce_scatter")


def recosted(result: EmulationResult, changes: EmulationChanges) -> WorldCosts:
    """What everything costs after ``changes``."""
    cluster, host = changes.cluster, changes.cluster.host
    plain = costs_of(result.classes, cluster, result.profile, result.alternatives, result.scheme)
    packed = plain
    if changes.ratio != 1.0:
        nic = replace(host.nic, bandwidth=host.nic.bandwidth * changes.ratio)
        faster = replace(cluster, host=replace(host, nic=nic))
        packed = costs_of(result.classes, faster, result.profile, result.alternatives, result.scheme)

    def collective(call: Collective, group: Group) -> float:
        if changes.instant:
            return 0.0
        if call.kind not in SUMS or changes.ratio == 1.0:
            return plain.collective(call, group)
        return packed.collective(call, group) + changes.passes * call.in_bytes / host.device.memory_bandwidth

    operators = [seconds / changes.compute for seconds in plain.operators]
    return replace(plain, operators=operators, collective=collective)


def retimed(result: EmulationResult, changes: EmulationChanges) -> Timing:
    """The captured steady step, replayed with these costs."""
    return replay_world(result.world, changes.cluster, recosted(result, changes))


def added_to_copy(op: Operator, scheme: ProtectionScheme) -> float:
    """Seconds that ``scheme`` adds to an operator: 0 where it is no copy between host and device."""
    nbytes = host_copy_bytes(op) if kind_of(op) == "copy" else None
    return 0.0 if nbytes is None else scheme.copy(nbytes)


def device_memory(
    classes: Classes, row: int, device: Device, allocator: AllocatorConfig, options: Options
) -> MemoryProfile:
    """Device memory of one class of ranks; a CPU's memory has no caching allocator and no reserve."""
    capacity = device.memory_bytes
    if device.kind == "gpu":
        capacity = min(capacity - options.reserve, capacity * allocator.per_process_memory_fraction)
    return emulate_memory(classes.classes[row].slice, allocator, capacity)


def first_iteration(
    classes: Classes, cluster: Cluster, costs: WorldCosts, slow: Sequence[Slow] = ()
) -> float:
    """Seconds of everything up to the end of the first step, set-up on the device included, replayed as the
    steady step is, without jitter. Reading data, compilation, and the set-up of communicators are not in
    it."""
    early = [replace(cls, slice=cls.slice.only(0)) for cls in classes.classes]
    world = stitch(replace(classes, classes=early))
    return replay_world(world, cluster, costs, slow=slow).iteration_time_s
