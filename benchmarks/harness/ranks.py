"""Ranks of a bench: processes that each have a network namespace, a limited link and torch from the start.

They are forked from a process that has imported torch, enter their namespace before they have threads, and
meet in gloo by a file. What the function returns on each rank comes back as JSON.
"""

from __future__ import annotations

import json
import os
import queue
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.harness.measure import scratch
from benchmarks.harness.rows import need
from windtunnel.base.errors import HostError
from windtunnel.linux import network
from windtunnel.linux.forkserver_client import ForkServerClient, ForkServerKeeper

MBIT = 1e6 / 8
PRELOAD = ("torch", "torch.distributed", __name__)


@contextmanager
def ranks(*preload: str) -> Iterator[Callable[..., list[Any]]]:
    """The process that ranks are forked from, which has imported ``preload`` too, and a function that starts
    them.

    ``run("module:function", arguments, world, rate, limit)`` gives what ``function(arguments)`` returns on
    each of ``world`` ranks that are joined by links of ``rate`` bytes/s (of some ranks ``wide``); HostError
    where one failed, or they took longer than ``limit`` seconds."""
    need(network.missing())
    with scratch() as folder:
        keeper = ForkServerKeeper(folder / "forkserver", (*PRELOAD, *preload), dict(os.environ))
        try:
            yield partial(_run, folder, keeper)
        finally:
            keeper.close()


def _run(
    folder: Path, keeper: ForkServerKeeper, function: str, arguments: Any, world: int, rate: float,
    limit: float, wide: Mapping[int, float] = MappingProxyType({}),
) -> list[Any]:  # fmt: skip
    ended: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    client = ForkServerClient(keeper.path, ended.put)
    joined = network.Network(f"bench-{os.urandom(3).hex()}", rate)
    try:
        with tempfile.TemporaryDirectory(dir=folder) as exchange:
            for rank in range(world):
                namespace, _ = joined.add(f"rank{rank}")
                if rank in wide:
                    joined.set_rate(f"rank{rank}", wide[rank])
                request = {
                    "call": f"{__name__}:main", "namespace": namespace,
                    "arguments": [function, arguments, rank, world, exchange, limit],
                }  # fmt: skip
                client.started(request)
            for _ in range(world):
                status = ended.get(timeout=limit + 60)
                if status["status"] != 0:
                    raise HostError(f"bench: a rank of {world} failed; its traceback is above")
            return [json.loads((Path(exchange) / str(rank)).read_text()) for rank in range(world)]
    except queue.Empty as error:
        raise HostError(f"bench: {world} ranks did not end within {limit:.0f} s") from error
    finally:
        client.close()
        joined.close()


def main(request: list[Any]) -> None:
    """A rank's process."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    function, arguments, rank, world, folder, limit = request
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = network.INTERFACE
    store = FileStore(f"{folder}/store", world)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=limit)
    )
    module, _, name = function.partition(":")
    result = getattr(import_module(module), name)(arguments)
    dist.barrier()
    (Path(folder) / str(rank)).write_text(json.dumps(result))


def interface_bytes(process: int | str = "thread-self", *more: str) -> int:
    """Sent by this rank's interface so far, or by that of another process, headers included; ``more`` of its
    interfaces count, too."""
    lines = Path(f"/proc/{process}/net/dev").read_text().splitlines()
    counters = {name.strip(): each.split() for name, _, each in (line.partition(":") for line in lines)}
    return sum(int(counters[name][8]) for name in (network.INTERFACE, *more))
