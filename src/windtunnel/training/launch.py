"""Launch a training script under supervision, on emulated hosts of this computer.

Every host is an agent of its own with its own memory folder (and, with ``network="netns"``, its own
network). They share one fork server, since one computer needs torch imported once (`site`). The launcher
plays the cloud: it starts the hosts that the supervisor orders. It keeps the fork server alive, holds the
supervisor in a thread of its own, and at the end, whatever the end is, leaves no process, file in memory or
network behind.

A launcher that is killed takes only its supervisor along. Agents and trainers wait ``orphan_after`` seconds
for the next one (`resume`), whose supervisor goes on from the log.

    launched = launch("train.py", ["--steps", "20"], hosts=4)
    outcome = launched.wait()
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from windtunnel.base import keys
from windtunnel.base.errors import UserError
from windtunnel.base.tls import Certificates
from windtunnel.linux import processes
from windtunnel.linux.hosts import own_address
from windtunnel.store import eventlog
from windtunnel.training import hosts
from windtunnel.training.elastic.live.agent.config import AgentConfig
from windtunnel.training.elastic.live.supervisor import Lead, Supervisor
from windtunnel.training.elastic.policy.evidence import in_short
from windtunnel.training.elastic.policy.state import Outcome, past
from windtunnel.training.elastic.spec import JobSpec
from windtunnel.training.site import Site, statuses

TICK = 0.02
LOOK = 0.5
"""Seconds after which who waits looks for signals: one that came just before does not wake him."""
PATIENCE = 10.0
ANYWHERE = "0.0.0.0"
Event = dict[str, Any]


def launch(
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    folder: Path,
    on_event: Callable[[Event], None] | None = None,
    output: int | None = None,
    **options: Any,
) -> Launched:
    """Start ``script`` (see `JobSpec` for the ``options``); the run's files go to ``folder``.

    ``on_event``: called, from a thread, with every event of the run. ``output``: fd for what the trainers
    print, stdout and stderr of this process if None.

    Raises:
        UserError: the script, an option or a fault is wrong, this computer cannot emulate the network, or the
            run in ``folder`` is led by somebody else.
    """
    job = JobSpec(Path(script), tuple(arguments), **options)
    job.check()
    return Launched(job, folder, on_event, output)


def resume(
    folder: Path,
    on_event: Callable[[Event], None] | None = None,
    output: int | None = None,
    **changes: Any,
) -> Launched:
    """Take over the run in ``folder``, whose launcher is gone: its job goes on, with what its hosts hold in
    memory. ``changes``: other values of the job's options. The rest is as in `launch`.

    Raises:
        UserError: there is no run, it has ended, its launcher is there, or it cannot be led from here.
    """
    events = eventlog.read(folder / eventlog.NAME)
    started = [event for event in events if event["kind"] == "started"]
    described = hosts.described(folder)
    if not started and described is not None:  # which no launcher has begun
        job = replace(described, **changes)
        job.check()
        return Launched(job, folder, on_event, output)
    if not started:
        raise UserError(f"{folder}: there is no run to resume")
    outcome = Outcome.of(events)
    if outcome is not None:
        raise UserError(f"{folder}: this run has ended ({in_short(outcome.reason)})")
    begun = JobSpec.of(started[0]["config"])
    if changes.get("tls") and not begun.tls:
        raise UserError(f"{folder}: the hosts of this run speak without TLS; resume it without certificates")
    job = replace(begun, **changes)
    job.check()
    if not (folder / keys.NAME).exists() and not job.secret_file and keys.VARIABLE not in os.environ:
        raise UserError(f"{folder}: the run's secret is needed; give --secret-file FILE")
    return Launched(job, folder, on_event, output, resumed=True)


class Preempted(KeyboardInterrupt):
    """An engine ends this launcher, and will start another that goes on with the run."""


class Launched:
    """A job that runs. Use it as a context manager, or call `close`. ``resumed``: the run that is in the
    folder goes on. A run within which `Preempted` is raised is left to the next launcher.

    Raises:
        UserError: somebody else leads that run, or it cannot be led from here.
    """

    def __init__(
        self,
        job: JobSpec,
        folder: Path,
        on_event: Callable[[Event], None] | None,
        output: int | None,
        *,
        resumed: bool = False,
    ) -> None:
        self.job = job
        self.folder = folder.absolute()
        self.outcome: Outcome | None = None
        self._lead = Lead(self.folder)
        self._on_event = on_event
        self._events: list[Event] = []
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._closing = False
        self._supervisor: Supervisor | None = None
        self._offer: hosts.Offer | None = None
        self._hosts: hosts.RayHosts | hosts.SlurmHosts | None = None
        self._leaves = resumed  # what it has not taken over yet
        self._told: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._ordered: queue.SimpleQueue[int] = queue.SimpleQueue()  # how many hosts more
        self._failure: BaseException | None = None
        self._adopted: set[int] = set()  # workers of a fork server that is gone: ours to reap
        self._joined: set[int] = set()  # pids of agents that the supervisor has seen
        try:
            self.site = Site(job, self.folder, output)
        except BaseException:
            self._lead.release()
            raise
        self.token, self.memory, self.network = self.site.token, self.site.memory, self.site.network
        try:
            self._begin(resumed)
        except BaseException:
            self.close()
            raise
        self._leaves = False
        self._thread = threading.Thread(target=self._tend_for_ever, name="launcher", daemon=True)
        self._thread.start()

    # -- for the caller ----------------------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> Outcome | None:
        """How the run ended; None if it still runs after ``timeout`` seconds.

        Raises:
            HostError: it could not be kept going.
        """
        last = math.inf if timeout is None else time.monotonic() + timeout
        while not self._over.wait(max(0.0, min(LOOK, last - time.monotonic()))):
            if time.monotonic() >= last:
                return None
        self.close()
        if self._failure is not None:
            raise self._failure
        return self.outcome

    def events(self) -> list[Event]:
        """All events so far."""
        with self._lock:
            return list(self._events)

    def places(self) -> dict[int, dict[str, Any]]:
        """What stands at each place (`site.statuses`)."""
        alive = {host.process.pid for host in self.site.hosts if host.process.poll() is None}
        return statuses(self.folder, alive.__contains__)

    def close(self) -> None:
        """End everything that is left. May be called more than once."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        if hasattr(self, "_thread") and self._thread is not threading.current_thread():
            self._thread.join(PATIENCE)
        self._end()

    def __enter__(self) -> Launched:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._leaves = kind is Preempted
        self.close()

    # -- beginning ---------------------------------------------------------------------------------------

    def _begin(self, resumed: bool) -> None:
        job = self.job
        own = self.folder / keys.NAME  # what the hosts of a run that goes on have
        shared = keys.of_run(self.folder, own if resumed and own.exists() else job.secret_file)
        self.keys = replace(shared, tls=Certificates.load(job.tls) if job.tls else None)
        events = eventlog.read(self.folder / eventlog.NAME)
        before = past(events)
        for event in events:
            self._hear(event, tell=False)
        if self.outcome is not None:  # a moment ago
            return
        host = self._address()
        self._supervisor = Supervisor(
            self.folder,
            job.rules,
            job.supervision,
            order_hosts=self._ordered.put,
            told=self._told.put,
            keys=self.keys,
            host=host,
            config=job.plain(),
        )
        self._supervisor.start()
        if job.external_hosts:
            listen = job.listen or f"{host}:0"
            self._offer = hosts.Offer(listen, self.keys, lambda: self._agent_config(len(self._joined)))
            if job.on:
                self._hosts = hosts.begin(job, self._offer.address, self.keys, self.folder, self.site.output)
                return
            self._note(f"hosts join by `windtunnel host {self._offer.address}`, with the secret in {own}")
            return
        # hosts that were never started, or were on order when the launcher before died
        waiting = [host for host in self.site.hosts if host.process.pid not in self._joined]
        if before.membership is None:
            missing = job.hosts + job.spares - len(self.site.hosts)
        else:
            missing = before.coming - len(waiting)
        self._start_hosts(missing)

    def _address(self) -> str:
        if self.network is not None:
            return self.network.address
        host = ANYWHERE if self.job.on else "127.0.0.1"
        if self.job.listen:
            host = hosts.split_address(self.job.listen, "--listen")[0]
        return own_address() if host == ANYWHERE else host  # under which no other host finds this one

    def _agent_config(self, number: int) -> AgentConfig:
        assert self._supervisor is not None
        job = self.job
        return AgentConfig(
            run=str(self.folder),
            supervisor=self._supervisor.address,
            secret=str(self.folder / keys.NAME),
            job=job,
            tls=self.keys.files,
            domain=job.domains[number % len(job.domains)] if job.domains else "",
            memory_root=str(self.memory),
            forkserver=str(self.site.forkserver.path),
            name=f"host-{number}",
        )

    def _start_hosts(self, count: int) -> None:
        for _ in range(0 if self.job.external_hosts else count):
            self.site.start(self._agent_config(self.site.next_number))

    # -- while it runs -----------------------------------------------------------------------------------

    def _tend_for_ever(self) -> None:
        try:
            while not self._closing and self.outcome is None:
                self._tend()
                with contextlib.suppress(queue.Empty):  # a host that was ordered is waited for
                    self._start_hosts(self._ordered.get(timeout=TICK))
        except BaseException as error:
            self._failure = error
        finally:
            self._over.set()

    def _tend(self) -> None:
        ended = None if self._supervisor is None else self._supervisor.wait(0)
        self._hear_all()
        self.outcome = self.outcome or ended  # of which no line could be written
        if self.outcome is not None:
            return
        failure = self._hosts.tend() if self._hosts is not None else None
        if failure is not None:
            self.outcome = Outcome(1, failure, {})
        if self.site.forkserver.tend():
            self._note("the fork server was gone; another one was started")
            for place in self.places().values():  # a worker that it had not started yet has no process
                self._adopted.update(pid for pid in place["workers"].values() if pid is not None)
        if self._adopted:
            self._adopted -= processes.reap(self._adopted)
        for host in self.site.hosts:
            status = host.process.poll()
            # A host that is gone is replaced by the supervisor; one that cannot begin would be for ever.
            if status is not None and status > 0 and host.process.pid not in self._joined:
                reason = f"the agent of {host.name} ended with status {status} before it joined"
                self.outcome = Outcome(1, reason, {})

    def _hear_all(self) -> None:
        while not self._told.empty():
            self._hear(self._told.get())

    def _hear(self, event: Event, *, tell: bool = True) -> None:
        """What the supervisor wrote to the log."""
        with self._lock:
            self._events.append(event)
        if self._on_event is not None and tell:
            self._on_event(event)
        if event["kind"] == "host.joined":
            self._joined.add(event["pid"])
        if event["kind"] == "finished":
            self.outcome = self.outcome or Outcome.of(self._events)

    def _note(self, text: str) -> None:
        if self._on_event is not None:
            self._on_event({"kind": "note", "t": time.time(), "text": text, "generation": 0})

    # -- the end -----------------------------------------------------------------------------------------

    def _end(self) -> None:
        if self._offer is not None:
            self._offer.close()
        supervisor, last = self._supervisor, time.monotonic() + PATIENCE
        if supervisor is not None and self._leaves:
            supervisor.abandon()
        elif supervisor is not None:
            supervisor.stop("ended by the launcher")  # it tells the agents, and waits until they go
        if supervisor is not None:
            supervisor.wait(PATIENCE)
        if self._hosts is not None:
            self._hosts.leave() if self._leaves else self._hosts.close()
        if self._leaves:
            self.site.leave()
        else:
            self.site.end_agents(last)
            self._hear_all()
            self.site.close(self._adopted)
        self._lead.release()
