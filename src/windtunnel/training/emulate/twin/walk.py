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


def split_step(job: WorldJob, result: ReplayResult, colour: int, begin: float, end: float) -> StepSplit:
    """The split of [begin, end] of one simulated rank. The kinds add up to ``end - begin``."""
    split = StepSplit(int(job.leader[colour]))
    starts, stops = compute_spans(job, result, colour, begin, end)
    split.add("compute", -1, -1, float((stops - starts).sum()))
    walk = _Walk(job, result, split, colour)
    starts, stops = walk.transfers_in_place(starts, stops, begin, end)

    program = walk.program
    start, stop = result.of(colour)
    issue = program.program.issue * job.replay.issue_scale[colour]
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
        walk = _Walk(job, result, split, colour, low, high)
        if high < end and at < len(nodes) and begins[at] == high:
            walk.explain(int(nodes[at]))
            continue
        done = np.flatnonzero(stop <= high)
        last = int(done[np.argmax(stop[done])]) if len(done) else -1
        walk.at = max(float(stop[last]), low) if last >= 0 else low
        split.add("idle", -1, -1, high - walk.at)
        if walk.at > low:
            walk.explain(last, ended=True)
    return split


class _Walk:
    """One walk through [low, at]: where it is (colour, instant) and how time is named from here on."""

    def __init__(
        self, job: WorldJob, result: ReplayResult, split: StepSplit, colour: int,
        low: float = 0.0, at: float = 0.0,
    ) -> None:  # fmt: skip
        self.job, self.result, self.split, self.low, self.at = job, result, split, low, at
        self.abroad = False
        self._move(colour)

    def _move(self, colour: int) -> None:
        self.colour = colour
        self.row = self.job.class_of(colour)
        self.program: StepProgram = self.job.programs[self.row]
        self.base = int(self.result.rank_ptr[colour])

    def transfers_in_place(
        self, starts: Floats, stops: Floats, begin: float, end: float
    ) -> tuple[Floats, Floats]:
        """Count the transfers on the compute streams themselves where nothing computes; join their spans."""
        start, stop = self.result.of(self.colour)
        nodes = np.flatnonzero(self.program.in_place & (stop > begin) & (start < end) & (stop > start))
        nodes = nodes[np.argsort(start[nodes], kind="stable")]
        reach = begin
        for node in nodes.tolist():
            low, high = max(float(start[node]), reach), min(float(stop[node]), end)
            first, last = np.searchsorted(stops, low, "right"), np.searchsorted(starts, high, "left")
            inside = np.minimum(stops[first:last], high) - np.maximum(starts[first:last], low)
            seconds = high - low - float(inside.sum())
            self.split.add(self._transfer_kind(node), self.row, node % self.program.nodes, seconds)
            reach = max(reach, high)
        low_ends, high_ends = np.maximum(start[nodes], begin), np.minimum(stop[nodes], end)
        return intervals(np.concatenate([starts, low_ends]), np.concatenate([stops, high_ends]))

    def explain(self, node: int, *, ended: bool = False) -> None:
        """Explain the time down to ``low``: ``node`` begins its operator here, or (``ended``) ends here."""
        if ended:
            node = self._through(node)
        elif self.program.is_join[node]:
            node = self._meet(node)
        elif self.program.program.queue[node] == 0:
            # A host node's operator comes after its own issue.
            self._spend("launch", node, self.at - self._issue(node))
        while node >= 0 and self.at > self.low:
            node = self._back(node)
        self.split.add("idle", -1, -1, self.at - self.low)

    def _spend(self, kind: str, node: int, begin: float) -> None:
        """The time from ``begin`` to here was of ``kind``; go there."""
        begin = max(begin, self.low)
        if begin < self.at:
            self.split.add(kind, self.row, node % self.program.nodes, self.at - begin)
            if kind == "imbalance":
                self.split.late[self.colour] += self.at - begin
            self.at = begin

    def _back(self, node: int) -> int:
        """``node`` could begin at this instant; go back through what it waited for. Returns the node before
        which the walk then stands, or -1."""
        end, code = self.result.end, self.program.program
        before = int(self.program.before_on_queue[node])
        dependencies = code.dep[code.dep_ptr[node] : code.dep_ptr[node + 1]].tolist()
        if code.queue[node] != 0 and before >= 0:
            dependencies.insert(0, before)
        for source in dependencies:
            if end[self.base + source] == self.at:
                return self._through(source)
        host = int(self.program.host_before[node])
        self._spend("launch", node, float(end[self.base + host]) if host >= 0 else 0.0)
        return self._through(host) if host >= 0 else -1

    def _through(self, node: int) -> int:
        """Go back from the end of ``node`` to its readiness, to another rank if that one's was later."""
        code, start = self.program.program, float(self.result.start[self.base + node])
        if code.join[node] >= 0:
            self._spend(self._transfer_kind(node), node, start)
            return self._meet(node)
        kind = ("imbalance" if self.abroad else "compute") if self.program.computes[node] else "launch"
        on_host = code.queue[node] == 0
        self._spend(kind, node, start + self._issue(node) if on_host else start)
        if on_host:
            self._spend("launch", node, start)
        return node

    def _issue(self, node: int) -> float:
        """What issuing ``node`` cost the host of this rank."""
        return float(self.program.program.issue[node] * self.job.replay.issue_scale[self.colour])

    def _transfer_kind(self, node: int) -> str:
        return f"communication:{self.job.call_at(self.row, node).family.name}"

    def _meet(self, node: int) -> int:
        """From the start of a join go to its member that came last, where that is another one. A pipeline's
        bubble is not looked into."""
        if self.at <= self.low or self.result.ready[self.base + node] >= self.at:
            return node
        ranks = self.job.replay
        join = int(ranks.rank_join[ranks.rank_join_ptr[self.colour] + self.program.program.join[node]])
        ptr, colours, nodes = self.job.members
        late = next(
            member
            for member in range(int(ptr[join]), int(ptr[join + 1]))
            if self.result.ready[self.result.rank_ptr[colours[member]] + nodes[member]] == self.at
        )
        other = int(colours[late])
        if self.job.pipelined and self.job.class_of(other) != self.row:
            self._spend("pipeline_bubble", node, self.low)
            return node
        self.abroad = self.abroad or other != self.colour
        self._move(other)
        return int(nodes[late])
