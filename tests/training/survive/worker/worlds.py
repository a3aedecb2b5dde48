"""Small worlds of real processes for the tests: forked from a server that has imported torch once."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from windtunnel.training.survive.model import Membership, Node

BOUND = 60.0  # seconds after which a test gives up waiting
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["warm"])


def membership_of(world: int, store: str, generation: int = 1, **changes: Any) -> Membership:
    nodes = tuple(Node(place, "127.0.0.1", "127.0.0.1:0") for place in range(world))
    return Membership(generation, 1, nodes, 1, store, "test", **changes)


class World:
    """Processes by rank, each of which calls ``body(rank, report, *args)``; what they report is read here."""

    def __init__(self) -> None:
        self.processes: dict[int, Any] = {}
        self.reports = _context.Queue()
        self.early: list[tuple[int, str, Any]] = []

    def start(self, rank: int, body: Callable[..., None], *args: Any) -> None:
        process = _context.Process(target=_child, args=(rank, self.reports, body, args), daemon=True)
        process.start()
        self.processes[rank] = process

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        os.kill(self.processes[rank].pid, number)

    def wait_for(self, *wanted: tuple[int, str]) -> list[Any]:
        """The values of the reports ``(rank, name)``, in that order, once all have come."""
        found: dict[tuple[int, str], Any] = {}
        waiting = self.early
        self.early = []
        end = time.monotonic() + BOUND
        while True:
            for report in waiting:
                if report[1] == "raised":
                    raise AssertionError(f"rank {report[0]} raised:\n{report[2]}")
                if report[:2] in wanted and report[:2] not in found:
                    found[report[:2]] = report[2]
                else:
                    self.early.append(report)
            if len(found) == len(wanted):
                return [found[key] for key in wanted]
            waiting = [self.reports.get(timeout=max(0.01, end - time.monotonic()))]


@contextmanager
def world() -> Iterator[World]:
    """A world that leaves no process behind."""
    made = World()
    try:
        yield made
    finally:
        for process in made.processes.values():
            process.kill()
            process.join(BOUND)


class Reporter:
    def __init__(self, rank: int, queue: Any) -> None:
        self._rank, self._queue = rank, queue

    def __call__(self, name: str, value: Any = None) -> None:
        self._queue.put((self._rank, name, value))


def _child(rank: int, queue: Any, body: Callable[..., None], args: tuple[Any, ...]) -> None:
    report = Reporter(rank, queue)
    try:
        body(rank, report, *args)
    except BaseException:
        report("raised", traceback.format_exc())
    queue.close()
    queue.join_thread()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
