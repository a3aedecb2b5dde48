"""The supervisor in a process of its own: ``python -m windtunnel.training.elastic.live.supervise CONFIG``.

CONFIG is JSON: run (its name), folder, secret (its file), tls (files of certificates), rules, places,
per_host, host, port, forkserver, beat, lease, config. On stdout, a line of JSON each:
``{"address": …, "epoch": …}`` once it listens, ``{"order": count}`` for every order of hosts,
``{"alive": true}`` now and then. It can be killed and started again; ``--after`` is the epoch of the
supervisor that it follows. On ``--lifeline`` its launcher says now and then that it moves. When the launcher
is gone it goes, too, and leaves the run to the next one; while it stands still the supervisor goes on, but no
longer says that the run is led.

Exit status 0, 1 or 3 as the run ended, 2 for a wrong input, whose sentence is on stderr, `SUPERSEDED` where
another supervisor leads the run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from windtunnel.base.errors import UserError
from windtunnel.base.keys import Keys
from windtunnel.base.processes import Adopted, Identity, boot_id, start_time
from windtunnel.linux import processes
from windtunnel.linux.forkserver_client import ForkServerClient
from windtunnel.store.eventlog import Fenced, LogFailed
from windtunnel.training.elastic.live import forked
from windtunnel.training.elastic.live.supervisor import Deadlines, Supervisor
from windtunnel.training.elastic.live.supervisor.leadership import Superseded
from windtunnel.training.elastic.live.supervisor.stores import StoreProcess
from windtunnel.training.elastic.policy.rules import Rules

SUPERSEDED = 4
LOG = "WINDTUNNEL_LOG"
"""Environment variable: the URL of the log where it is in a database; it may hold a password."""
ALIVE = 0.2
"""Seconds between signs of life, on stdout and of the launcher."""
STUCK = 10.0
"""Seconds without a sign from a process that is not stopped, after which it counts as silent."""


def main(arguments: list[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="supervise")
    parser.add_argument("config", type=Path)
    parser.add_argument("--after", type=int, required=True)
    parser.add_argument("--lifeline", type=int, required=True)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the launcher
    try:
        status = supervise(json.loads(options.config.read_text()), options.after, options.lifeline)
    except (Superseded, Fenced) as error:
        print(f"windtunnel: {error}", file=sys.stderr)
        status = SUPERSEDED
    except (UserError, LogFailed) as error:
        print(f"windtunnel: {error}", file=sys.stderr)
        status = 2
    sys.stdout.flush()
    os._exit(status)


def supervise(plain: dict[str, Any], after: int, lifeline: int) -> int:
    """Supervise until the run is over: its exit status."""
    forks = ForkServerClient(Path(plain["forkserver"]), lambda _: None)

    def start_store() -> tuple[str, StoreProcess]:
        address, pid = forked.start_store(forks, plain["host"], plain["secret"], plain["tls"])
        return address, Adopted(Identity(pid, start_time(pid) or 0, boot_id()))

    url = os.environ.pop(LOG, "")
    if url:
        from windtunnel.store.sharedlog import SharedLog

        shared = SharedLog(url, plain["run"])
    launcher = _Launcher(os.getppid(), lifeline, plain["lease"])
    supervisor = Supervisor(
        Path(plain["folder"]),
        Rules(**plain["rules"]),
        plain["places"],
        plain["per_host"],
        start_store=start_store,
        order_hosts=lambda count: _say(order=count),
        keys=Keys.of_job(plain["secret"], plain["tls"]),
        beat=plain["beat"],
        lease=plain["lease"],
        listen=(plain["host"], plain["port"]),
        deadlines=Deadlines(**plain["deadlines"]),
        config=plain["config"],
        after=after,
        attended=launcher.moves,
        shared=shared if url else None,
        alive=_Signs().due,
        strike=partial(_strike, launcher.pid),
    )
    signal.signal(signal.SIGTERM, lambda *_: supervisor.stop("ended by the launcher"))
    threading.Thread(target=launcher.watch, args=(supervisor.abandon,), name="lifeline", daemon=True).start()
    _say(address=supervisor.address, epoch=supervisor.epoch)
    status = supervisor.run().status
    return SUPERSEDED if supervisor.superseded else status


def _strike(launcher: int, action: str) -> None:
    if action == "stop-supervisor":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action == "kill-launcher" and os.getppid() == launcher:
        os.kill(launcher, signal.SIGKILL)


class _Launcher:
    """The process that keeps this one, with the seconds of its ``lease`` once it is stopped."""

    def __init__(self, pid: int, lifeline: int, lease: float) -> None:
        self.pid, self._lifeline, self._lease = pid, lifeline, lease
        self._heard = time.monotonic()

    def watch(self, gone: Callable[[], None]) -> None:
        """Hear its signs until there is nobody more to give one."""
        while os.read(self._lifeline, 1 << 12):
            self._heard = time.monotonic()
        gone()

    def moves(self) -> bool:
        """Soon no more where the kernel says that it is stopped, later where it may want for a processor."""
        silent = time.monotonic() - self._heard
        return silent < self._lease or (silent < STUCK and processes.state(self.pid) not in ("T", "t"))


class _Signs:
    """Says now and then that the supervisor's own thread goes round; not to a launcher that does not read."""

    def __init__(self) -> None:
        self._next = 0.0

    def due(self) -> None:
        now = time.monotonic()
        if now >= self._next and select.select([], [1], [], 0.0)[1]:
            self._next = now + ALIVE
            _say(alive=True)


def _say(**fields: Any) -> None:
    with contextlib.suppress(BrokenPipeError):  # the launcher is gone, and so are we in a moment
        os.write(1, json.dumps(fields).encode() + b"\n")


if __name__ == "__main__":
    main()
