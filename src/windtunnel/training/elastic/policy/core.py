"""What a supervisor decides: the state of a run, changed by messages and by the time, one after the other.

No clock, thread or socket is in here: `Core` is called by one thread with what came and the time (monotonic
seconds), and acts through `Effects`; so its behaviour can be searched for faults without waiting.

The life of a generation: a loss (of a host or a worker), a suspicion that stays alone, or a host that
came is a *change*. When nothing more comes for a short while the policy is asked with all that is known, and
its answer, a complete membership, is written to the log and sent to every agent. A change while ranks still
group in the generation before makes the next one; the newest always wins, so that failures during a recovery
need no case of their own.
"""

from __future__ import annotations

import math
from typing import Any

from windtunnel.training.elastic.model import Membership
from windtunnel.training.elastic.policy.evidence import Round, in_short
from windtunnel.training.elastic.policy.rules import (
    Blame,
    Change,
    Decision,
    Doubt,
    Ended,
    Fail,
    Fence,
    Form,
    Keep,
    Late,
    Look,
    Observation,
    Overdue,
    Reached,
    Rules,
    Wait,
    decide,
)
from windtunnel.training.elastic.policy.state import (
    Agreements,
    Effects,
    Hosts,
    LiveHost,
    LoggedState,
    Outcome,
    SupervisorSettings,
)

Message = dict[str, Any]
NOT_REACHED = 3  # the exit status of what was asked for and not reached


