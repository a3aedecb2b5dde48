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

from fake_agents import FakeStore

from support.secret import KEYS
from support.waiting import PATIENCE, until
from windtunnel.training.elastic.live.supervisor import Deadlines, Supervisor, leadership
from windtunnel.training.elastic.policy.rules import Rules

TESTS = Path(__file__).parents[3]


def start(folder: Path, places: int, lease: float = 1.0) -> tuple[subprocess.Popen[bytes], str]:
    """A supervisor's process and its address."""
    record = leadership.FileRecord(folder)
    before = record.read().epoch
    command = [sys.executable, __file__, str(folder), str(places), str(lease)]
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(TESTS)})

    def listening() -> str | None:
        assert process.poll() is None, "the supervisor ended"
        leader = record.read()
        return leader.address if leader.epoch > before and leader.beat else None

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
        Rules(order=False),
        places,
        1,
        start_store=lambda: ("127.0.0.1:1", FakeStore()),
        order_hosts=lambda count: None,
        keys=KEYS,
        beat=0.02,
        lease=lease,
        deadlines=Deadlines(grace=10.0, back=10.0, suspect=0.2),
    )
    sys.exit(supervisor.run().status)


if __name__ == "__main__":
    main()
