"""Pipeline templates (Oobleck) as a scheme of the twin: the runtime's own policies decide every layout."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace

from windtunnel.training.elastic.policy.rules import Rules
from windtunnel.training.goodput.twin import copy_seconds
from windtunnel.training.goodput.twin.restart import StorageRestart, regroup_time
from windtunnel.training.goodput.twin.simulate import TEMPLATES, JobModel, PhaseCosts, Setback
from windtunnel.training.goodput.twin.supervisor import TwinSupervisor
from windtunnel.training.pipelines.model import LayerProfile, Layout, Reconfiguration, TemplateSet
from windtunnel.training.pipelines.policy import HostsChanged, after_change
from windtunnel.training.pipelines.policy.compose import share, step_seconds
from windtunnel.training.pipelines.policy.templates import template_set

Pipeline = tuple[int, ...]


def uniform_profile(job: JobModel) -> list[LayerProfile]:
    """Equal layers, backward twice forward, as transformer blocks are; the time of the whole step is 1 s."""
    time = 1.0 / job.layers
    state = job.state_bytes / job.layers
    return [LayerProfile(f"layer {n}", time / 3, 2 * time / 3, state) for n in range(job.layers)]


# Up to so many pipelines every layout is searched for among all, as the runtime does; beyond, by the local
# rules.
WHOLE = 32


class Templates:
    """Pipelines of ``job.stages`` hosts and more; after a loss those that are left go on at once.

    Layers that a host newly needs are copied between hosts; a layer without a copy is fetched from
    storage, with the steps since that checkpoint redone.
    """

    name = TEMPLATES

    def __init__(self, job: JobModel, costs: PhaseCosts, storage_every: int) -> None:
        self.job, self.costs = job, costs
        self.storage = StorageRestart(job, costs, storage_every)
        profile = uniform_profile(job)
        self.layer_bytes = tuple(layer.state_bytes for layer in profile)
        # a host holds what the smallest pipeline gives it, and no more
        memory = math.ceil(job.layers / job.stages) * self.layer_bytes[0] * 1.001
        failures = min(1, job.hosts // job.stages - 1)  # where hosts hold the model once, none
        self.set: TemplateSet = template_set(profile, job.hosts, failures, memory, largest=2 * job.stages - 1)
        self.microbatches = job.microbatches
        self.layout: Layout = self._decided(None, (), range(job.hosts), self.microbatches).layout
        self._around: Neighbourhood | None = None
        self._touched: tuple[Sequence[int], Sequence[tuple[int, ...]]] = (), ()
        self._timed: tuple[Layout, float] | None = None
        self.scale = job.step_time / self._time()
        self.supervisor = TwinSupervisor(job.hosts, 0, Rules("shrink", minimum=self.set.n0))

    def pace(self) -> tuple[float, float]:
        saving = self.storage.stall / self.storage.every
        return self._time() * self.scale + saving, saving

    def lost(self, hosts: Sequence[int], software: bool, steps: float) -> Setback | None:
        if not (self.supervisor.break_off if software else self.supervisor.lose)(hosts):
            # what is left holds no whole pipeline; whatever comes begins from storage
            self.layout = Layout((), ())
            return Setback((), self.storage.newest_stored(steps), waits=True, from_storage=True)
        change = self._change(hosts, ())
        detect = ("detect", self.costs.detect)
        start = ("start", self.costs.start if software or change.lost else 0.0)
        regroup = ("regroup", regroup_time(self.costs, self.job.hosts))
        if software:
            # new processes on the same hosts: the layout stays, and what they held is copied to them
            load = 0.0 if change.lost else self._largest_part() / self.costs.peer_bandwidth
        else:
            self._adopt(change.layout)
            load = copy_seconds(change.transfers, self.costs.peer_bandwidth)
        if change.lost:
            phases = (detect, start, regroup, ("load", self.storage.load))
            return Setback(phases, self.storage.newest_stored(steps), from_storage=True)
        return Setback((detect, start, regroup, ("load", load)))

    def came(self, host: int, running: bool) -> Setback | None:
        if not self.supervisor.come(host):
            return None
        regroup = ("regroup", regroup_time(self.costs, self.job.hosts))
        if not self.layout.pipelines:
            present = [host for host in range(self.job.hosts) if host not in self.supervisor.missing]
            self.layout = self._decided(None, (), present, self.microbatches).layout
            begin = ("start", self.costs.start)
            return Setback((begin, regroup, ("load", self.storage.load)), from_storage=True)
        change = self._change((), (host,))
        self._adopt(change.layout)
        load = copy_seconds(change.transfers, self.costs.peer_bandwidth)
        return Setback((("join", self.costs.join), ("load", load)))

    def recovered(self) -> None:
        pass

    def _change(self, lost: Sequence[int], joined: Sequence[int]) -> Reconfiguration:
        """What the runtime's policy makes of it; of a large job, of the part that it can concern."""
        if len(self.layout.pipelines) <= WHOLE:
            self._around = None
            return self._decided(self.layout, lost, joined, self.microbatches)
        if self._around is None or self._around.layout is not self.layout:
            self._around = Neighbourhood(self.layout, self.set.n0)
        near = self._around.near(lost, joined)
        before = self._around.part(near)
        part = self._decided(before, lost, joined, sum(before.microbatches), search=False)
        pipelines = self._around.merged(near, part.layout.pipelines)
        shares = share(self.set, list(map(len, pipelines)), self.microbatches)
        layout = Layout(tuple(pipelines), shares)
        self._touched = near, part.layout.pipelines
        return replace(part, layout=layout)

    def _decided(
        self,
        before: Layout | None,
        lost: Sequence[int],
        joined: Sequence[int],
        microbatches: int,
        search: bool = True,
    ) -> Reconfiguration:
        running = [host for pipeline in before.pipelines for host in pipeline] if before else []
        gone = set(lost)
        present = (*(host for host in running if host not in gone), *joined)
        changed = HostsChanged(self.set, before, present, microbatches, self.layer_bytes, search=search)
        return after_change(changed)

    def _adopt(self, layout: Layout) -> None:
        """Go on with what `_change` has just found."""
        if self._around is not None and self._around.layout is self.layout:
            self._around.change(*self._touched, layout)
        self.layout = layout

    def _time(self) -> float:
        """Seconds of a step in the unit of the profile, for the layout as it is."""
        if self._timed is None or self._timed[0] is not self.layout:
            self._timed = self.layout, step_seconds(self.set, self.layout)
        return self._timed[1]

    def _largest_part(self) -> float:
        template = self.set.of(self.set.n0)
        return max(sum(self.layer_bytes[stage.first : stage.last]) for stage in template.stages)


