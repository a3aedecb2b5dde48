"""Whether a rank gets on, as its process shows from outside, and when it counts as hung.

A rank *gets on* when it records events (operators, memory, collectives), when it reads or writes files, which
imports, data sets and checkpoints do, or when it needs more memory than ever before. All else may be a hang:
a wait that nothing ends, or a loop that nothing leaves; and so may be, whatever it does, a loop that waits
for a value of the device which never changes (`WaitingLoops`). It is one when it has lasted for ``timeout``
seconds, of which these are not counted:

* those in which the rank could run and another process had the CPU. A busy machine makes nobody hang;
* more than count for an earlier rank that runs, for which it may be waiting.

All of it is of the rank's process and those that it started. Python shows its line when asked by a signal
(``faulthandler``), before a rank that hangs is ended.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import linecache
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from ctypes import c_int64
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

from windtunnel.linux.processes import descendants
from windtunnel.linux.snapshot import read_file, read_status
from windtunnel.training.emulate.live import failure
from windtunnel.training.emulate.live.failure import RankFiles

LOOKS = 50  # in the time after which a rank counts as hung
SHORTEST = 0.05  # seconds between two looks
FILE_BYTES, MEMORY_BYTES = 1 << 16, 1 << 20
"""What a rank must read and write, or take, between two looks to get on; what logs and polls is less."""
LEAST_LOOKS = 20
"""At a rank that does not get on, before it counts as hung: on a busy machine looks come late."""
SHOWING = 2.0
"""Seconds that a process is given to show where it stands before it is ended."""


class Signs(NamedTuple):
    """What a tree of processes has done since it began: events recorded, bytes read and written, the most
    memory in bytes, and seconds that it had a CPU and that it waited for one."""

    events: int
    file_bytes: int
    memory_bytes: int
    run: float
    wait: float

    def gets_on(self, before: Signs) -> bool:
        """Whether something came of the time since ``before``."""
        return (
            self.events != before.events
            or self.file_bytes - before.file_bytes >= FILE_BYTES
            or self.memory_bytes - before.memory_bytes >= MEMORY_BYTES
        )


def counted(seconds: float, run: float, wait: float) -> float:
    """Of ``seconds`` in which a rank did not get on, those that count: the share in which it had a CPU or
    asked for none. ``run``, ``wait``: of all its threads."""
    demand = run + wait
    return seconds - wait if demand <= seconds else seconds * run / demand


@dataclass
class Watch:
    """Follows the process of one rank, a child of this one. ``events``: what it has recorded, in shared
    memory. ``hung``: it was ended for that. ``ended``: can be read when it has."""

    pid: int
    files: RankFiles
    events: c_int64
    timeout: float
    hung: bool = False
    began: float = field(default_factory=time.monotonic)
    quiet: float = 0.0
    """Seconds that count since it last got on."""

    def __post_init__(self) -> None:
        self.ended = os.pidfd_open(self.pid)
        self.checked_at = self.began
        self._before = self._signs()
        self.begin_anew()

    @property
    def hangs(self) -> bool:
        return self.quiet >= self.timeout and self._looks >= LEAST_LOOKS

    @property
    def due(self) -> bool:
        """Whether it is time to look again."""
        return time.monotonic() - self.checked_at >= max(SHORTEST, self.timeout / LOOKS)

    def begin_anew(self) -> None:
        """It got on, or one that it may have waited for ended."""
        self.moved = time.monotonic()
        self._looks = 0
        self._begin_stretch(0.0)

    def _begin_stretch(self, quiet: float) -> None:
        # The kernel counts a wait when it is over: what counts is worked out of long stretches, not of looks.
        self.quiet = self._earlier = quiet
        self._start = time.monotonic(), self._before

    def look(self, bound: float) -> None:
        """Look whether the rank got on since the last time. It is not ``quiet`` for longer than ``bound``:
        those are that it may be waiting for."""
        self.checked_at, signs = time.monotonic(), self._signs()
        before, self._before = self._before, signs
        if signs.gets_on(before) and not self.files.loop.exists():
            self.begin_anew()
            return
        self._looks += 1
        since, start = self._start
        run, wait = max(0.0, signs.run - start.run), max(0.0, signs.wait - start.wait)
        self.quiet = self._earlier + counted(self.checked_at - since, run, wait)
        if self.quiet > bound:
            self._begin_stretch(bound)

    def _signs(self) -> Signs:
        tree = [self.pid, *descendants(self.pid)]
        seconds = [_cpu_seconds(pid) for pid in tree]
        return Signs(
            self.events.value, sum(map(_file_bytes, tree)), sum(map(_most_memory, tree)),
            sum(run for run, _ in seconds), sum(wait for _, wait in seconds),
        )  # fmt: skip

    def end(self) -> None:
        """Let it write where it stands, then end it and all that it started, as one that hangs."""
        self.hung = True
        shown(self.pid, self.files.stack)
        kill_tree(self.pid)


def shown(pid: int, stack: Path) -> str:
    """Where a process stands, one that is stopped, too: a dump of its threads (``faulthandler``), which it
    writes to the file ``stack`` when it is asked. What there is of one after `SHOWING` seconds."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR1)
        os.kill(pid, signal.SIGCONT)
    until, before, text = time.monotonic() + SHOWING, "", ""
    while time.monotonic() < until and not (text and text == before):
        time.sleep(SHORTEST)
        with contextlib.suppress(OSError):
            before, text = text, stack.read_text(errors="replace")
    return text


