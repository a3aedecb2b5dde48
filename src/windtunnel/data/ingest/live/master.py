"""The master of a session: it gives splits to clients, has workers read them, and knows what is consumed.

Protocol. Workers and clients register, and say every quarter of a second that they are there. A client asks
for a split (`lease`), is told a worker, and has it streamed from there; it reports what its trainer has
consumed (`ack`). What goes wrong:

- A worker is gone (its stream breaks, or it is silent for ``worker_lease``): the clients ask for another one,
  and go on with the batch after the last that they have. They drop what they have already: so a worker that
  was only stopped, and goes on, does no harm.
- A client is gone (silent for ``client_lease``): its splits go to others, from the last batch it reported.
  Should it only have been stopped: it hands nothing out before it has heard from the master again, which then
  tells it what it lost.
- The master is killed: the log (`ledger`) has what it knew; workers and clients call until it is there
  again, and register anew with what they have.
- The log cannot be written: what was asked is refused, and asked again; nothing is given out meanwhile.
- A split cannot be read: it is tried by three workers (by one, where the error is of the data), and then the
  session fails, with that error at each client; or it is left out, and counted, where that was asked for.

A client for which nothing is left reads the first splits of the next epoch ahead. That gives it no right to
them: who has read what is not in the log, and only makes a client be given what it has, if that is possible.

Which split goes to whom, when a client's epoch is over and how many workers there should be, `policy.decide`
says; each such decision is in the event log, waits only where something else was decided before.
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.flight as fl

from windtunnel.base import schema
from windtunnel.base.errors import HostError
from windtunnel.base.keys import Keys
from windtunnel.base.plain import canonical, to_plain
from windtunnel.base.wire import WireError
from windtunnel.data.ingest import policy, reader
from windtunnel.data.ingest.live import ledger, protocol
from windtunnel.data.ingest.live.calls import CALLS, MasterSettings
from windtunnel.data.ingest.live.crew import CAPABILITY, WorkerPool
from windtunnel.data.ingest.live.ledger import DONE, SplitLog
from windtunnel.data.ingest.live.pool import WorkerLauncher
from windtunnel.data.ingest.model import IngestSession
from windtunnel.data.ingest.policy import (
    EpochEnd,
    GiveUpSplit,
    PeerClient,
    RankProgress,
    ReadAhead,
    RepeatBatch,
    SplitFault,
    SplitGrant,
    SplitRequest,
    StepLimit,
    WaitForSplit,
)  # fmt: skip
from windtunnel.store.eventlog import NAME, EventLog, LogFailed


@dataclass
class _Client:
    key: str
    world: int
    last_message: float
    steps: int = 0
    ready: int = 0
    dry: bool = False
    reading: int = 0
    stalled: float = 0.0
    settled: bool = False
    """It has received all of the splits that it has."""
    waits: bool = False
    """The last decision about it in the log is that it waits."""


class Master(protocol.SecretServer):
    """The server, which listens when this returns. ``folder``: of the log and events. ``pool``: starts
    workers.

    Raises:
        UserError: the table or the log cannot be used. HostError: the port is taken, the log is not written.
    """

    def __init__(
        self,
        session: IngestSession,
        folder: Path,
        keys: Keys,
        settings: MasterSettings,
        pool: WorkerLauncher | None = None,
    ) -> None:
        self.splits = reader.Reader(session).splits()
        identity = canonical([to_plain(session), to_plain(self.splits)])
        self.ledger = SplitLog(folder / ledger.NAME, hashlib.sha256(identity).hexdigest())
        self.log = EventLog(folder / NAME)
        self.session, self.settings = session, settings
        self._turn = threading.Condition()
        self._stop = threading.Event()
        now = time.monotonic()
        state = self.ledger.state
        if state.failed:
            self.ledger.write("fail", why="")
        # Those that had splits may come back: until their lease is over nobody else gets these.
        self._clients = {name: _Client("", 0, now) for name in set(state.owners.values())}
        self.crew = WorkerPool(settings, pool, self.log, again=bool(state.marks or state.owners))
        self._serves: dict[int, str] = {}
        self._ahead: dict[tuple[int, int], tuple[str, str]] = {}
        """Of an epoch and a split: which client reads it ahead, from which worker."""
        self._failures: Counter[int] = Counter()
        self._order()
        try:
            super().__init__(keys, settings.host, settings.port)
        except HostError:
            self.ledger.close()
            self.log.close()
            raise
        self.log.append("master", address=self.address, epoch=state.epoch, splits=len(self.splits))

    # --- calls

    def do_action(self, context: Any, action: Any) -> Any:
        message = protocol.body(action)
        op = action.type
        if op in ("register", "heartbeat"):
            op = f"{op} {message.get('role')}"
        try:
            schema.require({**message, "op": op}, CALLS)
            with self._turn:
                answer = self._answers[op](self, message)
        except WireError as error:
            raise fl.FlightServerError(str(error)) from error
        except (ledger.LogFull, LogFailed) as error:
            raise fl.FlightUnavailableError(str(error)) from error
        except (KeyError, ValueError, TypeError) as error:
            raise fl.FlightServerError(f"a {op!r} is not understood") from error
        return protocol.result(answer)

    def _register_worker(self, request: dict[str, Any]) -> dict[str, Any]:
        self.crew.came(request)
        self._turn.notify_all()
        return {"session": to_plain(self.session), "every": self.settings.every}

    def _heartbeat_worker(self, request: dict[str, Any]) -> dict[str, Any]:
        return self.crew.heartbeat(request)

    def _register_client(self, request: dict[str, Any]) -> dict[str, Any]:
        state, name, now = self.ledger.state, request["client"], time.monotonic()
        old = self._clients.get(name)
        if request.get("again") is not None:
            if old is not None and old.key not in ("", request["key"]):
                return _REPLACED
            if request["epoch"] != state.epoch:
                return {"rewound": True}
            self._clients[name] = _Client(request["key"], request["world"], now)
            self._take(name, sorted(ledger.unpacked(request["again"]).items()))
            return self._welcome()
        if request.get("resume") is not None:
            # The checkpoint is right: what came after it is not part of the trainer's state.
            marks = ledger.unpacked(request["resume"])
            if any(not 0 <= split < len(self.splits) for split in marks) or request["epoch"] is None:
                raise ValueError("no such split")
            if request["epoch"] >= self.session.epochs:
                return {"over": self.session.epochs}
            again = name in state.came and (old is None or old.key != request["key"])
            if request["epoch"] != state.epoch or again:
                # marks of who has not gone back yet are of before: nobody gets a split
                self.ledger.write("back")
            self.ledger.write("rewind", client=name, epoch=request["epoch"], marks=list(marks.items()))
            self._failures.clear()
            self._ahead.clear()
            self._order()
        else:
            mine = [split for split, client in state.owners.items() if client == name]
            if mine:  # of a process that had this name before
                self._free(mine)
            left = self._open() if state.last < 0 else 0
            if name in state.ended or (self.splits and not left):
                others = (client for client in self._clients if client != name)
                if left or any(rank not in state.ended for rank in others):
                    return {"wait": True}
                if state.epoch + 1 >= self.session.epochs:
                    return {"over": self.session.epochs}
                self.ledger.write("epoch", epoch=state.epoch + 1)
                self._failures.clear()
                self._order()
        self._clients[name] = _Client(request["key"], request["world"], now)
        self.ledger.write("came", client=name)
        self.log.append("client", name=name, epoch=state.epoch)
        self._turn.notify_all()
        return self._welcome()

    def _welcome(self) -> dict[str, Any]:
        return {
            "epoch": self.ledger.state.epoch, "every": self.settings.every,
            "lease": self.settings.client_lease, "ends": self.settings.ends,
        }  # fmt: skip

    def _heartbeat_client(self, request: dict[str, Any]) -> dict[str, Any]:
        member = self._client_of(request)
        if isinstance(member, dict):
            return member
        member.last_message = time.monotonic()
        self.crew.count_batches(
            request["steps"] - member.steps, request["stalled"] - member.stalled, request["fill"]
        )
        member.stalled = request["stalled"]
        self._follow(member, request)
        state = self.ledger.state
        lost_splits = [split for split in request["held"] if state.owners.get(split) != request["client"]]
        return {
            "lost": lost_splits, "gone": [name for name in request["uses"] if name not in self.crew.there],
            "late": not self._todo, "failed": state.failed,
            "streams": policy.share(self.crew.ready, SplitRequest.slots, len(self._clients)),
        }  # fmt: skip

    def _lease(self, request: dict[str, Any]) -> dict[str, Any]:
        member = self._client_of(request)
        if isinstance(member, dict):
            return member
        self._follow(member, request)
        if request["client"] in self.ledger.state.ended:
            return {"end": True}
        owners = self.ledger.state.owners
        # Given to it in an answer that it never got.
        missed = [
            split
            for split, name in owners.items()
            if name == request["client"] and split not in request["held"]
        ]
        if missed:
            return self._response(request["client"], self._decide_for(request["client"], member, missed[0]))
        last = time.monotonic() + self.settings.every
        while True:
            decision = self._decide_for(request["client"], member)
            if not isinstance(decision, WaitForSplit) or (left := last - time.monotonic()) <= 0:
                break
            self._turn.wait(left)
            if self._clients.get(request["client"]) is not member:
                return {"wait": True}
        return self._response(request["client"], decision)

    def _go(self, request: dict[str, Any]) -> dict[str, Any]:
        """How far ranks go that end together: told as soon as it is further than ``until``."""
        until = time.monotonic() + self.settings.every
        while True:
            client = self._client_of(request)
            if isinstance(client, dict):
                return client
            pace = self._pace()
            if pace.last or pace.steps > request["until"] or (left := until - time.monotonic()) <= 0:
                return {"until": pace.steps, "last": pace.last, "failed": self.ledger.state.failed}
            self._turn.wait(left)

    def _pace(self) -> StepLimit:
        state = self.ledger.state
        if state.last >= 0:
            return StepLimit(state.last, True)
        here = [client for client in self._clients.values() if client.key]
        pace = RankProgress(
            max((client.world for client in here), default=1),
            tuple(client.steps + client.ready for client in here),
            tuple(client.settled for client in here),
            len(self._todo),
        )
        decision = policy.POLICIES[self.settings.policy](pace)
        assert isinstance(decision, StepLimit)
        if decision.last:
            self.ledger.write("last", steps=decision.steps)
            self.log.decision(CAPABILITY, self.settings.policy, pace, decision)
            self._turn.notify_all()
        return decision

    def _again(self, request: dict[str, Any]) -> dict[str, Any]:
        """A stream broke: ``error`` is what the worker said, empty where it said nothing."""
        member = self._client_of(request)
        if isinstance(member, dict):
            return member
        split, name = request["split"], request["client"]
        if self.ledger.state.owners.get(split) != name:
            return {"lost": True}
        if self._serves.get(split) == request["worker"]:
            del self._serves[split]
        if request["error"]:
            self._failures[split] += 1
            fault = SplitFault(self.settings.on_error, request["permanent"], self._failures[split])
            given_up = policy.POLICIES[self.settings.policy](fault)
            self.log.decision(CAPABILITY, self.settings.policy, fault, given_up, split=split)
            if isinstance(given_up, GiveUpSplit):
                return self._give_up(split, request["error"], given_up.skip)
        decision = self._decide_for(name, member, split, request["worker"])
        return self._response(name, decision)

    def _give_up(self, split: int, why: str, skip: bool) -> dict[str, Any]:
        if skip:
            rows = self.splits[split].rows
            self.ledger.write("skip", split=split, why=why[:500])
            self.log.append("skipped", split=split, rows=rows, why=why)
            self._turn.notify_all()
            return {"skipped": why}
        self.ledger.write("fail", why=why[:2000])
        self.log.append("failed", split=split, why=why)
        return {"failed": why}

    def _ack(self, request: dict[str, Any]) -> dict[str, Any]:
        client = self._client_of(request)
        if isinstance(client, dict):
            return client
        return {"lost": self._take(request["client"], [(number, mark) for number, mark in request["marks"]])}

    def _take(self, name: str, marks: list[tuple[int, int]]) -> list[int]:
        """What a client has consumed; of splits that it does not have, the answer is that it lost them."""
        state = self.ledger.state
        new: list[tuple[int, int]] = []
        lost: list[tuple[int, int]] = []
        for split, mark in marks:
            if not 0 <= split < len(self.splits) or mark < DONE:
                raise ValueError("no such split")
            claimed = state.claims.get(name, {}).get(split, 0)
            if claimed == DONE or (mark != DONE and claimed >= mark):
                continue  # it says again what it said to a master that was killed
            (new if state.owners.get(split) == name else lost).append((split, mark))
        if new:
            self.ledger.write("ack", client=name, marks=new)
            for split, mark in new:
                if mark == DONE:
                    self._serves.pop(split, None)
            self._turn.notify_all()
        return [split for split, _ in lost]

    def _leave(self, request: dict[str, Any]) -> dict[str, Any]:
        if isinstance(self._client_of(request), _Client):
            self._forget(request["client"])
        return {}

    def _snapshot(self, request: dict[str, Any]) -> dict[str, Any]:
        state, crew, load = self.ledger.state, self.crew, Counter(self._serves.values())
        done = [split for split, mark in state.marks.items() if mark == DONE]
        return {
            "epoch": state.epoch,
            "epochs": self.session.epochs,
            "splits": len(self.splits),
            "done": len(done),
            "held": len(state.owners),
            "left": len(self._todo),
            "clients": {
                name: {"steps": client.steps, "stalled": client.stalled, "ended": name in state.ended}
                for name, client in sorted(self._clients.items())
            },
            "came": len(state.came),
            "world": max((client.world for client in self._clients.values()), default=0),
            "workers": len(crew.there),
            "served_by": {
                name: {"address": worker.address, "splits": load[name], "produced": worker.rows,
                       "busy": worker.busy, "process": worker.process, "drain": worker.drain}
                for name, worker in sorted(crew.there.items())
            },
            "wanted": crew.scaler.target,
            "demand": crew.scaler.memory.demand,
            "capacity": crew.scaler.memory.capacity,
            "batches": crew.batches,
            "cpu_seconds": crew.cpu,
            "failed": state.failed,
            "skipped": [
                {"split": split, "rows": self.splits[split].rows, "why": why}
                for split, why in state.skipped.items()
            ],
        }  # fmt: skip

    _answers: dict[str, Callable[[Any, dict[str, Any]], dict[str, Any]]] = {  # noqa: RUF012
        "register worker": _register_worker, "register client": _register_client,
        "heartbeat worker": _heartbeat_worker, "heartbeat client": _heartbeat_client, "lease": _lease,
        "go": _go,
        "again": _again, "ack": _ack, "leave": _leave, "snapshot": _snapshot,
    }  # fmt: skip

    # --- what stands behind them

    def _client_of(self, request: dict[str, Any]) -> _Client | dict[str, Any]:
        """The client, or the answer to one that is none of ours."""
        client = self._clients.get(request["client"])
        if client is None or not client.key:
            return {"unknown": True}
        if client.key != request["key"]:
            return _REPLACED
        if request["epoch"] != self.ledger.state.epoch:
            return {"rewound": True}
        return client

    def _follow(self, member: _Client, request: dict[str, Any]) -> None:
        changed = (member.steps, member.dry, member.ready) != (
            request["steps"],
            request["dry"],
            request["ready"],
        )
        member.steps, member.ready, member.dry = (
            max(member.steps, request["steps"]),
            request["ready"],
            request["dry"],
        )
        member.reading = len(request["reading"])
        for split in set(request["held"]) - set(request["reading"]):  # which have come whole
            changed = self._serves.pop(split, "") != "" or changed
        if self.settings.ends == "drop":
            mine = [
                split for split, client in self.ledger.state.owners.items() if client == request["client"]
            ]
            member.settled = not request["reading"] and set(mine) <= set(request["held"])
            changed = True
        if changed:
            self._turn.notify_all()

    def _decide_for(
        self, name: str, member: _Client, split: int | None = None, last: str = ""
    ) -> policy.Decision:
        """The decision on a client that asks; ``split``: for another worker for that one, not for a new."""
        state, load = self.ledger.state, Counter(self._serves.values())
        if state.failed:
            return WaitForSplit("the session has failed")
        if state.last >= 0 and split is None:
            return WaitForSplit("the epoch is over")
        owned = Counter(state.owners.values())
        peers = tuple(
            PeerClient(it.steps, it.ready, owned[each], it.dry, each in state.ended)
            for each, it in sorted(self._clients.items()) if each != name
        )  # fmt: skip
        if not self._todo and split is None:
            load.update(worker for _, worker in self._ahead.values())
        own = self._own(name) if split is None else split
        first = split if split is not None else self._sequence[self._todo[0]] if self._todo else -1
        left = len(self._todo) if split is None else 1
        client, sender = self._ahead.get((state.epoch, own), ("", ""))
        coming = state.epoch + 1
        after = next((member for member in self._coming if (coming, member) not in self._ahead), -1)
        ahead = sum(it == name and at == coming for (at, _), (it, _) in self._ahead.items())
        workers = tuple(
            policy.SplitWorker(each, load[each])
            for each, it in sorted(self.crew.there.items())
            if not it.drain
        )
        ask = SplitRequest(
            self.settings.ends, member.world, len(state.came), member.reading if split is None else 0,
            member.steps, member.dry, first, left, self._open(), workers, peers, last=last,
            sender=sender if client == name else "", after=after, ahead=ahead,
            own=own,
        )  # fmt: skip
        decision = policy.POLICIES[self.settings.policy](ask)
        if not (isinstance(decision, WaitForSplit) and member.waits):
            epoch = state.epoch + isinstance(decision, ReadAhead)
            self.log.decision(CAPABILITY, self.settings.policy, ask, decision, client=name, epoch=epoch)
        member.waits = isinstance(decision, WaitForSplit)
        if isinstance(decision, SplitGrant):
            if split is None:
                self.ledger.write("grant", split=decision.split, client=name)
                self._todo.remove(self._place[split := decision.split])
                self._ahead.pop((state.epoch, split), None)
                member.settled = False
            self._serves[decision.split] = decision.worker
        elif isinstance(decision, ReadAhead):
            self._ahead[coming, decision.split] = name, decision.worker
        elif isinstance(decision, EpochEnd):
            self.ledger.write("end", client=name)
            self._turn.notify_all()
        return decision

    def _response(self, name: str, decision: policy.Decision) -> dict[str, Any]:
        state = self.ledger.state
        match decision:
            case SplitGrant(split, worker) | ReadAhead(split, worker):
                now = isinstance(decision, SplitGrant)
                return {
                    "split": to_plain(self.splits[split]), "first": state.marks.get(split, 0) if now else 0,
                    "epoch": state.epoch + (not now), "worker": worker,
                    "address": self.crew.there[worker].address,
                }  # fmt: skip
            case RepeatBatch():
                return {"pad": True}
            case EpochEnd():
                return {"end": True}
        missing = max(0, self._clients[name].world - len(state.came))
        return {"wait": True, "failed": state.failed, "missing": missing}

    def _open(self) -> int:
        marks = self.ledger.state.marks
        return len(self.splits) - sum(mark == DONE for mark in marks.values())

    def _order(self) -> None:
        """What of the epoch is to be given out, and in which order."""
        state = self.ledger.state
        self._sequence = self._sequence_of(state.epoch)
        self._coming = self._sequence_of(state.epoch + 1) if state.epoch + 1 < self.session.epochs else []
        self._place = {split: place for place, split in enumerate(self._sequence)}
        gone = {split for split, mark in state.marks.items() if mark == DONE} | set(state.owners)
        self._todo = [place for place, split in enumerate(self._sequence) if split not in gone]
        self._serves = {}
        self._ahead = {key: worker for key, worker in self._ahead.items() if key[0] >= state.epoch}

    def _sequence_of(self, epoch: int) -> list[int]:
        return reader.order(self.session, len(self.splits), epoch)

    def _own(self, name: str) -> int:
        """The first split in the epoch's order that the client has read ahead or that nobody has; -1 where
        there is none."""
        splits = (self._sequence[place] for place in self._todo)
        epoch = self.ledger.state.epoch
        return next((split for split in splits if self._ahead.get((epoch, split), (name,))[0] == name), -1)

    def _free(self, splits: list[int]) -> None:
        self.ledger.write("free", splits=splits)
        for split in splits:
            self._serves.pop(split, None)
            if self.ledger.state.marks.get(split) != DONE:
                bisect.insort(self._todo, self._place[split])
        self._turn.notify_all()

    def _forget(self, name: str) -> None:
        mine = [split for split, client in self.ledger.state.owners.items() if client == name]
        if mine:
            self._free(mine)
        self._clients.pop(name, None)
        self.log.append("client gone", name=name, splits=mine)
        self._turn.notify_all()

    # --- what happens as time passes

    def run(self) -> None:
        """Look after clients and workers until `stop`, then let them go."""
        try:
            while not self._stop.wait(self.settings.every):
                with self._turn, contextlib.suppress(ledger.LogFull, LogFailed):  # it is tried again
                    self._tick(time.monotonic())
        finally:
            self._end()

    def stop(self) -> None:
        self._stop.set()

    def _tick(self, now: float) -> None:
        for name, client in list(self._clients.items()):
            if now - client.last_message > self.settings.client_lease:
                self._forget(name)
                self._ahead = {key: it for key, it in self._ahead.items() if it[0] != name}
        for name in self.crew.gone(now):
            for split in [split for split, worker in self._serves.items() if worker == name]:
                del self._serves[split]
            self._ahead = {key: it for key, it in self._ahead.items() if it[1] != name}
        state = self.ledger.state
        why = self.crew.fill(now, Counter(self._serves.values()), self.address, failed=bool(state.failed))
        if why:
            self.ledger.write("fail", why=why)
        self.crew.scale(now, sum(name not in state.ended for name in self._clients))

    def _end(self) -> None:
        with self._turn:
            self.crew.end()
        self.shutdown()
        self.ledger.close()
        self.log.close()


_REPLACED = {"replaced": True}
