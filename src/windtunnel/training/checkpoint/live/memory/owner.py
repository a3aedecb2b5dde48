"""What the ranks of a host ask of its memory service: slots, and that what they saved be replicated.

A rank reserves slots for its shards, writes to them by itself (it maps the files), and says `saved`. The
service sends the slot to the hosts that hold copies of this host's shards, and when all shards that the rank
reserved are where they are to be, it posts the step for the rank; all ranks' posts together commit it.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict
from functools import partial

from windtunnel.base import handshake, wire
from windtunnel.store import eventlog
from windtunnel.training.checkpoint.live import slot as slots
from windtunnel.training.checkpoint.live.memory import transfer
from windtunnel.training.checkpoint.live.memory.folder import Shelf
from windtunnel.training.checkpoint.live.memory.replicate import Delivery, Pace, Pacer, Sender
from windtunnel.training.checkpoint.live.memory.state import Board, Ledger, Spec, State
from windtunnel.training.checkpoint.live.memory.transfer import Handler, Message, Refused
from windtunnel.training.checkpoint.live.slot import CopyError, Slot
from windtunnel.training.checkpoint.model import Placement, Shard
from windtunnel.training.checkpoint.policy import CopiesWanted, Decision, Observation, decide
from windtunnel.training.checkpoint.policy.slots import EMPTY, explain, needed, require
from windtunnel.training.elastic.model import MemberHost

ALLOCATION = 1e8
"""Bytes/s at which memory is taken and touched at the very least."""
TRAFFIC_KEPT = 64


class Owner:
    """The handlers of these requests, and the senders."""

    def __init__(self, state: State) -> None:
        self._state, self._pacer = state, Pacer(tell=self._tell)
        self._senders: dict[int, Sender] = {}
        self._traffic: dict[int, list[int]] = {}
        self.handlers: dict[str, Handler] = {
            "hello": lambda _, message, raw: self._hello(message),
            "reserve": lambda _, message, raw: self._reserve(message, raw),
            "saved": lambda _, message, raw: self._saved(message),
            "wait": lambda _, message, raw: self._wait(message),
            "restored": lambda _, message, raw: self._restored(message),
            "window": lambda _, message, raw: self._window(message),
            "locate": lambda _, message, raw: self._locate(message),
            "health": lambda *_: asdict(state.health()),
            "traffic": lambda *_: self._give_traffic(),
        }

    def change(self, hosts: tuple[MemberHost, ...]) -> None:
        """A new generation of these hosts: what was being sent is cancelled."""
        with self._state.changed:
            self._pacer.forget()
            self._traffic.clear()
            self._cancel()
            for gone in self._senders.keys() - {host.id for host in hosts}:
                self._senders.pop(gone).end()

    def _cancel(self) -> None:
        for sender in self._senders.values():
            sender.cancel()

    def close(self) -> None:
        """End all senders."""
        with self._state.changed:
            senders = list(self._senders.values())
            self._senders.clear()
        for sender in senders:
            sender.end()
        for sender in senders:
            sender.join(2.0)

    def _hello(self, message: Message) -> Message:
        state = self._state
        state.require(message["generation"])
        board = state.folder.path / "committed"
        with state.changed:
            if not board.exists():  # somebody wiped this memory
                state.board = Board(board, create=True)
                state.board.write(state.committed)
        return {"board": str(board), "secret": state.keys.secret.hex(), "tls": state.keys.files}

    def _reserve(self, message: Message, layout: bytes) -> Message:
        state, rank, generation = self._state, message["rank"], message["generation"]
        state.require(generation)
        nbytes: dict[str, int] = message["nbytes"]
        require(message["slots"])
        with state.changed:
            copies_wanted = self._asked(message)
            placement = decide(copies_wanted)
            assert isinstance(placement, Placement) and state.membership is not None
            hosts, place = state.membership.hosts, rank // state.membership.per_host
            holders = tuple(hosts[at].id for at in placement.holders[place][1:])
            spec = state.specs.get(rank) or Spec({}, frozenset(), 0, 0, ())
            shards = frozenset(nbytes)
            spec = Spec(
                {**spec.nbytes, **nbytes},
                spec.alone - shards if holders else spec.alone | shards,
                message["slots"],
                max(message["copies"], spec.copies),
                holders or spec.holders,
            )
            if holders:
                self._pacer.configure(Pace(**message["pace"]))
        if rank == 0:
            self._tell(copies_wanted, placement)
        needs = self._require(rank, spec)
        state.folder.keep_layout(message["layout"], layout, generation)
        paths = {}
        for shard, count in nbytes.items():
            shelf = state.folder.ensure(shard, state.world, count, message["slots"], generation, state.base)
            paths[shard] = [str(slot.path) for _, slot in sorted(shelf.slots.items())]
            for host in holders:
                self._prepare(host, shard, shelf, message)
        state.require(generation)
        with state.changed:
            state.specs[rank] = spec
        return {"paths": paths, "needs": needs}

    def _asked(self, message: Message) -> CopiesWanted:
        membership, wanted = self._state.membership, message["placement"]
        assert membership is not None
        kind, domains = wanted.get("kind", "mixed"), tuple(wanted.get("domains") or ())
        own = tuple(host.domain for host in membership.hosts)
        return CopiesWanted(len(own), message["copies"], kind, domains, own)

    def _tell(self, observation: Observation, decision: Decision) -> None:
        """All hosts decide alike; the first one says it in the run's events."""
        if self._state.place == 0:
            record = eventlog.decided("training.checkpoint", "newest", observation, decision)
            self._state.context.event("decision", **record)

    def _require(self, rank: int, spec: Spec) -> str:
        """Refuse what will not fit, taking for granted that peers' shards are as large as the own ones; the
        sum in words.

        Raises:
            UserError: with the sum.
        """
        state = self._state
        with state.changed:
            specs = [*(other for at, other in state.specs.items() if at != rank), spec]
            world = state.world
            here = sum(shelf.nbytes for shelf in state.folder.shelves if shelf.world == world)
        own = sum(sum(spec.nbytes.values()) for spec in specs)
        held = sum(
            n * len(spec.holders)
            for spec in specs
            for shard, n in spec.nbytes.items()
            if shard not in spec.alone
        )
        headers = (
            spec.slots * slots.HEADER * sum(len(spec.nbytes) * (1 + len(spec.holders)) for spec in specs)
        )
        more = needed(own, held, spec.slots, headers) - here
        needs = explain(own, held, spec.slots, headers)
        stands = all(state.folder.stands(shard, world, n, spec.slots) for shard, n in spec.nbytes.items())
        if more > 0 and not stands:  # who comes back to slots that are there needs nothing more
            state.folder.require(
                more, lambda: f"checkpoints in memory need {needs} on this host", world, state.base
            )
        return needs

    def _prepare(self, host: int, shard: str, shelf: Shelf, message: Message) -> None:
        """Have a holder take the memory for its copy now. One that does not answer is the membership's
        matter."""
        state = self._state
        fields = {
            "op": "prepare",
            "generation": message["generation"],
            "shard": shard,
            "world": shelf.world,
            "capacity": shelf.capacity,
            "slots": message["slots"],
        }
        limits = state.limits
        try:
            address = self._address(host)
            with handshake.connect(address, limits.connect, state.keys, transfer.service(address)) as sock:
                sock.settimeout(
                    limits.silence + limits.membership + message["slots"] * shelf.capacity / ALLOCATION
                )
                answer = transfer.ask(sock, fields)
        except (OSError, wire.WireError) as error:
            state.context.event("note", text=f"host {host} does not prepare for {shard}: {error}")
            return
        if answer.get("error") == "user":
            raise Refused("user", f"host {host}, which is to hold a copy: {answer['text']}")

    def _address(self, host: int) -> str:
        membership = self._state.membership
        for member_host in membership.hosts if membership else ():
            if member_host.id == host:
                return member_host.memory
        raise Refused("stale", f"host {host} is not in the job")

    def _saved(self, message: Message) -> Message:
        state, rank, shard, step = self._state, message["rank"], message["shard"], message["step"]
        state.require(message["generation"])
        with state.changed:
            state.folder.look()
            spec = state.specs.get(rank)
            shelf = state.folder.shelf(shard, state.world, spec.nbytes.get(shard, 0)) if spec else None
            if spec is None or shelf is None or message["slot"] not in shelf.slots:
                raise Refused(
                    "copy",
                    f"rank {rank} has no slot {message['slot']} of {shard} here: it has not reserved one, or "
                    f"somebody has wiped this memory",
                )
            slot = shelf.slots[message["slot"]]
        header = slot.header
        if header is None or header.shard.step != step:
            raise Refused("copy", f"{slot.path} does not hold step {step}")
        if not header.complete:
            with slot.data as data:
                slot.complete(slots.checksum_of(data))
            header = slot.header
            assert header is not None
        alone = not message["replicate"] or shard in spec.alone
        holders = () if alone else spec.holders
        with state.changed:
            if state.generation == message["generation"]:
                it = header.shard
                state.ledger.saved(rank, step, shard, state.host.id, holders, it.generation)
                for host in holders:
                    self._send(host, self._delivery(slot, it, spec.slots, rank, shelf))
        self._post_if_done(rank, step)
        return {"committed": state.committed}

    def _delivery(self, slot: Slot, shard: Shard, count: int, rank: int, shelf: Shelf) -> Delivery:
        def keeps() -> list[int]:
            return [step for step in shelf.held() if step not in (EMPTY, shard.step)]

        ledger = self._state.ledger
        done = partial(self._delivered, ledger)
        return Delivery(slot, shard, count, rank, self._state.generation, keeps, done)

    def _send(self, host: int, delivery: Delivery) -> None:
        state = self._state
        if host not in self._senders:
            membership = state.membership
            assert membership is not None
            target = next(member for member in membership.hosts if member.id == host)
            self._senders[host] = Sender(
                target,
                self._pacer,
                state.keys,
                state.limits,
                lambda: (state.committed, state.base),
                state.folder.layout,
            )
        self._senders[host].add(delivery)

    def _delivered(self, ledger: Ledger, delivery: Delivery, host: int, verdict: str) -> None:
        state, it = self._state, delivery.shard
        if verdict not in ("complete", "have"):
            text = f"{it.name} of step {it.step} did not reach host {host}: {verdict}"
            state.context.event("note", text=text)
            return
        with state.changed:
            if ledger is not state.ledger:  # of a generation, or a course, that is over
                return
            sent = self._traffic.setdefault(it.step, [0, 0])
            sent[0] += delivery.sent
            sent[1] += delivery.inside
            while len(self._traffic) > TRAFFIC_KEPT:
                del self._traffic[min(self._traffic)]
            ledger.arrived(delivery.rank, it.step, it.name, host)
            if it.step == max(state.committed, state.base) and it.name in state.holders:
                state.holders[it.name] |= {host}
            state.changed.notify_all()
        self._post_if_done(delivery.rank, it.step)

    def _post_if_done(self, rank: int, step: int) -> None:
        state = self._state
        with state.changed:
            spec = state.specs.get(rank)
            holders = state.ledger.done(rank, step, spec.nbytes) if spec else None
            term = state.term
            about = state.ledger.about(rank, step) if holders is not None else {}
        if holders is not None:
            state.context.post(f"checkpoint/{step}/{term}", rank, {"holders": holders, **about})

    def _wait(self, message: Message) -> Message:
        state, step = self._state, message["step"]
        end = time.monotonic() + message["seconds"]
        with state.changed:
            while state.committed < step and state.generation == message["generation"] and not state.closed:
                left = end - time.monotonic()
                if left <= 0:
                    break
                state.changed.wait(left)
            return {"committed": state.committed >= step}

    def _restored(self, message: Message) -> Message:
        """All ranks go on from a step, and save it again as it is, so that it gets its copies again."""
        self._state.require(message["generation"])
        with self._state.changed:
            if self._state.go_back(message["step"], message["course"]):
                self._cancel()
        return {}

    def _window(self, message: Message) -> None:
        with contextlib.suppress(KeyError, TypeError):
            if message["generation"] == self._state.generation:
                self._pacer.window(message["rank"], message["until"])

    def _locate(self, message: Message) -> Message:
        """Where a place's copies are read: its address, and for this host's own the slot's file."""
        state, wanted = self._state, message["place"]
        with state.changed:
            if wanted is None or wanted == state.place:
                match = state.folder.find(message["shard"], message["step"], message.get("world"))
                if match is None:
                    raise CopyError(f"{message['shard']} of step {message['step']} is not here")
                return {"path": str(match[0].path)}
            hosts = state.membership.hosts if state.membership else ()
            if not isinstance(wanted, int) or not 0 <= wanted < len(hosts):
                raise CopyError(f"there is no place {wanted!r}")
            return {"address": hosts[wanted].memory}

    def _give_traffic(self) -> Message:
        with self._state.changed:
            return {"steps": [[step, *sent] for step, sent in sorted(self._traffic.items())]}
