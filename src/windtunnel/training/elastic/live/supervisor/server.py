"""The supervisor of a run: one process, no torch, that owns the membership of a job.

Protocol (frames of `wire`; the fields are in the messages' senders): agents connect, say ``hello`` and get
``welcome`` with their host id; from then on they beat. When enough hosts are there generation 1 is formed
and sent (``membership``). What agents report (workers that ended or froze, suspicions, their own silence)
leads to the next generation. Ranks agree on values by ``post`` and ``decided``, and may ``ask`` for durable
ones later. A host or worker that was given up is fenced: its messages are refused by generation, its agent
told to ``end``, its process killed (``fence``). When all ranks are done, or nothing more can be done, all
agents get ``end``.

The supervisor lives in the launcher's process. If that dies the agents try to connect again. The next one
(`lead`) takes a higher epoch, the same address, and the state from the event log, waits for the agents, and
forms a new generation only if something is missing.

One thread does everything; it is the only one that touches the state (`Core`). Sources: membership in views
as in ISIS (Birman and Joseph, SOSP 1987); leases: Gray and Cheriton, SOSP 1989; fencing by generation as in
Oobleck's rewritten runtime and torchft's quorum ids.
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from windtunnel.base.errors import UserError
from windtunnel.base.keys import Keys
from windtunnel.store import eventlog
from windtunnel.training.elastic.live.supervisor.connections import Connections
from windtunnel.training.elastic.live.supervisor.stores import StartStore, Stores
from windtunnel.training.elastic.policy import handlers
from windtunnel.training.elastic.policy.core import Core
from windtunnel.training.elastic.policy.rules import Decision, Observation, Rules
from windtunnel.training.elastic.policy.state import Outcome, Settings, past

CAPABILITY = "training.elastic"
PATIENCE = 5.0
"""Seconds for which a port that is in use is tried."""


class Supervisor:
    """The one that supervises the run in ``folder``; see the module.

    ``start_store``: starts a store process and returns its "host:port" and the process (`StoreProcess`); it
    is called in a thread and may take seconds. ``order_hosts``: asks for so many more hosts; it is
    called in the supervisor's thread and must return at once. ``host``: where it listens, at the port that
    the log names if this one follows another. ``config``: for the log, values of JSON.

    Raises:
        UserError: the log cannot be read, or nobody can listen there.
    """

    def __init__(
        self,
        folder: Path,
        rules: Rules,
        settings: Settings,
        *,
        start_store: StartStore,
        order_hosts: Callable[[int], None],
        keys: Keys,
        host: str = "127.0.0.1",
        config: dict[str, Any] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / eventlog.NAME
        before = past(eventlog.read(path))
        self.epoch = before.epoch + 1
        listener = _listen(host, before.address)
        self.address = "{}:{}".format(*listener.getsockname()[:2])
        self._log = eventlog.EventLog(path, epoch=self.epoch)
        self._log_works = True
        self._connections = Connections(listener, keys)
        self._stores = Stores(start_store, self._connections.wake)
        self._order = order_hosts
        self._stop: tuple[str, bool] | None = None
        self._thread: threading.Thread | None = None
        self._outcome: Outcome | None = None
        self._settings = settings
        now = time.monotonic()
        self._core = Core(settings, rules, self, self.epoch, before, now)
        self.record("started", before.generation, config=config or {}, address=self.address)
        address = self._stores.adopt(before.store)
        if address is not None and before.store is not None:
            fields = {key: before.store[key] for key in ("pid", "started")}
            self._core.store_up(address, now, **fields)
        self._view = _view(self._core)

    # for the caller

    def run(self) -> Outcome:
        """Supervise until the run is over. To be called once."""
        try:
            outcome = self._loop()
            self._stores.close(kill=self._stop is None or self._stop[1])
        finally:
            self._connections.close_all()
            self._log.close()
        return outcome

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
        self._connections.wake()

    def abandon(self) -> None:
        """Go away as a crash would: the job goes on, and another supervisor may take it up."""
        self._stop = "abandoned", False
        self._connections.wake()

    def snapshot(self) -> dict[str, Any]:
        """What there is now, as values of JSON: epoch, generation, membership; places (host ids, None where
        the host is lost), spares, away (hosts without a connection), coming; ranks that grouped, are done,
        or are lost; waiting (for hosts), store; status and reason, None and "" while the run goes on.
        """
        return self._view

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
            now = time.monotonic()
            if self._stop is not None and not self._stop[1]:
                return Outcome(1, self._stop[0], {})
            try:
                self._turn(now)
            except eventlog.LogFailed as error:
                core.outcome = core.outcome or Outcome(1, f"the event log cannot be written: {error}", {})
                self._log_works = False
                core.end_all()
            except Exception as error:
                self.record("note", core.generation, text=traceback.format_exc())
                core.finish(1, f"the supervisor failed: {type(error).__name__}: {error}", now)
            self._view = _view(core)
            if core.outcome is not None:
                ended = ended or now
                if not len(self._connections) or now > ended + self._settings.deadlines.end:
                    return core.outcome

    def _turn(self, now: float) -> None:
        core, connections = self._core, self._connections
        if self._stop is not None:
            core.finish(1, self._stop[0], now)
        for link, what in connections.poll(core.due(now), now):
            now = time.monotonic()
            if isinstance(what, str):
                host = core.hosts.of_link(link)
                if what and host is not None:  # strangers leave nothing in the log
                    self.record(
                        "note", core.generation, text=f"host {host.member.id} loses its connection: {what}"
                    )
                handlers.closed(core, link, now)
            else:
                self._hear(link, what, now)
        now = time.monotonic()
        for link in connections.silent(before=now - self._settings.lease - 1.0):
            connections.close(link)
        news = self._stores.look(now) if core.outcome is None else None
        if news is not None:
            kind, text, fields = news
            if kind == "up":
                core.store_up(text, now, **fields)
            else:
                core.store_down(text, now)
        core.store_awaited = self._stores.awaited(now)
        core.tick(now)

    def _hear(self, link: int, message: dict[str, Any], now: float) -> None:
        if self._connections.greeted(link):
            handlers.message(self._core, link, message, now)
        elif message["op"] == "hello":
            self._connections.greet(link)
            handlers.hello(self._core, link, message, now)

    # effects of the core

    def send(self, link: int, message: dict[str, Any]) -> None:
        self._connections.send(link, message)

    def drop(self, link: int) -> None:
        self._connections.drop(link)

    def record(self, kind: str, generation: int, t: float | None = None, **fields: Any) -> None:
        if self._log_works:
            self._log.append(kind, generation=generation, t=t, **fields)

    def decision(self, generation: int, policy: str, observation: Observation, decision: Decision) -> None:
        if self._log_works:
            self._log.decision(CAPABILITY, policy, observation, decision, generation=generation)

    def kill_launcher(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def order(self, count: int) -> None:
        try:
            self._order(count)
        except Exception as error:
            self._core.finish(1, f"{count} hosts could not be ordered: {error}", time.monotonic())


def _view(core: Core) -> dict[str, Any]:
    places, outcome = core.places(), core.outcome
    return {
        "epoch": core.epoch,
        "generation": core.generation,
        "membership": core.plain,
        "places": list(places),
        "spares": [id for id in core.hosts.live if id not in places],
        "away": [id for id, host in core.hosts.live.items() if host.link is None],
        "coming": core.coming,
        "grouped": sorted(core.grouped),
        "done": sorted(core.done),
        "lost": sorted(core.lost),
        "waiting": core.waiting_since is not None,
        "store": core.store,
        "status": outcome.status if outcome is not None else None,
        "reason": outcome.reason if outcome is not None else "",
    }


def _listen(host: str, last: str) -> socket.socket:
    """A socket that listens where the ``last`` supervisor did, since agents look for the next one there."""
    address = (host, int(last.rpartition(":")[2])) if last else (host, 0)
    end = time.monotonic() + PATIENCE
    while True:
        try:
            return socket.create_server(address, backlog=256)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > end:
                why = f"{error.strerror}, and the hosts of this run look for it there"
                reason = why if last else error.strerror
                raise UserError(f"the supervisor cannot listen at {host}:{address[1]}: {reason}") from error
            time.sleep(0.1)  # a connection of somebody else has that port for its own end
