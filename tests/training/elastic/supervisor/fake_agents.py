"""Agents that call the supervisor over real sockets, without hosts or workers behind them."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from support import secret
from support.waiting import PATIENCE, until
from windtunnel.base import remote
from windtunnel.training.elastic.live.calls import Hello, Post, Supervision
from windtunnel.training.elastic.live.supervisor import Supervisor
from windtunnel.training.elastic.policy.rules import Rules
from windtunnel.training.elastic.policy.state import Deadlines, SupervisorSettings

PIDS = itertools.count(1_000_000)
QUICK = Deadlines(suspect=0.1, end=2.0)


class Calls(remote.RemoteLink):
    """Whose connections a test can break."""

    def __init__(self, address: str) -> None:
        super().__init__(f"tcp:{address}", keys=secret.KEYS, timeout=PATIENCE)
        self.sockets: list[socket.socket] = []

    def _dialled(self) -> socket.socket:
        self.sockets.append(super()._dialled())
        return self.sockets[-1]

    def cut(self) -> None:
        for sock in self.sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self.sockets.clear()


class Agent:
    """One fake agent. It beats, groups its ranks at once in every generation (``groups``), and comes back
    when its connection breaks (``returns``). ``silent``: hosts that it says it does not reach.
    """

    def __init__(self, address: str, *, groups: bool = True, returns: bool = True) -> None:
        self.address = address
        self.pid = next(PIDS)
        self.host: int | None = None
        self.generation = 0
        self.epoch = 0
        self.place: int | None = None
        self.workers: dict[int, int] = {}
        self._turn = threading.Lock()
        self.received: list[dict[str, Any]] = []
        self.outstanding: list[Post] = []
        self.groups, self.returns, self.beats = groups, returns, True
        self.silent: list[int] = []
        self.met: dict[str, str] = {}
        self.ended = threading.Event()
        self._closed = threading.Event()
        self._calls = Calls(address)
        self._number: int | None = None
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()
        threading.Thread(target=self._beat, daemon=True).start()

    def say(self, op: str, **fields: Any) -> Any:
        """Call, if it attends."""
        number = self._number
        if number is not None:
            with contextlib.suppress(ConnectionError, OSError):
                return self._calls.call(Supervision, op, "", number, **fields)
        return None

    def exit(self, rank: int, status: int | None = None, signal: int | None = None, **fields: Any) -> None:
        with self._turn:  # a worker is of the generation that it was started in
            about = {"rank": rank, "generation": self.generation, "pid": self.workers.pop(rank), "error": ""}
            about |= fields
        self.say("worker", what="exit", status=status, signal=signal, **about)

    def frozen(self, rank: int) -> None:
        self.say("worker", what="frozen", rank=rank, generation=self.generation, pid=self.workers[rank])

    def post(self, key: str, rank: int, value: Any, generation: int | None = None) -> None:
        self.say("post", key=key, values={rank: value}, generation=generation or self.generation)

    def done(self, result: Any = None) -> None:
        for rank in list(self.workers):
            self.say("done", generation=self.generation, rank=rank, result=result)

    def step(self, step: int) -> None:
        self.event("step", step=step, rank=0)

    def event(self, kind: str, **fields: Any) -> None:
        self.say("event", kind=kind, fields={"generation": self.generation, **fields})

    def ask(self, key: str) -> Any:
        return self.say("ask", key=key)

    def of(self, op: str, **fields: Any) -> list[dict[str, Any]]:
        """Messages received with these fields."""
        return [m for m in list(self.received) if m["op"] == op and fields.items() <= m.items()]

    def cut(self) -> None:
        """Break the connections."""
        self._calls.cut()

    def kill(self) -> None:
        """As SIGKILL: the connections break, and nobody comes back."""
        self.returns = False
        self._closed.set()
        self.cut()
        self._thread.join(PATIENCE)

    def _live(self) -> None:
        while not self._closed.is_set() and not self.ended.is_set():
            with contextlib.suppress(OSError):
                self._calls.call(
                    Supervision, "attend", "", self._hello(), lambda message, _: self._hear(message)
                )
            self._number = None
            if not self.returns:
                return
            self._closed.wait(0.01)

    def _hello(self) -> Hello:
        workers: dict[int, int | None] = {**self.workers}
        memory, about = f"127.0.0.1:{self.pid}", (self.host, "", self.generation, self.epoch)
        return Hello("127.0.0.1", memory, self.pid, *about, workers, self.outstanding, self.met)

    def _hear(self, message: dict[str, Any]) -> None:
        if message["epoch"] < self.epoch:
            return
        self.epoch = message["epoch"]
        # What a test waits for (a message, the host, generation, ended) is set when the rest is there.
        if message["op"] == "welcome":
            self._number = message["link"]
            self.received.append(message)
            self.host = message["host"]
        elif message["op"] == "membership":
            restart, generation = message["membership"]["restart_all"], message["membership"]["generation"]
            for rank in message["mine"] if self.groups else ():
                self.event("grouped", rank=rank, generation=generation)
            with self._turn:
                kept = {} if restart else {r: p for r, p in self.workers.items() if r in message["mine"]}
                self.workers = {rank: kept.get(rank) or next(PIDS) for rank in message["mine"]}
                self.place = message["place"]
                self.received.append(message)
                self.generation = generation
        elif message["op"] == "fence":
            self.received.append(message)
            if self.workers.get(message["rank"]) == message["pid"]:
                self.exit(message["rank"], signal=9)
        elif message["op"] == "look":
            self.received.append(message)
            silent = [host for host in self.silent if str(host) in message["hosts"]]
            self.say("reached", round=message["round"], silent=silent)
        else:
            self.received.append(message)
            if message["op"] == "end":
                self.ended.set()

    def _beat(self) -> None:
        while not self._closed.wait(0.02) and not self.ended.is_set():
            if self.beats:
                self.say("beat")


def snapshot(supervisor: Supervisor) -> dict[str, Any]:
    """What there is now. ``places``: host ids, None where the host is lost; ``coming``: hosts on order."""
    with supervisor._lock:
        core = supervisor._core
        return {
            "epoch": core.epoch,
            "generation": core.generation,
            "membership": core.plain,
            "places": list(core.places()),
            "spares": [id for id in core.hosts.live if id not in core.places()],
            "coming": core.coming,
            "grouped": sorted(core.grouped),
            "status": core.outcome.status if core.outcome is not None else None,
        }


class Run:
    """A supervisor in a thread with its agents."""

    def __init__(self, folder: Path, places: int, rules: Rules | None = None, **settings: Any) -> None:
        self.folder = folder
        self.rules = rules or Rules()
        self.places = places
        self.given = {name: settings.pop(name) for name in ("order_hosts",) if name in settings}
        self.settings: dict[str, Any] = {"deadlines": QUICK, "beat": 0.02, "lease": 20.0, **settings}
        self.ordered: list[int] = []
        self.agents: list[Agent] = []
        self.supervisor = self.supervise()

    def supervise(self) -> Supervisor:
        settings = {"order_hosts": self.ordered.append, "keys": secret.KEYS, **self.given}
        supervisor_settings = SupervisorSettings(self.places, **{"per_host": 1, **self.settings})
        self.supervisor = Supervisor(self.folder, self.rules, supervisor_settings, **settings)
        self.supervisor.start()
        return self.supervisor

    def add(self, count: int = 1, **how: Any) -> list[Agent]:
        """More agents, each welcome before the next comes."""
        for _ in range(count):
            agent = Agent(self.supervisor.address, **how)
            self.agents.append(agent)
            until(lambda a=agent: a.host is not None, "a welcome")  # type: ignore[misc]
        return self.agents[-count:]

    def formed(self, generation: int, agents: list[Agent] | None = None) -> dict[str, Any]:
        """Wait until ``agents`` (all) are in ``generation`` or a later one; the supervisor's view."""
        for agent in self.agents if agents is None else agents:
            until(lambda a=agent: a.generation >= generation, f"generation {generation}")  # type: ignore[misc]
        return snapshot(self.supervisor)

    def together(self) -> contextlib.AbstractContextManager[object]:
        """What happens within is one change, however long it takes: the supervisor's turns wait for it."""
        return mock.patch.object(self.supervisor._core, "tick")

    def form_is_over(self) -> None:
        """As if this generation had had all the time that ranks are given to group."""
        with self.supervisor._lock:
            core, deadlines = self.supervisor._core, self.supervisor._settings.deadlines
            core._formed -= max(deadlines.form, deadlines.process)
            core._started = core._formed

    def events(self, kind: str) -> list[dict[str, Any]]:
        from windtunnel.store import eventlog

        return [event for event in eventlog.read(self.folder / "events.jsonl") if event["kind"] == kind]

    def outcome(self) -> Any:
        outcome = self.supervisor.wait(PATIENCE)
        assert outcome is not None, "the supervisor does not end"
        return outcome

    def close(self) -> None:
        self.supervisor.stop()
        self.supervisor.wait(PATIENCE)
        for agent in self.agents:
            agent.kill()


@contextlib.contextmanager
def a_run(folder: Path, places: int, rules: Rules | None = None, **settings: Any) -> Iterator[Run]:
    run = Run(folder, places, rules, **settings)
    try:
        yield run
    finally:
        run.close()


@contextlib.contextmanager
def begun(
    folder: Path, places: int, rules: Rules | None = None, hosts: int | None = None, **settings: Any
) -> Iterator[tuple[Run, list[Agent]]]:
    """A run in its first generation, with its ``hosts``: as many as places, where no spares are wanted."""
    with a_run(folder, places, rules, **settings) as run:
        agents = run.add(hosts or places)
        run.formed(1, agents[:places])
        yield run, agents
