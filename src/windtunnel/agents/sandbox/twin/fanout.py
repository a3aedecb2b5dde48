"""One checkpoint forked many times over many hosts: when does each fork run?

The checkpoint lies on the first host. Every other host that gets a fork fetches it once, all over the first
host's network; then each host restores its forks, as many at once as it has workers. A lazy fork runs before
all of its memory is there; the rest comes while it runs, and is not waited for.
"""

from __future__ import annotations

from dataclasses import dataclass

from windtunnel.agents.sandbox.costs import Costs, Work
from windtunnel.agents.sandbox.twin.scheduler import Job, Scheduler
from windtunnel.agents.sandbox.twin.setup import Machine
from windtunnel.engines.events import Activity, Clock, Running, Shared


@dataclass(frozen=True)
class Fanout:
    """So many forks over so many hosts; seconds until the first, the median and the last run."""

    forks: int
    hosts: int
    lazy: bool
    first: float
    median: float
    last: float


def fanout(
    machine: Machine, costs: Costs, forks: int, hosts: int, *, memory: float, processes: int, lazy: bool
) -> Fanout:
    """Fork a checkpoint of that much memory and so many processes. What is fetched is compressed."""
    clock, ready = Clock(), []
    source = Shared(clock, machine.network, machine.network)
    work = costs.bring_back(memory=memory, processes=processes, lazy=lazy, fork=True)
    size = costs.new_per_byte * (costs.image_base + memory)
    shares = [forks // hosts + (place < forks % hosts) for place in range(hosts)]

    def host(place: int, count: int) -> Activity:
        if place:
            yield source.use(size)
        cpu = Shared(clock, machine.cores, 1.0)
        disk = Shared(clock, costs.disk_lanes, 1.0)
        engine = Scheduler(lambda: clock.now, machine.lanes)

        def fork(job: Job) -> Activity:
            yield cpu.use(work.seconds * work.cpu)
            yield disk.use(work.seconds * (1 - work.cpu))
            ready.append(clock.now)
            engine.finished(job)

        def start(job: Job) -> None:
            Running(fork(job))

        for number in range(count):
            engine.submit(Job(str(number), start))

    for place, count in enumerate(shares):
        if count:
            Running(host(place, count))
    clock.run()
    return Fanout(forks, hosts, lazy, ready[0], ready[(len(ready) - 1) // 2], ready[-1])


def together(costs: Costs, work: Work, count: int, cores: int) -> float:
    """Seconds until so many equal operations end that start at once, each with a worker of its own."""
    clock = Clock()
    cpu, disk = Shared(clock, cores, 1.0), Shared(clock, costs.disk_lanes, 1.0)

    def one() -> Activity:
        for seconds in (work.freeze, work.after):
            yield cpu.use(seconds * work.cpu)
            yield disk.use(seconds * (1 - work.cpu))

    for _ in range(count):
        Running(one())
    clock.run()
    return clock.now
