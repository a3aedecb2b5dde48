"""A control plane in this host, at which processes are killed while it works: what is lost, and what comes twice.

A scheduler and some workers are real processes. Each task leaves a line in a file (how often its command ran) and
makes a file that must not be there (its effect, which cannot come twice); the task's row is done once. At random
moments a random process gets SIGKILL and is started again.
"""

from __future__ import annotations

import multiprocessing
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from windtunnel.base.errors import HostError, UserError
from windtunnel.control.database.handlers import GROUP
from windtunnel.control.database.live.control import Control, Wrap, open_control
from windtunnel.control.database.live.serve import serve
from windtunnel.control.database.live.worker import WorkerProcess
from windtunnel.linux.system import end_with_parent
from windtunnel.store import eventlog

LEASE = 2.0
_COMMAND = 'echo $WINDTUNNEL_KEY >> "$0/runs"; set -C; true > "$0/effect-$WINDTUNNEL_KEY" || true'
_FIGURES = """SELECT count(*), coalesce(sum(CASE WHEN state = 'done' THEN 1 ELSE 0 END), 0), max(ended),
    avg(assigned - created), max(assigned - created), coalesce(sum(CASE WHEN state = 'failed' THEN 1 ELSE 0 END), 0)
FROM task WHERE key LIKE '{name}-%'"""


def process(role: str, url: str, policy: str, log: Path, wrap: Wrap | None) -> None:
    """What a process of the demo does, as scheduler or as a worker, until it gets SIGTERM."""
    end_with_parent()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control, events = open_control(url, option="--db", wrap=wrap), eventlog.EventLog(log)
    if role == "scheduler":
        serve(control, stop, policy=policy, log=events)
    else:
        WorkerProcess(control, role, slots=4, lease=LEASE, log=events).run(stop)


def demo(
    url: str, log: Path, *, workers: int = 2, tasks: int = 1000, kill: int = 3, policy: str = "least", seed: int = 0,
    wrap: Wrap | None = None, limit: float = 300.0, progress: Callable[[str, float], object] = lambda what, part: None,
) -> dict[str, Any]:  # fmt: skip
    """What came of ``tasks`` commands on ``workers`` while ``kill`` processes were killed; seconds. Decisions go to
    the event log at ``log``; ``wrap`` as for `open_control`, it goes to other processes.

    Raises:
        UserError: others use the database.
        HostError: it did not end within ``limit`` seconds.
    """
    control = open_control(url, option="--db", create=True, wrap=wrap)
    busy = "SELECT count(*) FROM task WHERE state NOT IN ('done', 'failed')"
    live = "SELECT count(*) FROM load WHERE state = 'live'"
    if any(control.query(statement)[1][0][0] for statement in (busy, live)):
        raise UserError("demo: --db is at work (tasks wait there, or workers are live); give another database")
    name, rng, context = f"demo-{time.time_ns()}", random.Random(seed), multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    roles = ["scheduler", *(f"{name}-worker-{number}" for number in range(workers))]
    running: dict[str, BaseProcess] = {}

    def start(role: str) -> None:
        running[role] = context.Process(target=process, args=(role, url, policy, log, wrap))
        running[role].start()

    with tempfile.TemporaryDirectory() as folder:
        try:
            for role in roles:
                start(role)
            listener, began = control.listen("scheduler"), time.time()
            for first in range(0, tasks, GROUP):
                control.run("submit", tasks=[
                    {"key": f"{name}-{number}", "command": ["sh", "-c", _COMMAND, folder]}
                    for number in range(first, min(tasks, first + GROUP))
                ])  # fmt: skip
            at = sorted(rng.randrange(1, max(2, tasks)) for _ in range(kill))
            killed = list[str]()
            while True:
                listener.wait(0.2)
                _, done, ended, mean, longest, failed = control.query(_FIGURES.format(name=name))[1][0]
                progress(f"{done} of {tasks} tasks, {len(killed)} kills", done / tasks)
                while len(killed) < kill and (done >= at[len(killed)] or done + failed == tasks):
                    killed.append(victim := rng.choice(roles))
                    running[victim].kill()
                    running[victim].join()
                    start(victim)
                if done + failed >= tasks:
                    break
                if time.time() - began > limit:
                    raise HostError(f"demo: {done} of {tasks} tasks are done after {limit:g} s")
            listener.close()
        finally:
            for one in running.values():
                one.terminate()
            for one in running.values():
                one.join()
        runs, effects = (Path(folder) / "runs").read_text().split(), len(list(Path(folder).glob("effect-*")))
    decisions = control.query(f"SELECT count(*) FROM history WHERE key LIKE '{name}-%'")[1][0][0]
    seconds = ended - began
    return {
        "tasks": tasks, "done": done, "failed": failed, "lost": tasks - done - failed, "effects": effects,
        "runs": len(runs), "begun_again": len(runs) - len(set(runs)), "killed": killed, "policy": policy,
        "seconds": seconds, "decisions": decisions, "decisions_per_second": decisions / seconds,
        "wait_mean_seconds": mean, "wait_longest_seconds": longest,
    }  # fmt: skip
