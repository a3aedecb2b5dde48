"""The summary of an emulation: typed, and as JSON with a stable schema, documented in docs/summary.md."""

from __future__ import annotations

import platform
import resource
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.base import ranges
from windtunnel.base.errors import UserError
from windtunnel.base.plain import from_plain, to_plain
from windtunnel.base.units import size
from windtunnel.cluster.draw import topology_text
from windtunnel.training.emulate.emulation import EmulationResult, added_to_copy, utilisation
from windtunnel.training.emulate.exports import joules
from windtunnel.training.emulate.graph import Category, EventKind, Group, NoteKind, Slice, sentences
from windtunnel.training.emulate.hybrid import HybridFacts
from windtunnel.training.emulate.twin.costs.collectives import (
    collective_cost,
    full_bytes,
    or_alternative,
    sharing_of,
)
from windtunnel.training.emulate.twin.costs.operators import cost_of
from windtunnel.training.emulate.twin.findings import CollectiveUse, Wait
from windtunnel.training.emulate.twin.memory.profile import OutOfMemory, ScopeBytes
from windtunnel.trust.gpu.schemes import messages

SCHEMA = "windtunnel.emulate/2"
EARLIER = "windtunnel.emulate/1"
"""Read as well, since stores keep it: there the sets of ranks are lists of numbers."""
MORE = 4
"""Calls that are told of a kind of step."""
HELD = 12
"""Module paths that are told of what is held at a time."""
RANKS = ("captured_ranks", "checked_ranks", "assumed_ranks")
"""Fields of a summary that are sets of ranks."""
EMULATED = (
    "iteration_time_s", "first_iteration_time_s", "tokens_per_second_per_device", "mfu", "hfu",
    "critical_path", "ranks", "collectives", "joules_per_iteration",
)  # fmt: skip


@dataclass(frozen=True)
class Command:
    """The user's program (a path, or the name of a function), its arguments, and the emulator's options."""

    script: str
    args: tuple[str, ...]
    options: dict[str, Any]


@dataclass(frozen=True)
class ClusterFacts:
    """What the program ran on, in words."""

    name: str
    hosts: int
    devices_per_host: int
    device: str
    topology: str
    nic: str
    intra: str


@dataclass(frozen=True)
class RankFacts:
    """A class of ranks that do the same; bytes are of each of them."""

    name: str
    members: tuple[int, ...]
    count: int
    captured: tuple[int, ...]
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    first_step_peak_allocated_bytes: int
    first_step_peak_reserved_bytes: int
    by_category: dict[Category, int]
    memory_bytes: float
    headroom_bytes: float
    fits: bool
    fragmentation: float
    peak_at: tuple[ScopeBytes, ...]
    oom: OutOfMemory | None
    busy_s: float
    iteration_time_s: float


@dataclass(frozen=True)
class CollectiveFacts:
    """A distinct collective or message; ``bytes`` of the whole buffer, ``bus_bandwidth`` in bytes/s,
    ``count`` in a period."""

    kind: str
    group: str
    group_size: int
    hosts: int
    backend: str
    dtype: str
    algorithm: str
    protocol: str
    count: int
    bytes: float
    seconds_each: float
    seconds_total: float
    exposed_seconds: float
    bus_bandwidth: float


@dataclass(frozen=True)
class OperatorFacts:
    """Operators of one name, of an iteration of the critical rank together; ``count`` in a period.
    ``source``: of their times."""

    name: str
    kind: str
    count: int
    flops: float
    bytes: float
    seconds: float
    source: str


@dataclass(frozen=True)
class BaselineFacts:
    """What an iteration was compared with: a run of the store or a file, and its time."""

    name: str
    iteration_time_s: float


@dataclass(frozen=True)
class VerdictFacts:
    """What the run was to fail on, as ``--fail-on`` said it, and why it does, a sentence each."""

    fail_on: tuple[str, ...]
    passed: bool
    reasons: tuple[str, ...]
    baseline: BaselineFacts | None


@dataclass(frozen=True)
class StepFacts:
    """Steps of a period that are alike. ``steps``: their places in it, from 1. Peaks are of the rank that
    needs most. ``more``: collectives and operators that the usual step does not have."""

    count: int
    steps: tuple[int, ...]
    iteration_time_s: float
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    more: tuple[str, ...]


