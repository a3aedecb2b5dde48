"""A control plane in this host whose processes are killed while it works: what is lost, and what comes twice.

A scheduler and some workers are real processes. Each task writes a line (how often its command ran) and makes
a file that must not be there (its effect, which cannot come twice); its row is done once. At random moments a
random process gets SIGKILL and is started again. As threads of one process they can be recorded."""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from windtunnel.base.errors import HostError, UserError
from windtunnel.control.database.handlers import GROUP, HANDLERS
from windtunnel.control.database.live.control import Control, Wrap, open_control
from windtunnel.control.database.live.serve import serve
from windtunnel.control.database.live.worker import WorkerProcess
from windtunnel.linux.system import end_with_parent
from windtunnel.store.eventlog import EventLog
from windtunnel.store.transactions import Transactions

SLOTS = 16
_COMMAND = 'echo $WINDTUNNEL_KEY >> "$0/runs"; set -C; true > "$0/effect-$WINDTUNNEL_KEY" || true'
_BUSY = """SELECT count(*) FROM task WHERE state NOT IN ('done', 'failed')
    UNION ALL SELECT count(*) FROM load WHERE state = 'live'"""
_ENDED = """SELECT count(CASE WHEN state = 'done' THEN 1 END), count(CASE WHEN state = 'failed' THEN 1 END),
    max(ended), avg(assigned - created), max(assigned - created) FROM task WHERE substr(key, 1, {}) = '{}'"""
_DECISIONS = "SELECT count(*) FROM history WHERE substr(key, 1, {}) = '{}'"


def process(role: str, url: str, policy: str, log: Path) -> None:
    """What the scheduler, or a worker of another name, does until it gets SIGTERM."""
    end_with_parent()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _work(open_control(url, option="--db"), role, stop, policy, log)


def _work(control: Control, role: str, stop: threading.Event, policy: str, log: Path) -> None:
    if role == "scheduler":
        serve(control, stop, policy=policy, log=EventLog(log))
    else:
        WorkerProcess(control, role, slots=SLOTS, lease=10.0).run(stop)


@contextlib.contextmanager
def _threads(control: Control, roles: list[str], policy: str, log: Path) -> Iterator[None]:
    stop = threading.Event()
    threads = [threading.Thread(target=_work, args=(control, role, stop, policy, log)) for role in roles]
    try:
        for thread in threads:
            thread.start()
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def demo(
    url: str, log: Path, *, workers: int = 2, tasks: int = 1000, kill: int = 3, policy: str = "least",
    seed: int = 0, wrap: Wrap | None = None, limit: float = 300.0,
    progress: Callable[[str, float], object] = lambda what, part: None,
) -> dict[str, Any]:  # fmt: skip
    """What came of ``tasks`` commands on ``workers`` while ``kill`` processes were killed. Decisions go to
    the event log at ``log``. With ``wrap``, as of `open_control`, all are threads of this process.

    Raises:
        UserError: others use the database, or threads are to be killed.
        HostError: it did not end within ``limit`` seconds.
    """
    if wrap and kill:
        raise UserError(f"demo: `kill` is {kill}, accepted is 0 where all is one process that is recorded")
    control = open_control(url, option="--db", create=True)
    if any(count for (count,) in control.query(_BUSY)[1]):
        raise UserError(
            "demo: --db is at work (tasks wait there, or workers are live); give another database"
        )
    if wrap:
        control = Control(control.engine, wrap(Transactions(control.engine, HANDLERS)))
    name, rng, context = (
        f"demo-{time.time_ns()}-",
        random.Random(seed),
        multiprocessing.get_context("forkserver"),
    )
    context.set_forkserver_preload([__name__])
    roles = ["scheduler", *(f"demo-{number}" for number in range(workers))]
    running: dict[str, BaseProcess] = {}

    def start(role: str) -> None:
        running[role] = context.Process(target=process, args=(role, url, policy, log))
        running[role].start()

    with (
        tempfile.TemporaryDirectory() as folder,
        _threads(control, roles if wrap else [], policy, log),
    ):
        try:
            for role in () if wrap else roles:
                start(role)
            keys, began = [f"{name}{number}" for number in range(tasks)], time.time()
            words = ["sh", "-c", _COMMAND, folder]
            for at in range(0, tasks, GROUP):
                control.run("submit", tasks=[{"key": key, "command": words} for key in keys[at : at + GROUP]])
            moments, killed = sorted(rng.randrange(tasks) for _ in range(kill)), list[str]()
            done = failed = 0
            while done + failed < tasks:
                time.sleep(0.1)
                done, failed, ended, mean, longest = control.query(_ENDED.format(len(name), name))[1][0]
                progress(f"{done} of {tasks} tasks, {len(killed)} kills", done / tasks)
                while len(killed) < kill and done >= moments[len(killed)]:
                    killed.append(rng.choice(roles))
                    running[killed[-1]].kill()
                    running[killed[-1]].join()
                    start(killed[-1])
                if time.time() - began > limit:
                    raise HostError(f"demo: {done} of {tasks} tasks are done after {limit:g} s")
        finally:
            for child in running.values():
                child.terminate()
            for child in running.values():
                child.join()
        runs = Path(folder, "runs").read_text().split()
        effects = len(list(Path(folder).glob("effect-*")))
    if not wrap:  # one that ended before it could say so holds a lease, and the next demo would be refused
        control.run("join", workers=[[role, SLOTS, ""] for role in roles[1:]], lease=0.0)
        control.run("expire")
    decisions = control.query(_DECISIONS.format(len(name), name))[1][0][0]
    return {
        "tasks": tasks, "done": done, "failed": failed, "lost": tasks - done - failed, "effects": effects,
        "begun_again": len(runs) - len(set(runs)), "killed": killed, "policy": policy,
        "seconds": ended - began, "decisions": decisions, "decisions_per_second": decisions / (ended - began),
        "wait_mean_seconds": mean, "wait_longest_seconds": longest,
    }  # fmt: skip