def kill_tree(pid: int) -> None:
    """End a process and all that it started, also what went into a group or session of its own."""
    for target in (pid, *descendants(pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(target, signal.SIGKILL)


def _cpu_seconds(pid: int) -> tuple[float, float]:
    """Seconds that the threads of a process ran, and that they were ready to (``/proc/PID/schedstat``; a
    kernel without it says nothing, and all time counts)."""
    run = wait = 0
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            if fields := read_file(f"/proc/{pid}/task/{thread}/schedstat", short=True).split():
                run, wait = run + int(fields[0]), wait + int(fields[1])
    return run / 1e9, wait / 1e9


def _file_bytes(pid: int) -> int:
    text = read_file(f"/proc/{pid}/io", short=True)
    return sum(int(number) for number in re.findall(rb"^[rw]char: (\d+)", text, re.MULTILINE))


def _most_memory(pid: int) -> int:
    return int(read_status(pid).get("VmHWM", "0").split()[0]) * 1024


OFTEN = 20
"""Times that a place reads the same answer, after which its loop is looked at."""
MOST_READS = 10_000
"""Different reads that are remembered."""


@dataclass
class WaitingLoops:
    """Loops of the user's program that wait for a value of the device which never changes.

    ``while x.sum().item() < 100`` issues operators, allocates, and may print, for ever: on the absent device
    the host reads the same stand-in each time. Such a loop does nothing for the first time: the same places
    read the same answers, no operator or collective comes that was not there before (each row of their tables
    is distinct), and no optimiser steps. That it is no long evaluation shows in its source: what is in a
    ``for`` loop ends with what it iterates over. While a ``while`` of the user's files is like that, it does
    not get on, and its place lies in a file.

    ``waiting``: the file that names the loop while there is one. ``count``: of all that is distinct and
    was recorded."""

    waiting: Path
    count: Callable[[], int]
    _reads: set[tuple[CodeType, int, float]] = field(default_factory=set)
    _again: Counter[tuple[CodeType, int, float]] = field(default_factory=Counter)
    _counted: int = 0
    _reported: bool = False

    def read(self, frame: FrameType | None, answer: float) -> None:
        """The host has read ``answer`` of the device, for the user's ``frame``."""
        if frame is None:
            return
        read, counted = (frame.f_code, frame.f_lasti, answer), self.count()
        if counted != self._counted or read not in self._reads:
            self.anew()
            self._counted = counted
            if len(self._reads) == MOST_READS:
                self._reads.clear()
            self._reads.add(read)
        self._again[read] += 1
        if not self._reported and self._again[read] % OFTEN == 0 and (place := _endless(frame)):
            self._reported = True
            self.waiting.write_text(place)

    def anew(self) -> None:
        """Something has happened for the first time."""
        self._again.clear()
        if self._reported:
            self._reported = False
            self.waiting.unlink()


def _endless(frame: FrameType | None) -> str:
    """The innermost loop of the user's files around ``frame``, if it is a ``while``; else nothing."""
    while frame is not None:
        code = frame.f_code
        loop = innermost(code.co_filename, frame.f_lineno) if failure.is_own(code.co_filename) else None
        if loop is not None:
            is_while = isinstance(loop, ast.While)
            return failure.name_place(code.co_filename, loop.lineno, code.co_name) if is_while else ""
        frame = frame.f_back
    return ""


LOOPS = (ast.While, ast.For, ast.AsyncFor)


def innermost(filename: str, line: int) -> ast.While | ast.For | ast.AsyncFor | None:
    """The loop of a source around a line, within the function that the line is in."""
    kinds = (*LOOPS, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in source_nodes(filename) if isinstance(node, kinds)]
    around = [node for node in nodes if node.lineno <= line <= (node.end_lineno or 0)]
    last = max(around, key=lambda node: node.lineno, default=None)
    return last if isinstance(last, LOOPS) else None


@functools.cache
def source_nodes(filename: str) -> list[ast.AST]:
    """All parts of a source; none of what cannot be read."""
    try:
        return list(ast.walk(ast.parse("".join(linecache.getlines(filename)))))
    except SyntaxError:
        return []
