"""The supervisor in a process of its own: ``python -m windtunnel.training.elastic.live.supervise CONFIG``.

CONFIG is JSON: run (its name), folder, secret (its file), rules, places, per_host, host, port, forkserver,
beat, lease, config. On stdout, a line of JSON each: ``{"address": …, "epoch": …}`` once it listens,
``{"order": count}`` for every order of hosts, ``{"alive": true}`` now and then. It can be killed and started
again; ``--after`` is the epoch of the supervisor that it follows. When its launcher is gone it goes, too, and
leaves the run to the next one.

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
from functools import partial
from pathlib import Path
from typing import Any

from windtunnel.base.errors import UserError
from windtunnel.base.keys import Keys
from windtunnel.base.processes import Adopted, Identity, boot_id, start_time
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
"""Seconds between signs of life on stdout."""


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
        address, pid = forked.start_store(forks, plain["host"], Path(plain["secret"]))
        return address, Adopted(Identity(pid, start_time(pid) or 0, boot_id()))

    url = os.environ.pop(LOG, "")
    if url:
        from windtunnel.store.sharedlog import SharedLog

        shared = SharedLog(url, plain["run"])
    supervisor = Supervisor(
        Path(plain["folder"]),
        Rules(**plain["rules"]),
        plain["places"],
        plain["per_host"],
        start_store=start_store,
        order_hosts=lambda count: _say(order=count),
        keys=Keys.read(Path(plain["secret"]), "the job's secret"),
        beat=plain["beat"],
        lease=plain["lease"],
        listen=(plain["host"], plain["port"]),
        deadlines=Deadlines(**plain["deadlines"]),
        config=plain["config"],
        after=after,
        shared=shared if url else None,
        alive=_Signs().due,
        strike=partial(_strike, os.getppid()),
    )
    signal.signal(signal.SIGTERM, lambda *_: supervisor.stop("ended by the launcher"))
    threading.Thread(target=_watch, args=(supervisor, lifeline), name="lifeline", daemon=True).start()
    _say(address=supervisor.address, epoch=supervisor.epoch)
    status = supervisor.run().status
    return SUPERSEDED if supervisor.superseded else status


def _watch(supervisor: Supervisor, lifeline: int) -> None:
    poll = select.poll()
    poll.register(lifeline, select.POLLIN | select.POLLHUP)
    poll.poll()
    supervisor.abandon()


def _strike(launcher: int, action: str) -> None:
    if action == "stop-supervisor":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif action == "kill-launcher" and os.getppid() == launcher:
        os.kill(launcher, signal.SIGKILL)


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
