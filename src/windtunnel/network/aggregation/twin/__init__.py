"""Training jobs that share the slots of a switch, in the packet engine: how long they take under which rules.

Every worker has a host and a link of its own, and so has every job's server. An iteration computes forward
and backward, layer by layer; each layer's backward gives fragments to send, and the next forward of a layer
waits for its sums. Workers start iterations late by up to ``jitter``. With one rack all are at one switch;
with more, each rack's switch adds what its workers send, and one above them the racks' sums.

All rules get the same repair: timeouts of workers, reminders of servers; and the same way of results: by the
server, which sends them back through the switch, or (``direct``) from the switch, with a copy to the server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.engines.packets import At, Flow, PacketLink, Queue, Simulation
from windtunnel.network.aggregation.policy import (
    ACTIONS,
    MOST_WORKERS,
    Decision,
    Observation,
    ResendDecision,
    SlotDecision,
    SwitchRules,
    priority,
)
from windtunnel.network.aggregation.twin import nodes

PICO = 10**12


@dataclass(frozen=True)
class AggregationJob:
    """``fragments`` of an iteration, in so many ``layers`` of equal size; ``compute``: seconds of an
    iteration's forward (a third) and backward. ``late``: seconds that its workers start an iteration late by
    at most (None: the world's ``jitter``); ``urgency``: of all its fragments (None: by `priority`)."""

    workers: int = 4
    fragments: int = 512
    compute: float = 50e-6
    layers: int = 4
    iterations: int = 4
    start: float = 0.0
    late: float | None = None
    urgency: int | None = None


@dataclass(frozen=True)
class AggregationWorld:
    """``rate``: bytes/s of every link; ``delay``: seconds of each, between switches ``core``; ``packet``:
    bytes on the wire. ``window``: fragments that a worker has under way at most. ``timeout``, ``reminder``:
    seconds that workers and servers wait the first time. ``loss``: of packets on every link. ``uplink``: of a
    rack's link to the switch above, as a part of what its workers could send."""

    slots: int = 256
    rate: float = 12.5e9
    delay: float = 1e-6
    core: float = 1e-6
    packet: int = 1100
    window: int = 128
    timeout: float = 0.5e-3
    reminder: float = 60e-6
    jitter: float = 20e-6
    loss: float = 0.0
    racks: int = 1
    uplink: float = 1.0
    direct: bool = False


@dataclass(frozen=True)
class AggregationResult:
    """Of one run. ``jct``: seconds of each job from its start. ``bytes``: on each link, in their order.
    ``actions``: what the switches did, by `ACTIONS`. ``used``: slots held at a time, mean. ``wrong``: sums
    that were not the plain sum, ``occupied``: slots held at the end; both must be 0."""

    jct: tuple[float, ...]
    bytes: tuple[int, ...]
    actions: dict[str, int]
    server_packets: int
    reminders: int
    resent: int
    used: float
    wrong: int
    occupied: int


def emulate(
    jobs: Sequence[AggregationJob],
    world: AggregationWorld,
    rules: SwitchRules,
    seed: int,
    first: int | None = None,
) -> AggregationResult:
    """All jobs to their ends, and until nothing is under way any more. With ``first`` that many of the jobs
    are of interest: it ends when they have, and tells their times.

    Raises:
        ValueError: a world or job that cannot be, by its field.
        RuntimeError: they do not end.
    """
    _check(jobs, world)
    rng = np.random.default_rng(seed)
    wires = _Wires(jobs, world)
    count = len(wires.racks) + 1  # the last is the one that servers are at
    states: list[tuple[Any, NDArray[Any]]] = [
        *((nodes.switch, np.zeros(1, nodes.SWITCH)) for _ in range(count)),
        *((nodes.server, np.zeros(1, nodes.SERVER)) for _ in jobs),
        *((nodes.worker, np.zeros(1, nodes.WORKER)) for job in jobs for _ in range(job.workers)),
    ]
    flows = [Flow([0], (), "node", packet=world.packet) for _ in jobs]
    engine = Simulation(wires.links, flows, nodes=states, seed=seed)
    switches = [state[0] for _, state in states[:count]]
    root, share, node = count - 1, world.slots // len(jobs), count + len(jobs)
    for place, switch in enumerate(switches):
        switch["rules"], switch["slots"], switch["size"] = rules.code, world.slots, world.packet
        switch["direct"] = world.direct and place == root
    # as SwitchML has two sets of slots in turn: a sum stays until the server has it
    window = min(world.window, max(share >> world.direct, 1)) if rules.static else world.window
    for number, job in enumerate(jobs):
        server, (there, back) = states[count + number][1][0], wires.servers[number]
        full = (1 << job.workers) - 1
        server["job"], server["full"], server["window"], server["size"] = number, full, window, world.packet
        server["patience"], server["remind"] = round(world.reminder * PICO), rules.remind
        server["newest"] = server["last"] = server["entries"]["sequence"] = -1
        server["down"] = engine.route([back, At(root)])
        at = [switch["jobs"][number] for switch in switches]
        for record in at:
            record["share"], record["window"], record["newest"] = share, window, -1
        at[root]["up"], at[root]["full"] = engine.route([there, At(count + number, int(world.direct))]), full
        for worker, (up, down) in enumerate(wires.workers[number]):
            rack = worker % len(wires.racks) if wires.racks else root
            between = [] if rack == root else [wires.racks[rack][1]]
            at[rack]["full"] |= 1 << worker
            _branch(at[rack], engine.route([down, At(node)]))
            if between and at[rack]["branches"] == 1:  # the rack's first of this job
                at[rack]["up"] = engine.route([wires.racks[rack][0], At(root)])
                _branch(at[root], engine.route([*between, At(rack)]))
            server["alone"][worker] = engine.route([back, *between, down, At(node)])
            _fill(states[node][1][0], job, world, (number, worker, window), rng)
            states[node][1]["up"] = engine.route([up, At(rack)])
            engine.wake(node, job.start)
            node += 1
    return _ran(engine, jobs, [state[0] for _, state in states], count, first)


class _Wires:
    """All links, and which are whose: (up, down) of racks, of servers, and of each job's workers."""

    def __init__(self, jobs: Sequence[AggregationJob], world: AggregationWorld) -> None:
        self.links: list[PacketLink] = []
        most = -(-sum(job.workers for job in jobs) // world.racks)
        self.racks = [
            self._pair(world, most * world.uplink, world.core)
            for _ in range(world.racks if world.racks > 1 else 0)
        ]
        self.servers = [self._pair(world, 1.0, world.delay) for _ in jobs]
        self.workers = [[self._pair(world, 1.0, world.delay) for _ in range(job.workers)] for job in jobs]

    def _pair(self, world: AggregationWorld, times: float, delay: float) -> tuple[int, int]:
        queue = Queue(packets=1 << 20)
        self.links += [PacketLink(world.rate * times, delay, queue, world.loss) for _ in range(2)]
        return len(self.links) - 2, len(self.links) - 1


def _branch(member: Any, route: int) -> None:
    member["down"][member["branches"]] = route
    member["branches"] += 1


def _fill(
    state: Any,
    job: AggregationJob,
    world: AggregationWorld,
    who: tuple[int, int, int],
    rng: np.random.Generator,
) -> None:
    """A worker's record."""
    state["job"], state["number"], state["window"] = who
    state["size"], state["patience"] = world.packet, round(world.timeout * PICO)
    for name in ("workers", "fragments", "layers", "iterations"):
        state[name] = getattr(job, name)
    state["slice"] = max(1, round(job.compute / (3 * job.layers) * PICO))
    state["finished"] = state["newest"] = -1
    late = world.jitter if job.late is None else job.late
    state["jitter"][: job.iterations] = rng.uniform(0, late, job.iterations) * PICO
    network = job.fragments * world.packet / world.rate
    for iteration in range(job.iterations):
        left = (job.iterations - iteration) * (network + job.compute)
        for layer in range(job.layers):
            level = job.urgency
            if level is None:
                level = priority(layer, job.layers, network / max(job.compute, 1e-9), left)
            state["priority"][iteration * nodes.MOST_LAYERS + layer] = level


def _ran(
    engine: Simulation, jobs: Sequence[AggregationJob], states: Sequence[Any], count: int, first: int | None
) -> AggregationResult:
    """Run until all have ended and nothing is under way, or the ``first`` have ended."""
    switches, (servers, workers) = states[:count], (states[count:][: len(jobs)], states[count + len(jobs) :])
    owner = np.repeat(np.arange(len(jobs)), [job.workers for job in jobs])
    jobs = jobs[:first]
    awaited = [worker for worker, job in zip(workers, owner, strict=True) if job < len(jobs)]
    most = 1000 * max(job.start + job.iterations * job.compute for job in jobs) + 10.0
    step = 1e-3
    while any(record["finished"] < 0 for record in awaited):
        if engine.now > most:
            raise RuntimeError(f"jobs have not ended after {engine.now:.3g} s: they wait for each other")
        engine.run(engine.now + step)
        step = min(2 * step, most)
    ends = np.array([worker["finished"] for worker in workers]) / PICO
    used = sum(float(switch["used"]) for switch in switches) / (float(ends.max()) * PICO)
    if first is None:
        engine.run(engine.now + 1.0)  # what is still under way
    did = sum(switch["did"] for switch in switches)
    return AggregationResult(
        jct=tuple(float(ends[owner == number].max()) - job.start for number, job in enumerate(jobs)),
        bytes=tuple(int(record) for record in engine.links["passed_bytes"]),
        actions={name: int(times) for name, times in zip(ACTIONS, did, strict=True)},
        server_packets=int(sum(server["came"] for server in servers)),
        reminders=int(sum(server["reminders"] for server in servers)),
        resent=int(sum(worker["resent"] for worker in workers)),
        used=used,
        wrong=int(sum(worker["wrong"] for worker in workers)),
        occupied=int(sum(switch["busy"] for switch in switches)),
    )


def _check(jobs: Sequence[AggregationJob], world: AggregationWorld) -> None:
    """Raises ValueError for what cannot be."""
    for number, job in enumerate(jobs):
        bounds = {"workers": MOST_WORKERS, "layers": nodes.MOST_LAYERS, "iterations": nodes.MOST_ITERATIONS}
        for name, most in bounds.items():
            if not 1 <= getattr(job, name) <= most:
                raise ValueError(f"job {number}: {name} is {getattr(job, name)}; accepted is 1 to {most}")
        if job.fragments < job.layers or job.fragments % job.layers:
            raise ValueError(
                f"job {number}: fragments is {job.fragments}; accepted is a multiple of its layers"
            )
    if not 1 <= len(jobs) <= nodes.MOST_JOBS:
        raise ValueError(f"there are {len(jobs)} jobs; accepted is 1 to {nodes.MOST_JOBS}")
    if not len(jobs) <= world.slots <= nodes.MOST_SLOTS:
        raise ValueError(f"slots is {world.slots}; accepted is {len(jobs)} to {nodes.MOST_SLOTS}")
    if not 1 <= world.window <= nodes.RING // 2:
        raise ValueError(f"window is {world.window}; accepted is 1 to {nodes.RING // 2}")
    if not 1 <= world.racks <= nodes.MOST_BRANCHES:
        raise ValueError(f"racks is {world.racks}; accepted is 1 to {nodes.MOST_BRANCHES}")


def cost(observation: Observation, decision: Decision) -> dict[str, float]:
    """What a decision sends on: packets with values towards the server, and packets that ask."""
    if isinstance(decision, SlotDecision):
        towards = {"complete": 1.0, "raw": 1.0, "swap": 1.0, "flush": 2.0}.get(decision.action, 0.0)
        return {"packets to the server": towards, "packets that ask": 0.0}
    return {
        "packets to the server": 0.0,
        "packets that ask": float(isinstance(decision, ResendDecision) and decision.now),
    }
