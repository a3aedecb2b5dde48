"""The job for real, beside what is emulated: ranks over gloo, each in a network namespace of its own.

All ranks share this machine, so the time of a step that sends nothing is measured in the same world, with
all ranks computing: once they have begun, their collectives return at once (`silent`). Then the job runs as
it is, over links of each stated rate. A rank's steps are those that the optimisers' calls tell, or the
program (`emulate.program`). It runs ``STEPS`` of them, or to the program's end, and waits there for the
others.

What is emulated is paced: operators take so much longer, or less, that a step in which nothing is sent takes
as long as measured. So what is judged is the network alone.

Nothing stays: ranks end with the process that forks them, which ends with this one and then sweeps networks.
"""

from __future__ import annotations

import json
import os
import queue
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.base.errors import HangError, ScriptError, UserError
from windtunnel.cluster.load import load_cluster
from windtunnel.linux import network
from windtunnel.linux.forkserver_client import ForkServerClient, ForkServerKeeper
from windtunnel.training.emulate.emulation import (
    EmulationChanges,
    EmulationResult,
    Progress,
    retimed,
    simulate,
)
from windtunnel.training.emulate.options import Options
from windtunnel.training.emulate.program import PROGRAM, Program, follow_steps, packed, run_packed

WARM, STEPS = 3, 15
"""Steps that are not counted, and those that are."""
LEAST = 3
PAYLOAD = 1448 / 1514
"""Of what a link carries: Ethernet, IP and TCP have the rest of a packet."""
PORT = 29500
LOG_LINES = 60
PRELOAD = ("torch", "torch.distributed", "torch.utils.data", __name__)
PATIENCE = timedelta(days=1)
"""Of a rank for the others; who started them is less patient."""


@dataclass(frozen=True)
class LivePoint:
    """``ranks`` over links of ``rate`` bytes/s. Seconds of a step, measured: ``alone``, where nothing is
    sent, and ``iteration``. Scaling factors, the first over the second: ``measured`` and ``emulated``."""

    ranks: int
    rate: float
    alone: float
    iteration: float
    measured: float
    emulated: float


def compare(
    program: Program, worlds: Sequence[int], rates: Sequence[float], progress: Progress
) -> Iterator[LivePoint]:
    """Measured beside emulated, for each number of ranks and each rate in bytes/s.

    Raises:
        UserError: this machine cannot emulate networks, or the program has too few steps.
        ScriptError: it failed.
    """
    with started(program) as run:
        for ranks in worlds:
            result = simulate(program, load_cluster(f"cpu:{ranks}x1"), Options(), progress)
            period = result.classes.classes[0].slice.period
            progress(f"run {ranks} ranks, nothing sent", 0.0)
            alone = _step(run(ranks), period)
            for place, rate in enumerate(rates):
                progress(f"run {ranks} ranks at {8e-9 * rate:g} Gb/s", (1 + place) / (1 + len(rates)))
                whole = _step(run(ranks, rate), period)
                yield LivePoint(ranks, rate, alone, whole, alone / whole, paced(result, rate, alone))


def _step(seconds: Sequence[Sequence[float]], period: int) -> float:
    """Of the ranks' steps, in each of which they wait for each other: of a period the mean, of several the
    median."""
    count = min(map(len, seconds)) // period * period
    if count < LEAST * period:
        raise UserError(
            f"`live`: the program ends too early, after {count} steps that count; accepted are"
            f" {WARM + LEAST * period} or more in all, of which the first {WARM} do not count"
        )
    means = np.mean([times[:count] for times in seconds], axis=0).reshape(-1, period).mean(1)
    return float(np.median(means))


def paced(result: EmulationResult, rate: float, alone: float) -> float:
    """The scaling factor that is emulated at ``rate``, where a step in which nothing is sent takes ``alone``
    seconds."""
    cluster, host = result.cluster, result.cluster.host
    cluster = replace(cluster, host=replace(host, nic=replace(host.nic, bandwidth=rate, efficiency=PAYLOAD)))
    changes = EmulationChanges(cluster, instant=True)
    once, twice = (retimed(result, replace(changes, compute=1 / n)).iteration_time_s for n in (1, 2))
    computing = twice - once  # the rest is none of the operators'
    pace = (alone - once + computing) / computing
    whole = retimed(result, replace(changes, instant=False, compute=1 / pace))
    return alone / whole.iteration_time_s


