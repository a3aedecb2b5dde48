"""Hosts of files on this computer, a writer, and a fault from outside: what `windtunnel files demo` shows.

The files stay, under the name ``demo``: for whoever opens ``lines://demo`` later a process is started that
serves them, and ends once nobody has used it for a while.
"""

from __future__ import annotations

import contextlib
import fcntl
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from windtunnel.base.errors import UserError
from windtunnel.data.files.check import check
from windtunnel.data.files.live import host as live
from windtunnel.data.files.live.client import FileClient, place
from windtunnel.data.files.live.host import HostProcesses
from windtunnel.data.files.model import FilesHostSpec, Mode, OperationKind, Status

NAME = "demo"
BLOCK = 16 << 10
_UNUSED = 10.0  # seconds without a user after which hosts that were started for one end
_FROZEN = 10.0


def demo(
    replicas: int, *, kill: str = "", freeze: int = 0, mode: Mode = "linefs", seconds: float = 10.0
) -> dict[str, Any]:
    """Write and fsync 16 KiB again and again for ``seconds``, with a fault in the middle, then read all of
    it.

    ``kill``: "primary", or the number of a host in the chain (1 is the primary), whose processes are killed.
    ``freeze``: such a number; its processes (in ``linefs`` and ``serial`` those that stand for the host, not
    those that stand for its SmartNIC) stop for 10 s.

    Raises:
        UserError: there is no such host.
    """
    struck = 1 if kill == "primary" else int(kill or freeze or 0)
    if not 0 <= struck <= replicas:
        raise UserError(f"host {struck} is not there; accepted are 1 to {replicas}")
    folder = place(NAME)
    with _locked(folder / "serving"):
        for part in ("store", *(f"host{number}" for number in range(16))):
            shutil.rmtree(folder / part, ignore_errors=True)
        spec = FilesHostSpec(
            "", "", str(folder / "store"), str(folder / "secret"), mode=mode, least=min(2, replicas)
        )
        with live.hosts(folder, replicas, spec) as hosts:
            live.remember(NAME, spec)
            files = live.client(folder)
            live.complete(files, replicas)
            chain = next(row.chain for row in files.status() if isinstance(row, Status))
            report = _write(files, hosts, chain, struck, bool(kill), mode, seconds)
            report["status"] = [row if isinstance(row, str) else _row(row) for row in files.status()]
            files.close()
        contents = {name: check(folder / name) for name in report["chain"]}
    report["equal"] = len({frozenset(content.digests.items()) for content in contents.values()}) == 1
    report["damage"] = {name: content.damage for name, content in contents.items() if content.damage}
    return {"replicas": replicas, "mode": mode, **report}


def _write(
    files: FileClient, hosts: list[HostProcesses], chain: tuple[str, ...], struck: int, kill: bool,
    mode: Mode, seconds: float,
) -> dict[str, Any]:  # fmt: skip
    target = next((host for host in hosts if struck and host.spec.name == chain[struck - 1]), None)
    pauses: list[float] = []
    files.perform(OperationKind.CREATE, "/file")
    begun = time.monotonic()
    end, fault = begun + seconds, begun + seconds / 2
    timer = None
    while time.monotonic() < end:
        if target is not None and time.monotonic() > fault:
            if kill:
                target.kill()
            else:
                part = None if mode == "host" else "server"
                target.signal(signal.SIGSTOP, part)
                timer = threading.Timer(_FROZEN, target.signal, (signal.SIGCONT, part))
                timer.start()
                end = max(end, time.monotonic() + _FROZEN + 1.0)
            target = None
        before = time.monotonic()
        number = len(pauses)
        files.write("/file", number * BLOCK, _block(number))
        files.sync()
        pauses.append(time.monotonic() - before)
    if timer is not None:
        timer.join()
    lost = sum(files.read("/file", number * BLOCK, BLOCK) != _block(number) for number in range(len(pauses)))
    leads = next(row for row in files.status() if isinstance(row, Status) and row.leads)
    ordered = sorted(pauses)
    return {
        "fault": {"host": chain[struck - 1], "kind": "kill" if kill else "freeze"} if struck else None,
        "writes": len(pauses), "acknowledged_bytes": len(pauses) * BLOCK, "lost_bytes": lost * BLOCK,
        "fsync_p50_s": ordered[len(ordered) // 2], "fsync_longest_s": ordered[-1],
        "epoch": leads.epoch, "chain": list(leads.chain), "copies": len(leads.chain),
    }  # fmt: skip


def _block(number: int) -> bytes:
    return number.to_bytes(8, "little") * (BLOCK // 8)


def _row(status: Status) -> dict[str, Any]:
    return {"name": status.name, "leads": status.leads, "written": status.written, "stalled": status.stalled,
            "published": status.published.sequence}  # fmt: skip


def use() -> BinaryIO:
    """Have the hosts of the last demo serve, as long as the file that is returned stays open, in any process.

    Raises:
        UserError: there was no demo.
    """
    folder = place(NAME)
    if not (folder / "access.json").exists():
        raise UserError("lines://demo: there is none yet; `windtunnel files demo` makes it")
    file = open(folder / "in-use", "ab")  # noqa: SIM115 - open as long as it is used
    fcntl.flock(file, fcntl.LOCK_SH)
    command = [sys.executable, "-m", "windtunnel.data.files.live.demo"]
    null = subprocess.DEVNULL
    subprocess.Popen(command, stdin=null, stdout=null, stderr=null, start_new_session=True)
    return file


def main() -> None:
    """Serve the hosts of the last demo until nobody has used them for a while; one process at a time does."""
    folder = place(NAME)
    with contextlib.suppress(UserError), _locked(folder / "serving"):
        count = len(list(folder.glob("host*")))
        spec = FilesHostSpec("", "", str(folder / "store"), str(folder / "secret"), least=min(2, count))
        with live.hosts(folder, count, spec) as hosts, open(folder / "in-use", "ab") as file:
            unused = time.monotonic()
            while time.monotonic() - unused < _UNUSED:
                time.sleep(0.2)
                for host in hosts:
                    host.revive()
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    fcntl.flock(file, fcntl.LOCK_UN)
                    continue
                unused = time.monotonic()


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Raises UserError: another process has it, and keeps it longer than one that nobody uses."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "ab") as file:
        end = time.monotonic() + _UNUSED + 5.0
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise UserError(f"{path.parent} is in use by another process") from None
            time.sleep(0.1)
        yield


if __name__ == "__main__":
    main()
