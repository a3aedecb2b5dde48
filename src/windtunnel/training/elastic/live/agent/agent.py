"""The agent: what it does with what the supervisor, its workers and its services say.

All state belongs to one thread, that of `Agent.run`; every other thread puts functions into its queue. The
agent decides nothing about the membership: it makes the present one true on its host. On a membership
 - of a lower epoch or generation than seen: it is refused;
 - workers that spoke to the agent go on and are told, under their new rank; a worker that never spoke (a
   script without `elastic.run`, or one that is still importing) is replaced, since its environment is old;
 - ranks without a process get one; with ``restart_all`` every process is replaced.
Everything else is passed on: posts and events of workers and services to the supervisor, decisions to them.

What is said to a supervisor that dies is said to the next one: posts (open ones, and the newest that were
decided in this generation), questions and results go with ``hello``. Without one for ``orphan_after`` seconds
the agent ends its workers, its memory and itself.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from windtunnel.base import atomic
from windtunnel.base.keys import Keys
from windtunnel.base.rpc import RpcServer, RpcService
from windtunnel.linux import processes
from windtunnel.linux.forkserver_client import ForkServerClient, ForkServerKeeper
from windtunnel.training.elastic.live.agent.config import PREPARE, AgentConfig, environment
from windtunnel.training.elastic.live.agent.link import SupervisorLink, silent
from windtunnel.training.elastic.live.agent.trainers import Answer, Trainers, nobody
from windtunnel.training.elastic.live.agent.workers import (
    TrainerProcess,
    TrainerStream,
    Workers,
)
from windtunnel.training.elastic.live.calls import Hello, HostAgent, Message, News, Post, TrainerWelcome
from windtunnel.training.elastic.model import Membership
from windtunnel.training.elastic.policy.evidence import Leases, cause_in

TICK = 0.05
KEPT_SETTLED = 64
RUDE_GRACE = 1.0  # seconds for workers to leave by themselves when the job failed
LAST_LINES = 2.0  # seconds for what trainers that have ended printed
BUSY = 10.0  # seconds that the agent's thread may be busy with something else


class HostService(Protocol):
    """What lives in the agent besides: the memory service."""

    address: str
    path: str

    def membership(self, membership: Membership, place: int | None) -> None: ...
    def decided(self, key: str, values: dict[int, Any]) -> None: ...
    def close(self) -> None: ...


class Agent:
    """One host's agent. ``run`` returns the exit status that the supervisor gave, or 1 as an orphan."""

    def __init__(self, config: AgentConfig, forkserver: Path, keeper: ForkServerKeeper | None = None) -> None:
        self.config = config
        self._waits = config.job.waits("agent")
        self._keeper = keeper
        self.host: int | None = None
        self.epoch = 0
        self.member: Membership | None = None
        self.place: int | None = None
        self.mine: list[int] = []
        self.service: HostService | None = None
        Path(config.memory_root).mkdir(parents=True, exist_ok=True)
        # not by the host's name: a path of a socket has 107 bytes at most
        self.memory = Path(tempfile.mkdtemp(prefix="host-", dir=config.memory_root))
        self.status: int | None = None
        self._inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._posts: dict[tuple[int, str, int], Any] = {}
        # decided ones: a supervisor that dies has told some hosts only, or has not heard what follows from it
        self._settled: dict[tuple[int, str, int], Any] = {}
        self._agreeing: dict[tuple[int, str], list[Answer]] = {}
        self._results: dict[int, Message] = {}
        self._early: list[Callable[[], None]] = []
        self.leases: Leases[int] = Leases(config.job.frozen_after)  # by process id: trainers
        self._supervision: Leases[str] = Leases(config.job.orphan_after)
        self._formed = threading.Condition()
        self._met: dict[str, str] = {}  # what ranks of this generation say to those they form groups with
        folder = Path(config.run) / "agents"
        folder.mkdir(parents=True, exist_ok=True)
        self._status_file = folder / f"{config.name}.json"
        self._forks = ForkServerClient(forkserver, lambda m: self.do(lambda: self.workers.exited(m)))
        self.workers = Workers(self._forks, self.do, self._started, self._gone)
        self._socket = self.memory / "agent.sock"
        self._server = RpcServer(RpcService.of(HostAgent, Trainers(self)), f"unix:{self._socket}")
        self.keys = Keys.of_job(config.secret, config.tls)
        self.link = SupervisorLink(
            config.supervisor, self.keys, self._greeting, lambda m: self.do(lambda: self._hear(m))
        )

    # -- what services call ------------------------------------------------------------------------------

    def post(self, key: str, rank: int, value: Any) -> None:
        """A service posts on behalf of a rank, in the present generation."""
        self.do(lambda: self._post(self.generation, key, rank, value))

    def event(self, kind: str, **fields: Any) -> None:
        """Something happened; from any thread."""
        about = {"t": time.time(), "generation": self.generation, **fields}
        self.link.send("event", kind=kind, fields=about)

    # -- the loop ----------------------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        return self.member.generation if self.member is not None else 0

    def do(self, function: Callable[[], object]) -> None:
        """Run ``function`` in the agent's thread."""
        self._inbox.put(function)

    def stop(self, status: int) -> None:
        """End in order, from any thread or a signal handler."""
        self.do(lambda: self._end(status))

    def run(self) -> int:
        """Serve until the end."""
        self._write_status()
        self.link.start()
        checked = time.monotonic()
        try:
            while self.status is None:
                self._turn(TICK)
                if time.monotonic() - checked >= TICK:
                    checked = time.monotonic()
                    self._tick(checked)
            return self.status
        finally:
            self._close()

    def _turn(self, timeout: float) -> None:
        """One thing that came. An agent outlives what goes wrong in it, and says so."""
        try:
            function = self._inbox.get(timeout=timeout)
        except queue.Empty:
            return
        try:
            function()
        except Exception:
            self.event("note", text=f"{self.config.name}: {traceback.format_exc()}")

    def _tick(self, now: float) -> None:
        if self._keeper is not None:
            self._keeper.tend()
        self._hear_early()
        self._reconcile()
        self._look_at_trainers(now)
        self._supervision.renew("", self.link.last_message)
        self._supervision.forgive(now)
        if self._supervision.silent(now):
            self._end(1)

    def _look_at_trainers(self, now: float) -> None:
        """A process that holds the interpreter's lock is silent, too: it is given more time. One that never
        speaks (a script without `elastic.run`) gives a sign of life as long as it is not stopped."""
        self.leases.forgive(now)
        for worker in self.workers.living():
            if worker.pid is None or worker.done or worker.frozen or worker.stopped:
                continue
            late = now - self.leases.last_signs.setdefault(worker.pid, now)
            if worker.spoke and late <= self.leases.seconds:
                continue
            stopped = processes.state(worker.pid) in ("T", "t")
            if not worker.spoke and not stopped:
                self.leases.renew(worker.pid, now)
            elif late > max(0.0 if stopped else self._waits["stuck"], self.leases.seconds):
                worker.frozen = True
                self.leases.end(worker.pid)
                how = "it is stopped" if stopped else "it does not answer"
                self._report(worker, "frozen", None, None, f"{how}: no sign of life for {late:.2f} s")

    # -- the supervisor ----------------------------------------------------------------------------------

    def _greeting(self) -> Hello:
        """In the link's thread."""
        answers: queue.SimpleQueue[Hello] = queue.SimpleQueue()
        self.do(lambda: answers.put(self._hello()))
        try:
            return answers.get(timeout=BUSY)
        except queue.Empty:
            raise OSError("the agent is busy") from None

    def _hello(self) -> Hello:
        posts = {**self._settled, **self._posts}.items()
        return Hello(
            address=self.config.address,
            memory=self.service.address if self.service else "",
            pid=os.getpid(),
            host=self.host,
            domain=self.config.domain,
            generation=self.generation,
            epoch=self.epoch,
            workers={worker.rank: worker.pid for worker in self._present()},
            posts=[Post(generation, key, {rank: value}) for (generation, key, rank), value in posts],
            met=dict(self._met),
        )

    def _present(self) -> list[TrainerProcess]:
        return [w for w in self.workers.living() if w.rank in self.mine and not w.stopped]

    def _hear(self, message: Message) -> None:
        if message["epoch"] < self.epoch:
            return  # of a supervisor that another one has followed
        self.epoch = message["epoch"]
        op = message["op"]
        if op == "welcome":
            self._welcome(message)
        elif op == "membership":
            membership = Membership.of(message["membership"])
            current = (self.member.epoch, self.member.generation) if self.member is not None else (0, 0)
            if (membership.epoch, membership.generation) >= current:
                self.epoch = max(self.epoch, membership.epoch)
                self._join(membership, message["place"], message["mine"])
        elif op == "decided":
            self._decided(message["generation"], message["key"], message["values"])
        elif op == "met":
            self._hear_met(message["generation"], message["said"])
        elif op == "look":
            threading.Thread(target=self._look, args=(message,), name="windtunnel-look", daemon=True).start()
        elif op == "fence":
            self._fence(message)
        elif op == "end":
            self._end(message["status"])

    def _welcome(self, message: Message) -> None:
        self.host = message["host"]
        for result in self._results.values():
            self.link.send("done", **result)
        self._write_status()

    def _join(self, membership: Membership, place: int | None, mine: list[int]) -> None:
        again = self.member == membership and self.place == place
        with self._formed:
            self.member, self.place, self.mine = membership, place, list(mine)
            if again:
                return
            self._met = {}
        for key in [key for key in self._agreeing if key[0] < membership.generation]:
            for answer in self._agreeing.pop(key):
                answer(None)
        self._posts = {k: v for k, v in self._posts.items() if k[0] >= membership.generation}
        self._settled.clear()
        self._results.clear()
        if self.service is not None:
            self.service.membership(membership, place)
        for worker in self.workers.living():
            rank = self._rank_of(worker.local)
            if rank is None or membership.restart_all or worker.frozen or not worker.spoke:
                self.workers.stop(worker)
                continue
            worker.rank = worker.stream.rank = rank
            worker.generation = self.generation
            worker.done = False
        with self._formed:
            self._formed.notify_all()
        self._reconcile()
        self._write_status()

    def _rank_of(self, local: int) -> int | None:
        return self.mine[local] if local < len(self.mine) else None

    def _reconcile(self) -> None:
        """Start what is missing, as far as the processes of before are gone."""
        for local, rank in enumerate(self.mine):
            before = self.workers.by_local.get(local)
            # What ended in the present generation is the supervisor's to decide about.
            if before is not None and (not before.ended or before.generation == self.generation):
                continue
            self._start(local, rank)

    def _start(self, local: int, rank: int) -> None:
        assert self.member is not None
        logs = Path(self.config.run) / "logs"
        logs.mkdir(exist_ok=True)
        stream = TrainerStream(logs / f"rank-{rank}.gen-{self.generation}.log", rank)
        worker = TrainerProcess(local, rank, self.generation, stream)
        request = {
            "script": str(self.config.job.script),
            "arguments": self.config.job.arguments,
            "cwd": str(self.config.job.cwd),
            "env": environment(self.config, self.member, self._socket, rank, self.place),
            "namespace": self.config.namespace,
            "before": [PREPARE],
        }
        try:
            self.workers.start(worker, request)
        except OSError:
            stream.begin()  # the fork server is being replaced: the next tick tries again

    def _look(self, message: Message) -> None:
        """In a thread of its own, since it waits for hosts that do not answer."""
        hosts = {int(host): address for host, address in message["hosts"].items()}
        self.link.send("reached", round=message["round"], silent=silent(hosts, message["within"]))

    def _fence(self, message: Message) -> None:
        worker = self.workers.of_pid(message["pid"]) if message.get("pid") else None
        if worker is None:
            worker = next((w for w in self.workers.living() if w.rank == message["rank"]), None)
        if worker is not None:
            self.workers.kill(worker)

    # -- the workers -------------------------------------------------------------------------------------

    def welcome(self, pid: int, answer: Answer) -> None:
        """A trainer has come. It may be faster than the fork server's word that it was forked."""
        worker = self.workers.of_pid(pid)
        if worker is None and any(other.pid is None for other in self.workers.living()):
            self._early.append(lambda: self.welcome(pid, answer))
        elif worker is None or worker.stopped:
            answer(nobody(pid))  # fenced: nobody of this generation
        else:
            worker.spoke = True
            self.leases.renew(pid, time.monotonic())
            path = self.service.path if self.service else None
            faults, config = list(self.config.job.faults), self.config.worker
            news = self._news()
            answer(TrainerWelcome(news, worker.rank, worker.local, self.host or 0, path, faults, config))

    def _news(self) -> News:
        assert self.member is not None
        return News(self.member.plain(), self.place)

    def news(self, generation: int, within: float) -> News | None:
        """What is newer than ``generation``, within so many seconds; from any thread."""
        with self._formed:
            if self._formed.wait_for(lambda: self.generation > generation, within):
                return self._news()
            return None

    def _hear_met(self, generation: int, said: dict[str, str]) -> None:
        with self._formed:
            if generation == self.generation:
                self._met |= said
                self._formed.notify_all()

    def meet(
        self, generation: int, said: dict[str, str], keys: list[str], within: float
    ) -> dict[str, str] | None:
        """See `HostAgent.meet`; from any thread."""
        if said:
            self._hear_met(generation, said)
            self.link.meet(generation, said)
        with self._formed:
            if not self._formed.wait_for(
                lambda: generation < self.generation or self._met.keys() >= set(keys), within
            ):
                missing = ", ".join(sorted(set(keys) - self._met.keys()))
                raise TimeoutError(f"nobody said {missing} within {within:g} s")
            return {key: self._met[key] for key in keys} if generation == self.generation else None

    def agree(self, pid: int, generation: int, key: str, value: Any, answer: Answer) -> None:
        """A trainer posts, and waits for the values of all."""
        worker = self.workers.of_pid(pid)
        if worker is None or worker.stopped:
            answer(nobody(pid))
        elif generation < self.generation:
            answer(None)
        else:
            self._agreeing.setdefault((generation, key), []).append(answer)
            self._post(generation, key, worker.rank, value)

    def _post(self, generation: int, key: str, rank: int, value: Any) -> None:
        if generation < self.generation:
            return
        self._posts[generation, key, rank] = value
        posts = {**self._settled, **self._posts}
        values = {member: posts[at] for member in self.mine if (at := (generation, key, member)) in posts}
        if len(values) == len(self.mine):  # nothing is agreed before all ranks have posted
            self.link.send("post", generation=generation, key=key, values=values)

    def _decided(self, generation: int, key: str, values: dict[str, Any]) -> None:
        by_rank = {int(rank): value for rank, value in values.items()}
        for rank in by_rank:
            if (generation, key, rank) in self._posts:
                self._settled[generation, key, rank] = self._posts.pop((generation, key, rank))
        while len(self._settled) > KEPT_SETTLED:
            del self._settled[next(iter(self._settled))]
        if self.service is not None:
            self.service.decided(key, by_rank)
        for answer in self._agreeing.pop((generation, key), []):
            answer(by_rank)

    def finish(self, worker: TrainerProcess, result: Any) -> None:
        """A rank is done."""
        if not worker.done:
            worker.done = True
            about = {"generation": self.generation, "rank": worker.rank, "result": result}
            self._results[worker.rank] = about
            self.link.send("done", **about)

    def _started(self, worker: TrainerProcess) -> None:
        self._report(worker, "started", None, None, "")
        self._write_status()
        self._hear_early()

    def _hear_early(self) -> None:
        early, self._early = self._early, []
        for welcome in early:
            welcome()

    def _gone(self, worker: TrainerProcess, status: int | None, number: int | None) -> None:
        self.leases.end(worker.pid or 0)
        if worker.stopped:
            self._reconcile()
            self._write_status()
            return
        if status == 0:
            self.finish(worker, None)  # a script without `run`, or one that left early of its own will
        error = worker.error
        if status and number is None:
            error = error or cause_in(list(worker.stream.tail), status)
        self._report(worker, "exit", status, number, error)
        self._write_status()

    def _report(
        self, worker: TrainerProcess, what: str, status: int | None, number: int | None, error: str
    ) -> None:
        self.link.send(
            "worker",
            what=what,
            rank=worker.rank,
            generation=self.generation,
            pid=worker.pid,
            status=status,
            signal=number,
            error=error,
            less=worker.less,
        )

    # -- the end -----------------------------------------------------------------------------------------

    def _end(self, status: int) -> None:
        if self.status is not None:
            return
        self.status = status
        last = time.monotonic() + (self._waits["leave"] if status == 0 else RUDE_GRACE)
        if status != 0:
            for worker in self.workers.living():
                self.workers.kill(worker, signal.SIGTERM)
        while self.workers.living() and time.monotonic() < last:
            self._turn(TICK)
        for worker in self.workers.living():
            self.workers.stop(worker)
        last = time.monotonic() + self._waits["leave"]
        while self.workers.living() and time.monotonic() < last:
            self._turn(TICK)

    def _close(self) -> None:
        for worker in self.workers.living():
            self.workers.stop(worker)
        self.link.close()
        self._forks.close()
        self._server.close()
        if self.service is not None:
            with contextlib.suppress(Exception):
                self.service.close()
        for worker in self.workers.by_local.values():
            worker.stream.wait(LAST_LINES)
        shutil.rmtree(self.memory, ignore_errors=True)
        self._status_file.unlink(missing_ok=True)

    def _write_status(self) -> None:
        """For the launcher, which has to find the processes of a place."""
        content = {
            "pid": os.getpid(),
            "host": self.host,
            "place": self.place,
            "generation": self.generation,
            "memory": str(self.memory),
            "workers": {worker.rank: worker.pid for worker in self.workers.living()},
        }
        atomic.replace(self._status_file, json.dumps(content))
