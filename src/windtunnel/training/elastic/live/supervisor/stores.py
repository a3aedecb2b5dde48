"""The store process that the supervisor keeps: started, watched, started again, ended.

The store serves the meeting of process groups, in a process of its own since it needs torch. It is started by
a function that the supervisor is given, in a thread, since that may take seconds. It outlives a supervisor
that dies; the next one takes it up by process id and start time, so that the present generation keeps it.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from windtunnel.base.processes import Adopted, Identity, boot_id, start_time

RETRY = 0.5
"""Seconds between tries to start a store."""


class StoreProcess(Protocol):
    """What `subprocess.Popen` has too."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """None while it lives."""

    def kill(self) -> None: ...


StartStore = Callable[[], tuple[str, StoreProcess]]


class Stores:
    """At most one store. `look` is called often by the supervisor's thread, and says what changed."""

    def __init__(self, start: StartStore, wake: Callable[[], None]) -> None:
        self._start = start
        self._wake = wake
        self._process: StoreProcess | None = None
        self._starting: threading.Thread | None = None
        self._started: queue.SimpleQueue[tuple[str, StoreProcess | None]] = queue.SimpleQueue()
        self._retry_at = self._requested_at = 0.0
        self._closed = False

    def adopt(self, before: dict[str, Any] | None) -> str | None:
        """Take up the store of the event ``before``, if it lives: its address."""
        if before is None or before.get("started") is None:
            return None
        process = Adopted(Identity(int(before["pid"]), int(before["started"]), boot_id()))
        if process.poll() is not None:
            return None
        self._process = process
        return str(before["address"])

    def look(self, now: float) -> tuple[str, str, dict[str, Any]] | None:
        """("up", address, fields for the log) or ("down", reason, {}), when that is new."""
        if self._process is not None:
            status = self._process.poll()
            if status is None:
                return None
            self._process = None
            return "down", f"it ended with status {status}", {}
        if not self._started.empty():
            self._starting = None
            text, process = self._started.get()
            if process is None:
                self._retry_at = now + RETRY
                return "down", text, {}
            self._process = process
            return "up", text, {"pid": process.pid, "started": start_time(process.pid)}
        if self._starting is None and now >= self._retry_at:
            self._requested_at = now
            self._starting = threading.Thread(target=self._run, name="store-start", daemon=True)
            self._starting.start()
        return None

    def awaited(self, now: float) -> str:
        """Why there is none, while one is being started."""
        if self._process is not None or self._starting is None:
            return ""
        load, cores = os.getloadavg()[0], os.cpu_count()
        return (
            f"the fork server was asked for one {now - self._requested_at:.0f} s ago and has not answered; "
            f"it imports what the script will need first (load {load:.1f} on {cores} cores)"
        )

    def _run(self) -> None:
        try:
            address, process = self._start()
        except Exception as error:
            self._started.put((f"it did not start ({error})", None))
        else:
            if self._closed:
                process.kill()
                process.poll()
            self._started.put((address, process))
        self._wake()

    def close(self, *, kill: bool, wait: float = 5.0) -> None:
        """End the store, also one that is just starting; bounded by ``wait`` seconds for each."""
        self._closed = kill
        if self._starting is not None:
            self._starting.join(wait)
        if not self._started.empty():
            self._process = self._started.get()[1]
        if kill and self._process is not None:
            self._process.kill()
            last = time.monotonic() + wait
            while self._process.poll() is None and time.monotonic() < last:
                time.sleep(0.005)
            self._process = None
