"""The summary of an emulation: typed, and as JSON with a stable schema.

The reference page of ``summary.json`` is made from the docstrings of these fields. Units are SI: seconds,
bytes, FLOP, bytes/s. Shares are from 0 to 1, and a figure that is not known is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from windtunnel.base import ranges
from windtunnel.base.errors import UserError
from windtunnel.base.plain import from_plain, to_plain
from windtunnel.training.emulate.graph import Category
from windtunnel.training.emulate.twin.findings import RankWait
from windtunnel.training.emulate.twin.memory.profile import OutOfMemory, ScopeBytes

SCHEMA = "windtunnel.emulate/2"
RANKS = ("captured_ranks", "checked_ranks", "assumed_ranks")
"""Fields of a summary that are sets of ranks."""


@dataclass(frozen=True)
class Command:
    """The user's program (a path, or the name of a function), its arguments, and the emulator's options."""

    script: str
    """path of the script, as it was given"""
    args: tuple[str, ...]
    """the script's own arguments"""
    options: dict[str, Any]
    """the emulator's options by name that figures depend on; null for one that was not given; `reserve` in
    bytes"""


@dataclass(frozen=True)
class ClusterFacts:
    """What the program ran on, in words."""

    name: str
    """the name or file that was given"""
    hosts: int
    """hosts of the cluster"""
    devices_per_host: int
    """devices of each"""
    device: str
    """name of the device in the catalogue"""
    topology: str
    """how the hosts are joined"""
    nic: str
    """the link of a host's NICs"""
    intra: str
    """the link between the devices of a host"""


@dataclass(frozen=True)
class RankFacts:
    """A class of ranks that do the same; bytes are of each of them."""

    name: str
    """the part that the class plays, such as `pp=0`"""
    members: tuple[int, ...]
    """its ranks; every rank is in one class"""
    count: int
    """how many they are"""
    captured: tuple[int, ...]
    """those that were really run"""
    peak_allocated_bytes: int
    """as `torch.cuda.max_memory_allocated()` would say"""
    peak_reserved_bytes: int
    """as `torch.cuda.max_memory_reserved()` would say"""
    first_step_peak_allocated_bytes: int
    """the greatest of the whole run, with set-up and the first step"""
    first_step_peak_reserved_bytes: int
    """likewise"""
    by_category: dict[Category, int]
    """bytes at the peak of allocated memory: `parameter`, `gradient`, `optimizer`, `activation`,
    `communication`, `temporary`"""
    memory_bytes: float
    """what a device has; a part of it no allocator sees (the CUDA context, kernels)"""
    headroom_bytes: float
    """what the allocator may have, less `first_step_peak_reserved_bytes`; negative where it does not fit"""
    fits: bool
    """whether the job runs without running out of memory"""
    fragmentation: float
    """share of `peak_reserved_bytes` that was never allocated at one time"""
    peak_at: tuple[ScopeBytes, ...]
    """`{scope, bytes, blocks}`: the module paths, or purposes outside modules, whose blocks are largest at
    the peak"""
    oom: OutOfMemory | None
    """the first allocation that is refused, see oom"""
    busy_s: float
    """time of an iteration in which operators run"""
    iteration_time_s: float
    """of these ranks"""


@dataclass(frozen=True)
class CollectiveFacts:
    """A distinct collective or message."""

    kind: str
    """`all_reduce`, `all_gather`, `reduce_scatter`, `broadcast`, `reduce`, `gather`, `scatter`, `all_to_all`,
    `barrier`, `send`, `recv`"""
    group: str
    """label of the groups"""
    group_size: int
    """ranks of a group"""
    hosts: int
    """hosts that a group crosses"""
    backend: str
    """`nccl` or `gloo`"""
    dtype: str
    """of the elements"""
    algorithm: str
    """the one that is chosen for this size and placement"""
    protocol: str
    """`LL`, `LL128` or `Simple`; empty where there is none"""
    count: int
    """in an iteration of a rank, or in a period"""
    bytes: float
    """of the whole buffer, as NCCL's tests count it"""
    seconds_each: float
    """from the last rank's readiness to the end"""
    seconds_total: float
    """of an iteration: `count * seconds_each`, over the steps of the period"""
    exposed_seconds: float
    """of it, on the critical path"""
    bus_bandwidth: float
    """bytes/s, as NCCL's tests define it"""


@dataclass(frozen=True)
class OperatorFacts:
    """Operators of one name, of an iteration of the critical rank together."""

    name: str
    """with overload, such as `aten.mm.default`"""
    kind: str
    """what its cost follows: `matmul`, `attention`, `elementwise`, …"""
    count: int
    """in an iteration of a rank, or in a period"""
    flops: float
    """of all of them"""
    bytes: float
    """read and written by all of them"""
    seconds: float
    """of all of them"""
    source: str
    """where the time comes from: a measured profile, a modelled one (`windtunnel mapper profile`), or the
    roofline"""


