"""Slices of worlds that are known: what DDP, FSDP and TP x PP x DP (1F1B) jobs issue, written by hand.

These are the truth that slicing, stitching and the twin are tested on. An operator's only input is the
number of seconds it takes, and so is the number of "bytes" of a collective, so that every time can be worked
out on paper. Events follow what PyTorch does: a collective on another stream waits for an event of the
issuing stream.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from windtunnel.cluster.model import Cluster, Device, Host, Link, Topology
from windtunnel.training.emulate.graph import (
    COMM_STREAM,
    EVENT,
    Category,
    Collective,
    EventKind,
    Group,
    Operator,
    Phase,
    Slice,
)  # fmt: skip
from windtunnel.training.emulate.policy.classes import Classes
from windtunnel.training.emulate.twin.emulate import WorldCosts


def mesh_groups(dims: dict[str, int]) -> list[Group]:
    """The world group, then for each dimension (outermost first) its groups, as a device mesh makes them."""
    size = int(np.prod(list(dims.values())))
    ranks = np.arange(size).reshape(tuple(dims.values()))
    groups = [Group("0", tuple(range(size)), "world")]
    for axis, name in enumerate(dims):
        rows = np.moveaxis(ranks, axis, -1).reshape(-1, dims[name])
        groups += [Group(str(len(groups) + i), tuple(row.tolist()), name) for i, row in enumerate(rows)]
    return groups


@dataclass
class Tracer:
    """Writes one rank's slice, event by event."""

    rank: int
    world: list[Group]
    events: list[tuple[int, int, int, int, int, int]] = field(default_factory=list)
    operators: dict[float, int] = field(default_factory=dict)
    collectives: dict[Collective, int] = field(default_factory=dict)
    steps: list[tuple[int, int]] = field(default_factory=list)
    sites: list[str] = field(default_factory=list)
    categories: dict[int, int] = field(default_factory=dict)
    streams: dict[tuple[object, ...], int] = field(default_factory=dict)
    names: int = 0
    phase: Phase = Phase.FORWARD

    def __post_init__(self) -> None:
        self.groups = [group for group in self.world if self.rank in group.ranks]

    def add(self, kind: EventKind, stream: int = 0, ref: int = 0, value: int = 0) -> None:
        self.events.append((int(kind), int(self.phase), stream, 0, ref, value))

    def unique(self) -> int:
        self.names += 1
        return self.names

    def at(self, site: str) -> None:
        """What follows is called from here."""
        self.sites.append(site)
        self.add(EventKind.CALL, ref=len(self.sites) - 1)

    def op(self, seconds: float, stream: int = 0) -> None:
        row = self.operators.setdefault(seconds, len(self.operators))
        self.add(EventKind.OP, stream, row)

    def alloc(self, nbytes: int, category: Category) -> None:
        block = self.unique()
        self.categories[block] = int(category)
        self.add(EventKind.ALLOC, ref=block, value=nbytes)

    def record(self, stream: int) -> int:
        ref = self.unique()
        self.add(EventKind.RECORD, stream, ref)
        return ref

    def wait(self, stream: int, ref: int) -> None:
        self.add(EventKind.WAIT, stream, ref)

    def group(self, label: str) -> int:
        return next(i for i, group in enumerate(self.groups) if group.label == label)

    def call(
        self, kind: str, label: str, nbytes: int = 0, *, peer: int = -1, on: int | None = None,
        batched: bool = True, backend: str = "nccl",
    ) -> int:  # fmt: skip
        """A call on stream ``on``, else on its communicator's own. Returns the handle."""
        group = self.group(label)
        sized = (nbytes if kind != "recv" else 0, nbytes if kind != "send" else 0)
        row = Collective(kind, group, *sized, peer=peer, backend=backend)
        number = self.collectives.setdefault(row, len(self.collectives))
        message = kind in ("send", "recv")
        key = (group, *((peer, kind if batched else "") if message else ()))
        stream = self.streams.setdefault(key, COMM_STREAM + len(self.streams)) if on is None else on
        if stream != 0 and backend == "nccl":
            self.wait(stream, self.record(0))
        handle = self.unique()
        self.add(EventKind.COLLECTIVE, stream, number, handle)
        return handle

    def join(self, handle: int, stream: int = 0) -> None:
        self.add(EventKind.WORK_WAIT, stream, value=handle)

    def step(self) -> None:
        self.add(EventKind.STEP)
        begin = self.steps[-1][1] if self.steps else 0
        self.steps.append((begin, len(self.events)))

    def slice(self) -> Slice:
        return Slice(
            rank=self.rank,
            world_size=len(self.world[0].ranks),
            device="test",
            operators=[Operator(f"op {seconds}", (seconds,), ()) for seconds in self.operators],
            collectives=list(self.collectives),
            groups=self.groups,
            world_groups=self.world,
            events=np.array(self.events, EVENT),
            steps=self.steps,
            scopes=[""],
            call_sites=self.sites,
            block_category=self.categories,
        )


Script = Callable[[Tracer], None]


def stepping(do: Script, steps: int = 3) -> Script:
    """A script of so many steps that do the same."""

    def script(t: Tracer) -> None:
        for _ in range(steps):
            do(t)
            t.step()

    return script


