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
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from windtunnel.base import atomic
from windtunnel.base.keys import Keys
from windtunnel.linux import processes
from windtunnel.linux.forkserver_client import ForkServerClient, ForkServerKeeper
from windtunnel.training.elastic.live import forked, inject, tunnel
from windtunnel.training.elastic.live.agent import reach
from windtunnel.training.elastic.live.agent.config import AgentConfig, environment
from windtunnel.training.elastic.live.agent.link import Link, LocalConnection, LocalServer, Message
from windtunnel.training.elastic.live.agent.workers import Outputs, Stream, Worker, Workers
from windtunnel.training.elastic.model import Membership
from windtunnel.training.elastic.policy.words import cause_in

TICK = 0.05
KEPT_SETTLED = 64
RUDE_GRACE = 1.0  # seconds for workers to leave by themselves when the job failed
LAST_WORDS = 1.0  # seconds that what a process said may arrive after the word of its end


class Service(Protocol):
    """What lives in the agent besides: the memory service."""

    address: str
    path: str

    def membership(self, membership: Membership, place: int | None) -> None: ...
    def decided(self, key: str, values: dict[int, Any]) -> None: ...
    def close(self, wipe: bool) -> None: ...


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
        self.services: list[Service] = []
        self.memory = Path(config.memory_root) / f"{config.name}-{os.getpid()}"
        self.memory.mkdir(parents=True, exist_ok=True)
        self.status: int | None = None
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._posts: dict[tuple[int, str, int], Any] = {}
        # decided ones: a supervisor that dies has told some hosts only, or has not heard what follows from it
        self._settled: dict[tuple[int, str, int], Any] = {}
        self._asked: dict[tuple[int, str], set[int]] = {}
        self._results: dict[int, Message] = {}
        self._connections: dict[int, LocalConnection] = {}
        self._early: list[tuple[LocalConnection, Message]] = []
        # with the generation, until when its last words are waited for, and its status
        self._ending: list[tuple[Worker, int, float, int]] = []
        self._heard = time.monotonic()
        folder = Path(config.run) / "agents"
        folder.mkdir(parents=True, exist_ok=True)
        self._status_file = folder / f"{config.name}.json"
        self._outputs = Outputs()
        self._forks = ForkServerClient(forkserver, lambda m: self.do(lambda: self.workers.exited(m)))
        self.workers = Workers(self._forks, self._outputs, self.do, self._started, self._gone)
        self._local = LocalServer(
            self.memory / "agent.sock", lambda v, m: self.do(lambda: self._hear_local(v, m))
        )
        self.keys = Keys.of_job(config.secret, config.tls)
        self._door = tunnel.Door(self.keys, lambda: self.member.store if self.member else "")
        self.link = Link(
            config.supervisor, self.keys, self._hello_from_link, lambda m: self.do(lambda: self._hear(m))
        )

    # -- what services call ------------------------------------------------------------------------------

    def post(self, key: str, rank: int, value: Any) -> None:
        """A service posts on behalf of a rank, in the present generation."""
        self.do(lambda: self._post(self.generation, key, rank, value))

    def event(self, kind: str, **fields: Any) -> None:
        """A service says that something happened."""
        now = time.time()
        self.do(lambda: self._event({"kind": kind, "t": now, **fields}))

    # -- the loop ----------------------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        return self.member.generation if self.member is not None else 0

    def do(self, function: Callable[[], None]) -> None:
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
            self._event({"kind": "note", "text": f"{self.config.name}: {traceback.format_exc()}"})

    def _tick(self, now: float) -> None:
        if self._keeper is not None:
            self._keeper.tend()
        self._hear_early()
        self._end_waiting(now)
        self._reconcile()
        for worker in self.workers.living():
            self._check_beat(worker, now)
        if now - max(self.link.last_heard, self._heard) > self.config.job.orphan_after:
            self._end(1)

    def _check_beat(self, worker: Worker, now: float) -> None:
        """Twice in a row, so that beats which came while this process itself stood still are read first."""
        if not worker.spoke or worker.done or worker.frozen or worker.stopped:
            return
        late = now - worker.last_beat
        worker.stale = worker.stale + 1 if late > self.config.job.frozen_after else 0
        if worker.stale < 2:
            return
        stopped = processes.state(worker.pid or 0) in ("T", "t")
        if stopped or late > max(self._waits["stuck"], self.config.job.frozen_after):
            worker.frozen = True
            how = "it is stopped" if stopped else "it does not answer"
            self._report(worker, "frozen", None, None, f"{how}: no sign of life for {late:.2f} s")

    # -- the supervisor ----------------------------------------------------------------------------------

    def _hello_from_link(self) -> Message:
        """Called by the link's thread: the agent's thread makes the message."""
        answer: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.do(lambda: answer.put(self._hello()))
        try:
            return answer.get(timeout=10.0)
        except queue.Empty:
            raise OSError("the agent is busy") from None

    def _hello(self) -> Message:
        memory = self.services[0].address if self.services else ""
        return {
            "op": "hello",
            "host": self.host,
            "address": self.config.address,
            "memory": memory,
            "domain": self.config.domain,
            "pid": os.getpid(),
            "generation": self.generation,
            "epoch": self.epoch,
            "workers": {worker.rank: worker.pid for worker in self._present()},
            "posts": [
                {"generation": generation, "key": key, "values": {rank: value}}
                for (generation, key, rank), value in {**self._settled, **self._posts}.items()
            ],
        }

    def _present(self) -> list[Worker]:
        return [w for w in self.workers.living() if w.rank in self.mine and not w.stopped]

    def _hear(self, message: Message) -> None:
        self._heard = time.monotonic()
        if message.get("epoch", self.epoch) < self.epoch:
            return  # of a supervisor that another one has followed
        self.epoch = message.get("epoch", self.epoch)
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
        elif op == "answer":
            self._answered(message)
        elif op == "look":
            threading.Thread(target=self._look, args=(message,), name="windtunnel-look", daemon=True).start()
        elif op == "fence":
            self._fence(message)
        elif op == "end":
            self._end(message["status"])

    def _welcome(self, message: Message) -> None:
        self.host = message["host"]
        for (generation, key), _ in self._asked.items():
            self.link.send({"op": "ask", "generation": generation, "key": key}, keep=False)
        for result in self._results.values():
            self.link.send(result, keep=False)
        self._write_status()

    def _join(self, membership: Membership, place: int | None, mine: list[int]) -> None:
        again = self.member == membership and self.place == place
        self.member, self.place, self.mine = membership, place, list(mine)
        if again:
            return
        self._posts = {k: v for k, v in self._posts.items() if k[0] >= membership.generation}
        self._settled.clear()
        self._results.clear()
        for service in self.services:
            service.membership(membership, place)
        for worker in self.workers.living():
            rank = self._rank_of(worker.local)
            if rank is None or membership.restart_all or worker.frozen or not worker.spoke:
                self.workers.stop(worker)
                continue
            worker.rank = worker.stream.rank = rank
            worker.generation = self.generation
            worker.done = False
        self._reconcile()
        for worker in self._present():
            self._tell(worker, self._membership_for(worker, "membership"))
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
        stream = Stream(logs / f"rank-{rank}.gen-{self.generation}.log", rank)
        worker = Worker(local, rank, self.generation, stream)
        wanted = {
            "script": str(self.config.job.script),
            "arguments": self.config.job.arguments,
            "cwd": str(self.config.job.cwd),
            "env": environment(
                self.config, self.member, self._door.address, self._local.path, rank, self.place
            ),
            "namespace": self.config.namespace,
            "before": [forked.PREPARE],
        }
        try:
            self.workers.start(worker, wanted)
        except OSError:
            stream.discard()  # the fork server is being replaced: the next tick tries again

    def _look(self, message: Message) -> None:
        """In a thread of its own, since it waits for hosts that do not answer."""
        hosts = {int(host): address for host, address in message["hosts"].items()}
        response = {
            "op": "reached",
            "round": message["round"],
            "silent": reach.silent(hosts, message["within"]),
        }
        self.do(lambda: self.link.send(response, keep=False))

    def _fence(self, message: Message) -> None:
        worker = self.workers.of_pid(message["pid"]) if message.get("pid") else None
        if worker is None:
            worker = next((w for w in self.workers.living() if w.rank == message["rank"]), None)
        if worker is not None:
            self.workers.kill(worker)

    # -- the workers -------------------------------------------------------------------------------------

    def _hear_local(self, connection: LocalConnection, message: Message | None) -> None:
        worker = self.workers.of_pid(connection.pid)
        if message is None:
            self._connections = {pid: c for pid, c in self._connections.items() if c is not connection}
            self._end_waiting(time.monotonic())
            return
        if worker is None and any(other.pid is None for other in self.workers.living()):
            self._early.append((connection, message))  # faster than the fork server's word that it was forked
            return
        ended = next((w for w in self.workers.by_local.values() if w.pid == connection.pid and w.ended), None)
        if ended is not None and not ended.stopped:
            self._hear_last_words(ended, message)
            return
        if worker is None or worker.stopped:
            connection.close()  # fenced: nobody of this generation
            return
        worker.last_beat = time.monotonic()
        op = message["op"]
        if op == "hello":
            worker.spoke = True
            self._connections[connection.pid] = connection
            self._tell(worker, self._membership_for(worker, "welcome"))
        elif op == "beat":
            worker.step = message.get("step", worker.step)
        elif op == "post":
            self._post(
                message["generation"], message["key"], message.get("rank", worker.rank), message["value"]
            )
        elif op == "ask":
            self._asked.setdefault((message["generation"], message["key"]), set()).add(connection.pid)
            self.link.send(
                {"op": "ask", "generation": message["generation"], "key": message["key"]}, keep=False
            )
        elif op in ("event", "step"):
            self._event({"rank": worker.rank, **message, "kind": message.get("kind", op)})
        elif op == "suspect":
            self.link.send({**message, "op": "suspect", "rank": message.get("rank", worker.rank)})
        elif op == "done":
            self._done(worker, message.get("result"))
        elif op == "failed":
            worker.error, worker.less = message["error"], bool(message.get("less"))
        elif op == "inject":
            inject.inject_on_host(self, message)

    def _membership_for(self, worker: Worker, op: str) -> Message:
        assert self.member is not None
        path = self.services[0].path if self.services else None
        return {
            "op": op,
            "membership": replace(self.member, store=self._door.address).plain(),
            "place": self.place,
            "rank": worker.rank,
            "local_rank": worker.local,
            "host": self.host,
            "memory_path": path,
            "faults": list(self.config.job.faults),
            "config": self.config.worker,
        }

    def _tell(self, worker: Worker, message: Message) -> None:
        connection = self._connections.get(worker.pid or -1)
        if connection is not None:
            connection.send(message)

    def _post(self, generation: int, key: str, rank: int, value: Any) -> None:
        if generation < self.generation:
            return
        self._posts[generation, key, rank] = value
        posts = {**self._settled, **self._posts}
        values = {member: posts[at] for member in self.mine if (at := (generation, key, member)) in posts}
        if len(values) == len(self.mine):  # nothing is agreed before all ranks have posted
            message = {"op": "post", "generation": generation, "key": key, "values": values}
            self.link.send(message, keep=False)  # open posts go with the next hello

    def _decided(self, generation: int, key: str, values: dict[str, Any]) -> None:
        by_rank = {int(rank): value for rank, value in values.items()}
        for rank in by_rank:
            if (generation, key, rank) in self._posts:
                self._settled[generation, key, rank] = self._posts.pop((generation, key, rank))
        while len(self._settled) > KEPT_SETTLED:
            del self._settled[next(iter(self._settled))]
        for service in self.services:
            service.decided(key, by_rank)
        message = {"op": "decided", "generation": generation, "key": key, "values": values}
        for worker in self._present():
            self._tell(worker, message)

    def _answered(self, message: Message) -> None:
        for known in [known for known in self._asked if known[1] == message["key"]]:
            for pid in self._asked.pop(known):
                connection = self._connections.get(pid)
                if connection is not None:
                    connection.send(message)

    def _event(self, fields: Message) -> None:
        fields.setdefault("t", time.time())
        fields.setdefault("generation", self.generation)
        self.link.send({**fields, "op": "event"})

    def _done(self, worker: Worker, result: Any) -> None:
        if not worker.done:
            worker.done = True
            message = {"op": "done", "generation": self.generation, "rank": worker.rank, "result": result}
            self._results[worker.rank] = message
            self.link.send(message, keep=False)

    def _started(self, worker: Worker) -> None:
        self._report(worker, "started", None, None, "")
        self._write_status()
        self._hear_early()

    def _hear_early(self) -> None:
        early, self._early = self._early, []
        for connection, message in early:
            self._hear_local(connection, message)

    def _hear_last_words(self, worker: Worker, message: Message) -> None:
        """They were overtaken by the word of its end; why it ended, or its result, may be among them."""
        op = message["op"]
        untold = any(other is worker for other, *_ in self._ending)
        if op in ("event", "step"):
            self._event({"rank": worker.rank, **message, "kind": message.get("kind", op)})
        elif op == "suspect" and untold:
            self.link.send({**message, "rank": message.get("rank", worker.rank)})
        elif op == "failed":
            worker.error, worker.less = message["error"], bool(message.get("less"))
        elif op == "done" and untold:
            self._done(worker, message.get("result"))
            self._end_waiting(time.monotonic())

    def _end_waiting(self, now: float) -> None:
        """Report ends with which no more words can come."""
        waiting, self._ending = self._ending, []
        for worker, generation, until, status in waiting:
            if generation != self.generation:
                continue  # there it is started anew
            if not worker.done and worker.pid in self._connections and now < until:
                self._ending.append((worker, generation, until, status))
            else:
                self._report_end(worker, status, None)

    def _gone(self, worker: Worker, status: int | None, number: int | None) -> None:
        ended = (
            status is not None and number is None
        )  # by itself: a process that was killed has no last words
        if ended and not worker.stopped and not worker.done and worker.pid in self._connections:
            self._ending.append((worker, self.generation, time.monotonic() + LAST_WORDS, status or 0))
            return
        self._report_end(worker, status, number)

    def _report_end(self, worker: Worker, status: int | None, number: int | None) -> None:
        self._connections.pop(worker.pid or -1, None)
        if worker.stopped:
            self._reconcile()
            self._write_status()
            return
        if status == 0:
            self._done(worker, None)  # a script without `run`, or one that left early of its own will
        error = worker.error
        if status and number is None:
            error = error or cause_in(list(worker.stream.tail), status)
        self._report(worker, "exit", status, number, error)
        self._write_status()

    def _report(self, worker: Worker, what: str, status: int | None, number: int | None, error: str) -> None:
        self.link.send(
            {
                "op": "worker",
                "rank": worker.rank,
                "generation": self.generation,
                "pid": worker.pid,
                "what": what,
                "status": status,
                "signal": number,
                "error": error,
                "less": worker.less,
            }
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
        self._local.close()
        self._door.close()
        for service in self.services:
            with contextlib.suppress(Exception):
                service.close(True)
        self._outputs.close()
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
