"""A switch and a server of their own on the loopback, in threads, and workers of theirs."""

from __future__ import annotations

import random
import selectors
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from windtunnel.network.aggregation.live.server import ParameterServer
from windtunnel.network.aggregation.live.switch import Switch
from windtunnel.network.aggregation.live.worker import Aggregator, connect

T = TypeVar("T")
TOKEN = 0x1234_5678_9ABC


def udp() -> socket.socket:
    endpoint = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    endpoint.bind(("127.0.0.1", 0))
    return endpoint


@dataclass
class Place:
    switch: Switch
    server: ParameterServer
    address: tuple[str, int]


@contextmanager
def standing(folder: Path | None = None, **options: Any) -> Iterator[Place]:
    """With a ``folder`` both log their decisions there."""
    logs = [None if folder is None else folder / name / "events.jsonl" for name in ("switch", "server")]
    with udp() as at_switch, udp() as at_server:
        stop = threading.Event()
        switch = Switch(at_switch, at_server.getsockname(), log=logs[0], **options)
        server = ParameterServer(at_server, at_switch.getsockname(), logs[1])
        threads = [threading.Thread(target=it.serve, args=(stop.is_set,)) for it in (switch, server)]
        for thread in threads:
            thread.start()
        try:
            yield Place(switch, server, at_switch.getsockname())
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def at_once(works: Sequence[Callable[[], T]]) -> list[T]:
    """All of them in threads of their own."""
    with ThreadPoolExecutor(len(works)) as pool:
        return [future.result() for future in [pool.submit(work) for work in works]]


@contextmanager
def joined(
    addresses: Sequence[tuple[str, int]], token: int = TOKEN, **options: Any
) -> Iterator[list[Aggregator]]:
    """A worker for each address of the switch."""
    world = len(addresses)
    with ExitStack() as stack:
        works = [
            lambda rank=rank, to=to: connect(to, rank=rank, world=world, token=token, **options)
            for rank, to in enumerate(addresses)
        ]
        yield [stack.enter_context(worker) for worker in at_once(works)]


def integers(rank: int, size: int) -> torch.Tensor:
    """Whole numbers: their sums are exact in whatever order."""
    return torch.randint(-1000, 1000, (size,), generator=torch.Generator().manual_seed(rank)).float()


def summed(workers: Sequence[Aggregator], tensors: Sequence[torch.Tensor], **more: int) -> list[torch.Tensor]:
    pairs = zip(workers, tensors, strict=True)
    return at_once([partial(worker.all_reduce, tensor.clone(), **more) for worker, tensor in pairs])


@dataclass
class Mangler:
    """Between a worker and the switch: loses, doubles and reorders what goes either way."""

    switch: tuple[str, int]
    seed: int
    front: socket.socket = field(default_factory=udp)
    back: socket.socket = field(default_factory=udp)

    def run(self, stop: threading.Event) -> None:
        draw, worker, held = random.Random(self.seed), None, []
        with selectors.DefaultSelector() as waiting:
            for sock in (self.front, self.back):
                waiting.register(sock, selectors.EVENT_READ)
            while not stop.is_set():
                for key, _ in waiting.select(0.005):
                    packet, origin = key.fileobj.recvfrom(2048)  # type: ignore[union-attr]
                    if key.fileobj is self.front:
                        worker = origin
                    if draw.random() < 0.05:
                        continue
                    for _ in range(1 + (draw.random() < 0.1)):
                        held.append((key.fileobj is self.front, packet))
                while len(held) > 3 or (held and draw.random() < 0.5):
                    there, packet = held.pop(draw.randrange(len(held)))
                    if there:
                        self.back.sendto(packet, self.switch)
                    elif worker is not None:
                        self.front.sendto(packet, worker)


@contextmanager
def mangled(switch: tuple[str, int], workers: int) -> Iterator[list[tuple[str, int]]]:
    """Where each worker finds the switch then."""
    stop = threading.Event()
    between = [Mangler(switch, seed) for seed in range(workers)]
    threads = [threading.Thread(target=mangler.run, args=(stop,)) for mangler in between]
    for thread in threads:
        thread.start()
    try:
        yield [mangler.front.getsockname() for mangler in between]
    finally:
        stop.set()
        for thread, mangler in zip(threads, between, strict=True):
            thread.join()
            mangler.front.close()
            mangler.back.close()


def recorded(folder: Path) -> list[Path]:
    """The logs of a switch and a server that had to repair; layers differ in priority, so slots age."""
    with standing(folder, slots=16, loss=0.05) as place, joined([place.address] * 3, window=32) as workers:
        tensors = [integers(rank, 6_000) for rank in range(3)]
        for layer in (2, 1, 0):
            for total in summed(workers, tensors, layer=layer, layers=3):
                assert torch.equal(total, sum(tensors[1:], tensors[0]))
    return [folder / name / "events.jsonl" for name in ("switch", "server")]
