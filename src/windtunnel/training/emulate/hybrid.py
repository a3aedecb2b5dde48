"""Hybrid emulation: chosen ranks run the program for real, all others are replayed beside them.

The job is emulated first, as always: that gives the graph of all ranks. Then each *live* rank is started as
a process of its own (`live.hybrid.rank`), which runs the whole program with real tensors. It tells this
process what it calls. From the replay is known when the virtual ranks come to that call (`twin.hybrid`), and
so when it ends. All times are virtual: a live rank's clock is set on (`coordinate`), nobody sleeps.

A live rank that raises, dies, stops or leaves a collective ends all of them, with its own error. What was
recorded by then lies in the run's folder ``live``: ``live.json``'s steps, and the output of each rank.

Source: the hybrid emulation of PrismLLM, in the abstract; how ranks meet is our own.
"""

from __future__ import annotations

import json
import marshal
import os
import selectors
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from windtunnel.base import atomic
from windtunnel.base.errors import HangError, ScriptError, UserError
from windtunnel.base.plain import to_plain
from windtunnel.cluster.model import Cluster
from windtunnel.training.emulate.coordinate import Coordinator, LiveRank
from windtunnel.training.emulate.emulation import EmulationResult, costs_of
from windtunnel.training.emulate.live import failure
from windtunnel.training.emulate.live.failure import RankFiles
from windtunnel.training.emulate.live.progress import kill_tree, shown
from windtunnel.training.emulate.live.session import LOG_LINES
from windtunnel.training.emulate.options import Options
from windtunnel.training.emulate.policy.search import parse_ranks
from windtunnel.training.emulate.program import PROGRAM, packed
from windtunnel.training.emulate.summary import HybridFacts, LiveFacts
from windtunnel.training.emulate.twin.hybrid import Virtual, expected
from windtunnel.training.emulate.twin.job import build, parse_slow, slowness

MODULE = "windtunnel.training.emulate.live.hybrid.rank"
RECORD = "steps.json"
DYING = 10.0
"""Seconds that a process has to end in, once it has closed its line."""


def check_live(options: Options, cluster: Cluster) -> list[int]:
    """The live ranks that ``options`` name, or would stop.

    Raises:
        UserError: there is none to stop, one is not of the cluster, or the device is not here.
    """
    if not options.live:
        raise UserError("`attach` stops a live rank, and `live` names none")
    live = parse_ranks(str(options.live), cluster.world_size, "live")
    device = cluster.host.device
    if device.kind == "gpu":
        import torch

        if not torch.cuda.is_available():
            raise UserError(
                f"`live`: a live rank runs on the cluster's device, and here is no {device.name}; accepted"
                f" is a cluster of CPUs, such as cpu:{cluster.hosts}x{cluster.devices_per_host}"
            )
    return live


def run_live(result: EmulationResult, live: Sequence[int], directory: Path) -> HybridFacts:
    """Run the ranks ``live`` of the emulated job for real; their files go to ``directory``.

    Raises:
        ScriptError: one of them failed, hung, or left the job.
    """
    directory.mkdir()
    coordinator, simulated = coordinate(result, live)
    _prepare(result, live, directory)
    processes = _Processes(result.options, live, directory)
    try:
        processes.run(coordinator)
    finally:
        processes.end()
        record = {str(rank.rank): to_plain(rank.steps) for rank in coordinator.ranks.values()}
        atomic.replace(directory / RECORD, json.dumps(record, indent=1) + "\n")
    return _facts(result, coordinator, simulated, directory)


def coordinate(result: EmulationResult, live: Sequence[int]) -> tuple[Coordinator, int]:
    """The coordinator for these ranks, and how many virtual ranks are simulated for all."""
    cluster, world = result.cluster, result.world
    costs = costs_of(result.classes, cluster, result.profile, result.alternatives, result.scheme)
    slower = slowness(
        [slow for text in result.options.slow for slow in parse_slow(text, cluster)], cluster, world.size
    )
    on_host = cluster.host.device.kind == "cpu"
    job = build(world, cluster, result.timing.job.programs, costs.collective, slower, apart=live)
    graph = {rank: expected(world, job, rank, on_host) for rank in live}
    slice_ = result.classes.classes[0].slice
    virtual = Virtual(job, {rank: record.joins for rank, record in graph.items()})
    first = len(slice_.steps) - slice_.period
    host = cluster.host
    blocking = on_host and host.cpu_cores <= host.devices
    factors = {rank: float(slower.compute[rank]) for rank in live}
    coordinator = Coordinator(virtual, graph, factors, first, slice_.period, blocking)
    return coordinator, job.replay.ranks - len(live)


def _prepare(result: EmulationResult, live: Sequence[int], directory: Path) -> None:
    """Write what the processes read."""
    cluster, options = result.cluster, result.options
    for name, content in result.classes.messages.items():
        (directory / name).write_bytes(content)
    (directory / PROGRAM).write_bytes(packed(result.program))
    request = {
        "world_size": cluster.world_size, "devices_per_host": cluster.devices_per_host, "live": list(live),
        "captured": result.classes.captured, "rule": options.data,
        "device": "cuda" if cluster.host.device.kind == "gpu" else "cpu", "attach": options.attach or 0,
    }  # fmt: skip
    (directory / "live.json").write_text(json.dumps(request))