class Core(LoggedState):
    """The state of a run: what the log tells, which changes with what is recorded, and the rest."""

    def __init__(
        self,
        settings: SupervisorSettings,
        rules: Rules,
        effects: Effects,
        epoch: int,
        before: LoggedState,
        now: float,
    ) -> None:
        super().__init__(**vars(before))
        deadlines = settings.deadlines
        self.outcome: Outcome | None = None
        self.hosts = Hosts(settings.lease, deadlines.grace, before.next_id, set(before.gone))
        self.plain = self.membership.plain() if self.membership is not None else None
        self.epoch = epoch
        self.settings = settings
        self._rules = rules
        self.effects = effects
        self._began = now
        self.hosts.forgive(now)
        self.waiting_since: float | None = None
        # the present generation
        self.agreements = Agreements(self.durable)
        self.met: dict[str, str] = {}  # what ranks of it say to those that they form a group with
        self._formed = self._started = now  # and when its last process was
        self.suspected: float | None = now if self.suspects else None
        self.round: Round | None = None  # the hosts are being asked whom they reach
        self._rounds = 0
        self._reach_checked = False  # they were, since this generation was formed
        self._hit = False  # something outside the program broke this generation
        self._own = False  # the program ended by itself in this generation
        # the next one
        self._changed: float | None = None
        self._forced = False  # a new generation is needed although all hosts and workers are there
        self._causes: list[str] = list(self.lost.values())
        # what must not go on for ever
        self.suspicions = self.formings = self.fruitless = 0
        self.progress = False
        self.newest: int | None = None  # step that was ever reported
        self.reached: int | None = None  # and in this generation
        self.cooperative = bool(self.grouped)  # workers speak to us: they are not plain scripts
        for host, pid in before.attended.values():
            self.hosts.expect(host, pid, now + max(settings.lease, deadlines.back))
        if self.membership is not None:
            self.agreements.begin(self.generation, self.membership.world)
            gone = [host.id for host in self.membership.hosts if host.id not in self.hosts.live]
            self._causes += [f"host {host} is lost" for host in gone]
        if self._causes or (self.membership is None and before.attended):
            self.change(now)

    def finish(self, status: int, reason: str, now: float) -> None:
        """The run is over: all agents are told."""
        if self.outcome is not None:
            return
        self.outcome = Outcome(status, reason, dict(sorted(self.done.items())))
        self.record("finished", status=status, reason=reason)
        self.end_all()

    def end_all(self) -> None:
        """Tell all agents the outcome."""
        assert self.outcome is not None
        for host in self.hosts.live.values():
            if host.link is not None:
                self.end(host.link, self.outcome.status, self.outcome.reason)

    # the time

    @property
    def changing(self) -> bool:
        """Whether a decision is near."""
        return self._changed is not None

    def due(self, now: float) -> float:
        """Seconds until `tick` is to be called, if nothing comes before."""
        until = now + self.settings.beat / 2
        if self.outcome is None:
            settled = math.inf if self._changed is None else self._ready(self._changed)
            until = min(until, settled, self.hosts.due())
        return max(0.001, until - now)

    def tick(self, now: float) -> None:
        """What is due by now. Called after all messages that are there have been handed over, so that
        nobody is given up whose beat waits to be read.
        """
        if self.hosts.forgive(now) and self.round is not None:
            self.round.until = now + self._answering()
        if self.outcome is not None:
            return
        for host, evidence in self.hosts.expired(now):
            self._host_lost(host, evidence, now)
        for host in self.hosts.live.values():
            for rank, until in list(host.unseen.items()):
                if now > until:
                    del host.unseen[rank]
                    self.worker_lost(host, rank, "exit", "it ended unseen", False, now)
        self._look_at_round(now)
        self._look_at_suspects(now)
        self._look_at_forming(now)
        self._look_at_waits(now)
        if self.outcome is None and self._changed is not None and self._settled(self._changed, now):
            self._decide(now)

    def _ready(self, since: float) -> float:
        """Losses that come together are one change. A job that stands still goes on with the last host."""
        return since + (self.settings.settle if self.waiting_since is None else 0.0)

    def _settled(self, since: float, now: float) -> bool:
        """So are those of hosts that are away this instant."""
        ready, patience = self._ready(since), max(self.settings.lease, self.settings.deadlines.back)
        return now >= ready and (not self.hosts.doubtful() or now >= ready + patience)

    def _look_at_suspects(self, now: float) -> None:
        if self.suspected is None or self._changed is not None or self.waiting_since is not None:
            return
        if self.round is not None:  # evidence is on its way
            return
        suspects = sorted(self.suspects.items())
        decision = self.ask(
            Doubt(
                ranks=tuple(rank for rank, _ in suspects),
                waited=now - self.suspected,
                allowed=self.settings.deadlines.suspect,
                times=self.suspicions + 1,
                probed=self._reach_checked,
                unstarted=self._unstarted(),
                lived=now - self._formed,
                start=self.settings.deadlines.process,
            )
        )
        if isinstance(decision, Keep):
            return
        if isinstance(decision, Look):
            self.look(now)
            return
        self.suspected = None
        self.suspicions += 1
        words = "; ".join(f"rank {rank}: {in_short(error)}" for rank, error in suspects)
        if isinstance(decision, Fail):
            self.finish(1, f"{decision.reason} ({words})", now)
            return
        for rank, error in suspects:
            self._rank_lost(rank, "suspect", error)
        self.force(f"suspicion ({words})", now)

    def look(self, now: float) -> None:
        """Ask all hosts of this generation whom of the others they reach."""
        if self.round is not None or self.membership is None:
            return
        addresses = {host.id: host.memory for host in self.membership.hosts if host.id in self.hosts.live}
        self._rounds += 1
        within = self.settings.deadlines.reach
        self.round = Round(self._rounds, frozenset(addresses), now + self._answering())
        for id in addresses:
            link = self.hosts.live[id].link
            if link is not None:
                others = {other: address for other, address in addresses.items() if other != id}
                self.send(link, {"op": "look", "round": self._rounds, "hosts": others, "within": within})

    def _answering(self) -> float:
        """Seconds within which a host that lives has said whom it reaches."""
        return self.settings.deadlines.reach + self.settings.lease

    def _look_at_round(self, now: float) -> None:
        """The hosts have said whom they reach, or had the time for it."""
        round_ = self.round
        if round_ is None or not round_.over(now, self.hosts.live):
            return
        self.round, self._reach_checked = None, True
        silent = round_.silent()
        decision = self.ask(Reached(self.places(), tuple(sorted(round_.answers)), silent))
        if isinstance(decision, Fence):
            for id in decision.hosts:
                peers = sorted({host_id for pair in silent if id in pair for host_id in pair} - {id})
                names = ", ".join(f"host {peer}" for peer in peers)
                self._host_lost(self.hosts.live[id], "cut", now, f"it and {names} do not reach each other")

    def _look_at_forming(self, now: float) -> None:
        """Ranks that did not join their group in time."""
        membership, deadline = self.membership, self.settings.deadlines.form
        if membership is None or self._changed is not None or self.waiting_since is not None:
            return
        if self.suspected is not None:  # who left the group that did not form will not come to it
            return
        late = self._unmet()
        if not late:
            return
        decision = self.ask(
            Late(
                ranks=tuple(sorted(late)),
                speaks=self.cooperative,
                waited=now - max(self._formed, self._started),
                allowed=deadline,
                times=self.formings + 1,
                unstarted=self._unstarted(),
                lived=now - self._formed,
                start=self.settings.deadlines.process,
            )
        )
        if isinstance(decision, Keep):
            return
        self.formings += 1
        if isinstance(decision, Fail):
            self.finish(1, decision.reason, now)
            return
        assert isinstance(decision, Fence)
        for rank in decision.ranks:
            host = self._host(rank)
            if host is not None:
                self.fence(host, rank, host.workers.get(rank))
                error = f"it joined no group within {deadline:g} s"
                self.worker_lost(host, rank, "frozen", error, False, now)
        self.look(now)

    def _look_at_waits(self, now: float) -> None:
        deadlines, first = self.settings.deadlines, self.membership is None
        since = self._began if first else self.waiting_since
        if self.outcome is not None or since is None or (first and self._changed is not None):
            return
        decision = self.ask(
            Overdue(
                first=first,
                there=len(self.hosts.live),
                target=self.settings.places,
                coming=self.coming,
                waited=now - since,
                allowed=deadlines.hello if first else deadlines.hosts,
            )
        )
        if isinstance(decision, Fail):
            self.finish(1, decision.reason, now)

    # decisions

    def change(self, now: float) -> None:
        if self._changed is None:
            self._changed = now

    def force(self, cause: str, now: float) -> None:
        self._forced = True
        self._causes.append(cause)
        self.change(now)

    def ask(self, observation: Observation) -> Decision:
        """The policy's answer. It is in the log before anything follows from it; that all stays as it is
        would be said at every turn and is not written down.
        """
        decision = decide(observation)
        if isinstance(observation, Change) or not isinstance(decision, Keep):
            self.effects.decision(self.generation, self._rules.on_loss, observation, decision)
        return decision

    def _decide(self, now: float) -> None:
        self._changed = None
        settings, places = self.settings, self.places()
        decision = self.ask(
            Change(
                rules=self._rules,
                target=settings.places,
                places=places,
                broken=tuple(sorted({rank // settings.per_host for rank in self.lost})),
                spares=tuple(host for host in self.hosts.live if host not in places),
                coming=self.coming,
                forced=self._forced,
                own=self._own,
                hit=self._hit,
                own_failures=self.own_failures,
                fruitless=self.fruitless,
                progress=self.progress,
                lived=now - self._formed,
                form=settings.deadlines.form,
                cause=self._cause(),
            )
        )
        if isinstance(decision, Fail):
            self.finish(1, decision.reason, now)
            return
        assert isinstance(decision, Form | Wait | Keep)
        if decision.own_failures > self.own_failures:
            self._hit = True  # whatever else ends in this generation is a consequence
        self.own_failures, self._own = decision.own_failures, False
        if isinstance(decision, Form):
            self._form(decision, now)
        elif isinstance(decision, Keep):
            self._causes.clear()
        elif self.membership is not None:
            if self.waiting_since is None:
                self.waiting_since = now
            if decision.order:
                self.record("ordered", count=decision.order, reason=decision.reason)
                self.effects.order(decision.order)

    def _form(self, decision: Form, now: float) -> None:
        live = self.hosts.live
        if self.membership is None:
            self._causes = ["the run begins"]
        cause = self._cause() + (f": {decision.reason}" if decision.reason else "")
        self.generation += 1
        self.fruitless = decision.fruitless
        membership = Membership(
            generation=self.generation,
            epoch=self.epoch,
            hosts=tuple(live[host].member for host in decision.places),
            per_host=self.settings.per_host,
            cause=cause,
            restart_all=decision.restart_all,
        )
        per_host = self.settings.per_host
        for place, id in enumerate(decision.places):  # its processes go on under other ranks
            before, workers = self.place_of(live[id]), live[id].workers
            shift = 0 if before is None else (place - before) * per_host
            live[id].workers = {} if decision.restart_all else {r + shift: p for r, p in workers.items()}
        self.plain = membership.plain()
        self.record(
            "decided",
            membership=self.plain,
            reason=cause,
            restart_all=decision.restart_all,
            own_failures=decision.own_failures,
        )
        self.agreements.begin(self.generation, membership.world)
        self._formed, self.waiting_since, self.suspected = now, None, None
        self._forced = self._hit = self._own = self.progress = self._reach_checked = False
        self.reached = None
        self._causes.clear()
        self.met = {}
        for host in live.values():
            host.unseen.clear()
            self.tell(host)

    def _cause(self) -> str:
        if not self._causes:
            return "hosts that came"
        more = f" and {len(self._causes) - 4} more" if len(self._causes) > 4 else ""
        return "; ".join(self._causes[:4]) + more

    # losses

    def _host_lost(self, host: LiveHost, evidence: str, now: float, error: str = "") -> None:
        self.hosts.lose(host)
        how = error or {"connection": "its connection broke", "lease": "nothing came from it"}[evidence]
        id, place = host.member.id, self.place_of(host)
        if host.link is not None:
            self.end(host.link, 1, f"host {id} is given up: {how}")
        about = {"host": id, "place": place, "rank": None}
        self.record("lost", what="host", **about, evidence=evidence, own=False, error=error)
        if place is not None:
            self._hit = True
            self._causes.append(f"host {id} (place {place}) is lost, {how}")
        self.change(now)

    def worker_lost(
        self, host: LiveHost, rank: int, evidence: str, error: str, own: bool, now: float
    ) -> None:
        if rank in self.lost or rank in self.done:
            return
        host.workers.pop(rank, None)
        self._hit |= not own
        self._own |= own
        self._rank_lost(rank, evidence, error, own)
        self._causes.append(f"rank {rank} is lost, {in_short(error) or evidence}")
        self.change(now)

    def worker_ended(
        self,
        host: LiveHost,
        rank: int,
        status: int | None,
        words: str,
        error: str,
        now: float,
        less: bool = False,
    ) -> None:
        """A process is gone: ``status`` is None where a signal ended it, or nobody knows. ``words``: how.
        ``less``: it said that what was asked for cannot be reached; ``error`` says what."""
        # one that lived may have made steps of which it does not tell
        lived = now - self._formed > self.settings.deadlines.form
        times, doubtful = 1 if lived else self.suspicions + 1, self.hosts.doubtful()
        decision = self.ask(Ended(rank, status, self._hit, doubtful, less, error[-2000:], times))
        assert isinstance(decision, Blame)
        if decision.peers:
            self.suspicions = times
            self.look(now)
        text = f"{words}: {error}" if error else words
        self.worker_lost(host, rank, "exit", text, decision.own, now)
        if decision.reason:
            self.finish(1, decision.reason, now)
        elif decision.hopeless and less:
            self.finish(NOT_REACHED, error, now)
        elif decision.hopeless:
            self.finish(1, f"rank {rank} refuses what it was given: {in_short(error) or words}", now)

    def fence(self, host: LiveHost, rank: int, pid: int | None) -> None:
        if pid is not None:
            host.fenced.add(pid)
        if host.link is not None:
            self.send(host.link, {"op": "fence", "rank": rank, "pid": pid})

    # progress

    def stepped(self, step: int) -> None:
        """A step was done. It is progress unless an earlier generation had done it already: else a program
        that fails at the same step each time would be started anew for ever. Where the numbers fall within a
        generation, the program counts each epoch from its beginning.
        """
        again = self.newest is not None and step <= self.newest
        if again and (self.reached is None or step > self.reached):
            self.reached = step
            return
        self.newest = self.reached = step
        self.progress = True
        self.suspicions = self.formings = self.fruitless = 0

    def is_done(self, rank: int, result: Any, now: float) -> None:
        membership = self.membership
        if membership is None or rank in self.lost:
            return
        if rank not in self.done:
            self.record("done", rank=rank, result=result)
        if len(self.done) == membership.world:
            missing = self.checkpoints.missing()
            self.finish(NOT_REACHED if missing else 0, missing or "all ranks are done", now)

    # hosts

    def tell(self, host: LiveHost) -> None:
        """The present membership, and this host's part in it."""
        membership = self.membership
        if host.link is None or membership is None:
            return
        place = membership.place_of(host.member.id)
        mine = list(self.ranks(place)) if place is not None else []
        message = {"op": "membership", "membership": self.plain, "place": place, "mine": mine}
        self.send(host.link, message)
        host.unmet = {}
        self.tell_met(host, self.met)

    def meet(self, generation: int, said: dict[str, str]) -> None:
        """Ranks have said something to those that they form a group with: all hosts are told."""
        if generation != self.generation:
            return
        news = {key: word for key, word in said.items() if self.met.get(key) != word}
        self.met |= news
        for host in self.hosts.live.values():
            self.tell_met(host, news)

    def tell_met(self, host: LiveHost, said: dict[str, str]) -> None:
        """What comes until the host is being told (`unmet`) goes to it in one message: of many ranks each has
        a word for all."""
        waits, host.unmet = bool(host.unmet), host.unmet | said
        if host.link is not None and said and not waits:
            self.send(host.link, {"op": "met", "generation": self.generation})

    def unmet(self, link: int, generation: int) -> dict[str, str]:
        """What the host is to be told now; nothing, where it has been, or the generation is over."""
        host = self.hosts.of_link(link)
        if host is None or generation != self.generation:
            return {}
        said, host.unmet = host.unmet, {}
        return said

    def end(self, link: int, status: int, reason: str) -> None:
        self.send(link, {"op": "end", "status": status, "reason": reason})
        self.effects.drop(link)

    # small things

    def _unmet(self) -> set[int]:
        """Ranks that are still to join the group of this generation."""
        world = self.membership.world if self.membership is not None else 0
        return set(range(world)) - self.grouped - set(self.done) - set(self.lost)

    def places(self) -> tuple[int | None, ...]:
        hosts = self.membership.hosts if self.membership is not None else ()
        return tuple(host.id if host.id in self.hosts.live else None for host in hosts)

    def place_of(self, host: LiveHost) -> int | None:
        return self.membership.place_of(host.member.id) if self.membership is not None else None

    def place(self, rank: int) -> int:
        return rank // self.settings.per_host

    def ranks(self, place: int) -> range:
        return range(place * self.settings.per_host, (place + 1) * self.settings.per_host)

    def _unstarted(self) -> tuple[int, ...]:
        """Those of them that have no process yet."""

        def starts(rank: int) -> bool:
            host = self._host(rank)
            return host is None or host.workers.get(rank) is None

        return tuple(rank for rank in sorted(self._unmet()) if starts(rank))

    def started(self, host: LiveHost, rank: int, pid: int | None, now: float) -> None:
        """A rank has a process in this generation."""
        host.workers[rank] = pid
        self._started = now

    def _host(self, rank: int) -> LiveHost | None:
        hosts = self.membership.hosts if self.membership is not None else ()
        return self.hosts.live.get(hosts[self.place(rank)].id)

    def send(self, link: int, message: Message) -> None:
        self.effects.send(link, {**message, "epoch": self.epoch})

    def record(self, kind: str, generation: int | None = None, t: float | None = None, **fields: Any) -> None:
        """Write it down, and change what the log tells of."""
        generation = self.generation if generation is None else generation
        self.effects.record(kind, generation, t, **fields)
        self.apply({"kind": kind, "generation": generation, **fields})

    def _rank_lost(self, rank: int, evidence: str, error: str, own: bool = False) -> None:
        assert self.membership is not None
        place = self.place(rank)
        about = {"host": self.membership.hosts[place].id, "place": place, "rank": rank}
        self.record("lost", what="worker", **about, evidence=evidence, own=own, error=error)
