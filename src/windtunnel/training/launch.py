"""Launch a training script under supervision, on emulated hosts of this computer.

Every host is an agent of its own with its own memory folder (and, with ``network="netns"``, its own
network). They share one fork server, since one computer needs torch imported once (`site`). The launcher
plays the cloud: it starts the hosts that the supervisor orders. It keeps the fork server and the supervisor
alive, and at the end, whatever the end is, leaves no process, file in memory or network behind.

A launcher that is killed takes only its supervisor along. Agents and trainers wait ``orphan_after`` seconds
for the next one (`resume`), which starts a supervisor after the last and goes on from its log. A launcher
that finds that another one has done so leaves everything to that one.

    launched = launch("train.py", ["--steps", "20"], hosts=4)
    outcome = launched.wait()
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windtunnel.base import keys
from windtunnel.base.errors import HostError, UserError
from windtunnel.base.tls import Certificates
from windtunnel.linux import processes
from windtunnel.store import eventlog
from windtunnel.training import calling, deadlines
from windtunnel.training.elastic.events import in_short
from windtunnel.training.elastic.live import rendezvous
from windtunnel.training.elastic.live.agent.config import CUT, GENERATION, AgentConfig
from windtunnel.training.elastic.live.keeper import GaveUp, SupervisorKeeper
from windtunnel.training.elastic.live.supervise import LOG
from windtunnel.training.elastic.live.supervisor import Outcome, leadership
from windtunnel.training.elastic.policy.state import past
from windtunnel.training.job import JobSpec
from windtunnel.training.site import EmulatedHost, Site, statuses

if TYPE_CHECKING:
    from windtunnel.store.sharedlog import SharedLog

TICK = 0.02
PATIENCE = 10.0
Event = dict[str, Any]


def launch(
    script: str | Path,
    arguments: Sequence[str] = (),
    *,
    folder: Path,
    on_event: Callable[[Event], None] | None = None,
    output: int | None = None,
    log: SharedLog | None = None,
    **options: Any,
) -> Launched:
    """Start ``script`` (see `JobSpec` for the ``options``); the run's files go to ``folder``, its ``log``
    also to a database.

    ``on_event``: called, from a thread, with every event of the run. ``output``: fd for what the trainers
    print, stdout and stderr of this process if None.

    Raises:
        UserError: the script, an option or a fault is wrong, or this computer cannot emulate the network.
    """
    where = None if log is None else log.where
    job = JobSpec(script=Path(script).absolute(), arguments=tuple(arguments), log=where, **options)
    job.check()
    return Launched(job, folder, on_event, output, log=log)


def resume(
    folder: Path,
    on_event: Callable[[Event], None] | None = None,
    output: int | None = None,
    *,
    log: SharedLog | None = None,
    wait: bool = False,
    **changes: Any,
) -> Launched:
    """Take over the run in ``folder``, whose launcher is gone: its job goes on, with what its hosts hold in
    memory. ``log``: where it is in a database; the folder may be a new one, on another host. ``wait``: as a
    standby, until its launcher is gone or silent, and again where another standby was faster. ``changes``:
    other values of the job's options. The rest is as in `launch`.

    Raises:
        UserError: there is no run, it cannot be led from here, or its launcher is there. Ended: it has.
            HostError, LogFailed: its log went away meanwhile.
    """
    record = leadership.record_of(folder, log)
    while True:
        job = _job(folder, log, changes)
        before = leadership.silent(record)
        while before is None and wait:
            before = leadership.silent(record)
        if before is None:
            raise UserError(f"{folder}: this run is running, {record.read()} leads it")
        if wait and not before.epoch:
            raise HostError(f"{record.where}: the run's log is gone; this standby cannot take over, and ends")
        _job(folder, log, changes)  # it may have ended meanwhile
        try:
            return Launched(job, folder, on_event, output, after=before.epoch, log=log)
        except TakenOver:
            if not wait:
                raise


def _job(folder: Path, log: SharedLog | None, changes: dict[str, Any]) -> JobSpec:
    """What runs in ``folder``, which gets a copy of the ``log`` in a database.

    Raises:
        UserError: there is no run, or it cannot be led from here. Ended: it has.
    """
    if log is not None:
        folder.mkdir(parents=True, exist_ok=True)
        log.copy(folder / eventlog.NAME)
    events = eventlog.read(folder / eventlog.NAME)
    started = [event for event in events if event["kind"] == "started"]
    if not started:
        raise UserError(f"{folder}: there is no run to resume")
    outcome = Outcome.of(events)
    if outcome is not None:
        raise Ended(f"{folder}: this run has ended ({in_short(outcome.reason)})")
    begun = JobSpec.of(started[0]["config"])
    if changes.get("tls") and not begun.tls:
        raise UserError(f"{folder}: the hosts of this run speak without TLS; resume it without certificates")
    job = replace(begun, **changes)
    job.check()
    if job.log is not None and log is None:
        raise UserError(f"{folder}: the log of this run is in {job.log}; give --log")
    if job.listen is not None:
        host, _ = rendezvous.split(job.listen, "--listen")
        try:
            socket.create_server((host, 0)).close()
        except OSError as error:
            told = f"{error.strerror}; give --listen HOST:PORT with an address of this host"
            raise UserError(f"--listen {job.listen}: {told}") from error
    if not (folder / keys.NAME).exists() and not job.secret_file and keys.VARIABLE not in os.environ:
        raise UserError(f"{folder}: the run's secret is needed; give --secret-file FILE")
    return job


class Ended(UserError):
    """The run has, so that nobody can take it over."""


class TakenOver(HostError):
    """Another launcher has the run by now."""


class Launched:
    """A job that runs. Use it as a context manager, or call `close`. ``after``: the epoch of the supervisor
    that this launcher's first one follows, 0 for a new run. ``log``: where the log is in a database."""

    def __init__(
        self,
        job: JobSpec,
        folder: Path,
        on_event: Callable[[Event], None] | None,
        output: int | None,
        after: int = 0,
        log: SharedLog | None = None,
    ) -> None:
        self.job, self._log = job, log
        self._record = leadership.record_of(folder.absolute(), log)
        self.folder = folder.absolute()
        self.outcome: Outcome | None = None
        self._on_event = on_event
        self._events: list[Event] = []
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._closing = False
        self._led = False
        self._leaves = after > 0  # what it has not taken over yet, and what is another launcher's by now
        self._read = 0
        self._due: list[float] = []  # when hosts that were ordered come
        self._ordered = 0  # of those that supervisors of ours have ordered
        self._failure: BaseException | None = None
        self._adopted: set[int] = set()  # workers of a fork server that is gone: ours to reap
        self._joined: set[int] = set()  # pids of agents that the supervisor has seen
        self.site = Site(job, self.folder, output)
        self.token, self.memory, self.network = self.site.token, self.site.memory, self.site.network
        try:
            self._begin(after)
        except BaseException:
            self.close()
            raise
        self._leaves, self._led = False, True
        self._thread = threading.Thread(target=self._tend_for_ever, name="launcher", daemon=True)
        self._thread.start()

    # -- for the caller ----------------------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> Outcome | None:
        """How the run ended; None if it still runs after ``timeout`` seconds.

        Raises:
            UserError: it could not be begun. TakenOver: another launcher has it. HostError: there is no
            supervisor any more.
        """
        if not self._over.wait(timeout):
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

    def kill_host(self, place: int, *, silent: bool = False) -> None:
        """A host is gone: SIGKILL to its workers and its agent, its memory is lost. ``silent`` (with
        "netns"): its network goes first, so that no peer sees a connection close."""
        status = self.places()[place]
        if silent and self.network is not None:
            self.network.link_down(self._host_of(status["pid"]).name)
        self._injected(f"kill_host({place})", place, None)
        for pid in (status["pid"], *status["workers"].values()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(status["memory"], ignore_errors=True)

    def kill_agent(self, place: int) -> None:
        """SIGKILL to an agent alone."""
        self._injected(f"kill_agent({place})", place, None)
        os.kill(self.places()[place]["pid"], signal.SIGKILL)

    def kill_worker(self, rank: int, number: int = signal.SIGKILL) -> None:
        """A signal to a worker."""
        place = rank // self.job.per_host
        pid = self.places()[place]["workers"][rank]
        self._injected(f"kill_worker({rank})", place, rank)
        os.kill(pid, number)

    def stop_worker(self, rank: int) -> None:
        """SIGSTOP: the worker freezes, its connections stay open."""
        self.kill_worker(rank, signal.SIGSTOP)

    def add_host(self) -> None:
        """A host comes that nobody ordered (spot capacity, a repair); the policy says what becomes of
        it."""
        with self._lock:
            if not self._closing:
                self._start_host()

    def kill_supervisor(self) -> None:
        """SIGKILL to the supervisor; the launcher starts another."""
        self._supervisor.process.kill()

    def kill_forkserver(self) -> None:
        """SIGKILL to the fork server; the launcher starts another."""
        self.site.forkserver.process.kill()

    def link(self, place: int, *, up: bool) -> None:
        """Take a host's network link down, or up again (needs "netns")."""
        assert self.network is not None
        name = self._host_of(self.places()[place]["pid"]).name
        self.network.link_up(name) if up else self.network.link_down(name)

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

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- beginning ---------------------------------------------------------------------------------------

    def _begin(self, after: int) -> None:
        job = self.job
        own = self.folder / keys.NAME  # what the hosts of a run that goes on have
        shared = keys.of_run(self.folder, own if after and own.exists() else job.secret_file)
        self.keys = replace(shared, tls=Certificates.load(job.tls) if job.tls else None)
        config = self.folder / "supervisor.config.json"
        plain = {
            "run": self.folder.name if self._log is None else self._log.run,
            "folder": str(self.folder),
            "secret": str(self.folder / keys.NAME),
            "tls": self.keys.files,
            "rules": asdict(job.rules),
            "places": job.hosts,
            "per_host": job.per_host,
            "host": self._address(),
            "port": 0,
            "forkserver": str(self.site.forkserver.path),
            "beat": job.beat,
            "lease": job.lease,
            "deadlines": deadlines.of("supervisor", job.deadlines),
            "config": job.plain(),
        }
        config.write_text(json.dumps(plain, indent=1) + "\n")
        before = past(eventlog.read(self.folder / eventlog.NAME))
        self._follow(tell=False)
        if self.outcome is not None:
            return
        known = self._record.read().address
        env = self.site.env if self._log is None else {**self.site.env, LOG: self._log.url}
        try:
            self._supervisor = SupervisorKeeper(
                config,
                env,
                self._record,
                after,
                lease=job.lease,
                start=deadlines.of("launcher", job.deadlines)["start"],
                over=self._ended,
            )
        except GaveUp as error:
            raise self._given_up(error) from error
        self._call(known)
        if job.listen is not None:
            self._offer = rendezvous.Offer(
                job.listen, self.keys, lambda: self._agent_config(len(self._joined)), must=not after
            )
            secret = self.folder / keys.NAME
            self._note(f"hosts join by `windtunnel host {self._offer.address}`, with the secret in {secret}")
            return
        # hosts that were never started, or were on order when the launcher before died
        waiting = [host for host in self.site.hosts if host.process.pid not in self._joined]
        if before.membership is None:
            missing = job.hosts + job.spares - len(self.site.hosts)
        else:
            missing = before.coming - len(waiting)
        for _ in range(missing):
            self._start_host()

    def _call(self, known: str) -> None:
        """Hosts that look for their supervisor at the address ``known`` learn where it is now."""
        if known and known != self._supervisor.address:
            hosts = [host for host, _ in past(self.events()).hosts.values()]
            calling.call(hosts, self._supervisor.address, self._supervisor.epoch, self.keys, self._over)

    def _address(self) -> str:
        if self.network is not None:
            return self.network.address
        return rendezvous.split(self.job.listen, "--listen")[0] if self.job.listen else "127.0.0.1"

    def _agent_config(self, number: int) -> AgentConfig:
        job, told = self.job, self.job.deadlines
        waits = {
            "timeout": told.get("operation", job.timeout),
            "patience": told.get("generation", GENERATION),
        }
        return AgentConfig(
            run=str(self.folder),
            supervisor=self._supervisor.address,
            secret=str(self.folder / keys.NAME),
            tls=self.keys.files,
            script=str(job.script),
            arguments=job.arguments,
            cwd=str(job.cwd),
            domain=job.domains[number % len(job.domains)] if job.domains else "",
            memory_root=str(self.memory),
            forkserver=str(self.site.forkserver.path),
            preload=job.preload,
            env={"WINDTUNNEL_CHECKPOINT": json.dumps(job.settings)} if job.settings else {},
            faults=job.faults,
            settings={"beat": min(0.2, job.frozen_after / 4), "cut": told.get("cut", CUT), **waits},
            name=f"host-{number}",
            frozen_after=job.frozen_after,
            orphan_after=told.get("orphan", job.orphan_after),
            stuck_after=deadlines.of("agent", told)["stuck"],
            leave=deadlines.of("agent", told)["leave"],
            limits=deadlines.of("memory", told),
        )

    def _start_host(self) -> None:
        self.site.start(self._agent_config(self.site.next_number))

    # -- while it runs -----------------------------------------------------------------------------------

    def _tend_for_ever(self) -> None:
        try:
            while not self._closing and self.outcome is None:
                self._tend(time.monotonic())
                time.sleep(TICK)
        except GaveUp as error:
            self._failure = self._given_up(error)
        except BaseException as error:
            self._failure = error
        finally:
            self._over.set()

    def _tend(self, now: float) -> None:
        if self._ended():
            return
        known = self._supervisor.address
        why = self._supervisor.tend(now)
        if why is not None:
            self._call(known)
            self._note(f"the supervisor was replaced: {why}")
        self._due += [now + self.job.replace_after] * (self._supervisor.ordered - self._ordered)
        self._ordered = self._supervisor.ordered
        while self._due and self._due[0] <= now and self.job.listen is None:
            self._due.pop(0)
            self._start_host()
        if self.site.forkserver.tend():
            self._note("the fork server was gone; another one was started")
            for found in self.places().values():  # a worker that it had not started yet has no process
                self._adopted.update(pid for pid in found["workers"].values() if pid is not None)
        if self._adopted:
            self._adopted -= processes.reap(self._adopted)
        for host in self.site.hosts:
            status = host.process.poll()
            # A host that is gone is replaced by the supervisor; one that cannot begin would be for ever.
            if status is not None and status > 0 and host.process.pid not in self._joined:
                reason = f"the agent of {host.name} ended with status {status} before it joined"
                self.outcome = Outcome(1, reason, {})

    def _ended(self) -> bool:
        """Whether the run has, as far as its log says."""
        self._follow()
        return self.outcome is not None

    def _given_up(self, error: GaveUp) -> Exception:
        """What the caller is told, once there is no supervisor any more."""
        if not error.superseded:
            return HostError(f"{self.folder}: {error}")
        self._leaves = True
        leader = self._record.read()
        told = f"another launcher has this run by now (epoch {leader.epoch}, {leader}); this one ends"
        return TakenOver(f"{self.folder}: {told}")

    def _follow(self, *, tell: bool = True) -> None:
        """New lines of the event log."""
        try:
            with (self.folder / eventlog.NAME).open("rb") as file:
                file.seek(self._read)
                text = file.read()
        except FileNotFoundError:
            return
        whole = text.rfind(b"\n") + 1
        self._read += whole
        for line in text[:whole].splitlines():
            event = json.loads(line)
            with self._lock:
                self._events.append(event)
            if self._on_event is not None and tell:
                self._on_event(event)
            if event["kind"] == "host.joined":
                self._joined.add(event["pid"])
            if event["kind"] == "finished":
                self.outcome = self.outcome or Outcome.of(self._events)

    def _injected(self, fault: str, place: int | None, rank: int | None) -> None:
        """Our own strikes are in no log of the supervisor: they are kept with the events of this process."""
        event = {"kind": "injected", "t": time.time(), "fault": fault, "place": place, "rank": rank}
        event["generation"] = max((e["generation"] for e in self.events()), default=0)
        with self._lock:
            self._events.append(event)

    def _note(self, text: str) -> None:
        if self._on_event is not None:
            self._on_event({"kind": "note", "t": time.time(), "text": text, "generation": 0})

    def _host_of(self, pid: int) -> EmulatedHost:
        return self.site.of(pid)

    # -- the end -----------------------------------------------------------------------------------------

    def _end(self) -> None:
        if hasattr(self, "_offer"):
            self._offer.close()
        supervisor = getattr(self, "_supervisor", None)
        if self._leaves:
            if supervisor is not None:
                supervisor.end(PATIENCE, tell=False)
            if self._led or self.site.found:
                self.site.forkserver.leave()
                return
            self.site.close(set())  # which no host has seen
            return
        last = time.monotonic() + PATIENCE
        if supervisor is not None:
            finished = any(event["kind"] == "finished" for event in self._events)
            supervisor.end(PATIENCE, tell=not finished)  # it tells the agents, waits until they go, and ends
        self.site.end_agents(last)
        with contextlib.suppress(OSError):
            self._follow()
        self.site.close(self._adopted)
