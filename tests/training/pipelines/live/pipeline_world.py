"""Hosts of the tests: one real trainer process each, under a small supervisor that lives in the test.

The trainers call it as they call an agent, so `elastic.run`, its link and its group are the real ones. It
does on purpose what a real one does by chance: kill at a chosen message, or die before telling some.
"""

from __future__ import annotations

import copy
import faulthandler
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from support import preloaded
from support.meeting import Meeting
from support.waiting import until
from training.pipelines.live.pipeline_problems import Problem, plain
from windtunnel.base.rpc import RpcServer, RpcService
from windtunnel.training.elastic.live.calls import HostAgent, News, TrainerWelcome
from windtunnel.training.elastic.model import MemberHost, Membership
from windtunnel.training.elastic.spec import JobSpec

BOUND = 60.0  # seconds after which a test gives up
PROBLEM = Problem()

expected = cache(plain)


@dataclass
class Script:
    """What happens to the hosts.

    ``faults``: texts for the real injector. ``kill_on_post``: (host, part of a key): killed when it has said
    so, and its death is known before. ``untold``: part of a key, and hosts that are not told of its decision;
    a victim (the third) is killed then. ``kill_at``, ``join_at``: step whose event was seen, hosts.
    """

    faults: Sequence[str] = ()
    kill_on_post: list[tuple[int, str]] = field(default_factory=list)
    untold: list[tuple[str, set[int], int]] = field(default_factory=list)
    kill_at: dict[int, list[int]] = field(default_factory=dict)
    join_at: dict[int, list[int]] = field(default_factory=dict)


LOST_BY_GLOO = "did not come out of a group that was cut"


