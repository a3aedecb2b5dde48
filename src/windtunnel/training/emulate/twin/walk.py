"""Why the slowest rank did not compute: its idle time, explained instant by instant.

The step of a rank is split over its compute streams. While an operator runs, the time is ``compute``; while
only a collective on these streams is in transfer, it is ``communication:<label>``. Every gap is explained by
walking back from what ends it: that waited for the one thing that came last, which waited in turn, until the
gap's beginning is reached. A piece of the walk is

* ``communication:<label>``: the transfer of a collective or message, all of whose members were ready;
* ``launch``: the host thread, issuing work;
* ``compute``: an operator of a stream that carries communication (rare);

and once the walk leaves the rank, for a member that came late,

* ``pipeline_bubble``: everything, if the late one plays another part in a pipeline;
* ``imbalance``: the late one's operators, if it plays the same part and is slower or has more to do; its
  transfers and its host stay what they are.

What remains (after the rank's last operator) is ``idle``. The pieces add up to the time between the ends of
the last two steps.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from windtunnel.engines.replay import ReplayResult
from windtunnel.training.emulate.graph import COMM_STREAM
from windtunnel.training.emulate.twin.job import WorldJob
from windtunnel.training.emulate.twin.program import StepProgram

Floats = NDArray[np.float64]

Reason = tuple[str, int, int]  # kind of time, class of ranks and node that spent it (-1, -1 where nobody did)


@dataclass
class StepSplit:
    """Seconds of the step of ``rank`` by kind, and by kind, class and node (in one copy of the step)."""

    rank: int
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    reasons: dict[Reason, float] = field(default_factory=lambda: defaultdict(float))
    late: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of imbalance by the colour that was late."""

    def over(self, steps: int) -> StepSplit:
        """The same of one of ``steps``, in the mean."""
        seconds = {kind: spent / steps for kind, spent in self.seconds.items()}
        reasons = {reason: spent / steps for reason, spent in self.reasons.items()}
        return replace(self, seconds=seconds, reasons=reasons)

    def add(self, kind: str, row: int, node: int, seconds: float) -> None:
        if seconds > 0:
            self.seconds[kind] += seconds
            self.reasons[kind, row, node] += seconds


def intervals(starts: Floats, ends: Floats) -> tuple[Floats, Floats]:
    """The union of intervals, as disjoint ones in order."""
    if not len(starts):
        return starts, ends
    order = np.argsort(starts, kind="stable")
    starts, reach = starts[order], np.maximum.accumulate(ends[order])
    first = np.concatenate([[True], starts[1:] > reach[:-1]])
    last = np.concatenate([first[1:], [True]])
    return starts[first], reach[last]


def compute_spans(
    job: WorldJob, result: ReplayResult, colour: int, begin: float, end: float
) -> tuple[Floats, Floats]:
    """When the rank's compute streams (on a CPU its host) run operators, within [begin, end]; disjoint."""
    program = job.programs[job.class_of(colour)]
    start, stop = result.of(colour)
    computes = program.computes & ~np.isin(
        program.program.queue, [queue for queue, name in enumerate(program.streams) if name >= COMM_STREAM]
    )
    on_host = program.program.queue == 0
    issue = program.program.issue * job.replay.issue_scale[colour]
    starts = np.where(on_host, start + issue, start)[computes]
    starts, stops = np.maximum(starts, begin), np.minimum(stop[computes], end)
    return intervals(starts[stops > starts], stops[stops > starts])


class Walker:
    """Walks back through the times of a replay."""

    def __init__(self, job: WorldJob, result: ReplayResult) -> None:
        self.job, self.result = job, result
        self.ready = result.ready

    def split(self, colour: int, begin: float, end: float) -> StepSplit:
        """The split of [begin, end] of one simulated rank. The kinds add up to ``end - begin``."""
        split = StepSplit(int(self.job.leader[colour]))
        starts, stops = compute_spans(self.job, self.result, colour, begin, end)
        split.add("compute", -1, -1, float((stops - starts).sum()))
        starts, stops = self._transfers_in_place(split, colour, starts, stops, begin, end)

        program = self.job.programs[self.job.class_of(colour)]
        start, stop = self.result.of(colour)
        issue = program.program.issue * self.job.replay.issue_scale[colour]
        nodes = np.flatnonzero(program.computes | program.in_place)
        begins = np.where((program.program.queue == 0) & program.computes, start + issue, start)[nodes]
        order = np.argsort(begins, kind="stable")
        nodes, begins = nodes[order], begins[order]
        gap_starts = np.concatenate([[begin], stops])
        gap_ends = np.concatenate([starts, [end]])
        for low, high in zip(gap_starts.tolist(), gap_ends.tolist(), strict=True):
            if high <= low:
                continue
            at = int(np.searchsorted(begins, high))
            if high < end and at < len(nodes) and begins[at] == high:
                self._walk(split, colour, int(nodes[at]), high, low)
                continue
            done = np.flatnonzero(stop <= high)
            last = int(done[np.argmax(stop[done])]) if len(done) else -1
            until = max(float(stop[last]), low) if last >= 0 else low
            split.add("idle", -1, -1, high - until)
            if until > low:
                self._walk(split, colour, last, until, low, ended=True)
        return split

    def _transfers_in_place(
        self, split: StepSplit, colour: int, starts: Floats, stops: Floats, begin: float, end: float
    ) -> tuple[Floats, Floats]:
        """Count the transfers on the compute streams themselves where nothing computes; join their spans."""
        row = self.job.class_of(colour)
        program = self.job.programs[row]
        start, stop = self.result.of(colour)
        nodes = np.flatnonzero(program.in_place & (stop > begin) & (start < end) & (stop > start))
        nodes = nodes[np.argsort(start[nodes], kind="stable")]
        walk = _Walk(self, split, colour, begin, end)
        reach = begin
        for node in nodes.tolist():
            low, high = max(float(start[node]), reach), min(float(stop[node]), end)
            first, last = np.searchsorted(stops, low, "right"), np.searchsorted(starts, high, "left")
            inside = np.minimum(stops[first:last], high) - np.maximum(starts[first:last], low)
            split.add(walk.transfer_kind(node), row, node % program.nodes, high - low - float(inside.sum()))
            reach = max(reach, high)
        low_ends, high_ends = np.maximum(start[nodes], begin), np.minimum(stop[nodes], end)
        return intervals(np.concatenate([starts, low_ends]), np.concatenate([stops, high_ends]))

    def _walk(
        self, split: StepSplit, colour: int, node: int, at: float, low: float, *, ended: bool = False
    ) -> None:
        """Explain [low, at]: ``node`` begins its operator at ``at``, or (``ended``) ends there."""
        walk = _Walk(self, split, colour, low, at)
        if ended:
            node = walk.through(node)
        elif walk.program.is_join[node]:
            node = walk.meet(node)
        elif walk.program.program.queue[node] == 0:
            # A host node's operator comes after its own issue.
            walk.spend("launch", node, walk.at - walk.issue(node))
        while node >= 0 and walk.at > low:
            node = walk.back(node)
        split.add("idle", -1, -1, walk.at - low)


