"""Workers, a switch and a server, each in a network namespace that stands: run by `live` as a program.

Torch is imported once; every process is forked from here and enters its namespace before it has threads. The
first worker prints what was measured: of each repeat the seconds of each arm (the slowest worker's), whether
sums were exact, and fragments sent again.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from windtunnel.linux import namespaces
from windtunnel.network.aggregation.live.server import ParameterServer
from windtunnel.network.aggregation.live.switch import Switch
from windtunnel.network.aggregation.live.worker import connect

PORTS = {"switch": 7000, "server": 7001, "store": 7002}
TOKEN = 4711


def bound(name: str) -> socket.socket:
    found = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    found.bind(("0.0.0.0", PORTS[name]))
    return found


def switch(spec: dict[str, Any]) -> None:
    options = {name: spec[name] for name in ("loss", "slots", "policy")}
    Switch(bound("switch"), (spec["addresses"]["server"], PORTS["server"]), jobs=1, **options).serve()


def server(spec: dict[str, Any]) -> None:
    ParameterServer(bound("server"), (spec["addresses"]["switch"], PORTS["switch"])).serve()


def worker(spec: dict[str, Any], rank: int) -> None:
    """All arms in turn, as often as is asked for."""
    torch.set_num_threads(1)
    world, size = spec["workers"], spec["bytes"] // 4
    os.environ["GLOO_SOCKET_IFNAME"] = "wt0"
    store = TCPStore(
        spec["addresses"]["worker0"], PORTS["store"], world, rank == 0, timeout=timedelta(seconds=120)
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    own = torch.randint(-1000, 1000, (size,), generator=torch.Generator().manual_seed(rank)).float()
    wanted = own.clone()
    dist.all_reduce(wanted)
    group = connect(
        (spec["addresses"]["switch"], PORTS["switch"]), rank=rank, world=world, token=TOKEN, window=64,
        deadline=spec["deadline"],
    )  # fmt: skip
    exact = True

    def aggregated() -> None:
        nonlocal exact
        exact &= torch.equal(group.all_reduce(own.clone()), wanted)

    half = own.half()
    arms: dict[str, Callable[[], Any]] = {"switch": aggregated}
    if spec["loss"] == 0:
        arms |= {
            "gloo fp32": lambda: dist.all_reduce(own.clone()),
            "gloo fp16": lambda: dist.all_reduce(half.clone()),
        }
    for arm in arms.values():
        arm()  # connections are made, and functions compiled
    found = []
    psutil.cpu_percent()
    for repeat in range(spec["repeats"]):
        times = {}
        for name in sorted(arms, key=lambda name: (len(name) + repeat) % 3):
            dist.barrier()
            began = time.monotonic()
            arms[name]()
            slowest = torch.tensor(time.monotonic() - began)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            times[name] = float(slowest)
        found.append(times)
    busy = psutil.cpu_percent() / 100
    told = torch.tensor([float(not exact), float(group.resent)])
    dist.all_reduce(told)
    if rank == 0:
        exact = told[0].item() == 0
        print(
            json.dumps({"rounds": found, "exact": exact, "resent": told[1].item(), "busy": busy}), flush=True
        )
    dist.barrier()
    group.close()
    dist.destroy_process_group()


def main() -> None:
    """Every part as a child; ends when the workers have, or one of them has failed."""
    spec = json.loads(sys.argv[1])
    parts: dict[str, Callable[[], None]] = {"switch": lambda: switch(spec), "server": lambda: server(spec)}
    for rank in range(spec["workers"]):
        parts[f"worker{rank}"] = lambda rank=rank: worker(spec, rank)  # type: ignore[misc]
    children = {}
    for name, part in parts.items():
        child = os.fork()
        if child == 0:
            try:
                namespaces.enter(spec["places"][name])
                part()
            except BaseException as error:
                print(f"{name}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        children[child] = name
    status, left = 0, spec["workers"]
    while left and not status:
        child, how = os.wait()
        left -= children.pop(child).startswith("worker")
        status = os.waitstatus_to_exitcode(how)
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    sys.exit(status)


if __name__ == "__main__":
    main()