@dataclass(frozen=True)
class PeriodFacts:
    """The sequence of steps that repeats: how many they are, what they take together, and their kinds, the
    most frequent first. ``repeats``: it was seen to."""

    steps: int
    seconds: float
    repeats: bool
    kinds: tuple[StepFacts, ...]


@dataclass(frozen=True)
class ConfidentialFacts:
    """What ``scheme`` added to a mean step of the critical rank (copies) and of a rank that makes the calls
    (collectives), whether they were waited for or not. ``messages``: encrypted and decrypted between GPUs.
    ``source``: of the scheme's figures."""

    scheme: str
    messages: int
    collective_seconds: float
    copies: int
    copy_seconds: float
    source: str


@dataclass(frozen=True)
class ReplayFacts:
    """Ranks and events that were replayed, and the seed of the jitter."""

    simulated_ranks: int
    events: int
    seed: int


@dataclass(frozen=True)
class Summary:
    """All that is told of one emulation.

    docs/summary.md says what every field means, in which unit, and where it comes from; `to_json` is the
    ``summary.json`` of that page."""

    schema: str
    run_id: str
    created_at: str
    versions: dict[str, str]
    command: Command
    cluster: ClusterFacts
    world_size: int
    captured_ranks: tuple[int, ...]
    steps_captured: int
    iteration_time_s: float
    first_iteration_time_s: float
    tokens_per_iteration: int | None
    tokens_per_second_per_device: float | None
    model_flops_per_iteration: float
    hardware_flops_per_iteration: float
    flops_dtype: str
    mfu: float
    hfu: float
    cost_per_iteration: float | None
    critical_rank: int
    critical_path: dict[str, float]
    waits: tuple[Wait, ...]
    ranks: tuple[RankFacts, ...]
    collectives: tuple[CollectiveFacts, ...]
    operators: tuple[OperatorFacts, ...]
    provenance: dict[str, str]
    approximations: tuple[str, ...]
    warnings: tuple[str, ...]
    replay: ReplayFacts
    directory: str
    capture_time_s: float
    wall_time_s: float
    peak_rss_bytes: int
    verdict: VerdictFacts | None = None
    checked_ranks: tuple[int, ...] = ()
    assumed_ranks: tuple[int, ...] = ()
    period: PeriodFacts | None = None
    joules_per_iteration: float | None = None
    confidential: ConfidentialFacts | None = None
    live: HybridFacts | None = None

    def to_json(self) -> dict[str, Any]:
        """The JSON object of docs/summary.md: sets of ranks are text there, ``0-503,510``."""
        content: dict[str, Any] = to_plain(self)
        for name in ("confidential", "live"):  # fields of those who asked for them
            if content[name] is None:
                del content[name]
        for name in RANKS:
            content[name] = ranges.write(getattr(self, name))
        for row, rank in zip(content["ranks"], self.ranks, strict=True):
            row |= {"members": ranges.write(rank.members), "captured": ranges.write(rank.captured)}
        return content

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Summary:
        """What `to_json` made, or the store kept.

        Raises:
            UserError: it is no summary of this form.
        """
        known = {field.name for field in fields(cls)}
        try:
            if content["schema"] not in (SCHEMA, EARLIER):
                raise ValueError(f"its schema is {content['schema']!r}")
            plain = {name: value for name, value in content.items() if name in known}
            plain |= {name: _numbers(content[name]) for name in RANKS if name in content}
            plain["ranks"] = [
                one | {name: _numbers(one[name]) for name in ("members", "captured")}
                for one in content["ranks"]
            ]
            return from_plain(cls, plain)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"this is no summary of an emulation ({SCHEMA}): {error}") from None

    @property
    def peak_reserved_bytes(self) -> int:
        """Of the rank that needs most."""
        return max(rank.peak_reserved_bytes for rank in self.ranks)

    @property
    def fits(self) -> bool:
        """Whether no rank runs out of memory."""
        return all(rank.fits for rank in self.ranks)


