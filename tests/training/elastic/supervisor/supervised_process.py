"""A supervisor in a process of its own, with a fake store, so that it can be killed and stopped.

``python supervised_process.py FOLDER PLACES LEASE``; ends with the outcome's status.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from support.secret import KEYS
from support.waiting import PATIENCE, until
from windtunnel.store import eventlog
from windtunnel.training.elastic.live.supervisor import Supervisor
from windtunnel.training.elastic.policy.rules import Rules
from windtunnel.training.elastic.policy.state import Deadlines, SupervisorSettings, past

TESTS = Path(__file__).parents[3]


def start(folder: Path, places: int, lease: float = 1.0) -> tuple[subprocess.Popen[bytes], str]:
    """A supervisor's process and its address."""
    path = folder / eventlog.NAME
    before = past(eventlog.read(path)).epoch
    command = [sys.executable, __file__, str(folder), str(places), str(lease)]
    process = subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": f"{TESTS}:{os.environ.get('PYTHONPATH', '')}"}
    )

    def listening() -> str | None:
        assert process.poll() is None, "the supervisor ended"
        now = past(eventlog.read(path))
        return now.address if now.epoch > before else None

    return process, until(listening, "the supervisor's address")


@contextlib.contextmanager
def supervised(
    folder: Path, places: int, lease: float = 1.0
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    process, address = start(folder, places, lease)
    try:
        yield process, address
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait(PATIENCE)


def main() -> None:
    folder, places, lease = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    supervisor = Supervisor(
        folder,
        Rules(),
        SupervisorSettings(places, 1, 0.02, lease, deadlines=Deadlines(grace=10.0, back=10.0, suspect=0.2)),
        order_hosts=lambda count: None,
        keys=KEYS,
    )
    sys.exit(supervisor.run().status)


if __name__ == "__main__":
    main()
