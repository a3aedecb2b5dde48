"""The supervisor in a process of its own: ``python -m windtunnel.training.elastic.live.supervise CONFIG``.

CONFIG is JSON: folder, secret (its file), rules, places, per_host, host, port, forkserver, beat, lease,
config. On stdout, a line of JSON each: ``{"address": …}`` once it listens, ``{"order": count}`` for every
order of hosts. It can be killed and started again on the same folder; exit status 0 or 1 as the run ended,
2 for a wrong input, whose sentence is on stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from windtunnel.base.errors import UserError
from windtunnel.base.keys import Keys
from windtunnel.base.processes import start_time
from windtunnel.linux.forkserver_client import ForkServerClient
from windtunnel.training.elastic.live import forked
from windtunnel.training.elastic.live.supervisor import Deadlines, Supervisor
from windtunnel.training.elastic.live.supervisor.stores import Adopted, StoreProcess
from windtunnel.training.elastic.policy.rules import Rules


def main(arguments: list[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="supervise")
    parser.add_argument("config", type=Path)
    parser.add_argument("--lifeline", type=int, default=None)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the launcher
    try:
        status = supervise(json.loads(options.config.read_text()), options.lifeline)
    except UserError as error:
        print(f"windtunnel: {error}", file=sys.stderr)
        status = 2
    sys.stdout.flush()
    os._exit(status)


def supervise(plain: dict[str, Any], lifeline: int | None = None) -> int:
    """Supervise until the run is over: its exit status."""
    forks = ForkServerClient(Path(plain["forkserver"]), lambda _: None)

    def start_store() -> tuple[str, StoreProcess]:
        address, pid = forked.start_store(forks, plain["host"], Path(plain["secret"]))
        return address, Adopted(pid, start_time(pid) or 0)

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
    )
    signal.signal(signal.SIGTERM, lambda *_: supervisor.stop("ended by the launcher"))
    if lifeline is not None:
        threading.Thread(target=_watch, args=(supervisor, lifeline), name="lifeline", daemon=True).start()
    _say(address=supervisor.address)
    return supervisor.run().status


def _watch(supervisor: Supervisor, lifeline: int) -> None:
    poll = select.poll()
    poll.register(lifeline, select.POLLIN | select.POLLHUP)
    poll.poll()
    supervisor.stop("the launcher is gone")


def _say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


if __name__ == "__main__":
    main()
