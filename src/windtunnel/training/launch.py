"""Launch a training script under supervision, on emulated hosts of this computer.

Every host is an agent of its own with its own memory folder (and, with ``network="netns"``, its own
network). They share one fork server, since one computer needs torch imported once. The launcher plays the
cloud: it starts the hosts that the supervisor orders. It keeps the fork server and the supervisor alive, and
at the end, whatever the end is, leaves no process, file in memory or network behind.

    launched = launch("train.py", ["--steps", "20"], hosts=4)
    outcome = launched.wait()
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from windtunnel.base import keys
from windtunnel.base.errors import UserError
from windtunnel.linux import namespaces, network, processes
from windtunnel.linux.forkserver_client import ForkServerKeeper
from windtunnel.training import cleanup, deadlines
from windtunnel.training.elastic.live import forked, rendezvous
from windtunnel.training.elastic.live.agent.config import CUT, GENERATION, AgentConfig
from windtunnel.training.elastic.live.supervisor import Outcome
from windtunnel.training.job import JobSpec

TICK = 0.02
MOST_SUPERVISORS = 20
PATIENCE = 10.0
Event = dict[str, Any]


@dataclass
class EmulatedHost:
    """One emulated host: its agent's process."""

    name: str
    process: subprocess.Popen[bytes]
    namespace: str | None


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
        UserError: the script, an option or a fault is wrong, or this computer cannot emulate the network.
    """
    job = JobSpec(script=Path(script).absolute(), arguments=tuple(arguments), **options)
    job.check()
    return Launched(job, folder, on_event, output)


class Launched:
    """A job that runs. Use it as a context manager, or call `close`."""

    def __init__(
        self, job: JobSpec, folder: Path, on_event: Callable[[Event], None] | None, output: int | None
    ) -> None:
        self.job = job
        self.folder = folder.absolute()
        self.outcome: Outcome | None = None
        self.supervisor_restarts = 0
        self._on_event, self._output = on_event, output
        self._hosts: list[EmulatedHost] = []
        self._events: list[Event] = []
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._closing = False
        self._read = 0
        self._due: list[float] = []  # when hosts that were ordered come
        self._failure: BaseException | None = None
        self._adopted: set[int] = set()  # workers of a fork server that is gone: ours to reap
        self._joined: set[int] = set()  # pids of agents that the supervisor has seen
        cleanup.sweep()
        network.sweep()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.token = f"windtunnel-{self.folder.name[-20:]}-{secrets.token_hex(3)}"
        self.memory = cleanup.claim(self.token)
        self._lifeline, self._held = os.pipe()
        self.network: network.Network | None = None
        try:
            self._begin()
        except BaseException:
            self.close()
            raise
        self._thread = threading.Thread(target=self._tend_for_ever, name="launcher", daemon=True)
        self._thread.start()

    # -- for the caller ----------------------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> Outcome | None:
        """How the run ended; None if it still runs after ``timeout`` seconds.

        Raises:
            UserError: it could not be begun.
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
        """What stands at each place: the agent's pid, host id, memory folder and workers {rank: pid}."""
        told = []
        for path in (self.folder / "agents").glob("*.json"):
            with contextlib.suppress(OSError, ValueError):
                told.append(json.loads(path.read_text()))
        found = {}
        # of two, the older is of a host that was cut off and does not know yet that it was replaced
        for status in sorted(told, key=lambda one: int(one["generation"])):
            alive = any(m.process.pid == status["pid"] and m.process.poll() is None for m in self._hosts)
            if status["place"] is not None and alive:
                status["workers"] = {int(rank): pid for rank, pid in status["workers"].items()}
                found[status["place"]] = status
        return found

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
        self._supervisor.kill()

    def kill_forkserver(self) -> None:
        """SIGKILL to the fork server; the launcher starts another."""
        self._forkserver.process.kill()

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

    def _begin(self) -> None:
        job = self.job
        self.keys = keys.of_run(self.folder, job.secret_file)
        if job.network == "netns":
            self.network = network.Network(self.token, job.rate)
        env = self._environment()
        self._forkserver = ForkServerKeeper(self.memory / "forkserver", (forked.MODULE, *job.preload), env)
        self._env = env
        self._config = self.folder / "supervisor.config.json"
        rules = asdict(job.rules)
        plain = {
            "folder": str(self.folder),
            "secret": str(self.folder / keys.NAME),
            "rules": rules,
            "places": job.hosts,
            "per_host": job.per_host,
            "host": self._address(),
            "port": 0,
            "forkserver": str(self._forkserver.path),
            "beat": job.beat,
            "lease": job.lease,
            "deadlines": deadlines.of("supervisor", job.deadlines),
            "config": {
                "script": str(job.script),
                "arguments": list(job.arguments),
                "hosts": job.hosts,
                "per_host": job.per_host,
                "spares": job.spares,
                "rules": rules,
                "faults": list(job.faults),
                "settings": job.settings,
                "network": job.network,
                "rate": job.rate,
            },
        }
        self._config.write_text(json.dumps(plain, indent=1) + "\n")
        self._supervisor = self._start_supervisor()
        self.address = self._told_address()
        if job.listen is not None:
            self._offer = rendezvous.Offer(
                job.listen, self.keys, lambda: self._agent_config(len(self._hosts))
            )
            secret = self.folder / keys.NAME
            self._note(f"hosts join by `windtunnel host {self._offer.address}`, with the secret in {secret}")
            return
        for _ in range(job.hosts + job.spares):
            self._start_host()

    def _address(self) -> str:
        if self.network is not None:
            return self.network.address
        return rendezvous.split(self.job.listen, "--listen")[0] if self.job.listen else "127.0.0.1"

    def _environment(self) -> dict[str, str]:
        env = {**os.environ, **self.job.env, cleanup.TOKEN: self.token}
        env.pop(keys.VARIABLE, None)  # it is in the run's folder
        env.setdefault("OMP_NUM_THREADS", "1")
        # torch asks the DNS for the name of each connection to a store, and waits 5 s where no answer comes
        env.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
        # each cut of a group would print a stack of C++ otherwise
        env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        if self.network is None and self.job.listen is None:
            env.setdefault("GLOO_SOCKET_IFNAME", "lo")
        elif self.network is not None:
            env["GLOO_SOCKET_IFNAME"] = network.INTERFACE
        return env

    def _start_supervisor(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "windtunnel.training.elastic.live.supervise", str(self._config)]
        command += ["--lifeline", str(self._lifeline)]
        process = subprocess.Popen(
            command,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            pass_fds=[self._lifeline],
        )
        return process

    def _told_address(self) -> str:
        assert self._supervisor.stdout is not None
        ready, _, _ = select.select(
            [self._supervisor.stdout], [], [], deadlines.of("launcher", self.job.deadlines)["start"]
        )
        line = self._supervisor.stdout.readline() if ready else b""
        if not line:
            if not ready:
                self._supervisor.kill()
            status = self._supervisor.wait(PATIENCE)
            raise UserError(f"{self.folder}: the supervisor did not start (status {status})")
        os.set_blocking(self._supervisor.stdout.fileno(), False)
        return str(json.loads(line)["address"])

    def _agent_config(self, number: int) -> AgentConfig:
        job, told = self.job, self.job.deadlines
        waits = {
            "timeout": told.get("operation", job.timeout),
            "patience": told.get("generation", GENERATION),
        }
        return AgentConfig(
            run=str(self.folder),
            supervisor=self.address,
            secret=str(self.folder / keys.NAME),
            script=str(job.script),
            arguments=job.arguments,
            cwd=str(job.cwd),
            domain=job.domains[number % len(job.domains)] if job.domains else "",
            memory_root=str(self.memory),
            forkserver=str(self._forkserver.path),
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
        config = self._agent_config(len(self._hosts))
        if self.network is not None:
            namespace, address = self.network.add(config.name)
            config = replace(config, address=address, namespace=namespace, interface=network.INTERFACE)
        path = self.folder / "agents" / f"{config.name}.config"
        path.parent.mkdir(exist_ok=True)
        config.write(path)
        command = [sys.executable, "-m", "windtunnel.training.host", str(path)]
        command += ["--lifeline", str(self._lifeline)]

        def start() -> subprocess.Popen[bytes]:
            return subprocess.Popen(
                command,
                env=self._env,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                pass_fds=[self._lifeline],
            )

        process = start() if config.namespace is None else namespaces.within(config.namespace, start)
        self._hosts.append(EmulatedHost(config.name, process, config.namespace))

    # -- while it runs -----------------------------------------------------------------------------------

    def _tend_for_ever(self) -> None:
        try:
            while not self._closing and self.outcome is None:
                self._tend(time.monotonic())
                time.sleep(TICK)
        except BaseException as error:
            self._failure = error
        finally:
            self._over.set()

    def _tend(self, now: float) -> None:
        self._follow()
        if self.outcome is not None:
            return
        self._take_orders(now)
        while self._due and self._due[0] <= now and self.job.listen is None:
            self._due.pop(0)
            self._start_host()
        if self._forkserver.tend():
            self._note("the fork server was gone; another one was started")
            for found in self.places().values():
                self._adopted.update(found["workers"].values())
        if self._adopted:
            self._adopted -= processes.reap(self._adopted)
        for host in self._hosts:
            status = host.process.poll()
            # A host that is gone is replaced by the supervisor; one that cannot begin would be for ever.
            if status is not None and status > 0 and host.process.pid not in self._joined:
                reason = f"the agent of {host.name} ended with status {status} before it joined"
                self.outcome = Outcome(1, reason, {})
        ended = self._supervisor.poll()
        if ended is not None:
            self._follow()
            if self.outcome is None:
                self._restart_supervisor(ended)

    def _restart_supervisor(self, status: int) -> None:
        self._take_orders(time.monotonic())
        self.supervisor_restarts += 1
        if status == 2 or self.supervisor_restarts > MOST_SUPERVISORS:
            reason = f"the supervisor ended with status {status}, {self.supervisor_restarts} times"
            self.outcome = Outcome(1, reason, {})
            return
        self._supervisor = self._start_supervisor()
        self._told_address()  # it listens where the one before did

    def _take_orders(self, now: float) -> None:
        assert self._supervisor.stdout is not None
        with contextlib.suppress(BlockingIOError):
            while line := self._supervisor.stdout.readline():
                count = json.loads(line).get("order", 0)
                self._due += [now + self.job.replace_after] * count

    def _follow(self) -> None:
        """New lines of the event log."""
        try:
            with (self.folder / "events.jsonl").open("rb") as file:
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
            if self._on_event is not None:
                self._on_event(event)
            if event["kind"] == "host.joined":
                self._joined.add(event["pid"])
            if event["kind"] == "finished":
                done = {e["rank"]: e.get("result") for e in self._events if e["kind"] == "done"}
                self.outcome = self.outcome or Outcome(event["status"], event["reason"], done)

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
        return next(host for host in self._hosts if host.process.pid == pid)

    # -- the end -----------------------------------------------------------------------------------------

    def _end(self) -> None:
        agents = [host.process for host in self._hosts]
        finished = any(event["kind"] == "finished" for event in self._events)
        last = time.monotonic() + PATIENCE
        supervisor = getattr(self, "_supervisor", None)
        if supervisor is not None:
            if not finished:
                supervisor.terminate()  # it tells the agents, waits until they go, and ends
            with contextlib.suppress(subprocess.TimeoutExpired):
                supervisor.wait(max(0.0, last - time.monotonic()))
        for process in agents:
            process.terminate()  # who was not told: a spare that came late, a host that was cut off
        for process in agents:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, last - time.monotonic()))
        with contextlib.suppress(OSError):
            self._follow()
        for fd in (self._held, self._lifeline):
            with contextlib.suppress(OSError):
                os.close(fd)
        if hasattr(self, "_offer"):
            self._offer.close()
        if hasattr(self, "_forkserver"):
            self._forkserver.close()
        cleanup.kill_marked(self.token)
        for process in [*agents, *([supervisor] if supervisor else [])]:
            process.wait(PATIENCE)
        if supervisor is not None and supervisor.stdout is not None:
            supervisor.stdout.close()
        processes.reap(self._adopted)
        if self.network is not None:
            self.network.close()
        shutil.rmtree(self.memory, ignore_errors=True)