class Neighbourhood:
    """The pipelines of a large job that a change can touch, found without looking at all of them.

    It follows a layout through its changes; pipelines are in the order of size and lowest id, as in all.
    """

    def __init__(self, layout: Layout, smallest: int) -> None:
        self.layout, self.smallest = layout, smallest
        self._home: dict[int, tuple[int, int]] = {}
        self._settle(layout.pipelines)

    def near(self, lost: Sequence[int], joined: Sequence[int]) -> list[int]:
        """Where the pipelines are that the local rules can touch.

        Those that lost hosts; for each host that these need to be long enough, or that joins, one of the
        largest (they yield) and one of the shortest (they grow); for each that is too short, one to merge
        with; and two more, so that no layer seems lost.
        """
        pipelines = self.layout.pipelines
        lost_of = Counter(self._home[host] for host in lost if host in self._home)
        struck = {bisect_left(pipelines, home, key=_order): count for home, count in lost_of.items()}
        left = [len(pipelines[i]) - count for i, count in struck.items()]
        count = sum(max(0, self.smallest - now) for now in left if now) + len(left) + len(joined) + 2
        return sorted(
            {
                *struck,
                *_first(range(len(pipelines)), struck, count),
                *_first(range(len(pipelines) - 1, -1, -1), struck, count),
            }
        )

    def part(self, near: Sequence[int]) -> Layout:
        """The layout of those pipelines alone."""
        pipelines, shares = self.layout.pipelines, self.layout.microbatches
        return Layout(tuple(pipelines[i] for i in near), tuple(shares[i] for i in near))

    def merged(self, near: Sequence[int], new: Iterable[Pipeline]) -> list[Pipeline]:
        """All pipelines with ``new`` ones in place of those that are ``near``."""
        runs = list(self.layout.pipelines)
        for i in reversed(near):
            del runs[i]
        for pipeline in new:
            insort(runs, pipeline, key=_order)
        return runs

    def change(self, near: Sequence[int], new: Sequence[Pipeline], layout: Layout) -> None:
        """``layout`` holds from now on; in it ``new`` pipelines took the place of those that are ``near``."""
        for i in near:
            for host in self.layout.pipelines[i]:
                del self._home[host]
        self.layout = layout
        self._settle(new)

    def _settle(self, pipelines: Iterable[Pipeline]) -> None:
        for pipeline in pipelines:
            self._home |= dict.fromkeys(pipeline, _order(pipeline))


def _order(pipeline: Pipeline) -> tuple[int, int]:
    return len(pipeline), min(pipeline)


def _first(places: Iterable[int], without: Container[int], count: int) -> set[int]:
    drawn: set[int] = set()
    for place in places:
        if len(drawn) == count:
            break
        if place not in without:
            drawn.add(place)
    return drawn
