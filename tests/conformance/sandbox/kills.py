"""Random kills over the programs of the matrix.

A program in the middle of its work is forked from its checkpoint, writes a mark and is checkpointed; then, at
an instant drawn by chance, something dies by SIGKILL: the whole sandbox, the daemon, CRIU, or one process
inside; in a turn, in a dump, while the image is stored, or in a restore. Whatever the operation said, the
newest checkpoint is restored then, and is held to three things: a checkpoint that was acknowledged is the
newest, the mark is the one of its time, and the program's own check passes, then and after it went on. Where
the checkpoint said itself that it holds less, or one process inside was killed (a later checkpoint may hold
that damage), the one before is restored, as who was told would do.

What dies when is drawn from a seed; the instants are those of a running machine, and differ.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Literal

import psutil

from agents.sandbox.daemon.daemons import pid_of
from benchmarks.agents.sandbox.harness import new_name, own_home
from benchmarks.harness.rows import Row, figure, left_out
from conformance.sandbox.matrix import judge
from conformance.sandbox.matrix.arena import OfHost
from conformance.sandbox.matrix.row import MatrixRow
from conformance.sandbox.matrix.run import ROWS, environment, image_of, missing
from windtunnel.agents.sandbox.client import Client, RemoteBox, connect
from windtunnel.agents.sandbox.context import FAULTS
from windtunnel.agents.sandbox.daemon import wait_gone
from windtunnel.agents.sandbox.errors import IncompleteError, MachineError, SandboxError
from windtunnel.agents.sandbox.machine import launch
from windtunnel.agents.sandbox.place import Home
from windtunnel.base.errors import UserError

KILLS, QUICK_KILLS = 300, 24
SECONDS = 900.0
"""After which no further kill is begun; how many were is told."""
CHEAP = (
    "bash with", "git rebase", "Python with threads", "Python multiprocessing", "Python asyncio",
    "Python http.server", "redis", "node with", "nginx", "ssh-agent",
)  # fmt: skip
"""Beginnings of the names of rows that need little time, and hold nothing that no checkpoint holds."""
When = Literal["in a turn", "in a dump", "while it is stored", "in a restore"]


def processes_of(home: Home, box: str, of: int | None = None) -> list[psutil.Process]:
    """CRIU programs that this process (or the one with pid ``of``) runs for one sandbox: they name its
    control group, or the folder of its restore."""
    group, folder = f"windtunnel-{home.tag}/{box}", f".{box}."
    processes = []
    for child in psutil.Process(of).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if child.name() == "criu" and any(
                word.endswith(group) or folder in word for word in child.cmdline()
            ):
                processes.append(child)
    return processes


What = Literal["the sandbox", "the daemon", "CRIU", "a process inside"]
PAIRS: tuple[tuple[When, What], ...] = (
    ("in a turn", "the sandbox"), ("in a turn", "the daemon"), ("in a turn", "a process inside"),
    ("in a dump", "the sandbox"), ("in a dump", "the daemon"), ("in a dump", "CRIU"),
    ("in a dump", "a process inside"), ("while it is stored", "the sandbox"),
    ("while it is stored", "the daemon"), ("in a restore", "the sandbox"), ("in a restore", "the daemon"),
    ("in a restore", "CRIU"),
)  # fmt: skip
WITHIN: dict[When, float] = {
    "in a turn": 0.3, "in a dump": 0.03, "while it is stored": 0.02, "in a restore": 0.15,
}  # fmt: skip
"""Seconds from the stage's beginning within which the kill comes."""
GIVE_UP = 30.0
"""Seconds after which a stage that never began is given up."""


@dataclass(frozen=True)
class RandomKill:
    """``share`` (0 to 1) of the stage's time passes first; ``seed`` draws which process dies."""

    row: MatrixRow
    when: When
    what: What
    share: float
    seed: int

    @property
    def words(self) -> str:
        return f"{self.what} {self.when} ({self.row.name})"


