"""The launchers of one run on this computer, and a parent that waits for them.

`split` forks them: a child goes on as a `Launcher`, which begins or resumes the run or waits as a standby,
and tells the parent what becomes of that; the parent leads nothing and ends with the run's status. It prints
the run's summary once, whichever launcher has brought the run to its end. Orphans of a killed launcher (its
agents) become children of the parent, which reaps them.

A launcher that a signal kills is followed by a standby that waits, or (``again``) is started anew as one. The
parent may be killed, too: its launchers stay, and then print themselves.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from windtunnel.linux import namespaces, processes
from windtunnel.linux.system import adopt_orphans

MOST = 10
"""Launchers that are started anew."""
END = 30.0
"""Seconds that the others have to end after one has told the end of the run."""
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOOK = 0.5  # seconds after which orphans are looked for


@dataclass(frozen=True)
class Launcher:
    """What a launcher does, and how its parent learns of it. ``run``: the one that it takes over, by a name
    by which it can be resumed; None: it begins one. ``waits``: as a standby, while another one leads it,
    under the name ``host``."""

    run: str | None = None
    waits: bool = False
    host: str = ""
    _parent: int = -1

    def begins(self, run: str) -> None:
        """What is begun can be resumed as ``run`` from now on."""
        self._tell(run=run)

    def leads(self) -> None:
        """The run has a leader: standbys have something to wait for."""
        self._tell(leads=os.getpid())

    def over(self, status: int, summary: Path | None) -> None:
        """The run has ended; ``summary``: the file of JSON that stdout is to get."""
        if not self._tell(over=status, summary=summary and str(summary)):
            _print(summary)

    def _tell(self, **what: Any) -> bool:
        """Whether a parent has heard it."""
        if self._parent >= 0:
            with contextlib.suppress(BrokenPipeError):
                os.write(self._parent, json.dumps(what).encode() + b"\n")
                return True
        return False


def split(standbys: Sequence[str] = (), run: str | None = None, *, again: bool = False) -> Launcher:
    """Go on in children: one that begins a run (resumes ``run``, where there are no ``standbys``) and one of
    each name of ``standbys``, once there is what they wait for. ``again``: those that are killed are started
    anew.

    Raises:
        SystemExit: in the parent, when the run is over or nobody is left.
    """
    ours, theirs = os.pipe()
    adopt_orphans()
    parent = _Parent(ours, run)
    first = not (run and standbys)
    due = [Launcher(run, _parent=theirs)] if first else []
    waiting = list(standbys)
    while True:
        if parent.run and (parent.leader or not first):
            due += [Launcher(parent.run, True, host, theirs) for host in waiting]
            waiting.clear()
        if not due and not parent.launchers:
            raise SystemExit(parent.end())
        while due:
            launcher, pid = due.pop(0), os.fork()
            if pid == 0:
                parent.leave()
                _go_to(launcher.host)
                return launcher
            parent.launchers[pid] = launcher
        for killed, by in parent.wait():
            anew = again and parent.restarts < MOST
            if anew:
                parent.restarts += 1
                due.append(Launcher(parent.run, parent.run is not None, killed.host, theirs))
            others = anew or parent.launchers or (waiting and parent.leader)
            goes_on = "another one goes on" if others else "none is left"
            of = f" on {killed.host}" if killed.host else ""
            _say(f"the launcher{of} was killed by {signal.Signals(by).name}; {goes_on}")


class _Parent:
    """``run``: as soon as it is known. ``launchers``: those that live, by pid. ``leader``: the pid of the one
    that led last, 0 while none has."""

    def __init__(self, file: int, run: str | None) -> None:
        self.run, self.launchers = run, dict[int, Launcher]()
        self.leader = self.restarts = 0
        self._file, self._unread = file, b""
        self._over: dict[str, Any] | None = None
        self._last = 0.0  # when the others must have ended
        self._statuses: dict[int, int] = {}
        self._asked = False
        own = os.getpid()

        def pass_on(number: int, _: object) -> None:
            if os.getpid() == own:
                self._asked = True
                for pid in self.launchers:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)

        # not what is ignored, as SIGHUP is under nohup
        numbers = [one for one in _PASSED_ON if signal.getsignal(one) != signal.SIG_IGN]
        self._before = [(number, signal.signal(number, pass_on)) for number in numbers]

    def leave(self) -> None:
        """What a child undoes."""
        os.close(self._file)
        for number, handler in self._before:
            signal.signal(number, handler)

    def wait(self) -> list[tuple[Launcher, int]]:
        """The launchers that a signal has killed before the end of the run, with its number; after a while
        none."""
        handles = [os.pidfd_open(pid) for pid in self.launchers]
        try:
            select.select([self._file, *handles], [], [], _LOOK)
        finally:
            for handle in handles:
                os.close(handle)
        ended = list(_reaped())  # first, so that what they said is read
        self._hear()
        killed = []
        for pid, status in ended:
            if pid in self.launchers:
                launcher = self.launchers.pop(pid)
                self._statuses[pid] = code = os.waitstatus_to_exitcode(status)
                if code < 0 and not self._asked and self._over is None:
                    killed.append((launcher, -code))
        if self._over is not None:
            self._end_others()
        return killed

    def _hear(self) -> None:
        while select.select([self._file], [], [], 0)[0]:
            *lines, self._unread = (self._unread + os.read(self._file, 1 << 16)).split(b"\n")
            for line in lines:
                said = json.loads(line)
                self.run = said.get("run", self.run)
                self.leader = said.get("leads", self.leader)
                if "over" in said and self._over is None:
                    self._over, self._last = said, time.monotonic() + END

    def _end_others(self) -> None:
        """They clean up, and end by themselves but for one that is stopped."""
        for pid in self.launchers:
            if processes.state(pid) in ("T", "t") or time.monotonic() > self._last:
                os.kill(pid, signal.SIGKILL)

    def end(self) -> int:
        """The status of the run, whose summary is printed; else that of the launcher that led."""
        if self._over is not None:
            _print(self._over["summary"])
            return int(self._over["over"])
        of = self.leader if self.leader in self._statuses else next(reversed(self._statuses))
        status = self._statuses[of]
        return status if status >= 0 else 128 - status


def _reaped() -> list[tuple[int, int]]:
    """The children that have ended, with their statuses."""
    found = []
    with contextlib.suppress(ChildProcessError):
        while (one := os.waitpid(-1, os.WNOHANG))[0]:
            found.append(one)
    return found


def _go_to(host: str) -> None:
    """To what takes itself for another host, where that is allowed: the leader's death is not seen there."""
    if host and host != os.uname().nodename:
        with contextlib.suppress(PermissionError):
            namespaces.own_hostname(host)


def _print(summary: str | Path | None) -> None:
    if summary is not None:
        print(json.dumps(json.loads(Path(summary).read_text())), flush=True)


def _say(text: str) -> None:
    os.write(2, f"windtunnel {text}\n".encode())
