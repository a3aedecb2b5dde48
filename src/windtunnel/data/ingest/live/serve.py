"""A master as a process: its folder, its secret, its workers, until it is told to stop.

The folder has the log, the events, the secret and the address. A master that is started on the folder of one
that was killed goes on at the same address, so that workers and clients find it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from windtunnel.base import atomic
from windtunnel.base.errors import UserError, WindtunnelError
from windtunnel.base.keys import NAME as SECRET
from windtunnel.base.keys import of_run
from windtunnel.base.plain import from_plain, to_plain
from windtunnel.base.processes import Identity
from windtunnel.base.tls import Certificates
from windtunnel.data.ingest.live.calls import MasterSettings
from windtunnel.data.ingest.live.master import Master
from windtunnel.data.ingest.live.pool import ProcessLauncher, RayLauncher, WorkerLauncher
from windtunnel.data.ingest.live.worker import leave_with, without_pandas
from windtunnel.data.ingest.model import IngestSession
from windtunnel.linux.hosts import own_address

ADDRESS = "address"


def serve(
    session: IngestSession, folder: Path, settings: MasterSettings, *, secret: Path | None = None,
    tls: tuple[str, ...] = (), on: str = "", owner: str = "", ready: Callable[[str], None] = lambda _: None,
) -> None:  # fmt: skip
    """Be the master until SIGTERM or SIGINT. ``secret``: a file, default the folder's own, made where there
    is none. ``on``: a Ray cluster for the workers. ``owner``: a process with which master and workers end.
    ``ready`` gets the address.

    Raises:
        UserError, HostError: as `Master`; strangers could come, or workers on Ray could not.
    """
    place = None
    with contextlib.suppress(ValueError):
        place = ip_address(settings.host)
    if settings.host != "localhost" and not (place and place.is_loopback) and secret is None:
        raise UserError(
            f"`host` {settings.host}: others can reach it; accepted is a loopback address, or `secret` "
            "with a secret that the clients have, too"
        )
    folder.mkdir(parents=True, exist_ok=True)
    keys = of_run(folder, secret)
    keys = replace(keys, tls=Certificates.load(tls) if tls else None)
    pool: WorkerLauncher | None = None
    if settings.workers != 0:
        # clients elsewhere call workers, too; none can call the address that stands for all
        host = own_address() if place and place.is_unspecified else settings.host
        file = folder / SECRET
        pool = RayLauncher(on, file, keys) if on else ProcessLauncher(file, keys, owner, host)
    address_file = folder / ADDRESS
    if settings.port == 0 and address_file.exists():
        settings = replace(settings, port=int(address_file.read_text().rpartition(":")[2]))
    with_signals = [signal.SIGTERM, signal.SIGINT]
    master = Master(session, folder, keys, settings, pool)
    for number in with_signals:
        signal.signal(number, lambda *_: master.stop())
    atomic.replace(address_file, master.address)
    ready(master.address)
    master.run()
    address_file.unlink(missing_ok=True)


def started(
    session: IngestSession, folder: Path, settings: MasterSettings, *, on: str = ""
) -> tuple[subprocess.Popen[bytes], str]:
    """A master in a process of its own, which ends with this one, and its address.

    Raises:
        UserError: it did not start; the message is its own.
    """
    arguments = {
        "session": to_plain(session), "folder": str(folder), "settings": to_plain(settings), "on": on,
        "owner": str(Identity.own()),
    }  # fmt: skip
    read, write = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "windtunnel.data.ingest.live.serve", json.dumps(arguments)],
        stdout=write, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    os.close(write)
    with open(read) as lines:
        address = lines.readline().strip()
    if not address:
        assert process.stderr is not None
        errors = process.stderr.read().decode(errors="replace").strip().splitlines()
        process.wait()
        raise UserError(errors[-1] if errors else "the master ended before it listened")
    return process, address


def main() -> None:
    """``python -m`` this: the master that `started` starts."""
    without_pandas()
    settings: dict[str, Any] = json.loads(sys.argv[1])
    leave_with(Identity.parse(settings["owner"]))
    try:
        serve(
            from_plain(IngestSession, settings["session"]), Path(settings["folder"]),
            from_plain(MasterSettings, settings["settings"]), on=settings["on"], owner=settings["owner"],
            ready=lambda address: print(address, flush=True),
        )  # fmt: skip
    except WindtunnelError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