@dataclass(frozen=True)
class BaselineFacts:
    """The iteration that `slower` compared with."""

    name: str
    """the id of a run, or a file"""
    iteration_time_s: float
    """its time of an iteration"""


@dataclass(frozen=True)
class VerdictFacts:
    """The result of ``--fail-on``."""

    fail_on: tuple[str, ...]
    """what was to fail the run: `oom`, `hang`, `slower:10%`"""
    passed: bool
    """whether none of it is so; else the command ends with status 3"""
    reasons: tuple[str, ...]
    """what is so, a sentence each"""
    baseline: BaselineFacts | None
    """what `slower` compared with"""


@dataclass(frozen=True)
class StepFacts:
    """Steps of a period that are alike."""

    count: int
    """steps of this kind"""
    steps: tuple[int, ...]
    """their places in the period, from 1"""
    iteration_time_s: float
    """time of one, in the mean"""
    peak_allocated_bytes: int
    """of the rank that needs most"""
    peak_reserved_bytes: int
    """of the rank that needs most"""
    more: tuple[str, ...]
    """collectives and operators that the most frequent kind has not, four at most"""


@dataclass(frozen=True)
class PeriodFacts:
    """The sequence of steps that repeats."""

    steps: int
    """steps in the sequence that repeats"""
    seconds: float
    """that they take together, `steps * iteration_time_s`"""
    repeats: bool
    """whether the sequence was seen to come again"""
    kinds: tuple[StepFacts, ...]
    """steps that are alike, the most frequent first"""


@dataclass(frozen=True)
class ConfidentialFacts:
    """What a protection added to a mean step: to copies of the critical rank, and to collectives."""

    scheme: str
    """the name of the protection"""
    messages: int
    """messages between GPUs that it protects, of a step"""
    collective_seconds: float
    """seconds that it adds to collectives of a step, overlapped or not"""
    copies: int
    """copies that it protects, of a step"""
    copy_seconds: float
    """seconds that it adds to copies of a step, overlapped or not"""
    source: str
    """where its figures come from"""


@dataclass(frozen=True)
class LiveStep:
    """A step of a live rank, in virtual seconds: of these ``own_s`` the program ran, and ``waited_s`` it
    waited. ``backend_s``: CPU seconds of windtunnel in its process, which are in none of these. ``hybrid``:
    the replay had part in it. ``loss``: of the last backward of a scalar."""

    step: int
    seconds: float
    own_s: float
    waited_s: float
    backend_s: float
    calls: int
    loss: float | None
    hybrid: bool


@dataclass(frozen=True)
class LiveFacts:
    """A live rank."""

    rank: int
    """the rank"""
    iteration_time_s: float | None
    """virtual seconds of the mean step with the replay in it"""
    own_s: float | None
    """of it, what the rank ran itself"""
    waited_s: float | None
    """of it, what the rank waited for"""
    backend_s: float | None
    """CPU seconds of windtunnel beside a step"""
    peak_tensor_bytes: int
    """peak bytes of tensors in the second step"""
    calls_per_step: int
    """collectives and messages of a step"""
    loss: float | None
    """the last loss, where the program has one"""
    log: str
    """the file with its output"""
    steps: tuple[LiveStep, ...] = ()
    """each step"""


@dataclass(frozen=True)
class HybridFacts:
    """Live ranks beside virtual ones."""

    data: str
    """the rule by which virtual ranks hold data"""
    clock: str
    """what a live rank's clock counts"""
    pace: float
    """measured over modelled seconds of what live ranks do themselves"""
    joins_after: int
    """steps before the replay joins in"""
    virtual_ranks: int
    """ranks that are replayed"""
    simulated: int
    """how many of these were simulated for all"""
    ranks: tuple[LiveFacts, ...]
    """the live ranks"""
    notes: tuple[str, ...] = ()
    """what a reader must know, a sentence each"""


@dataclass(frozen=True)
class ReplayFacts:
    """What was replayed."""

    simulated_ranks: int
    """ranks that were replayed; all others do the same as one of these"""
    events: int
    """operators, collectives and waits that were replayed"""
    seed: int
    """of the jitter"""


