"""Where jobs come from, and what they are on a cluster: emulated runs, Chakra traces, generated ones.

A `TrainingStep` is an iteration without a place: marks, delays between them (`engines.replay.skeleton`),
and of each collective the groups that do it at once. `lower` puts it on ranks of a cluster: a delay is a
computing task on devices of the job's own, a collective one sending task that loads every link that it
crosses, behind a computing task for what sending does not take: NCCL's kernels, protocol, latencies.

A Chakra trace is a folder with one file a rank (``NAME.RANK.et``, as ASTRA-sim has them) and, for groups of
part of the world, ``comm_group.json`` ({group: [ranks]}). Collectives of a group are done one after another,
computing nodes as well, in the order of dependencies and numbers; messages when they can be, and a send does
not wait for its receive. A trace is one iteration, and a rank begins the next one when it has ended it.
``comm_size`` is taken as nccl-tests has it.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.base.errors import UserError
from windtunnel.cluster.fabric import ALGORITHMS, Fabric
from windtunnel.cluster.model import Device
from windtunnel.engines.replay import Program, ReplayJob
from windtunnel.engines.replay.skeleton import Mark, Skeleton, skeleton
from windtunnel.network.dag.policy.graph import GraphJob, GraphTask
from windtunnel.report.chakra import COMM_COLL, COMM_RECV, COMM_SEND, COMM_TYPES, GraphNodes, read_graph

MESSAGES = {COMM_SEND: "send", COMM_RECV: "recv"}


@dataclass(frozen=True)
class CollectiveCall:
    """A collective of ``nbytes`` (as nccl-tests counts them) by all ``groups`` at once, the root first in
    each; a ``send`` from the first to the second."""

    kind: str
    nbytes: float
    groups: tuple[tuple[int, ...], ...]
    dtype: str = "float32"
    backend: str = "nccl"


@dataclass(frozen=True)
class TrainingStep:
    """``skeleton``: its joins are places in ``calls``. ``seconds``: what it was emulated to take, on
    ``cluster``, where it was."""

    name: str
    ranks: int
    skeleton: Skeleton
    calls: tuple[CollectiveCall, ...]
    seconds: float | None = None
    cluster: str = ""


def of_file(path: Path) -> TrainingStep:
    """The step that ``windtunnel emulate`` has written.

    Raises:
        UserError: it cannot be read, or is none.
    """
    try:
        content = json.loads(path.read_text())
        groups = [tuple(map(tuple, entry)) for entry in content["groups"]]
        calls = tuple(
            CollectiveCall(
                entry["kind"], entry["bytes"], groups[entry["groups"]], entry["dtype"], entry["backend"]
            )
            for entry in content["calls"]
        )
        marks = tuple(Mark(call, tuple(map(tuple, after))) for call, after in content["marks"])
        version = content["version"]
        step = TrainingStep(
            Path(str(content["program"])).name, content["world_size"],
            Skeleton(marks, tuple(content["ends"])), calls,
            content["iteration_time_s"], content["cluster"],
        )  # fmt: skip
    except OSError as error:
        raise UserError(f"{path}: the job cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise UserError(f"{path}: no job of `windtunnel emulate` ({type(error).__name__}: {error})") from None
    if version != 1:
        raise UserError(f"{path}: version is {version}, accepted is 1")
    return step


def of_chakra(folder: Path, device: Device) -> TrainingStep:
    """The step in a folder of Chakra files; ``device`` prices nodes that have operations but no duration.

    Raises:
        UserError: files, groups, calls or dependencies that are wrong.
    """
    ranked: list[tuple[int, Path]] = []
    for path in sorted(folder.glob("*.et")):
        if not (number := re.search(r"(\d+)\.et$", path.name)):
            raise UserError(f"{path}: names no rank, accepted are files NAME.RANK.et, one a rank")
        ranked.append((int(number[1]), path))
    numbers = sorted(rank for rank, _ in ranked)
    if not numbers or numbers != [*range(len(numbers))]:
        words = f"ranks {', '.join(map(str, numbers))}" if numbers else "no .et file"
        raise UserError(f"{folder}: holds {words}, accepted are files NAME.RANK.et of ranks from 0")
    trace = _Trace(_groups(folder, len(numbers)), device)
    for rank, path in sorted(ranked):
        trace.read(rank, path, read_graph(path))
    return trace.step(folder)


def _groups(folder: Path, ranks: int) -> dict[str, tuple[int, ...]]:
    path = folder / "comm_group.json"
    if not path.exists():
        return {}
    try:
        by_name = {str(name): tuple(map(int, load)) for name, load in json.loads(path.read_text()).items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: groups cannot be read ({error}), accepted is {{name: [ranks]}}") from None
    for name, members in by_name.items():
        if not members or min(members) < 0 or max(members) >= ranks or len(set(members)) < len(members):
            raise UserError(
                f"{path}: group {name} is {list(members)}, accepted are ranks 0 to {ranks - 1}, once"
            )
    return by_name


class _Trace:
    """Files of ranks as they become a job of the replay engine."""

    def __init__(self, groups: dict[str, tuple[int, ...]], device: Device) -> None:
        self.groups, self.device = groups, device
        self.programs: list[Program] = []
        self.joins: list[list[tuple[Any, ...]]] = []  # of each rank, by ordinal
        self.calls: dict[tuple[Any, ...], tuple[CollectiveCall, Path]] = {}
        self.met: dict[tuple[Any, ...], int] = defaultdict(int)
        self.receives: set[tuple[int, int]] = set()

    def read(self, rank: int, path: Path, nodes: GraphNodes) -> None:
        if "rank_class" in nodes.metadata:
            raise UserError(
                f"{path}: is of a class of ranks, accepted are files of one rank each, or the run's folder"
                " with graph/job.json"
            )
        version = str(nodes.metadata.get("version", ""))
        if version and not version.startswith(("1.", "0.0.4")):
            raise UserError(f"{path}: is of Chakra version {version}, accepted are 1.x and 0.0.4")
        place = {number: i for i, number in enumerate(nodes.id.tolist())}
        if len(place) < len(nodes):
            raise UserError(f"{path}: two nodes have the same id")
        needs: list[list[int]] = [[] for _ in range(len(nodes))]
        for ptr, deps in ((nodes.data_ptr, nodes.data_deps), (nodes.ctrl_ptr, nodes.ctrl_deps)):
            for i in range(len(nodes)):
                earlier = deps[ptr[i] : ptr[i + 1]].tolist()
                needs[i] += [place[operator] for operator in earlier if operator in place]
        sorter = TopologicalSorter(dict(enumerate(needs)))
        try:
            sorter.prepare()
        except CycleError as error:
            number = nodes.id[error.args[1][0]]
            raise UserError(f"{path}: the dependencies of node {number} go round in a circle") from None
        order: list[int] = []
        while sorter.is_active():
            ready = sorted(sorter.get_ready(), key=lambda i: int(nodes.id[i]))
            order += ready
            sorter.done(*ready)
        at = {node: number for number, node in enumerate(order)}
        queues: dict[Any, int] = {}
        columns: list[tuple[int, float, int]] = []
        joins: list[tuple[Any, ...]] = []
        counts: dict[Any, int] = defaultdict(int)
        for node in order:
            kind, attributes = int(nodes.type[node]), nodes.attributes[int(nodes.attribute[node])]
            if kind not in (COMM_COLL, *MESSAGES):
                columns.append((1, self._seconds(float(nodes.duration[node]), attributes), -1))
                continue
            call, key, queue = self._call(rank, path, int(nodes.id[node]), kind, attributes)
            if call is None:
                columns.append((1, 0.0, -1))
                continue
            counts[key] += 1
            full = (*key, counts[key])
            first_call, other = self.calls.setdefault(full, (call, path))
            if first_call != call:
                raise UserError(
                    f"{path}: node {nodes.id[node]} is {call.kind} of {call.nbytes:g} bytes where"
                    f" {other.name} has {first_call.kind} of {first_call.nbytes:g}: they would not meet"
                )
            self.met[full] += 1
            own = queue if queue is not None else ("message", node)
            columns.append((queues.setdefault(own, 2 + len(queues)), 0.0, len(joins)))
            if kind == COMM_RECV:
                self.receives.add((rank, len(joins)))
            joins.append(full)
        ends = np.cumsum([0, *(len(set(needs[node])) for node in order)]).astype(np.int32)
        flat = [operator for node in order for operator in sorted({at[need] for need in needs[node]})]
        queue_, seconds, join = zip(*columns, strict=True) if columns else ((), (), ())
        work = np.array(queue_, np.int32), np.array(seconds, np.float64), np.zeros(len(columns))
        self.programs.append(Program(*work, ends, np.array(flat, np.int32), np.array(join, np.int32)))
        self.joins.append(joins)

    def _seconds(self, seconds: float, attributes: Any) -> float:
        """Of a node that computes or moves memory: its duration, or a roofline of what it does."""
        if seconds > 0:
            return seconds
        dtype = "bfloat16" if "bfloat16" in self.device.peak_flops else "float32"
        flops, moved = float(attributes.get("num_ops") or 0), float(attributes.get("tensor_size") or 0)
        busy = flops / (self.device.peak(dtype) * self.device.sustained)
        return max(busy, moved / self.device.memory_bandwidth) if flops > 0 else 0.0

    def _call(self, rank: int, path: Path, node: int, kind: int, attributes: Any) -> Any:
        """The call of a node (None where nothing is sent), what it meets by, and its queue."""
        size = float(attributes.get("comm_size") or 0)
        if kind in MESSAGES:
            ends = tuple(int(attributes.get(word, -1)) for word in ("comm_src", "comm_dst"))
            if kind == COMM_SEND and ends[0] < 0:
                ends = rank, ends[1]
            if kind == COMM_RECV and ends[1] < 0:
                ends = ends[0], rank
            if ends[kind == COMM_RECV] != rank or min(ends) < 0:
                raise UserError(
                    f"{path}: node {node} is a {MESSAGES[kind]} from {ends[0]} to {ends[1]} in the file of"
                    f" rank {rank}"
                )
            return (
                CollectiveCall("send", size, (ends,)),
                ("message", *ends, int(attributes.get("comm_tag") or 0)),
                None,
            )
        number = attributes.get("comm_type", 0)
        if not isinstance(number, int) or not 0 <= number < len(COMM_TYPES):
            raise UserError(f"{path}: node {node} has comm_type {number!r}, accepted are 0 to 9")
        name = str(attributes.get("pg_name") or "")
        if name and name not in self.groups and self.groups:
            raise UserError(f"{path}: node {node} is of group {name}, which comm_group.json has not")
        ranks = self.groups.get(name, ())
        if ranks and rank not in ranks:
            raise UserError(f"{path}: node {node} is of group {name}, of which rank {rank} is no member")
        word = COMM_TYPES[number].replace("reduce_scatter_block", "reduce_scatter")
        call = CollectiveCall(word, size, (ranks,) if ranks else ())
        return (call if len(ranks) != 1 else None), ("group", ranks), ("group", ranks)

    def step(self, folder: Path) -> TrainingStep:
        world = tuple(range(len(self.programs)))
        for key, (call, path) in self.calls.items():
            members = 2 if call.kind == "send" else len((call.groups or (world,))[0])
            if self.met[key] != members:
                raise UserError(
                    f"{path}: {call.kind} of {call.nbytes:g} bytes is met by {self.met[key]} of {members}"
                    " ranks"
                )
        number = {key: place for place, key in enumerate(self.calls)}
        flat = [number[key] for join in self.joins for key in join]
        calls = tuple(
            CollectiveCall(call.kind, call.nbytes, call.groups or (world,)) for call, _ in self.calls.values()
        )
        job = ReplayJob(
            self.programs, np.arange(len(world), dtype=np.int32), np.ones(len(world)), np.ones(len(world)),
            np.cumsum([0, *map(len, self.joins)]), np.array(flat, np.int64),
            np.zeros(len(calls), np.int32), np.zeros(len(calls)),
        )  # fmt: skip
        try:
            return TrainingStep(
                folder.name, len(world), skeleton(job, 1, barrier=True, receives=self.receives), calls
            )
        except ValueError:
            raise UserError(f"{folder}: its calls wait for each other in a circle, as if it hung") from None


def data_parallel(ranks: int, layers: int, nbytes: float, seconds: float) -> TrainingStep:
    """Training with an all_reduce for each of ``layers``, whose gradients have ``nbytes`` in all: backward
    (two thirds of ``seconds``) gives them from the last layer on, and the next step's forward waits at each
    layer for its own."""
    forward, backward = seconds / 3 / layers, 2 * seconds / 3 / layers
    call = CollectiveCall("all_reduce", nbytes / layers, (tuple(range(ranks)),))
    marks = [Mark(-1, ((layers - 1, 1, forward + layers * backward), (2 * layers - 1, 1, 0.0)))]
    for layer in range(1, layers):
        marks.append(Mark(-1, ((layer - 1, 0, forward), (2 * layers - 1 - layer, 1, 0.0))))
    for turn in range(layers):
        before = ((layers + turn - 1, 0, 0.0),) if turn else ()
        marks.append(Mark(0, ((layers - 1, 0, forward + (turn + 1) * backward), *before)))
    return TrainingStep("data-parallel", ranks, Skeleton(tuple(marks), (2 * layers - 1,)), (call,))


def mapreduce(ranks: int, nbytes: float, seconds: float) -> TrainingStep:
    """A map (half of ``seconds``), a shuffle of ``nbytes`` a rank from all to all, and a reduce, in turn."""
    call = CollectiveCall("all_to_all", nbytes, (tuple(range(ranks)),))
    marks = (Mark(0, ((1, 1, seconds / 2),)), Mark(-1, ((0, 0, seconds / 2),)))
    return TrainingStep("mapreduce", ranks, Skeleton(marks, (1,)), (call,))


@dataclass(frozen=True)
class Lowered:
    """A job's iteration on a cluster. ``carry``: of a task, (task, iterations back) of those of earlier
    iterations that must have ended too. ``ends``: tasks at whose ends a rank's iteration is over. ``flows``:
    of a sending task, how many messages share its fullest link. ``calls``: of a sending task, its call."""

    job: GraphJob
    carry: dict[str, tuple[tuple[str, int], ...]]
    ends: tuple[str, ...]
    flows: dict[str, float]
    calls: dict[str, CollectiveCall]


def lower(
    name: str, step: TrainingStep, fabric: Fabric, ranks: Sequence[int],
    seconds: Callable[[CollectiveCall], float] | None = None,
    loads: Callable[[CollectiveCall, dict[int, float]], dict[int, float]] = lambda call, by_link: by_link,
) -> Lowered:  # fmt: skip
    """``step`` on ``ranks`` of the fabric's cluster. Resources are the names of links, and ``NAME devices``.

    ``seconds``: of a call (of the step's ranks) alone, sending included; what its fullest link takes less
    than that is a computing task before it. ``loads``: may change what a call of one byte puts on links.
    """
    own = f"{name} devices"
    tasks: list[GraphTask] = []
    carry: dict[str, tuple[tuple[str, int], ...]] = {}
    flows, calls = {}, {}
    priced: dict[int, tuple[CollectiveCall, tuple[tuple[str, float], ...], float, float]] = {}
    for number, issued in enumerate(step.calls):
        groups = tuple(tuple(ranks[rank] for rank in group) for group in issued.groups)
        call = CollectiveCall(issued.kind, issued.nbytes, groups, issued.dtype, issued.backend)
        link_loads: dict[int, float] = defaultdict(float)
        for group in groups:
            for link, times in _one_byte(fabric, call.kind, group).items():
                link_loads[link] += times
        link_loads = loads(issued, link_loads) if issued.nbytes and link_loads else {}
        slowest = max(link_loads, key=lambda link: link_loads[link] / fabric.rates[link], default=-1)
        alone = issued.nbytes * link_loads[slowest] / fabric.rates[slowest] if link_loads else 0.0
        latency = max(0.0, seconds(issued) - alone) if seconds else 0.0
        part = _message(fabric, call.kind, groups[0])
        parallel = max(1.0, round(link_loads[slowest] / part, 6)) if link_loads and part else 1.0
        named = tuple((fabric.name(link), times) for link, times in link_loads.items())
        priced[number] = call, named, latency, parallel
    ends = tuple(dict.fromkeys(f"m{mark}" for mark in step.skeleton.ends))

    def add(task: GraphTask, before: list[tuple[str, int]]) -> None:
        """A task that waits for nothing begins with the iteration."""
        tasks.append(task)
        if before or not task.after:
            carry[task.name] = tuple(before) or tuple((end, 1) for end in ends)

    for number, mark in enumerate(step.skeleton.marks):
        after, before = [], []
        for place, (before_mark, back, delay) in enumerate(mark.after):
            now, then = ([], [(f"m{before_mark}", back)]) if back else ([f"m{before_mark}"], [])
            if delay > 0:
                add(GraphTask(f"c{number}.{place}", "compute", delay, ((own, 1.0),), tuple(now)), then)
                now, then = [f"c{number}.{place}"], []
            after += now
            before += then
        call_, named, latency, parallel = priced.get(mark.join, (None, (), 0.0, 1.0))
        if latency > 0 and named:
            add(GraphTask(f"l{number}", "compute", latency, ((own, 1.0),), tuple(after)), before)
            after, before = [f"l{number}"], []
        if call_ is None or not named:
            add(GraphTask(f"m{number}", "compute", latency, ((own, 1.0),), tuple(after)), before)
            continue
        add(GraphTask(f"m{number}", "network", call_.nbytes, named, tuple(after)), before)
        flows[f"m{number}"], calls[f"m{number}"] = parallel, call_
    return Lowered(GraphJob(name, tuple(tasks)), carry, ends, flows, calls)


def _one_byte(fabric: Fabric, kind: str, group: tuple[int, ...]) -> dict[int, float]:
    """How many times its size a call puts on each link."""
    if kind == "send":
        return dict.fromkeys(fabric.path(*group), 1.0)
    return fabric.collective(kind, group, 1.0) if kind in ALGORITHMS and len(group) > 1 else {}


def _message(fabric: Fabric, kind: str, group: tuple[int, ...]) -> float:
    """What one message of a call of one byte has, of those that are sent at a time."""
    n = len(group)
    if kind == "send":
        return 1.0
    if ALGORITHMS.get(kind, ("",))[0] == "direct":
        return 1.0 / n
    domain = fabric.cluster.host.devices * fabric.cluster.host.intra_hosts
    members: dict[int, int] = defaultdict(int)
    for rank in group:
        members[rank // domain] += 1
    whole = 1.0 if kind in ("broadcast", "reduce") else (2.0 if kind == "all_reduce" else 1.0) * (n - 1) / n
    return whole / min(members.values())
