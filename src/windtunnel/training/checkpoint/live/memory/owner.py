"""What the ranks of a host ask of its memory service: slots, and that what they saved be replicated.

A rank reserves slots for its shards, writes to them by itself (it maps the files), and says `saved`. The
service sends the slot to the hosts that hold copies of this host's shards, and when all shards that the rank
reserved are where they are to be, it posts the step for the rank; all ranks' posts together commit it.
"""

from __future__ import annotations

from functools import partial

from windtunnel.base import handshake, wire
from windtunnel.base.errors import UserError
from windtunnel.store import eventlog
from windtunnel.training.checkpoint.live import slot as slots
from windtunnel.training.checkpoint.live.memory import messages
from windtunnel.training.checkpoint.live.memory.folder import Shelf
from windtunnel.training.checkpoint.live.memory.messages import (
    Caller,
    Reservation,
    Reserved,
    StaleGeneration,
    Welcome,
)
from windtunnel.training.checkpoint.live.memory.replicate import Delivery, Pacer, Sender
from windtunnel.training.checkpoint.live.memory.state import Board, Ledger, RankReservation, State
from windtunnel.training.checkpoint.live.memory.storing import Persister
from windtunnel.training.checkpoint.live.slot import CopyError, SlotFile
from windtunnel.training.checkpoint.model import SHARED, Copy, Placement, Shard
from windtunnel.training.checkpoint.policy import CopiesWanted, Decision, Observation, decide
from windtunnel.training.checkpoint.policy.slots import EMPTY, SLOTS, explain, needed
from windtunnel.training.elastic.model import MemberHost

ALLOCATION = 1e8
"""Bytes/s at which memory is taken and touched at the very least."""
TRAFFIC_KEPT = 64


