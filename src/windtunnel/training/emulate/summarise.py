"""An emulation in figures: the `Summary` of an `EmulationResult`."""

from __future__ import annotations

import os
import platform
import resource
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from windtunnel.base.units import size
from windtunnel.cluster.draw import topology_text
from windtunnel.linux.snapshot import read_status
from windtunnel.training.emulate.emulation import EmulationResult, added_to_copy
from windtunnel.training.emulate.exports import joules
from windtunnel.training.emulate.graph import EventKind, NoteKind, Slice, sentences
from windtunnel.training.emulate.summary import (
    SCHEMA,
    ClusterFacts,
    CollectiveFacts,
    Command,
    ConfidentialFacts,
    OperatorFacts,
    PeriodFacts,
    RankFacts,
    ReplayFacts,
    StepFacts,
    Summary,
)
from windtunnel.training.emulate.twin.costs.collectives import call_cost, full_bytes
from windtunnel.training.emulate.twin.costs.profile import cost_of
from windtunnel.training.emulate.twin.findings import CollectiveUse
from windtunnel.training.emulate.utilisation import HARDWARE, MODEL, utilisation

MORE = 4
"""Calls that are named of a kind of step."""
HELD = 12
"""Module paths that are named of what is held at a time."""
OPERATORS = 60
"""Operators that are told, those that take longest."""
KINDS = ("compute", "pipeline_bubble", "imbalance", "launch", "idle")
"""Of time on the critical path, which are told where they took none, too."""
EMULATED = (
    "iteration_time_s", "first_iteration_time_s", "tokens_per_second_per_device", "mfu", "hfu",
    "critical_path", "ranks", "collectives", "joules_per_iteration",
)  # fmt: skip


def summarise(result: EmulationResult, run_id: str, directory: Path) -> Summary:
    """An emulation in figures."""
    cluster, timing, work = result.cluster, result.timing, result.work
    world, seconds = cluster.world_size, timing.iteration_time_s
    device = cluster.host.device
    used = utilisation(work, seconds, world, device, measured=result.profile is not None)
    notes = (*result.notes, *used.notes)
    return Summary(
        schema=SCHEMA, run_id=run_id, created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        versions={name: version(name) for name in ("windtunnel", "torch")}
        | {"python": platform.python_version()},
        command=Command(
            script=result.program.name,
            args=tuple(str(argument) for argument in result.program.arguments),
            options=result.options.deciding(),
        ),
        cluster=ClusterFacts(
            name=cluster.name,
            hosts=cluster.hosts,
            devices_per_host=cluster.devices_per_host,
            device=device.name,
            topology=topology_text(cluster),
            nic=cluster.host.nic.name,
            intra=cluster.host.intra.name,
        ),
        world_size=world, captured_ranks=tuple(sorted(result.classes.captured)),
        steps_captured=len(result.classes.classes[0].slice.steps), iteration_time_s=seconds,
        first_iteration_time_s=result.first_iteration_s, tokens_per_iteration=work.tokens,
        tokens_per_second_per_device=work.tokens / seconds / world if work.tokens and seconds > 0 else None,
        model_flops_per_iteration=work.total(MODEL), hardware_flops_per_iteration=work.total(HARDWARE),
        flops_dtype=work.dtype, mfu=used.mfu, hfu=used.hfu,
        cost_per_iteration=_price(result), critical_rank=timing.critical_rank,
        critical_path=dict.fromkeys(KINDS, 0.0) | timing.critical_path,
        waits=tuple(timing.waits),
        ranks=tuple(_rank_class(result, row) for row in range(len(result.classes.classes))),
        collectives=tuple(_collective(result, use) for use in timing.collectives),
        operators=tuple(operator_table(result)),
        provenance=_provenance(result),
        approximations=tuple(sentences(notes, NoteKind.APPROXIMATION)),
        warnings=tuple(sentences(notes, NoteKind.WARNING)),
        replay=ReplayFacts(timing.simulated, timing.events, result.options.seed), directory=str(directory),
        capture_time_s=result.capture_time_s, wall_time_s=result.wall_time_s, peak_rss_bytes=peak_rss_bytes(),
        checked_ranks=result.classes.checked, assumed_ranks=tuple(result.classes.unseen),
        period=_period(result), joules_per_iteration=joules(result), confidential=_confidential(result),
    )  # fmt: skip


