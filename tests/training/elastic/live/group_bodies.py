"""What the ranks of the tests of the group do: block in some operation, come out, and meet again."""

from __future__ import annotations

import functools
import gc
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from worker_worlds import membership_of

from windtunnel.base.remote import RemoteLink
from windtunnel.linux.sockets import sockets_now
from windtunnel.training.elastic.live.group import CuttableGroup
from windtunnel.training.elastic.live.store import MeetingStore

LIMIT = 50.0  # seconds: far more than any test waits, so that a timeout cannot pass for a release
WORLD = 3


def all_reduce(_: int) -> Callable[[], Any]:
    return lambda: dist.all_reduce(torch.ones(1 << 16))


def barrier(_: int) -> Callable[[], Any]:
    return dist.barrier


def receive(rank: int) -> Callable[[], Any]:
    """Rank 0 waits for 1, which waits for the victim: only 1 is connected to it by this operation."""
    return lambda: dist.recv(torch.zeros(8), (rank + 1) % WORLD)


def store_barrier(_: int) -> Callable[[], Any]:
    return dist.monitored_barrier


def new_group(_: int) -> Callable[[], Any]:
    part = dist.new_group(list(range(WORLD)))
    return lambda: dist.all_reduce(torch.ones(8), group=part)


def mesh(_: int) -> Callable[[], Any]:
    part = init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("a", "b"))["b"].get_group()
    return lambda: dist.all_reduce(torch.ones(8), group=part)


def ddp(_: int) -> Callable[[], Any]:
    model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
    model(torch.ones(2, 64)).sum().backward()
    return lambda: model(torch.ones(2, 64)).sum().backward()


def fsdp(_: int) -> Callable[[], Any]:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model(torch.ones(2, 64)).sum().backward()
    return lambda: model(torch.ones(2, 64)).sum().backward()


OPERATIONS = {
    f.__name__: f for f in (all_reduce, barrier, receive, store_barrier, new_group, mesh, ddp, fsdp)
}


@functools.cache
def link(address: str) -> RemoteLink:
    return RemoteLink(address)


def store_of(address: str, generation: int) -> MeetingStore:
    return MeetingStore(link(address), generation, timedelta(seconds=LIMIT))


def form(group: CuttableGroup, address: str, ranks: int, rank: int, generation: int = 1) -> None:
    group.form(membership_of(ranks, generation), rank, store_of(address, generation))


def blocked(rank: int, report: Any, store: str, operation: str, is_cut: bool) -> None:
    """Block in ``operation`` with a victim (the last rank) that never comes to it. ``is_cut``: somebody sets
    the key "cut" in the store, upon which this rank cuts; else it comes out by the victim's end alone."""
    own = store_of(store, 0)
    group = CuttableGroup("gloo", LIMIT)
    form(group, store, WORLD, rank)
    run = OPERATIONS[operation](rank)
    dist.barrier()
    if rank == WORLD - 1:
        report("ready")
        time.sleep(LIMIT)
    telling = threading.Thread(target=lambda: (own.wait(["cut"]), group.cut()))
    if is_cut:
        telling.start()
    report("ready")
    begin = time.monotonic()
    try:
        run()
        raise AssertionError("it was not blocked")
    except RuntimeError as error:
        released = str(error)
        group.cut()  # as `run` does: lets the neighbours out
        if is_cut:
            telling.join()  # where a neighbour's cut was first, this one would be of the next generation
        del run
        group.leave(error)
    took = time.monotonic() - begin
    own.set(f"alive/{rank}", "yes")
    form(group, store, WORLD - 1, rank, 2)
    total = torch.ones(1)
    dist.all_reduce(total)
    report("met", (total.item(), took < LIMIT / 2, released))


def too_few(rank: int, report: Any, store: str) -> None:
    """Form with a rank that never comes; the next generation brings us out, and works."""
    group = CuttableGroup("gloo", LIMIT)
    report("forming")
    try:
        form(group, store, WORLD, rank)
        raise AssertionError("it formed")
    except RuntimeError as error:
        group.leave(error)
    form(group, store, WORLD - 1, rank, 2)
    report("met", dist.get_world_size())


def strangers(rank: int, report: Any, store: str) -> None:
    """Other threads open connections all the time while groups are made: none of those is cut."""
    listener = socket.create_server(("127.0.0.1", 0))
    ends: list[tuple[socket.socket, socket.socket]] = []
    enough = threading.Event()

    def connect() -> None:
        while not enough.is_set() and len(ends) < 300:
            near = socket.create_connection(listener.getsockname())
            ends.append((near, listener.accept()[0]))

    thread = threading.Thread(target=connect)
    thread.start()
    group = CuttableGroup("gloo", LIMIT)
    form(group, store, 2, rank)
    parts = [dist.new_group([0, 1]) for _ in range(5)]
    enough.set()
    thread.join()
    count = group.cut()
    refused = ""
    try:
        dist.new_group([0, 1])
    except (RuntimeError, OSError) as error:
        refused = type(error).__name__
    for near, far in ends:
        near.settimeout(LIMIT)
        far.sendall(b"x")
        assert near.recv(1) == b"x"
    report("alive", (len(ends) > 0, count, len(parts), refused))


def with_child(rank: int, report: Any, store: str) -> None:
    """Rank 1 forks a child that outlives it; rank 0 must still notice when it is killed."""
    group = CuttableGroup("gloo", LIMIT)
    form(group, store, 2, rank)
    if rank == 1:
        child = os.fork()
        if child == 0:
            time.sleep(LIMIT)
            os._exit(0)
        report("child", child)
        time.sleep(LIMIT)
    report("ready")
    try:
        dist.recv(torch.zeros(1), 1)
    except RuntimeError as error:
        report("noticed", str(error))


def recoveries(rank: int, report: Any, store: str, kind: str, count: int) -> None:
    """Form, fail and leave ``count`` times; what the process holds after a few and at the end."""
    import psutil

    me = psutil.Process()
    held = []
    gc.freeze()  # as `run` does
    for generation in range(1, count + 1):
        group = CuttableGroup("gloo", LIMIT)
        try:
            form(group, store, WORLD, rank, generation)
            run: Any = OPERATIONS[kind](rank)
            if rank == WORLD - 1:
                raise RuntimeError("mine")
            run()
        except RuntimeError as error:
            group.cut()
            run = None
            group.leave(error)
        if generation in (count // 4, count):
            for thread in threading.enumerate():  # those that connect ahead, or end a group in the background
                if thread.name.startswith("windtunnel-"):
                    thread.join(LIMIT)
            held.append((len(sockets_now()), me.num_fds(), me.num_threads(), me.memory_info().rss))
    report("held", held)