@dataclass(frozen=True)
class KillEnd:
    """``wrong``: in words, empty when all is right. ``silent``: every operation after the kill had said that
    all is well. ``landed``: the kill came while its stage went on."""

    kill: RandomKill
    landed: bool
    wrong: str = ""
    silent: bool = False


def kills_rows(quick: bool) -> Iterator[Row]:
    """How many kills were wrong, how many of these in silence, and which."""
    rows = [row for row in ROWS if row.name.startswith(CHEAP) and not missing(row)]
    planned = plan(rows, QUICK_KILLS if quick else KILLS)
    begin = time.monotonic()
    lanes = min(2, os.cpu_count() or 1)
    with ThreadPoolExecutor(lanes) as pool:
        shares = [planned[at::lanes] for at in range(lanes)]
        ends = [end for done in pool.map(partial(_lane, begin + SECONDS), shares) for end in done]
    yield from judged_rows(planned, ends)


def judged_rows(planned: Sequence[RandomKill], ends: Sequence[KillEnd]) -> Iterator[Row]:
    wrong = [end for end in ends if end.wrong]
    silent = [end for end in wrong if end.silent]
    hits = Counter((end.kill.what, end.kill.when) for end in ends if end.landed)
    tally = Counter((end.kill.what, end.kill.when) for end in ends)
    notes = [f"{what} {when}: {hits[what, when]} of {count}" for (what, when), count in sorted(tally.items())]
    notes += [f"WRONG {end.kill.words}: {end.wrong[:200]}" for end in wrong]
    whole = len(ends) == len(planned)
    if not whole:
        notes.insert(0, f"{len(planned) - len(ends)} of {len(planned)} were not begun in {SECONDS:g} s")
    if not ends:
        yield left_out("random kills over the matrix programs", "; ".join(notes))
        return
    name = f"of {len(ends)} random kills over the matrix programs"
    yield figure(
        f"{name}, wrong", "kills", len(wrong), "0", passed=whole and not wrong,
        note="hit their stage: " + "; ".join(notes),
    )  # fmt: skip
    yield figure(f"{name}, wrong in silence", "kills", len(silent), "0", passed=whole and not silent)


def plan(rows: Sequence[MatrixRow], kills: int, seed: int = 1) -> list[RandomKill]:
    """So many kills: every pair of what and when comes as often as any other, over rows drawn by chance."""
    random = Random(seed)
    planned = []
    for number in range(kills if rows else 0):
        when, what = PAIRS[number % len(PAIRS)]
        planned.append(RandomKill(random.choice(rows), when, what, random.random(), random.randrange(2**32)))
    random.shuffle(planned)
    return planned


def _lane(until: float, kills: Sequence[RandomKill]) -> list[KillEnd]:
    """These kills one after the other, under a daemon of their own."""
    with own_home() as folder, ExitStack() as stack:
        client = stack.enter_context(connect(folder))
        stack.callback(_down, client, folder)
        lane = Lane(client, Home(folder))
        rows = {kill.row.name: kill.row for kill in kills}
        image = image_of(list(rows.values()))
        starts = {name: lane.start(row, image) for name, row in rows.items()}
        ends = []
        for kill in kills:
            if time.monotonic() > until:
                break
            ends.append(lane.struck(kill, starts[kill.row.name]))
        return ends


def _down(client: Client, folder: Path) -> None:
    client.down()
    wait_gone(folder)