class World:
    """Runs ``train(job, *args)`` on ``hosts`` hosts until all that are left have returned from it."""

    def __init__(
        self, folder: Path, hosts: int, train: Callable[..., Any], args: tuple[Any, ...], script: Script
    ) -> None:
        self.folder, self.train, self.args, self.script = folder, train, args, script
        (folder / "faults").mkdir(exist_ok=True)
        self.meeting = Meeting()
        self.processes: dict[int, preloaded.Process] = {}
        self.servers: list[RpcServer] = []
        self.changed = threading.Condition(threading.RLock())
        self.waiting: dict[int, queue.SimpleQueue[Any]] = {}
        self.posts: dict[str, dict[int, Any]] = {}
        self.durable: dict[str, dict[int, Any]] = {}
        self.results: dict[int, Any] = {}
        self.events: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self.memberships: list[Membership] = []
        self.coming: set[int] = set()
        self.killed: set[int] = set()
        self._form(list(range(hosts)))
        for host in range(hosts):
            self._start(host, host)

    def run(self) -> World:
        end = time.monotonic() + BOUND
        try:
            while self.members() - set(self.results) and not self.errors:
                assert time.monotonic() < end, self._stuck()
                time.sleep(0.02)
                dead = [host for host, process in self.processes.items() if process.poll() is not None]
                if dead and not self.errors:
                    self._bury(dead)
        finally:
            for process in self.processes.values():
                process.kill()
                process.wait(BOUND)
            for server in self.servers:
                server.close()
        return self

    def members(self) -> set[int]:
        return {host.id for host in self.memberships[-1].hosts}

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]

    def steps(self) -> dict[int, float]:
        """Loss by step, as reported; reports of one step must be equal."""
        losses: dict[int, float] = {}
        for event in self.of_kind("step"):
            assert losses.setdefault(event["step"], event["loss"]) == event["loss"]
        return losses

    def result(self) -> dict[str, Any]:
        """The hashes that all hosts agree on."""
        assert not self.errors, self.errors[0]
        hashes = [result["hashes"] for result in self.results.values()]
        assert all(each == hashes[0] for each in hashes)
        return next(iter(self.results.values()))

    def _stuck(self) -> str:
        """Where everybody is."""
        files = {host: self.folder / f"log{host}" for host in self.processes}
        sizes = {host: file.stat().st_size for host, file in files.items()}
        for process in self.processes.values():
            os.kill(process.pid, signal.SIGUSR1)
        with suppress(AssertionError):  # one that cannot say where it is keeps nobody from hearing the others
            until(lambda: all(file.stat().st_size > sizes[host] for host, file in files.items()), timeout=10)
        logs = [f"--- {host}\n{file.read_text()[-6000:]}" for host, file in files.items()]
        said = [f"{self.memberships[-1]}", f"posts {self.posts}", f"results of {set(self.results)}"]
        return "\n".join([*said, *(str(event) for event in self.events[-5:]), *logs])

    def _form(self, hosts: list[int]) -> None:
        members = tuple(MemberHost(host, "127.0.0.1", "127.0.0.1:0") for host in hosts)
        number = len(self.memberships) + 1
        self.memberships.append(Membership(number, 1, members, 1, "test"))
        self.meeting.form(number)
        self.posts.clear()

    def _announce(self) -> None:
        for answer in self.waiting.values():
            answer.put(None)
        self.waiting.clear()
        self.changed.notify_all()

    def news(self, host: int) -> News:
        membership = self.memberships[-1]
        return News(membership.plain(), membership.place_of(host))

    def _start(self, host: int, rank: int) -> None:
        path = self.folder / f"agent{host}"
        self.servers.append(RpcServer(RpcService.of(HostAgent, _Agent(self, host)), f"unix:{path}"))
        environment = {
            "WINDTUNNEL_AGENT": f"unix:{path}",
            "WINDTUNNEL_RUN": str(self.folder),
            "RANK": str(rank),
            "WORLD_SIZE": "0",
        }
        log = str(self.folder / f"log{host}")
        self.processes[host] = preloaded.call(_child, environment, log, self.train, self.args)

    def join(self, host: int) -> None:
        if self.results:
            raise ConnectionError("too late to join")
        joins = host not in self.members()
        self.coming.discard(host)
        if joins:
            self._form([*(n.id for n in self.memberships[-1].hosts), host])
            self._announce()

    def happened(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        if event["kind"] == "step":
            self._at_step(event["step"])

    def post(self, host: int, generation: int, key: str, value: Any) -> queue.SimpleQueue[Any]:
        """Where the values will be put, None where a newer generation comes."""
        answer: queue.SimpleQueue[Any] = queue.SimpleQueue()
        membership = self.memberships[-1]
        if generation < membership.generation:
            answer.put(None)
        elif host not in self.killed:
            self.waiting[host] = answer
            self._post(host, key, membership, value)
        return answer

    def _post(self, host: int, key: str, membership: Membership, value: Any) -> None:
        for entry in list(self.script.kill_on_post):
            if entry[0] == host and entry[1] in key:
                self.script.kill_on_post.remove(entry)
                self.kill(host)
                return
        posts = self.posts.setdefault(key, {})
        posts[membership.place_of(host) or 0] = value
        if len(posts) < membership.world or self.coming:
            return  # a host that is on its way comes before the job can end
        if key.startswith("commit/"):
            self.durable[key] = posts
        untold, victims = set[int](), []
        for entry in list(self.script.untold):
            if entry[0] in key:
                self.script.untold.remove(entry)
                untold |= entry[1]
                victims.append(entry[2])
        for member in self.members() - untold:
            self.waiting.pop(member).put(dict(posts))
        for victim in victims:
            self.kill(victim)

    def _at_step(self, step: int) -> None:
        for host in self.script.kill_at.pop(step, []):
            self.kill(host)
        for host in self.script.join_at.pop(step, []):
            self.coming.add(host)
            self._start(host, 0)

    def kill(self, host: int) -> None:
        """What it said of what is not decided yet dies with it: else a step might end, and the next host be
        killed at it, before this death is known."""
        os.kill(self.processes[host].pid, signal.SIGKILL)
        self.killed.add(host)
        place = self.memberships[-1].place_of(host)
        for posts in self.posts.values():
            posts.pop(place, None)

    def _bury(self, dead: list[int]) -> None:
        for host in dead:
            del self.processes[host]
        lost = [host for host in dead if host in self.members() and host not in self.results]
        if lost:
            for host in lost:
                log = (self.folder / f"log{host}").read_text()
                assert "Traceback" not in log, log
            with self.changed:
                self._form([n.id for n in self.memberships[-1].hosts if n.id not in lost])
                self._announce()


class _Agent:
    """`HostAgent`, for the trainer of one host."""

    def __init__(self, world: World, host: int) -> None:
        self._world, self._host = world, host
        self.meet = world.meeting.meet

    def join(self, pid: int) -> TrainerWelcome:
        world, host = self._world, self._host
        with world.changed:
            world.join(host)
            faults = list(world.script.faults)
            waits = JobSpec().waits("trainer") | {"generation": BOUND}
            return TrainerWelcome(world.news(host), 0, 0, host, None, faults, waits)

    def beat(self, pid: int, generation: int) -> News | None:
        world = self._world
        with world.changed:
            world.changed.wait_for(lambda: world.memberships[-1].generation > generation, 0.2)
            return world.news(self._host) if world.memberships[-1].generation > generation else None

    def agree(self, pid: int, generation: int, key: str, value: Any, within: float) -> dict[int, Any] | None:
        with self._world.changed:
            answer = self._world.post(self._host, generation, key, value)
        try:
            values: dict[int, Any] | None = answer.get(timeout=within)
        except queue.Empty:
            raise TimeoutError(key) from None
        return values

    def ask(self, pid: int, key: str, within: float) -> dict[int, Any] | None:
        return self._world.durable.get(key)

    def event(self, pid: int, kind: str, fields: dict[str, Any]) -> None:
        with self._world.changed:
            self._world.happened({**fields, "kind": kind})

    def suspect(self, pid: int, generation: int, error: str) -> None:
        """The death is seen without."""

    def done(self, pid: int, result: Any) -> None:
        self._world.results[self._host] = result

    def failed(self, pid: int, error: str, less: bool = False) -> None:
        self._world.errors.append(error)


def run_job(
    folder: Path, hosts: int, train: Callable[..., Any], *args: Any, script: Script | None = None
) -> World:
    """One run, to its end.

    gloo now and then loses an operation that is posted while its connection is cut. The process in it is
    ended then, and a host's agent starts another; here is none, so the run is begun again.
    """
    for attempt in range(3):
        at = folder / f"run-{attempt}"
        at.mkdir(parents=True)
        world = World(at, hosts, train, args, copy.deepcopy(script or Script())).run()
        if not any(LOST_BY_GLOO in error for error in world.errors):
            break
    return world


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


def check(world: World, problem: Problem = PROBLEM) -> None:
    losses, hashes = expected(problem)
    assert world.result()["hashes"] == hashes
    assert world.steps() == losses


def layouts(world: World) -> list[tuple[str, list[list[int]], int]]:
    """How each layout came about, its pipelines, and the step that it went on with."""
    return [(event["how"], event["pipelines"], event["step"]) for event in world.of_kind("layout")]