def _numbers(ranks: str | list[int]) -> list[int]:
    return list(ranges.read(ranks)) if isinstance(ranks, str) else ranks


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
        model_flops_per_iteration=work.model_flops, hardware_flops_per_iteration=work.hardware_flops,
        flops_dtype=work.dtype, mfu=used.mfu, hfu=used.hfu,
        cost_per_iteration=_price(result), critical_rank=timing.critical_rank,
        critical_path=_split(timing.critical_path),
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
    added, sent = 0.0, 0
    for use in result.timing.collectives:
        nbytes = full_bytes(use.call, use.group_size)
        sent += use.count * messages(use.call.kind, nbytes, use.group_size)[0]
        added += use.count * scheme.collective(use.call.kind, nbytes, use.group_size)
    row = int(result.classes.rank_class[result.timing.critical_rank])
    slice_ = result.classes.classes[row].slice
    events = slice_.events[slice(*slice_.steady)]
    count = np.bincount(events["ref"][events["kind"] == EventKind.OP], minlength=len(slice_.operators))
    each = np.array([added_to_copy(op, scheme) for op in slice_.operators])
    copies, seconds = int(count[each > 0].sum()) // slice_.period, float(count @ each) / slice_.period
    return ConfidentialFacts(scheme.name, sent // steps, added / steps, copies, seconds, scheme.source)


def _period(result: EmulationResult) -> PeriodFacts | None:
    """None where every step is like the one before it."""
    timing, slice_ = result.timing, result.classes.classes[0].slice
    if slice_.period == 1:
        return None
    parts = [Counter(_calls(slice_, *step)) for step in slice_.steps[-slice_.period :]]
    kinds = Counter(slice_.kinds)  # those that come first of equally frequent ones
    usual = parts[slice_.kinds.index(kinds.most_common(1)[0][0])]

    def facts(kind: int) -> StepFacts:
        steps = [place for place, one in enumerate(slice_.kinds) if one == kind]
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
    """Peak resident memory of this process plus that of its largest child, bytes."""
    return 1024 * sum(
        resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    )


def _price(result: EmulationResult) -> float | None:
    hourly = result.cluster.price_per_device_hour
    return (
        None if hourly is None else hourly * result.cluster.world_size * result.timing.iteration_time_s / 3600
    )


def _split(parts: dict[str, float]) -> dict[str, float]:
    """Every kind that there always is, then exposed communication by group kind; in seconds."""
    always = {
        kind: parts.get(kind, 0.0) for kind in ("compute", "pipeline_bubble", "imbalance", "launch", "idle")
    }
    return (
        {"compute": always.pop("compute")}
        | {k: v for k, v in parts.items() if k.startswith("communication:")}
        | always
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
    cluster, call = result.cluster, use.call
    placement = cluster.placement(use.ranks)
    nbytes = full_bytes(call, use.group_size)
    cost = collective_cost(
        call.kind, nbytes, placement, cluster, backend=call.backend, sharing=sharing_of(cluster, placement),
        profile=result.profile,
    )  # fmt: skip
    cost = or_alternative(cost, call, Group("", use.ranks, use.label), result.alternatives)
    added = result.scheme.collective(call.kind, nbytes, use.group_size) if result.scheme else 0.0
    return CollectiveFacts(
        kind=call.kind, group=use.label, group_size=use.group_size, hosts=placement.hosts,
        backend=call.backend, dtype=call.dtype, algorithm=cost.algorithm, protocol=cost.protocol,
        count=use.count, bytes=nbytes, seconds_each=use.seconds_each,
        seconds_total=use.seconds_each * use.count / len(result.timing.step_s),
        exposed_seconds=use.exposed_seconds,
        bus_bandwidth=cost.bus_bandwidth * (cost.seconds / (cost.seconds + added) if added else 1.0),
    )  # fmt: skip


def operator_table(result: EmulationResult, most: int = 60) -> list[OperatorFacts]:
    """Operators of the critical rank's steps, those that take longest first: calls of one name together, in
    all of the period; their figures are of the mean step."""
    row = int(result.classes.rank_class[result.timing.critical_rank])
    slice_ = result.classes.classes[row].slice
    device = result.cluster.host.device
    totals: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0, 0.0, 0.0])
    sources: dict[tuple[str, str], set[str]] = defaultdict(set)
    for op, times in slice_.calls():
        cost = cost_of(op, device, result.profile)
        if cost.source == "free":
            continue
        key = op.name, str(cost.kind)
        each = (cost.flops / slice_.period, cost.bytes / slice_.period, cost.seconds / slice_.period)
        for place, value in enumerate((1, *each)):
            totals[key][place] += times * value
        sources[key].add(cost.source)
    rows = [
        OperatorFacts(*key, int(times), flops, nbytes, seconds, "+".join(sorted(sources[key])))
        for key, (times, flops, nbytes, seconds) in totals.items()
    ]
    return sorted(rows, key=lambda row: -row.seconds)[:most]