@contextmanager
def started(program: Program, timeout: float = 900.0) -> Iterator[Callable[..., list[list[float]]]]:
    """A function ``run(world, rate=None)``: seconds of each counted step of each of ``world`` ranks, whose
    links carry ``rate`` bytes/s; None: nothing is sent. It raises ScriptError where a rank failed, with its
    output, and HangError where they take longer than ``timeout``.

    Raises:
        UserError: this machine cannot emulate networks.
    """
    if why := network.missing():
        raise UserError(f"`live`: {why}")
    network.sweep()
    with tempfile.TemporaryDirectory(prefix="windtunnel-") as name:
        folder = Path(name)
        (folder / PROGRAM).write_bytes(packed(program))
        sweep = f"{network.__name__}:sweep"
        keeper = ForkServerKeeper(folder / "forkserver", PRELOAD, dict(os.environ), sweep)
        try:
            yield partial(_run, keeper, folder, timeout)
        finally:
            keeper.close()


def _run(
    keeper: ForkServerKeeper, folder: Path, timeout: float, world: int, rate: float | None = None
) -> list[list[float]]:
    ended: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    client = ForkServerClient(keeper.path, ended.put)
    net = network.Network(f"bottleneck-{os.urandom(4).hex()}", rate)
    try:
        places = [net.add(f"rank-{rank}") for rank in range(world)]
        with tempfile.TemporaryDirectory(dir=folder) as directory:
            pids = {}
            for rank, (namespace, _) in enumerate(places):
                pid = client.started(
                    {
                        "call": f"{__name__}:main", "namespace": namespace, "cwd": os.getcwd(),
                        "env": {**os.environ, **_environment(rank, world, places[0][1])},
                        "arguments": [str(folder), directory, rate is None],
                    }
                )  # fmt: skip
                pids[pid] = rank
            for _ in places:
                message = ended.get(timeout=timeout)
                if message["status"] != 0:
                    rank = pids[message["pid"]]
                    log = Path(directory, f"{rank}.txt").read_text(errors="replace").splitlines()
                    how = f"by signal {message['signal']}" if message["signal"] else "with an error"
                    raise ScriptError(f"rank {rank} of {world} ended {how}", "\n".join(log[-LOG_LINES:]))
            return [json.loads(Path(directory, f"{rank}.json").read_text()) for rank in range(world)]
    except queue.Empty:
        raise HangError(f"{world} ranks did not end within {timeout:.0f} s of each other") from None
    finally:
        client.close()
        net.close()


def _environment(rank: int, world: int, master: str) -> dict[str, str]:
    """As torchrun gives it to the only rank of a host."""
    numbers = {
        "RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": rank,
        "MASTER_PORT": PORT, "OMP_NUM_THREADS": 1,
    }  # fmt: skip
    return {
        "MASTER_ADDR": master, "GLOO_SOCKET_IFNAME": network.INTERFACE, "CUDA_VISIBLE_DEVICES": "",
        **{name: str(value) for name, value in numbers.items()},
    }  # fmt: skip


def main(message: list[Any]) -> None:
    """A rank's process."""
    import torch
    from torch._C._distributed_c10d import FileStore

    folder, directory, silent = message
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    log = os.open(f"{directory}/{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    store = FileStore(f"{directory}/store", world)
    ends: list[float] = []

    def enough() -> None:
        seconds = [after - before for before, after in pairwise(ends[WARM - 1 :])]
        Path(directory, f"{rank}.json").write_text(json.dumps(seconds))
        if store.add("done", 1) == world:
            store.set("all", "")

    def leave() -> None:
        store.wait(["all"], PATIENCE)
        os._exit(0)

    def ended(moment: float) -> None:
        ends.append(moment)
        if silent and len(ends) == WARM - 1:
            from windtunnel.training.bottleneck.silent import silence

            silence()
        if len(ends) == WARM + STEPS:
            enough()
        # who sends nothing computes beside the others to the last
        if len(ends) >= WARM + STEPS and (not silent or store.check(["all"])):
            leave()

    follow_steps(time.perf_counter, ended)
    try:
        run_packed(Path(folder) / PROGRAM)
    except SystemExit as stop:
        if stop.code:
            raise
    if len(ends) < WARM + STEPS:
        enough()
    leave()