class Owner:
    """What ranks call (`messages.Ranks`), and the senders."""

    def __init__(self, state: State, persister: Persister) -> None:
        self._state, self._persister, self._pacer = state, persister, Pacer(tell=self._tell)
        self._senders: dict[int, Sender] = {}
        self._traffic: dict[int, list[int]] = {}

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

    def hello(self, caller: Caller) -> Welcome:
        state = self._state
        state.require(caller.generation)
        board = state.folder.path / "committed"
        with state.changed:
            if not board.exists():  # somebody wiped this memory
                state.board = Board(board, create=True)
                state.board.write(state.committed)
        return Welcome(str(board), state.keys.secret.hex(), tuple(state.keys.files))

    def reserve(self, caller: Caller, reservation: Reservation, layout: bytes) -> Reserved:
        state, rank, generation = self._state, caller.rank, caller.generation
        state.require(generation)
        shard, nbytes = reservation.shard, reservation.nbytes
        with state.changed:
            question = self._placement_question(reservation)
            placement = decide(question)
            assert isinstance(placement, Placement) and state.membership is not None
            hosts, place = state.membership.hosts, rank // state.membership.per_host
            holders = tuple(hosts[at].id for at in placement.holders[place][1:])
            spec = state.specs.get(rank) or RankReservation({}, ())
            spec = RankReservation({**spec.nbytes, shard: nbytes}, holders or spec.holders)
            if holders:
                self._pacer.configure(reservation.pace)
        if rank == 0:
            self._tell(question, placement)
        needs = self._require(rank, spec)
        state.folder.keep_layout(reservation.digest, layout, generation)
        shelf = state.folder.ensure(shard, state.world, nbytes, generation, state.base)
        paths = [str(slot.path) for _, slot in sorted(shelf.slots.items())]
        for host in holders:
            self._prepare(host, shelf, generation)
        state.require(generation)
        with state.changed:
            state.specs[rank] = spec
        return Reserved(paths, needs)

    def _placement_question(self, reservation: Reservation) -> CopiesWanted:
        membership = self._state.membership
        assert membership is not None
        own = tuple(host.domain for host in membership.hosts)
        return CopiesWanted(len(own), reservation.copies, reservation.kind, reservation.domains, own)

    def _tell(self, observation: Observation, decision: Decision) -> None:
        """All hosts decide alike; the first one says it in the run's events."""
        if self._state.place == 0:
            record = eventlog.decided("training.checkpoint", "newest", observation, decision)
            self._state.context.event("decision", **record)

    def _require(self, rank: int, spec: RankReservation) -> str:
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
        bytes_for_others = sum(
            n * len(spec.holders) for spec in specs for shard, n in spec.nbytes.items() if shard != SHARED
        )
        headers = SLOTS * slots.HEADER * sum(len(spec.nbytes) * (1 + len(spec.holders)) for spec in specs)
        more = needed(own, bytes_for_others, headers) - here
        needs = explain(own, bytes_for_others, headers)
        stands = all(state.folder.stands(shard, world, n) for shard, n in spec.nbytes.items())
        if more > 0 and not stands:  # who comes back to slots that are there needs nothing more
            state.folder.require(
                more, lambda: f"checkpoints in memory need {needs} on this host", world, state.base
            )
        return needs

    def _prepare(self, host: int, shelf: Shelf, generation: int) -> None:
        """Have a holder take the memory for its copy now. One that does not answer is the membership's
        matter."""
        state = self._state
        fields = {
            "op": "prepare",
            "generation": generation,
            "shard": shelf.shard,
            "world": shelf.world,
            "capacity": shelf.capacity,
        }
        limits = state.limits
        try:
            address = self._address(host)
            with handshake.connect(address, limits.connect, state.keys, messages.service(address)) as sock:
                sock.settimeout(limits.silence + limits.membership + SLOTS * shelf.capacity / ALLOCATION)
                answer = messages.ask(sock, fields)
        except (OSError, wire.WireError) as error:
            state.context.event("note", text=f"host {host} does not prepare for {shelf.shard}: {error}")
            return
        if answer.get("error") == "user":
            raise UserError(f"host {host}, which is to hold a copy: {answer['text']}")

    def _address(self, host: int) -> str:
        membership = self._state.membership
        for member_host in membership.hosts if membership else ():
            if member_host.id == host:
                return member_host.memory
        raise StaleGeneration(f"host {host} is not in the job")

    def saved(self, caller: Caller, shard: str, slot: int, step: int) -> int:
        state, rank, index = self._state, caller.rank, slot
        state.require(caller.generation)
        with state.changed:
            state.folder.look()
            spec = state.specs.get(rank)
            shelf = state.folder.shelf(shard, state.world, spec.nbytes.get(shard, 0)) if spec else None
            if spec is None or shelf is None or index not in shelf.slots:
                raise CopyError(
                    f"rank {rank} has no slot {index} of {shard} here: it has not reserved one, or "
                    f"somebody has wiped this memory"
                )
            memory_slot = shelf.slots[index]
        header = memory_slot.header
        if header is None or header.shard.step != step:
            raise CopyError(f"{memory_slot.path} does not hold step {step}")
        if not header.complete:
            with memory_slot.data as data:
                memory_slot.complete(slots.checksum_of(data))
            header = memory_slot.header
            assert header is not None
        holders = () if shard == SHARED else spec.holders  # every host has that from a rank of its own
        with state.changed:
            if state.generation == caller.generation:
                it = header.shard
                state.ledger.saved(rank, step, shard, holders, it.generation)
                for host in holders:
                    self._send(host, self._delivery(memory_slot, it, rank, shelf))
        self._post_if_done(rank, step)
        return state.committed

    def _delivery(self, slot: SlotFile, shard: Shard, rank: int, shelf: Shelf) -> Delivery:
        def keeps() -> list[int]:
            return [step for step in shelf.slot_steps() if step not in (EMPTY, shard.step)]

        ledger = self._state.ledger
        done = partial(self._delivered, ledger)
        return Delivery(slot, shard, rank, self._state.generation, keeps, done)

    def _send(self, host: int, delivery: Delivery) -> None:
        state = self._state
        if host not in self._senders:
            membership = state.membership
            assert membership is not None
            target = next(member for member in membership.hosts if member.id == host)
            self._senders[host] = Sender(target, self._pacer, state)
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
            state.changed.notify_all()
        self._post_if_done(delivery.rank, it.step)

    def _post_if_done(self, rank: int, step: int) -> None:
        state = self._state
        with state.changed:
            spec = state.specs.get(rank)
            course = state.ledger.done(rank, step, spec.nbytes) if spec else None
            term = state.term
        if course is not None:
            state.context.post(f"checkpoint/{step}/{term}", rank, {"course": course})

    def wait(self, caller: Caller, step: int, seconds: float) -> bool:
        state = self._state
        with state.changed:
            over = lambda: state.committed >= step or state.generation != caller.generation or state.closed  # noqa: E731
            state.changed.wait_for(over, seconds)
            return state.committed >= step

    def restored(self, caller: Caller, step: int, course: int) -> None:
        """All ranks go on from a step, and save it again as it is, so that it gets its copies again."""
        self._state.require(caller.generation)
        with self._state.changed:
            if self._state.go_back(step, course):
                self._cancel()

    def window(self, caller: Caller, until: float) -> None:
        if caller.generation == self._state.generation:
            self._pacer.window(caller.rank, until)

    def persist(self, caller: Caller, step: int, url: str, keep: int) -> None:
        self._state.require(caller.generation)
        self._persister.begin(caller.rank, step, url, keep)

    def copies(self) -> list[Copy]:
        state = self._state
        with state.changed:
            return state.folder.copies(-1 if state.place is None else state.place)

    def locate(self, shard: str, step: int, world: int | None, place: int | None) -> str:
        state = self._state
        with state.changed:
            if place is None or place == state.place:
                match = state.folder.find(shard, step, world)
                if match is None:
                    raise CopyError(f"{shard} of step {step} is not here")
                return str(match[0].path)
            addresses = self.addresses()
            if not 0 <= place < len(addresses):
                raise CopyError(f"there is no place {place!r}")
            return addresses[place]

    def layout(self, digest: str) -> bytes:
        blob = self._state.folder.layout(digest)
        if blob is None:
            raise CopyError(f"layout {digest} is not here")
        return blob

    def addresses(self) -> list[str]:
        membership = self._state.membership
        return [host.memory for host in membership.hosts] if membership else []

    def traffic(self) -> list[tuple[int, int, int]]:
        with self._state.changed:
            return [(step, sent, inside) for step, (sent, inside) in sorted(self._traffic.items())]