class _Walk:
    """One walk: where it is (colour, instant) and how time is named from here on."""

    def __init__(self, walker: Walker, split: StepSplit, colour: int, low: float, at: float) -> None:
        self.walker, self.split, self.low, self.at = walker, split, low, at
        self.abroad = False
        self._move(colour)

    def _move(self, colour: int) -> None:
        self.colour = colour
        self.row = self.walker.job.class_of(colour)
        self.program: StepProgram = self.walker.job.programs[self.row]
        self.base = int(self.walker.result.rank_ptr[colour])

    def spend(self, kind: str, node: int, begin: float) -> None:
        """The time from ``begin`` to here was of ``kind``; go there."""
        begin = max(begin, self.low)
        if begin < self.at:
            self.split.add(kind, self.row, node % self.program.nodes, self.at - begin)
            if kind == "imbalance":
                self.split.late[self.colour] += self.at - begin
            self.at = begin

    def back(self, node: int) -> int:
        """``node`` could begin at this instant; go back through what it waited for. Returns the node before
        which the walk then stands, or -1."""
        end, code = self.walker.result.end, self.program.program
        before = int(self.program.before_on_queue[node])
        dependencies = code.dep[code.dep_ptr[node] : code.dep_ptr[node + 1]].tolist()
        if code.queue[node] != 0 and before >= 0:
            dependencies.insert(0, before)
        for source in dependencies:
            if end[self.base + source] == self.at:
                return self.through(source)
        host = int(self.program.host_before[node])
        self.spend("launch", node, float(end[self.base + host]) if host >= 0 else 0.0)
        return self.through(host) if host >= 0 else -1

    def through(self, node: int) -> int:
        """Go back from the end of ``node`` to its readiness, to another rank if that one's was later."""
        result, code = self.walker.result, self.program.program
        start = float(result.start[self.base + node])
        if code.join[node] < 0:
            if code.queue[node] == 0:
                self.spend(self._run_kind(node), node, start + self.issue(node))
                self.spend("launch", node, start)
            else:
                self.spend(self._run_kind(node), node, start)
            return node
        self.spend(self.transfer_kind(node), node, start)
        return self.meet(node)

    def meet(self, node: int) -> int:
        """From the start of a join go to its member that came last."""
        if self.at > self.low and self.walker.ready[self.base + node] < self.at:
            return self._late(node)
        return node

    def issue(self, node: int) -> float:
        """What issuing ``node`` cost the host of this rank."""
        return float(self.program.program.issue[node] * self.walker.job.replay.issue_scale[self.colour])

    def _run_kind(self, node: int) -> str:
        if not self.program.computes[node]:
            return "launch"
        return "imbalance" if self.abroad else "compute"

    def transfer_kind(self, node: int) -> str:
        return f"communication:{self.walker.job.call_at(self.row, node).family.name}"

    def _late(self, node: int) -> int:
        """Move to the member of the join that came last. A pipeline's bubble is not looked into."""
        job = self.walker.job
        ranks = job.replay
        join = int(ranks.rank_join[ranks.rank_join_ptr[self.colour] + self.program.program.join[node]])
        ptr, colours, nodes = job.members
        members = range(int(ptr[join]), int(ptr[join + 1]))
        late = next(
            member
            for member in members
            if self.walker.ready[self.walker.result.rank_ptr[colours[member]] + nodes[member]] == self.at
        )
        other = int(colours[late])
        if job.pipelined and job.class_of(other) != self.row:
            self.spend("pipeline_bubble", node, self.low)
            return node
        self.abroad = self.abroad or other != self.colour
        self._move(other)
        return int(nodes[late])