def capture_of(
    script: Script, world: list[Group], log: list[int] | None = None
) -> Callable[[list[int]], list[Slice]]:
    """A capture that runs ``script`` for each rank, and notes in ``log`` which were asked for."""

    def capture(ranks: list[int]) -> list[Slice]:
        if log is not None:
            log.extend(ranks)
        slices = []
        for rank in ranks:
            tracer = Tracer(rank, world)
            script(tracer)
            slices.append(tracer.slice())
        return slices

    return capture


def ddp(buckets: int = 3, steps: int = 3, forward: float = 1.0, transfer: int = 1) -> Script:
    """Forward, backward with one asynchronous all_reduce a bucket, optimiser after all of them."""

    def script(t: Tracer) -> None:
        t.at("train.py:1")
        t.call("broadcast", "world", 8, peer=0, on=0)
        for _ in range(steps):
            t.at("train.py:10")
            t.phase = Phase.FORWARD
            for _ in range(buckets):
                t.op(forward)
            t.phase = Phase.BACKWARD
            t.at("train.py:11")
            handles = []
            for _ in range(buckets):
                t.op(2 * forward)
                handles.append(t.call("all_reduce", "world", transfer))
            for handle in handles:
                t.join(handle)
            t.phase = Phase.OPTIMIZER
            t.op(0.5)
            t.step()

    return script


def fsdp(
    world_size: int, layers: int = 3, steps: int = 3, rows: int | None = None, label: str = "world"
) -> Script:
    """FSDP2 without prefetch: gather each layer, reduce its gradient; shards of ``rows`` by chunks."""
    rows = world_size if rows is None else rows
    chunk = -(-rows // world_size)

    def script(t: Tracer) -> None:
        held = max(min(chunk, rows - t.rank * chunk), 0)
        for _ in range(layers):
            t.alloc(1024 * held, Category.PARAMETER)
        for _ in range(steps):
            t.phase = Phase.FORWARD
            for _ in range(layers):
                handle = t.call("all_gather", label, chunk * world_size)
                t.join(handle)
                t.op(1.0)
            t.phase = Phase.BACKWARD
            for _ in range(layers):
                t.join(t.call("all_gather", label, chunk * world_size))
                t.op(2.0)
                last = t.call("reduce_scatter", label, chunk * world_size)
            t.join(last)
            t.phase = Phase.OPTIMIZER
            t.op(0.25)
            t.step()

    return script


def pipeline(
    sizes: dict[str, int], microbatches: int, forward: float = 1.0, backward: float = 2.0,
    steps: int = 3, tensor: int = 0, data: int = 0, message: int = 0,
) -> Script:  # fmt: skip
    """1F1B over "pp", each forward and backward with an all_reduce over "tp" of ``tensor`` seconds in place,
    and at the end one over "dp" of ``data`` seconds. Messages, batched, take ``message`` seconds.
    """
    stages = sizes["pp"]

    def script(t: Tracer) -> None:
        ranks = t.groups[t.group("pp")].ranks
        stage = ranks.index(t.rank)
        sends: list[int] = []

        def move(kind: str, to: int) -> None:
            if 0 <= to < stages:
                handle = t.call(kind, "pp", message, peer=ranks[to])
                if kind == "recv":
                    t.join(handle)
                else:
                    sends.append(handle)

        def work(seconds: float) -> None:
            t.op(seconds)
            if sizes.get("tp", 1) > 1 and tensor:
                t.call("all_reduce", "tp", tensor, on=0)

        def run_forward() -> None:
            t.phase = Phase.FORWARD
            move("recv", stage - 1)
            work(forward)
            move("send", stage + 1)

        def run_backward() -> None:
            t.phase = Phase.BACKWARD
            move("recv", stage + 1)
            work(backward)
            move("send", stage - 1)

        for _ in range(steps):
            warm = min(stages - 1 - stage, microbatches)
            for _ in range(warm):
                run_forward()
            for _ in range(microbatches - warm):
                run_forward()
                run_backward()
            for _ in range(warm):
                run_backward()
            for handle in sends:
                t.join(handle)
            sends.clear()
            if sizes.get("dp", 1) > 1 and data:
                t.call("all_reduce", "dp", data, on=0)
            t.step()

    return script


def costs_of(classes: Classes, host: float = 0.0) -> WorldCosts:
    """Operators take what their input says, collectives a second a byte, issuing an operator ``host``."""
    slices = [cls.slice for cls in classes.classes]
    phases = len(Phase)
    return WorldCosts(
        operators=[np.array([op.inputs[0] for op in s.operators], np.float64) for s in slices],
        host_operators=[np.full((len(s.operators), phases), host) for s in slices],
        host_events=[np.zeros((len(EventKind), phases)) for _ in slices],
        collective=lambda row, group: float(max(row.in_bytes, row.out_bytes)),
    )


def cluster_of(hosts: int, devices: int, kind: str = "gpu") -> Cluster:
    link = Link("link", 1e11, 1e-6, 0.9)
    device = Device(
        "test", "none", kind, "test", (9, 0), 100, 8e10, 3e12, 1 << 25, 700.0, 1.0, {"float32": 1e13}
    )  # type: ignore[arg-type]
    host = Host(device, devices, link, True, False, link, devices, link, 8)
    return Cluster("test", host, hosts, Topology("single-switch"))
