"""Machines of the tests: one real trainer process each, under a small supervisor that lives in the test.

It speaks to the trainers what an agent speaks, so `elastic.run`, its link and its group are the real ones. It
does on purpose what a real one does by chance: kill at a chosen message, or die before telling some.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from windtunnel.base import wire
from windtunnel.training.elastic.model import Membership, Node

BOUND = 60.0  # seconds after which a test gives up

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",
        "windtunnel.training.elastic.live.run",
        "windtunnel.training.pipelines.live.trainer",
    ]
)


@dataclass
class Script:
    """What happens to the machines.

    ``faults``: texts for the real injector. ``kill_on_post``: (node, part of a key): killed when it has said
    so, and its death is known before. ``untold``: part of a key, and nodes that are not told of its decision;
    a victim (the third) is killed then. ``kill_at``, ``join_at``: step whose event was seen, nodes.
    """

    faults: Sequence[str] = ()
    kill_on_post: list[tuple[int, str]] = field(default_factory=list)
    untold: list[tuple[str, set[int], int]] = field(default_factory=list)
    kill_at: dict[int, list[int]] = field(default_factory=dict)
    join_at: dict[int, list[int]] = field(default_factory=dict)


class World:
    """Runs ``train(job, *args)`` on ``nodes`` machines until all that are left have returned from it."""

    def __init__(self, folder: Path, nodes: int, train: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.folder, self.train, self.args = folder, train, args
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes: dict[int, Any] = {}
        self.listeners: dict[int, socket.socket] = {}
        self.links: dict[int, socket.socket] = {}
        self.selector = selectors.DefaultSelector()
        self.posts: dict[str, dict[int, Any]] = {}
        self.durable: dict[str, dict[int, Any]] = {}
        self.results: dict[int, Any] = {}
        self.events: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self.memberships: list[Membership] = []
        self.script = Script()
        self.coming: set[int] = set()
        self._form(list(range(nodes)))
        for node in range(nodes):
            self._start(node, node)

    def run(self, script: Script) -> World:
        self.script = script
        (self.folder / "faults").mkdir(exist_ok=True)
        end = time.monotonic() + BOUND
        try:
            while self.members() - set(self.results) and not self.errors:
                assert time.monotonic() < end, self._stuck()
                sentinels = {process.sentinel: node for node, process in self.processes.items()}
                ready = self.selector.select(0.05)
                for key, _ in ready:
                    key.data()
                dead = [sentinels[s] for s in multiprocessing.connection.wait(list(sentinels), 0)]
                if dead and not self.errors:
                    self._bury(dead)
        finally:
            for process in self.processes.values():
                process.kill()
                process.join(BOUND)
            for sock in (*self.links.values(), *self.listeners.values()):
                sock.close()
            self.selector.close()
        return self

    def members(self) -> set[int]:
        return {node.id for node in self.memberships[-1].nodes}

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]

    def steps(self) -> dict[int, float]:
        """Loss by step, as reported; reports of one step must be equal."""
        found: dict[int, float] = {}
        for event in self.of_kind("step"):
            assert found.setdefault(event["step"], event["loss"]) == event["loss"]
        return found

    def result(self) -> dict[str, Any]:
        """The hashes that all machines agree on."""
        assert not self.errors, self.errors[0]
        hashes = [result["hashes"] for result in self.results.values()]
        assert all(each == hashes[0] for each in hashes)
        return next(iter(self.results.values()))

    def _stuck(self) -> str:
        """Where everybody is."""
        for process in self.processes.values():
            os.kill(process.pid, signal.SIGUSR1)
        time.sleep(1)  # nothing tells when they have written it
        logs = [f"--- {node}\n{(self.folder / f'log{node}').read_text()[-6000:]}" for node in self.processes]
        said = [f"{self.memberships[-1]}", f"posts {self.posts}", f"results of {set(self.results)}"]
        return "\n".join([*said, *(str(event) for event in self.events[-5:]), *logs])

    def _form(self, nodes: list[int]) -> None:
        members = tuple(Node(node, "127.0.0.1", "127.0.0.1:0") for node in nodes)
        number = len(self.memberships) + 1
        store = f"127.0.0.1:{self.store.port}"
        self.memberships.append(Membership(number, 1, members, 1, store, "test"))
        self.posts.clear()

    def _tell(self, node: int, message: dict[str, Any]) -> None:
        with suppress(OSError, KeyError):  # it is dead, or has not said hello yet
            wire.send(self.links[node], message)

    def _announce(self) -> None:
        membership = self.memberships[-1]
        for node in self.members():
            place = membership.place_of(node)
            self._tell(node, {"op": "membership", "membership": membership.plain(), "place": place})

    def _start(self, node: int, rank: int) -> None:
        path = self.folder / f"agent{node}"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen()
        self.listeners[node] = listener
        self.selector.register(listener, selectors.EVENT_READ, lambda: self._accept(node))
        environment = {
            "WINDTUNNEL_AGENT": f"unix:{path}",
            "WINDTUNNEL_RUN": str(self.folder),
            "RANK": str(rank),
            "WORLD_SIZE": "0",
        }
        log = str(self.folder / f"log{node}")
        process = _context.Process(target=_child, args=(environment, log, self.train, self.args))
        process.start()
        self.processes[node] = process

    def _accept(self, node: int) -> None:
        link, _ = self.listeners[node].accept()
        if self.results:  # too late to join
            link.close()
            return
        link.settimeout(BOUND)
        wire.receive(link)
        self.links[node] = link
        self.selector.register(link, selectors.EVENT_READ, lambda: self._hear(node))
        joins = node not in self.members()
        self.coming.discard(node)
        if joins:
            self._form([*(n.id for n in self.memberships[-1].nodes), node])
        membership = self.memberships[-1]
        welcome = {"membership": membership.plain(), "place": membership.place_of(node), "node": node}
        config = {"patience": BOUND}
        self._tell(node, {"op": "welcome", **welcome, "faults": list(self.script.faults), "config": config})
        if joins:
            self._announce()

    def _hear(self, node: int) -> None:
        try:
            message, _ = wire.receive(self.links[node])
        except OSError:
            self.selector.unregister(self.links[node])
            return
        op = message["op"]
        if op == "post" and message["generation"] == self.memberships[-1].generation:
            self._post(node, message)
        elif op == "ask":
            values = self.durable.get(message["key"])
            self._tell(node, {"op": "answer", "key": message["key"], "values": values})
        elif op == "event" or op == "step":
            message.setdefault("kind", op)
            self.events.append(message)
            if message["kind"] == "step":
                self._at_step(message["step"])
        elif op == "done":
            self.results[node] = message["result"]
        elif op == "failed":
            self.errors.append(message["error"])

    def _post(self, node: int, message: dict[str, Any]) -> None:
        key, rank = message["key"], message["rank"]
        for entry in list(self.script.kill_on_post):
            if entry[0] == node and entry[1] in key:
                self.script.kill_on_post.remove(entry)
                self.kill(node)
                return
        posts = self.posts.setdefault(key, {})
        posts[rank] = message["value"]
        membership = self.memberships[-1]
        if len(posts) < membership.world or self.coming:
            return  # a machine that is on its way comes before the job can end
        if key.startswith("commit/"):
            self.durable[key] = posts
        untold, victims = set[int](), []
        for entry in list(self.script.untold):
            if entry[0] in key:
                self.script.untold.remove(entry)
                untold |= entry[1]
                victims.append(entry[2])
        generation = message["generation"]
        for member in self.members() - untold:
            self._tell(member, {"op": "decided", "generation": generation, "key": key, "values": posts})
        for victim in victims:
            self.kill(victim)

    def _at_step(self, step: int) -> None:
        for node in self.script.kill_at.pop(step, []):
            self.kill(node)
        for node in self.script.join_at.pop(step, []):
            self.coming.add(node)
            self._start(node, 0)

    def kill(self, node: int) -> None:
        os.kill(self.processes[node].pid, signal.SIGKILL)

    def _bury(self, dead: list[int]) -> None:
        for node in dead:
            self.processes.pop(node).join()
        lost = [node for node in dead if node in self.members() and node not in self.results]
        if lost:
            for node in lost:
                log = (self.folder / f"log{node}").read_text()
                assert "Traceback" not in log, log
            self._form([n.id for n in self.memberships[-1].nodes if n.id not in lost])
            self._announce()


def fly(
    folder: Path, nodes: int, train: Callable[..., Any], *args: Any, script: Script | None = None
) -> World:
    """One run, to its end."""
    folder.mkdir(parents=True, exist_ok=True)
    return World(folder, nodes, train, args).run(script or Script())


def _child(environment: dict[str, str], log: str, train: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.environ.update(environment)
    handle = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    sys.stderr = sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, sys.stderr, all_threads=True)
    torch.set_num_threads(1)
    from windtunnel.training.elastic.live.run import run

    run(lambda job: train(job, *args), backend="gloo", timeout=BOUND)
