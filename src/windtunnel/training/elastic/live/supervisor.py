"""The supervisor of a run: one process, no torch, that owns the membership of a job.

Protocol (`live.calls`): an agent attends and is told its host's id (``welcome``); from then on it beats. When
enough hosts are there generation 1 is formed and told (``membership``). What agents report (workers that
ended or froze, suspicions) leads to the next generation. Ranks agree on values by ``post`` and ``decided``,
and may ``ask`` for durable ones later. A host or worker that was given up is fenced: its calls are refused
by generation, its agent told to ``end``, its process killed (``fence``). When all ranks are done, or nothing
more can be done, all agents are told the ``end``.

The supervisor lives in the launcher's process. If that dies the agents try to connect again. The next one
takes a higher epoch, the same address, and the state from the event log, waits for the agents, and
forms a new generation only if something is missing.

Calls come in threads of their own; one at a time touches the state (`Core`). Sources: membership in views
as in ISIS (Birman and Joseph, SOSP 1987); leases: Gray and Cheriton, SOSP 1989; fencing by generation as in
Oobleck's rewritten runtime and torchft's quorum ids.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import functools
import itertools
import os
import queue
import signal
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from windtunnel.base.calls import Departure
from windtunnel.base.errors import UserError
from windtunnel.base.keys import Keys
from windtunnel.base.rpc import RpcServer, RpcService
from windtunnel.store import eventlog
from windtunnel.training.elastic.live.calls import Hello, Message, Supervision
from windtunnel.training.elastic.policy import handlers
from windtunnel.training.elastic.policy.core import Core
from windtunnel.training.elastic.policy.rules import Decision, Observation, Rules
from windtunnel.training.elastic.policy.state import Outcome, SupervisorSettings, past

T = TypeVar("T")
CAPABILITY = "training.elastic"
PATIENCE = 5.0
"""Seconds for which a port that is in use is tried."""


class Supervisor:
    """The one that supervises the run in ``folder``; see the module.

    ``order_hosts``: asks for so many more hosts; ``told`` gets each event of the log. Both are called in a
    thread of the supervisor's and must return at once. ``host``: where it listens, at the port that the log
    names if this one follows another. ``config``: for the log, values of JSON.

    Raises:
        UserError: the log cannot be read, or nobody can listen there.
    """

    def __init__(
        self,
        folder: Path,
        rules: Rules,
        settings: SupervisorSettings,
        *,
        order_hosts: Callable[[int], None],
        keys: Keys,
        told: Callable[[dict[str, Any]], object] = lambda _: None,
        host: str = "127.0.0.1",
        config: dict[str, Any] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / eventlog.NAME
        before = past(eventlog.read(path))
        self.epoch = before.epoch + 1
        self._lock = threading.RLock()
        self._changed = threading.Event()
        self._links: dict[int, queue.SimpleQueue[Message | None]] = {}  # what is to be told, None: all is
        self._numbers = itertools.count(self.epoch << 32)  # of attendances: no other supervisor gave them
        self._order, self._told = order_hosts, told
        self._stop: tuple[str, bool] | None = None
        self._thread: threading.Thread | None = None
        self._outcome: Outcome | None = None
        self._settings = settings
        with self._lock:  # who comes meanwhile waits
            self._service = RpcService.of(Supervision, _Calls(self))
            self._server = _served(self._service, host, before.address, keys)
            self.address = self._server.address.removeprefix("tcp:")
            self._log = eventlog.EventLog(path, epoch=self.epoch)
            self._log_works = True
            self._core = Core(settings, rules, self, self.epoch, before, time.monotonic())
            self.record("started", before.generation, config=config or {}, address=self.address)

    # for the caller

    def run(self) -> Outcome:
        """Supervise until the run is over. To be called once."""
        try:
            return self._loop()
        finally:
            self._server.close()
            with self._lock:
                self._log_works = False
                self._log.close()

    def start(self) -> None:
        """`run` in a thread."""
        self._thread = threading.Thread(target=self._run_in_thread, name="supervisor", daemon=True)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> Outcome | None:
        """The outcome of a supervisor that was started with `start`, None if it still runs after
        ``timeout`` seconds.
        """
        assert self._thread is not None
        self._thread.join(timeout)
        return self._outcome

    def stop(self, reason: str = "stopped") -> None:
        """End the run with status 1: agents end their workers. From any thread; `run` returns soon."""
        self._stop = reason, True
        self._changed.set()

    def abandon(self) -> None:
        """Go away as a crash would: the job goes on, and another supervisor may take it up."""
        self._stop = "abandoned", False
        self._changed.set()

    # the loop

    def _run_in_thread(self) -> None:
        try:
            self._outcome = self.run()
        except Exception as error:
            self._outcome = Outcome(1, f"the supervisor failed: {error}", {})
            raise

    def _loop(self) -> Outcome:
        core, ended = self._core, None
        while True:
            self._changed.wait(core.due(time.monotonic()))
            self._changed.clear()
            stop = self._stop  # once: what is abandoned in the middle of a turn is not finished by it
            if stop is not None and not stop[1]:
                return Outcome(1, stop[0], {})
            self._act(functools.partial(self._turn, None if stop is None else stop[0]))
            if core.outcome is not None:
                ended = ended or time.monotonic()
                if not self._service.busy or time.monotonic() > ended + self._settings.deadlines.end:
                    return core.outcome

    def _turn(self, stopped: str | None, now: float) -> None:
        """``stopped``: why the run is to end."""
        if stopped is not None:
            self._core.finish(1, stopped, now)
        self._core.tick(now)

    def _act(self, deed: Callable[[float], T]) -> T | None:
        """One thing after the other. What goes wrong in it ends the run."""
        with self._lock:
            core, now = self._core, time.monotonic()
            try:
                return deed(now)
            except eventlog.LogFailed as error:
                core.outcome = core.outcome or Outcome(1, f"the event log cannot be written: {error}", {})
                self._log_works = False
                core.end_all()
            except Exception as error:
                self.record("note", core.generation, text=traceback.format_exc())
                core.finish(1, f"the supervisor failed: {type(error).__name__}: {error}", now)
            return None

    # what agents call

    def attend(self, hello: Hello, tell: Callable[[Message, bytes], None], gone: Departure) -> None:
        """See `Supervision`."""
        messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        gone.then = lambda: messages.put(None)
        with self._lock:
            link = next(self._numbers)
            self._links[link] = messages
            self._act(lambda now: handlers.hello(self._core, link, dataclasses.asdict(hello), now))
        self._changed.set()
        try:
            while not gone.is_set():
                try:
                    message = messages.get(timeout=self._settings.beat)
                except queue.Empty:
                    message = {"op": "beat", "epoch": self.epoch}
                if message is None:
                    return
                if message["op"] == "met":
                    with self._lock:
                        message["said"] = self._core.unmet(link, message["generation"])
                    if not message["said"]:
                        continue
                self._tell(link, {**message, "link": link}, tell, gone)
        finally:
            with self._lock:
                self._links.pop(link, None)
                self._act(lambda now: handlers.closed(self._core, link, now))
            self._changed.set()

    def _tell(
        self, link: int, message: Message, tell: Callable[[Message, bytes], None], gone: Departure
    ) -> None:
        """A host that does not read holds its own thread up, until it is given up."""
        while not gone.is_set():
            try:
                return tell(message, b"")
            except BlockingIOError:
                if self._core.hosts.of_link(link) is None:
                    return

    def hear(self, link: int, message: Message) -> Any:
        """Any other call of the host that attends as ``link``."""
        with self._lock:
            if self._core.hosts.of_link(link) is None and self._core.outcome is None:
                raise OSError(errno.ENOTCONN, "this attendance is over")
            value = self._act(lambda now: handlers.message(self._core, link, message, now))
            if self._core.changing or self._core.outcome is not None:
                self._changed.set()
            return value

    # effects of the core

    def send(self, link: int, message: Message) -> None:
        if link in self._links:
            self._links[link].put(message)

    def drop(self, link: int) -> None:
        if link in self._links:
            self._links[link].put(None)

    def record(self, kind: str, generation: int, t: float | None = None, **fields: Any) -> None:
        if self._log_works:
            self._told(self._log.append(kind, generation=generation, t=t, **fields))

    def decision(self, generation: int, policy: str, observation: Observation, decision: Decision) -> None:
        self.record("decision", generation, **eventlog.decided(CAPABILITY, policy, observation, decision))

    def kill_launcher(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def order(self, count: int) -> None:
        try:
            self._order(count)
        except Exception as error:
            self._core.finish(1, f"{count} hosts could not be ordered: {error}", time.monotonic())


class Lead:
    """The right to supervise the run in ``folder``, until `release` or the end of this process: that holds
    the lock on a file in it, which goes with the process.

    Raises:
        UserError: somebody else has it.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(folder / "leader.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            leader = os.read(self._file, 256).decode(errors="replace")
            os.close(self._file)
            raise UserError(f"{folder}: this run is running, {leader} leads it") from None
        os.ftruncate(self._file, 0)
        os.write(self._file, f"process {os.getpid()} on {os.uname().nodename}".encode())

    def release(self) -> None:
        os.close(self._file)


class _Calls:
    """`Supervision`, but for the attendance: each call is a message of its name."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self.attend = supervisor.attend

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(link: int, fields: Message | None = None, **more: Any) -> Any:
            op = name.replace("_", "-")
            return self._supervisor.hear(link, {**(fields or {}), **more, "op": op})

        return call


def _served(service: RpcService, host: str, last: str, keys: Keys) -> RpcServer:
    """A server where the ``last`` supervisor had its, since agents look for the next one there."""
    port = int(last.rpartition(":")[2]) if last else 0
    end = time.monotonic() + PATIENCE
    while True:
        try:
            return RpcServer(service, f"tcp:{host}:{port}", keys)
        except UserError as error:
            cause = error.__cause__
            if getattr(cause, "errno", None) != errno.EADDRINUSE or time.monotonic() > end:
                more = ", and the hosts of this run look for it there" if last else ""
                why = getattr(cause, "strerror", None) or error
                raise UserError(f"the supervisor cannot listen at {host}:{port}: {why}{more}") from error
            time.sleep(0.1)  # a connection of somebody else has that port for its own end