@dataclass(frozen=True)
class Summary:
    """The result of one emulation. Figures without another statement are of the steady iteration, the last
    one captured; where steps differ, of the mean one of the period. `to_json` is ``summary.json``."""

    schema: str
    """`windtunnel.emulate/2`: the form of this object"""
    run_id: str
    """the run's id in the store"""
    created_at: str
    """when the run began, ISO 8601, UTC"""
    versions: dict[str, str]
    """versions of `windtunnel`, of `torch` that ran the script, and of `python`"""
    command: Command
    """the program, its arguments and the emulator's options"""
    cluster: ClusterFacts
    """what the program ran on"""
    world_size: int
    """ranks of the job"""
    captured_ranks: tuple[int, ...]
    """ranks whose program was really run"""
    steps_captured: int
    """steps of each that were captured, up to the end of the first period"""
    iteration_time_s: float
    """time of a steady iteration"""
    first_iteration_time_s: float
    """time of the first one, set-up on the device included"""
    tokens_per_iteration: int | None
    """tokens of all ranks in an iteration; null for a job without tokens"""
    tokens_per_second_per_device: float | None
    """`tokens_per_iteration / iteration_time_s / world_size`; null without tokens"""
    model_flops_per_iteration: float
    """FLOP that the model needs, all ranks, nothing computed twice"""
    hardware_flops_per_iteration: float
    """FLOP that the devices run, with what is recomputed"""
    flops_dtype: str
    """the dtype of most matrix products (`float8_e4m3fn` for both formats of float8, `tf32` for float32 that
    takes TF32)"""
    mfu: float
    """model FLOP utilisation, never above 1: FLOPs of each dtype over the devices' dense peak in that dtype,
    summed, over the time; so a job of bf16 and fp8 has 1 where every product runs at the peak of its own
    units"""
    hfu: float
    """hardware FLOP utilisation, likewise"""
    cost_per_iteration: float | None
    """price of all devices for an iteration, in the currency of the cluster file; null without a price"""
    critical_rank: int
    """the rank that ends last, whose time is split in `critical_path`"""
    critical_path: dict[str, float]
    """seconds by what the slowest rank did or waited for; they add up to `iteration_time_s`. `compute`:
    operators ran; `communication:<label>`: nothing ran but a collective or message of the groups with that
    label (`dp`, `tp`, …); `pipeline_bubble`: waiting for another stage to compute; `imbalance`: waiting for a
    rank with the same part that has more to do or is slower; `launch`: waiting for the host to issue work;
    `idle`: anything else. A kind that took no time may be left out"""
    waits: tuple[RankWait, ...]
    """the three largest waits, the largest first"""
    ranks: tuple[RankFacts, ...]
    """classes of ranks that do the same"""
    collectives: tuple[CollectiveFacts, ...]
    """distinct collectives and messages"""
    operators: tuple[OperatorFacts, ...]
    """operators by name"""
    provenance: dict[str, str]
    """for a field's name, how its figures came about: `emulated` (worked out by
    windtunnel; also the meaning of a field that is not named); `measured` (on a machine, in this run or in a
    profile); `published` (from a source that the catalogue names); `declared` (stated by the user, or assumed
    as a warning says)"""
    approximations: tuple[str, ...]
    """what is only approximated, a sentence each"""
    warnings: tuple[str, ...]
    """what a reader must know, a sentence each"""
    replay: ReplayFacts
    """what was replayed"""
    directory: str
    """the folder of the run's files"""
    capture_time_s: float
    """how long the script's ranks ran; measured"""
    wall_time_s: float
    """how long the emulation itself took; measured"""
    peak_rss_bytes: int
    """memory that it took, parent and children; measured"""
    verdict: VerdictFacts | None = None
    """the result of `--fail-on`; null without that option"""
    checked_ranks: tuple[int, ...] = ()
    """ranks that ran only for their calls to others, which are those of their class"""
    assumed_ranks: tuple[int, ...] = ()
    """ranks that did not run: they are assumed to do what their class does"""
    period: PeriodFacts | None = None
    """the steps that repeat; null where all are alike"""
    joules_per_iteration: float | None = None
    """energy of the operators of all ranks; null unless `windtunnel mapper profile` made the device and its
    profile has each of them"""
    confidential: ConfidentialFacts | None = None
    """with `--confidential` only: what the protection added"""
    live: HybridFacts | None = None
    """with `--live` only: the live ranks beside the virtual ones"""

    def to_json(self) -> dict[str, Any]:
        """The object of ``summary.json``: sets of ranks are text there, ``0-503,510``."""
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
        field_names = {field.name for field in fields(cls)}
        try:
            if content["schema"] != SCHEMA:
                raise ValueError(f"its schema is {content['schema']!r}")
            plain = {name: value for name, value in content.items() if name in field_names}
            plain |= {name: [*ranges.read(content[name])] for name in RANKS if name in content}
            plain["ranks"] = [
                row | {name: [*ranges.read(row[name])] for name in ("members", "captured")}
                for row in content["ranks"]
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
