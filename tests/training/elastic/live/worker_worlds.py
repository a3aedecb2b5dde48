"""Small worlds of real processes for the tests: forked from a server that has imported torch once."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import connection
from typing import Any

import torch

from support import preloaded
from windtunnel.training.elastic.model import MemberHost, Membership

BOUND = 60.0  # seconds after which a test gives up waiting


def membership_of(world: int, generation: int = 1, **changes: Any) -> Membership:
    hosts = tuple(MemberHost(place, "127.0.0.1", "127.0.0.1:0") for place in range(world))
    return Membership(generation, 1, hosts, 1, "test", **changes)


class World:
    """Processes by rank, each of which calls ``body(rank, report, *args)``; what they report is read here.

    Each has a pipe of its own: one that is killed while it writes must not hold a lock that others need.
    """

    def __init__(self) -> None:
        self.processes: dict[int, preloaded.Process] = {}
        self._pipes: dict[Any, int] = {}
        self._early: dict[tuple[int, str], Any] = {}

    def start(self, rank: int, body: Callable[..., None], *args: Any) -> None:
        ours, theirs = connection.Pipe(duplex=False)
        with theirs:
            fd = theirs.fileno()
            self.processes[rank] = preloaded.call(_child, rank, fd, body, args, pass_fds=[fd])
        self._pipes[ours] = rank

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        os.kill(self.processes[rank].pid, number)

    def wait_for(self, *wanted: tuple[int, str], bound: float = BOUND) -> list[Any]:
        """The values of the reports ``(rank, name)``, in that order, once all have come."""
        end = time.monotonic() + bound
        while not all(key in self._early for key in wanted):
            ready = connection.wait(list(self._pipes), max(0.0, end - time.monotonic()))
            assert ready, f"{set(wanted) - self._early.keys()} did not come within {bound} s"
            for pipe in ready:
                rank = self._pipes[pipe]
                try:
                    name, value = pipe.recv()
                except EOFError:
                    del self._pipes[pipe]
                    continue
                assert name != "raised", f"rank {rank} raised:\n{value}"
                self._early[rank, name] = value
        return [self._early.pop(key) for key in wanted]


@contextmanager
def world() -> Iterator[World]:
    """A world that leaves no process behind."""
    world = World()
    try:
        yield world
    finally:
        for process in world.processes.values():
            process.kill()
            process.wait(BOUND)
        for pipe in world._pipes:
            pipe.close()


def _child(rank: int, fd: int, body: Callable[..., None], args: tuple[Any, ...]) -> None:
    pipe = connection.Connection(fd, readable=False)
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(BOUND / 2)  # where it hangs, should it hang
    try:
        body(rank, lambda name, value=None: pipe.send((name, value)), *args)
    except BaseException:
        pipe.send(("raised", traceback.format_exc()))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