@dataclass
class Lane:
    """Kills under one daemon, which is started again by whatever asks next."""

    client: Client
    home: Home

    def start(self, row: MatrixRow, image: str) -> str:
        """A checkpoint of ``row`` in the middle of its work; its sandbox stands still after that."""
        name = new_name("start")
        judge.start(OfHost(self.client, self.home), row, name, image, environment(row))
        checkpoint = self.client.get(name).checkpoint(full=True)
        self.client.get(name).stop()
        return checkpoint.id

    def struck(self, kill: RandomKill, start: str) -> KillEnd:
        """One kill, the recovery, and what is wrong after it."""
        name = new_name("kill")
        arena = OfHost(self.client, self.home)
        landed, said = False, ""
        try:
            self.client.fork(start, name=name)
            box = self.client.get(name)
            _must(box, "echo 1 > /row/mark")
            first = box.checkpoint(full=True).id
            stroke = Stroke(self.home, name, kill, pid_of(self.home.path))
            before = first if kill.what == "a process inside" else ""
            try:
                acknowledged = self._operation(kill, name, box, stroke)
            except IncompleteError:
                acknowledged, before = "", first
            landed = stroke.landed
            said = "the restore failed: "
            restored = box.restore(before).checkpoint
            said = ""
            if acknowledged and not before and restored != acknowledged:
                return KillEnd(kill, landed, f"checkpoint {acknowledged} was acknowledged and is gone", True)
            wanted = "1" if restored == first else "2"
            _must(box, f"cat /row/mark; test $(cat /row/mark) = {wanted}")
            wrong = judge.failed(arena, kill.row, name, "after the restore")
            wrong = wrong or judge.failed(arena, kill.row, name, "going on")
            return KillEnd(kill, landed, wrong, bool(wrong))
        except judge.WrongRow as error:
            return KillEnd(kill, landed, str(error), True)
        except (SandboxError, UserError, *FAULTS) as error:
            return KillEnd(kill, landed, f"{said}{error}")
        finally:
            arena.remove(name)

    def _operation(self, kill: RandomKill, name: str, box: RemoteBox, stroke: Stroke) -> str:
        """Do what is struck, whatever becomes of it; the checkpoint that it acknowledged. IncompleteError
        where that is told to hold less."""
        if kill.when != "in a turn":
            _must(box, "echo 2 > /row/mark")
        if kill.when == "in a restore":
            launch.group(self.home, name).kill()
        with stroke:
            try:
                if kill.when == "in a turn":
                    box.run(f"echo 2 > /row/mark; {kill.row.check}; sleep 0.3", timeout=kill.row.seconds)
                elif kill.when == "in a restore":
                    box.restore()
                else:
                    return box.checkpoint(full=True).id
            except IncompleteError:
                if kill.when != "in a restore":
                    raise
            except (SandboxError, *FAULTS):
                pass
        return ""


def _must(box: RemoteBox, command: str) -> None:
    done = box.run(command, timeout=30)
    if done.exit_code != 0:
        raise judge.WrongRow(f"{command}: {done.ended} {done.exit_code}: {done.text.strip()[-200:]}")


class Stroke:
    """The kill itself, by a thread of its own that waits for the stage within the block."""

    def __init__(self, home: Home, box: str, kill: RandomKill, daemon: int) -> None:
        self.landed = False
        self._home, self._box, self._kill, self._daemon = home, box, kill, daemon
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._strike, name="bench-kill", daemon=True)

    def __enter__(self) -> Stroke:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _strike(self) -> None:
        when = self._kill.when
        with contextlib.suppress(psutil.NoSuchProcess):
            if when in ("in a dump", "while it is stored") or self._kill.what == "CRIU":
                self._wait(there=True)
            if when == "while it is stored":
                self._wait(there=False)
            self._over.wait(self._kill.share * WITHIN[when])
            self.landed = not self._over.is_set()
            # what is to die may end by itself just now, and its group with it
            with contextlib.suppress(MachineError, OSError):
                self._kill_it()

    def _wait(self, *, there: bool) -> None:
        deadline = time.monotonic() + GIVE_UP
        while not self._over.is_set() and time.monotonic() < deadline:
            if bool(processes_of(self._home, self._box, self._daemon)) is there:
                return
            time.sleep(0.0005)

    def _kill_it(self) -> None:
        group = launch.group(self._home, self._box)
        if self._kill.what == "the sandbox":
            group.kill()
        elif self._kill.what == "the daemon":
            daemon = psutil.Process(self._daemon)
            daemon.kill()
            daemon.wait(GIVE_UP)
        elif self._kill.what == "CRIU":
            for program in processes_of(self._home, self._box, self._daemon):
                with contextlib.suppress(psutil.NoSuchProcess):
                    program.kill()
        else:
            inside = sorted(group.pids())
            if inside:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(Random(self._kill.seed).choice(inside), signal.SIGKILL)