class _Processes:
    """The processes of the live ranks. The first has the terminal if it is to be stopped in a debugger."""

    def __init__(self, options: Options, live: Sequence[int], directory: Path) -> None:
        self.directory, self.timeout, self.attached = directory, options.timeout, bool(options.attach)
        self.connections: dict[int, Connection] = {}
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.last_progress: dict[int, float] = {}
        for rank in live:
            ours, theirs = Pipe()
            terminal = self.attached and rank == live[0]
            with theirs, open(log_file(directory, rank), "wb") as log:
                self.processes[rank] = subprocess.Popen(
                    [sys.executable, "-m", MODULE, str(directory), str(rank), str(theirs.fileno())],
                    stdin=None if terminal else subprocess.DEVNULL, stdout=None if terminal else log,
                    stderr=None if terminal else log, pass_fds=[theirs.fileno()],
                    env={"OMP_NUM_THREADS": "1", **os.environ},
                )  # fmt: skip
            self.connections[rank] = ours
            self.last_progress[rank] = time.monotonic()

    def run(self, coordinator: Coordinator) -> None:
        """Hear them until all have ended.

        Raises:
            ScriptError: one failed; see `run_live`.
        """
        selector = selectors.DefaultSelector()
        for rank, connection in self.connections.items():
            selector.register(connection, selectors.EVENT_READ, rank)
        patience = None if self.attached else self.timeout
        while selector.get_map():
            for key, _ in selector.select(patience and min(patience, 1.0)):
                rank = key.data
                self.last_progress[rank] = time.monotonic()
                try:
                    notes = marshal.loads(self.connections[rank].recv_bytes())
                except (EOFError, OSError):
                    selector.unregister(key.fileobj)
                    self._ended(coordinator.ranks[rank])
                    continue
                coordinator.take(rank, notes)
            if patience:
                self._check_quiet(coordinator, patience)
        coordinator.finish()

    def end(self) -> None:
        """End those that are still there, and what they started."""
        for process in self.processes.values():
            if process.poll() is None:
                kill_tree(process.pid)
            process.wait()
        for connection in self.connections.values():
            connection.close()

    def _ended(self, live_rank: LiveRank) -> None:
        rank = live_rank.rank
        try:
            status = self.processes[rank].wait(DYING)
        except subprocess.TimeoutExpired:
            status = 0
        if status == 0 and live_rank.status is not None:
            return
        log = log_file(self.directory, rank).read_text(errors="replace")
        tail = failure.shorten(log, LOG_LINES)
        if reason := failure.content(RankFiles(self.directory, rank).reason):
            raise ScriptError(f"{reason} (as live rank {rank})", tail)
        if status < 0:
            raise ScriptError(f"live rank {rank} was killed by signal {-status}", tail)
        how = f"with status {status}" if status else "by itself (os._exit?)"
        raise ScriptError(f"live rank {rank} ended {how} before the program did", tail)

    def _check_quiet(self, coordinator: Coordinator, patience: float) -> None:
        """A rank that has not ended says something at each step."""
        for rank in coordinator.ranks.values():
            if rank.status is None and time.monotonic() - self.last_progress[rank.rank] > patience:
                stack = RankFiles(self.directory, rank.rank).stack
                place = failure.stood_at(shown(self.processes[rank.rank].pid, stack))
                at = f"; it stands at {place}" if place else ""
                raise HangError(f"live rank {rank.rank} said nothing for {patience:.0f} s{at}")


def log_file(directory: Path, rank: int) -> Path:
    """Where a live rank's output goes."""
    return directory / f"rank-{rank}.txt"


def _facts(result: EmulationResult, coordinator: Coordinator, simulated: int, directory: Path) -> HybridFacts:
    notes = [
        f"live rank {rank.rank} ended after {len(rank.steps)} steps, and the replay joins in after"
        f" {coordinator.joins_after}: let it run more"
        for rank in coordinator.ranks.values()
        if not any(step.hybrid for step in rank.steps)
    ]
    on_host = result.cluster.host.device.kind == "cpu"
    return HybridFacts(
        result.options.data, "process CPU time" if on_host else "device time", coordinator.pace,
        coordinator.joins_after, result.world.size - len(coordinator.ranks), simulated,
        tuple(_of_rank(rank, directory) for rank in coordinator.ranks.values()), tuple(notes),
    )  # fmt: skip


def _of_rank(live_rank: LiveRank, directory: Path) -> LiveFacts:
    joined = [step for step in live_rank.steps if step.hybrid]
    seconds, own_s, waited_s, backend_s = (
        statistics.fmean(getattr(step, name) for step in joined) if joined else None
        for name in ("seconds", "own_s", "waited_s", "backend_s")
    )
    last = live_rank.steps[-1] if live_rank.steps else None
    return LiveFacts(
        live_rank.rank, seconds, own_s, waited_s, backend_s, live_rank.peak_bytes,
        last.calls if last else 0, last.loss if last else None,
        str(log_file(directory, live_rank.rank)), tuple(live_rank.steps),
    )  # fmt: skip