def _confidential(result: EmulationResult) -> ConfidentialFacts | None:
    scheme, steps = result.scheme, len(result.timing.step_s)
    if scheme is None:
        return None
    from windtunnel.trust.gpu.schemes import messages

    added, sent = 0.0, 0
    for use in result.timing.collectives:
        nbytes = full_bytes(use.call, use.group_size)
        sent += use.count * messages(use.call.kind, nbytes, use.group_size)[0]
        added += use.count * scheme.collective(use.call.kind, nbytes, use.group_size)
    row = int(result.classes.rank_class[result.timing.critical_rank])
    slice_ = result.classes.classes[row].slice
    copies = [(times, each) for op, times in slice_.calls() if (each := added_to_copy(op, scheme))]
    return ConfidentialFacts(
        scheme.name, sent // steps, added / steps, sum(times for times, _ in copies) // slice_.period,
        sum(times * each for times, each in copies) / slice_.period, scheme.source,
    )  # fmt: skip


def _period(result: EmulationResult) -> PeriodFacts | None:
    """None where every step is like the one before it."""
    timing, slice_ = result.timing, result.classes.classes[0].slice
    if slice_.period == 1:
        return None
    parts = [Counter(_calls(slice_, *step)) for step in slice_.steps[-slice_.period :]]
    kinds = Counter(slice_.kinds)  # those that come first of equally frequent ones
    usual = parts[slice_.kinds.index(kinds.most_common(1)[0][0])]

    def facts(kind: int) -> StepFacts:
        steps = [place for place, step_kind in enumerate(slice_.kinds) if step_kind == kind]
        allocated, reserved = zip(*(memory.steps[k] for memory in result.memory for k in steps), strict=True)
        more = parts[steps[-1]] - usual
        return StepFacts(
            len(steps), tuple(k + 1 for k in steps), float(np.mean([timing.step_s[k] for k in steps])),
            max(allocated), max(reserved), tuple(more)[:MORE],
        )  # fmt: skip

    return PeriodFacts(
        slice_.period, timing.window[1] - timing.window[0], slice_.settled,
        tuple(facts(kind) for kind, _ in kinds.most_common()),
    )  # fmt: skip


def _calls(slice_: Slice, begin: int, end: int) -> Iterator[str]:
    """What a step calls, in words: collectives before operators."""
    events = slice_.events[begin:end]
    for row in events["ref"][events["kind"] == EventKind.COLLECTIVE].tolist():
        call = slice_.collectives[row]
        group = slice_.groups[call.group]
        nbytes = size(full_bytes(call, len(group.ranks)))
        yield f"{call.kind} of {nbytes} over {group.label or 'unnamed'}"
    for row in events["ref"][events["kind"] == EventKind.OP].tolist():
        yield slice_.operators[row].name.removeprefix("aten.").removesuffix(".default")


def _provenance(result: EmulationResult) -> dict[str, str]:
    """How figures came about; nothing is said of those that are not known."""
    words = dict.fromkeys(EMULATED, "emulated") | {
        "tokens_per_iteration": "emulated" if result.options.tokens is None else "declared",
        "cluster": "published", "wall_time_s": "measured", "peak_rss_bytes": "measured",
    }  # fmt: skip
    words |= {} if result.scheme is None else {"confidential": "emulated"}
    unknown = [] if result.work.tokens else ["tokens_per_iteration", "tokens_per_second_per_device"]
    unknown += [] if joules(result) else ["joules_per_iteration"]
    return {name: word for name, word in words.items() if name not in unknown}


