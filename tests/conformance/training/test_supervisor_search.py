"""A search for faults in the decisions: losses, joins, silence, broken connections, stale and repeated
messages and restarts of the supervisor, in any order, without a clock.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from windtunnel.base.plain import from_plain
from windtunnel.store import eventlog
from windtunnel.training.elastic.policy import handlers, rules
from windtunnel.training.elastic.policy.core import Core
from windtunnel.training.elastic.policy.rules import Decision, Observation, Rules, decide
from windtunnel.training.elastic.policy.state import Deadlines, SupervisorSettings, past

PLACES, PER_HOST = 3, 2
SETTINGS = SupervisorSettings(PLACES, PER_HOST, deadlines=Deadlines(hosts=1e9, form=1e9, hello=1e9))
BEAT = 0.3  # seconds between turns of the model; a lease is 1


@pytest.fixture(autouse=True, scope="module")
def never_fruitless() -> Iterator[None]:
    """No job ends here because its generations ended without a step: nobody makes any."""
    with mock.patch.object(rules, "MOST_FRUITLESS", 10**9):
        yield


@dataclass
class Peer:
    """What an agent knows. ``said``: messages of earlier, which may come again."""

    pid: int
    host: int | None = None
    link: int | None = None
    generation: int = 0
    epoch: int = 0
    silent: bool = False
    ended: bool = False
    workers: dict[int, int] = field(default_factory=dict)
    asked: dict[str, Any] | None = None
    said: list[dict[str, Any]] = field(default_factory=list)


class World(RuleBasedStateMachine):
    """Agents, and a supervisor that is called as its server would call it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0
        self.rules = Rules("shrink", minimum=1)
        self.log: list[dict[str, Any]] = []
        self.peers: list[Peer] = []
        self.links: dict[int, Peer] = {}
        self.next_link = 0
        self.next_pid = 1
        self.changes = 0
        self.ordered = 0
        self.restarted_at = 0
        self.epoch = 1
        self.posted: set[tuple[int, str, int]] = set()
        self.parted: list[set[int | None]] = []
        self.core = self.supervise()

    def supervise(self) -> Core:
        before = past(json.loads(json.dumps(self.log)))
        core = Core(SETTINGS, self.rules, self, self.epoch, before, self.now)
        return core

    # effects

    def send(self, link: int, message: dict[str, Any]) -> None:
        peer = self.links.get(link)
        if peer is None:
            return
        message = json.loads(json.dumps(message))
        assert message["epoch"] >= peer.epoch, "an agent hears an older supervisor"
        peer.epoch = message["epoch"]
        if message["op"] == "welcome":
            assert peer.host in (None, message["host"])
            peer.host = message["host"]
        elif message["op"] == "membership":
            membership = message["membership"]
            assert membership["generation"] >= peer.generation, "a generation goes back"
            if membership["generation"] > peer.generation:
                peer.generation = membership["generation"]
                kept = {r: p for r, p in peer.workers.items() if r in message["mine"]}
                peer.workers = {rank: kept.get(rank) or self.pid() for rank in message["mine"]}
        elif message["op"] == "decided":
            world = len(message["values"])
            for rank in range(world):
                assert (message["generation"], message["key"], rank) in self.posted
            assert set(message["values"].values()) == {message["generation"]}, "a stale post counted"
        elif message["op"] == "look":
            peer.asked = message
        elif message["op"] == "end":
            peer.ended = True

    def drop(self, link: int) -> None:
        peer = self.links.pop(link, None)
        if peer is not None and peer.link == link:
            peer.link = None

    def record(self, kind: str, generation: int, t: float | None = None, **fields: Any) -> None:
        head = {"kind": kind, "generation": generation, "t": t or self.now, "epoch": self.epoch}
        self.log.append({**fields, **head})

    def decision(self, generation: int, policy: str, observation: Observation, decision: Decision) -> None:
        said = json.loads(json.dumps(eventlog.decided("training.elastic", policy, observation, decision)))
        assert from_plain(Observation, said["observation"]) == observation
        assert from_plain(Decision, said["decision"]) == decide(observation)
        self.record("decision", generation, None, **said)

    def order(self, count: int) -> None:
        self.ordered += count

    def kill_launcher(self) -> None:
        raise AssertionError

    # the model

    def pid(self) -> int:
        self.next_pid += 1
        return self.next_pid

    def connect(self, peer: Peer) -> None:
        peer.link = self.next_link
        self.links[peer.link] = peer
        self.next_link += 1
        workers = {str(rank): pid for rank, pid in peer.workers.items()}
        about = {"address": "h", "memory": f"m{peer.pid}", "domain": "", "pid": peer.pid}
        state = {"host": peer.host, "generation": peer.generation, "epoch": peer.epoch, "workers": workers}
        handlers.hello(self.core, peer.link, {"op": "hello", **about, **state, "posts": []}, self.now)

    def say(self, peer: Peer, message: dict[str, Any]) -> None:
        if peer.link is not None:
            handlers.message(self.core, peer.link, message, self.now)

    def close(self, peer: Peer) -> None:
        if peer.link is not None:
            link = peer.link
            self.drop(link)
            handlers.closed(self.core, link, self.now)

    def tell(self, peer: Peer) -> None:
        """Whom it does not reach, if it was asked."""
        if peer.asked is not None:
            others = {int(host) for host in peer.asked["hosts"]}
            silent = sorted(other for other in others if {peer.host, other} in self.parted)
            reply = {"op": "reached", "round": peer.asked["round"], "silent": silent}
            peer.asked = None
            self.say(peer, reply)

    def alive(self) -> list[Peer]:
        return [peer for peer in self.peers if not peer.ended]

    def pick(self, data: st.DataObject, what: str = "peer") -> Peer:
        return data.draw(st.sampled_from(self.alive()), what)

    def pass_time(self, seconds: float) -> None:
        for peer in self.alive():
            if peer.link is None:
                self.connect(peer)  # it has tried again and again
            elif not peer.silent:
                self.say(peer, {"op": "beat"})
                self.tell(peer)
        self.now += seconds
        self.core.tick(self.now)

    # what happens

    @initialize(hosts=st.sampled_from([0, 3, 4, 5]))
    def begin(self, hosts: int) -> None:
        for _ in range(hosts):
            self.join()
        self.pass_time(0.05)
        self.pass_time(0.05)

    @precondition(lambda self: len(self.alive()) < 6)
    @rule()
    def join(self) -> None:
        peer = Peer(self.pid())
        self.peers.append(peer)
        self.changes += 1
        self.connect(peer)

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        peer = self.pick(data)
        self.close(peer)
        peer.ended = True
        self.changes += 1

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def freeze(self, data: st.DataObject) -> None:
        self.pick(data).silent = True
        self.changes += 1

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def break_connection(self, data: st.DataObject) -> None:
        self.close(self.pick(data))
        self.changes += 1  # it may come back too late

    @precondition(lambda self: any(peer.workers for peer in self.alive()))
    @rule(data=st.data(), how=st.sampled_from([{"status": 1}, {"signal": 9}, {"what": "frozen"}]))
    def worker_ends(self, data: st.DataObject, how: dict[str, Any]) -> None:
        peer = data.draw(st.sampled_from([peer for peer in self.alive() if peer.workers]))
        rank = data.draw(st.sampled_from(sorted(peer.workers)))
        pid = peer.workers.pop(rank)
        what = {"op": "worker", "what": "exit", "rank": rank, "generation": peer.generation, "pid": pid}
        self.changes += 1
        peer.said.append({**what, **how, "error": ""})
        self.say(peer, peer.said[-1])

    @precondition(lambda self: any(peer.workers for peer in self.alive()))
    @rule(data=st.data(), key=st.sampled_from(["a", "commit/1"]), late=st.booleans())
    def post(self, data: st.DataObject, key: str, late: bool) -> None:
        """Some ranks or all; ``late``: what they posted in earlier generations arrives just before."""
        ready = [peer for peer in self.alive() if peer.workers]
        for peer in data.draw(st.lists(st.sampled_from(ready), unique_by=id) | st.just(ready)):
            for message in list(peer.said) if late else ():
                self.say(peer, message)
            for rank in peer.workers:
                self.posted.add((peer.generation, key, rank))
                values = {str(rank): peer.generation}
                about = {"generation": peer.generation, "key": key, "values": values}
                peer.said.append({"op": "post", **about})
                self.say(peer, peer.said[-1])

    @precondition(lambda self: any(peer.said for peer in self.alive()))
    @rule(data=st.data())
    def say_again(self, data: st.DataObject) -> None:
        """A message of now or of long ago comes (again), from this host or another."""
        message = data.draw(st.sampled_from([m for peer in self.peers for m in peer.said]))
        self.changes += 1
        self.say(self.pick(data), message)

    @precondition(lambda self: any(peer.workers for peer in self.alive()))
    @rule(data=st.data())
    def suspect(self, data: st.DataObject) -> None:
        peer = data.draw(st.sampled_from([peer for peer in self.alive() if peer.workers]))
        rank = min(peer.workers)
        self.changes += 1
        self.say(peer, {"op": "suspect", "generation": peer.generation, "rank": rank, "error": "?"})
        step = {"op": "event", "kind": "step", "step": 0, "generation": peer.generation}
        self.say(peer, step)

    @precondition(lambda self: sum(bool(peer.workers) for peer in self.alive()) > 1)
    @rule(data=st.data(), turns=st.integers(0, 4))
    def part(self, data: st.DataObject, turns: int) -> None:
        """Two hosts do not reach each other any more, and suspect it; the supervisor reaches both."""
        ready = [peer for peer in self.alive() if peer.workers]
        two = data.draw(st.lists(st.sampled_from(ready), min_size=2, max_size=2, unique_by=id))
        self.parted.append({peer.host for peer in two})
        self.changes += 3  # both suspect, one goes
        for peer in two:
            about = {"generation": peer.generation, "rank": min(peer.workers), "error": "?"}
            self.say(peer, {"op": "suspect", **about})
        for _ in range(turns):
            self.pass_time(BEAT)

    @rule(seconds=st.sampled_from([0.01, 0.05, 0.2, BEAT]))
    def wait(self, seconds: float) -> None:
        self.pass_time(seconds)

    @rule()
    def stopped_for_long(self) -> None:
        """The supervisor itself stood still: nobody is given up for that."""
        lost = sum(event["kind"] == "lost" and event["what"] == "host" for event in self.log)
        away = [peer for peer in self.alive() if peer.link is None]
        self.now += 100.0
        if not away:
            self.core.tick(self.now)
            assert lost == sum(e["kind"] == "lost" and e["what"] == "host" for e in self.log)

    @precondition(lambda self: len(self.log) > self.restarted_at + 2)
    @rule()
    def restart(self) -> None:
        """The supervisor dies; the next one has only the log."""
        self.epoch += 1
        self.links.clear()
        for peer in self.peers:
            peer.link = None
        self.changes += 1
        self.core = self.supervise()
        self.restarted_at = len(self.log)

    # what must hold

    @invariant()
    def generations_grow(self) -> None:
        decided = [event["membership"]["generation"] for event in self.log if event["kind"] == "decided"]
        assert decided == list(range(1, len(decided) + 1))

    @invariant()
    def no_decision_without_a_change(self) -> None:
        assert sum(event["kind"] == "decided" for event in self.log) <= self.changes

    @invariant()
    def a_durable_key_is_in_the_log(self) -> None:
        for event in self.log:
            if event["kind"] == "agreed":
                assert set(event["values"].values()) == {event["generation"]}

    @invariant()
    def only_who_is_cut_off_goes_for_it(self) -> None:
        for event in self.log:
            if event["kind"] == "lost" and event["evidence"] == "cut":
                assert any(event["host"] in pair for pair in self.parted)

    def teardown(self) -> None:
        """When nothing more happens all live hosts are in, with all workers, in one generation."""
        if self.core.outcome is not None:
            assert self.core.outcome.status == 1
            return
        for _ in range(40):
            self.pass_time(BEAT)
        if self.core.outcome is not None:
            assert ("own_failures" in str(self.log) and "ended by itself" in self.core.outcome.reason) or (
                "hosts are left" in self.core.outcome.reason
            )
            return
        live = {peer.host for peer in self.alive() if not peer.silent}
        assert set(self.core.hosts.live) == live
        self.settled(live)

    def settled(self, live: set[int | None]) -> None:
        membership = self.core.membership
        if membership is None:
            assert len(live) < PLACES
            return
        members = {host.id for host in membership.hosts}
        assert members <= live and len(members) == min(PLACES, len(live))
        for peer in self.alive():
            if peer.host in members:
                assert peer.generation == membership.generation and len(peer.workers) == PER_HOST


class Replacing(World):
    """The same with a policy that waits for hosts: they come as soon as they are ordered."""

    def __init__(self) -> None:
        super().__init__()
        self.rules = Rules(max_own_failures=10**9)
        self.core = self.supervise()

    @precondition(lambda self: self.ordered)
    @rule()
    def deliver(self) -> None:
        self.ordered -= 1
        self.join()

    def settled(self, live: set[int | None]) -> None:
        for _ in range(60):
            if self.ordered:
                self.deliver()
            self.pass_time(BEAT)
        membership = self.core.membership
        if membership is None:
            assert len(self.core.hosts.live) < PLACES
            return
        assert len(membership.hosts) == PLACES
        assert {host.id for host in membership.hosts} <= set(self.core.hosts.live)


# fixed examples: the same search in every run
SEARCH = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
TestShrinking = World.TestCase
TestShrinking.settings = SEARCH
TestReplacing = Replacing.TestCase
TestReplacing.settings = SEARCH
