"""The store where process groups meet, in a process of its own, so that no rank is special.

``python -m windtunnel.training.survive.live.store PORT_FILE --run FOLDER`` serves a TCPStore on a free port,
writes the port to PORT_FILE, and ends when nobody has supervised the run in FOLDER for a while (the
supervisor's lock is free), so that it outlives a supervisor that is started again, and no longer.
`serve` is the same for a process that was forked with torch loaded; `spawn` starts a new interpreter.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from windtunnel.training.survive.live.supervisor.ownership import owned

ORPHAN_AFTER = 60.0
"""Seconds without a supervisor after which a store ends."""


def serve(port_file: Path, run: Path, host: str = "127.0.0.1", orphan_after: float = ORPHAN_AFTER) -> None:
    """Serve until the run has had no supervisor for ``orphan_after`` seconds."""
    import torch.distributed as dist

    listener = socket.create_server((host, 0), backlog=1024)
    port = listener.getsockname()[1]
    # the store takes the descriptor over: it listens at this host only, on a port that nobody can take first
    store = dist.TCPStore(  # type: ignore[attr-defined]
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    new = port_file.with_name(port_file.name + ".new")
    new.write_text(f"{store.port}\n")
    new.replace(port_file)
    alone = 0.0
    while alone < orphan_after:
        time.sleep(0.25)
        alone = 0.0 if owned(run) else alone + 0.25


def spawn(run: Path, host: str = "127.0.0.1", timeout: float = 60.0) -> tuple[str, subprocess.Popen[bytes]]:
    """A store for the run in folder ``run`` in a new interpreter: its "host:port" and its process.

    Raises:
        TimeoutError: it does not serve within ``timeout`` seconds.
        OSError: it ended.
    """
    with tempfile.TemporaryDirectory(prefix="windtunnel-store-") as folder:
        port_file = Path(folder) / "port"
        command = [sys.executable, "-m", __name__, str(port_file), "--run", str(run), "--host", host]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
        )
        try:
            return f"{host}:{_port(port_file, process, timeout)}", process
        except BaseException:
            process.kill()
            process.wait()
            raise


def _port(port_file: Path, process: subprocess.Popen[bytes], timeout: float) -> int:
    last = time.monotonic() + timeout
    while time.monotonic() < last:
        with contextlib.suppress(FileNotFoundError):
            return int(port_file.read_text())
        if process.poll() is not None:
            raise OSError(f"the store ended with status {process.returncode}")
        time.sleep(0.01)
    raise TimeoutError(f"the store does not serve within {timeout:g} s")


def main() -> None:
    parser = argparse.ArgumentParser(description="a store where process groups meet")
    parser.add_argument("port_file", type=Path)
    parser.add_argument("--run", type=Path, required=True, help="the run's folder")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--orphan-after", type=float, default=ORPHAN_AFTER)
    given = parser.parse_args()
    serve(given.port_file, given.run, given.host, given.orphan_after)
    os._exit(0)


if __name__ == "__main__":
    main()