def peak_rss_bytes() -> int:
    """Peak resident memory of this process plus that of its largest child, bytes.

    Its own is not `getrusage`'s, which begins with the peak of whatever process started it.
    """
    own = int(read_status(os.getpid())["VmHWM"].split()[0])
    return 1024 * (own + resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)


def _price(result: EmulationResult) -> float | None:
    hourly = result.cluster.price_per_device_hour
    return (
        None if hourly is None else hourly * result.cluster.world_size * result.timing.iteration_time_s / 3600
    )


def _rank_class(result: EmulationResult, row: int) -> RankFacts:
    cls, memory, timing = result.classes.classes[row], result.memory[row], result.timing
    whole, steady, oom = memory.whole, memory.steady, memory.oom
    return RankFacts(
        name=cls.name, members=tuple(cls.members.tolist()), count=len(cls.members),
        captured=tuple(sorted(cls.captured)),
        peak_allocated_bytes=steady.allocated_bytes, peak_reserved_bytes=steady.reserved_bytes,
        first_step_peak_allocated_bytes=whole.allocated_bytes,
        first_step_peak_reserved_bytes=whole.reserved_bytes,
        by_category=steady.by_category,
        memory_bytes=result.cluster.host.device.memory_bytes, headroom_bytes=memory.headroom_bytes,
        fits=memory.fits, fragmentation=memory.fragmentation,
        peak_at=steady.held[:HELD], oom=oom and replace(oom, held=oom.held[:HELD]),
        busy_s=float(timing.rank_busy_s[cls.members].mean()),
        iteration_time_s=float(timing.rank_iteration_s[cls.members].max()),
    )  # fmt: skip


def _collective(result: EmulationResult, use: CollectiveUse) -> CollectiveFacts:
    call, nbytes = use.call, full_bytes(use.call, use.group_size)
    cost = call_cost(call, use.group, result.cluster, result.profile, result.alternatives)
    added = result.scheme.collective(call.kind, nbytes, use.group_size) if result.scheme else 0.0
    return CollectiveFacts(
        kind=call.kind, group=use.group.label, group_size=use.group_size,
        hosts=result.cluster.placement(use.group.ranks).hosts,
        backend=call.backend, dtype=call.dtype, algorithm=cost.algorithm, protocol=cost.protocol,
        count=use.count, bytes=nbytes, seconds_each=use.seconds_each,
        seconds_total=use.seconds_each * use.count / len(result.timing.step_s),
        exposed_seconds=use.exposed_seconds,
        bus_bandwidth=cost.bus_bandwidth * (cost.seconds / (cost.seconds + added) if added else 1.0),
    )  # fmt: skip


def operator_table(result: EmulationResult) -> list[OperatorFacts]:
    """Operators of the critical rank's steps, those that take longest first: calls of one name together, in
    all of the period; their figures are of the mean step."""
    row = int(result.classes.rank_class[result.timing.critical_rank])
    slice_ = result.classes.classes[row].slice
    device = result.cluster.host.device
    totals: dict[tuple[str, str], NDArray[np.float64]] = defaultdict(lambda: np.zeros(4))
    sources: dict[tuple[str, str], set[str]] = defaultdict(set)
    for op, times in slice_.calls():
        cost = cost_of(op, device, result.profile)
        if cost.source != "free":
            each = np.array([cost.flops, cost.bytes, cost.seconds]) / slice_.period
            totals[op.name, cost.kind] += times * np.array([1.0, *each])
            sources[op.name, cost.kind].add(cost.source)
    rows = [
        OperatorFacts(*key, int(times), flops, nbytes, seconds, "+".join(sorted(sources[key])))
        for key, (times, flops, nbytes, seconds) in ((key, row.tolist()) for key, row in totals.items())
    ]
    return sorted(rows, key=lambda row: -row.seconds)[:OPERATORS]
