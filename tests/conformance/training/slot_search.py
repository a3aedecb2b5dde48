"""A search through all states of ranks that save, replicate and die, for one that cannot be recovered from.

What is checked is the rule that the live code runs (`slots.may_overwrite`, `slots.slot_for`), handed in as a
function. Each rank saves step after step into its slots; a service sends each complete step on to the slots
of the other holders, in the background; a step of which all copies of all shards are complete is committed,
and each rank hears of it at a time of its own. Training is synchronous: a rank comes to save step s only
when every rank has saved s-1 at home. In every state, any host may die, with all that lies in its memory,
so long as no copy set lies wholly within it and hosts that were replaced and have not got all their
copies again. Then there must be a step with a complete copy of every shard, all of one course of the job,
and not older than the newest committed one.

The job goes on after a death (``failures`` times): a replacement with empty memory, everybody back to the
newest complete step R, half-written slots lost. Copies of R that are missing are made again first, and nobody
saves before R is committed once more. Until then no second loss inside the sets of the replaced host is
survived, and any other is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from windtunnel.training.checkpoint.model import Placement
from windtunnel.training.checkpoint.policy import placement as placements
from windtunnel.training.checkpoint.policy import slots as slot_rules

Rule = Callable[[int, Sequence[int], int], bool]
Choose = Callable[[int, Sequence[int]], int]
Slot = tuple[int, int] | None
"""What lies in a slot: a step and the course of the job (counted by its failures) that it is of."""


@dataclass(frozen=True)
class Counterexample:
    """The way to a state in which the loss of place ``dead`` cannot be recovered from; -1: in which no rank
    may ever save again."""

    trace: tuple[str, ...]
    dead: int
    why: str
    states: int


@dataclass(frozen=True)
class _Rank:
    own: tuple[Slot, ...]
    replicas: tuple[tuple[Slot, ...], ...]  # of this rank's shard, with each other holder
    writing: int = -1  # the slot that is being written
    written: int = 0  # the next step to save
    sending: bool = False
    sent: int = 0  # the next step to replicate
    known: int = -1  # the newest committed step it has heard of


@dataclass(frozen=True)
class State:
    ranks: tuple[_Rank, ...]
    committed: int = -1
    base: int = -1  # the step of the last restore
    course: int = 0
    agreed: int = -1  # the newest step committed since, which ranks hear of
    impaired: int = -1  # the place that was replaced and has not got all its copies


def search(
    slots: int,
    ranks: int,
    rule: Rule = slot_rules.may_overwrite,
    steps: int = 4,
    *,
    choose: Choose = slot_rules.slot_for,
    copies: int = 2,
    failures: int = 0,
    wait: bool = True,
    start: State | None = None,
) -> Counterexample | None:
    """The shortest way to an unrecoverable (or stuck) state, None if there is none.

    ``steps``: saves after the start and after each restore. ``failures``: after how many losses the job goes
    on; one more is then checked in every state. ``wait``: for R to be committed. ``start``: the state to
    begin with, as `lead` gives it.
    """
    placement = placements.place(ranks, copies, "mixed")
    world = _World(slots, placement, rule, choose, steps, failures, wait)
    start = start or world.empty
    came: dict[State, tuple[State, str] | None] = {start: None}
    queue = deque([start])
    while queue:
        state = queue.popleft()
        for dead in world.may_die(state):
            newest = world.recovered(state, dead)
            if newest is None or newest < state.committed:
                back = "nothing" if newest is None else f"step {newest}"
                why = f"step {state.committed} was committed; without host {dead}, {back} can be restored"
                return Counterexample(_trace(came, state), dead, why, len(came))
        moves = list(world.moves(state))
        if not moves and any(rank.written <= state.base + steps for rank in state.ranks):
            return Counterexample(_trace(came, state), -1, "no rank may save, and none ever will", len(came))
        for event, after in (*moves, *world.deaths(state)):
            if after not in came:
                came[after] = (state, event)
                queue.append(after)
    return None


def lead(slots: int, ranks: int, events: Sequence[str], *, wait: bool = True) -> State:
    """The state after the happenings ``events``, in the words of a trace.

    Raises:
        ValueError: one of them cannot happen.
    """
    placement = placements.place(ranks, 2, "mixed")
    count = len(events)
    world = _World(slots, placement, slot_rules.may_overwrite, slot_rules.slot_for, count, count, wait)
    state = world.empty
    for text in events:
        moves = dict((*world.moves(state), *world.deaths(state)))
        if text not in moves:
            raise ValueError(f"{text!r} cannot happen now; what can: {', '.join(moves)}")
        state = moves[text]
    return state


def _trace(came: dict[State, tuple[State, str] | None], state: State) -> tuple[str, ...]:
    events = []
    while (step := came[state]) is not None:
        state, text = step
        events.append(text)
    return tuple(reversed(events))


@dataclass(frozen=True)
class _World:
    slots: int
    placement: Placement
    rule: Rule
    choose: Choose
    steps: int
    failures: int
    wait: bool

    @property
    def empty(self) -> State:
        """Nothing was saved yet."""
        none: tuple[Slot, ...] = (None,) * self.slots
        copies = self.placement.copies - 1
        return State(tuple(_Rank(none, (none,) * copies) for _ in self.placement.holders))

    def moves(self, state: State) -> Iterator[tuple[str, State]]:
        """All that may happen next if no host dies."""
        for r, rank in enumerate(state.ranks):
            yield from self._save(state, r, rank)
            yield from self._replicate(state, r, rank)
            if rank.known < state.agreed:
                event = f"rank {r} hears that step {state.agreed} is committed"
                yield event, _with(state, r, replace(rank, known=state.agreed))

    def deaths(self, state: State) -> Iterator[tuple[str, State]]:
        """The losses after which the job goes on."""
        if state.course < self.failures:
            for dead in self.may_die(state):
                yield f"host {dead} dies and is replaced", self._regrouped(state, dead)

    def _save(self, state: State, r: int, rank: _Rank) -> Iterator[tuple[str, State]]:
        step = rank.written
        if rank.writing >= 0:
            own = _put(rank.own, rank.writing, (step, state.course))
            after = replace(rank, own=own, writing=-1, written=step + 1)
            yield f"rank {r} has saved step {step}", _with(state, r, after)
            return
        if step > state.base + self.steps or any(other.written < step for other in state.ranks):
            return
        if self.wait and rank.known < state.base:
            return
        held = _steps(rank.own)
        if self.rule(step, held, rank.known):
            slot = self.choose(step, held)
            after = replace(rank, own=_put(rank.own, slot, None), writing=slot)
            yield f"rank {r} begins to save step {step}", _with(state, r, after)

    def _replicate(self, state: State, r: int, rank: _Rank) -> Iterator[tuple[str, State]]:
        step = rank.sent
        if step >= rank.written:
            return
        content = next((kept for kept in rank.own if kept is not None and kept[0] == step), None)
        if not rank.sending:
            if content is not None and all(content in slots for slots in rank.replicas):
                after = replace(rank, sent=step + 1)
                yield f"the copies of step {step} of rank {r} are there", self._commit(state, r, after, step)
                return
            replicas = tuple(
                slots if content in slots else _put(slots, self.choose(step, _steps(slots)), None)
                for slots in rank.replicas
            )
            after = replace(rank, replicas=replicas, sending=True)
            yield f"step {step} of rank {r} is on its way", _with(state, r, after)
            return
        # What was overwritten at home meanwhile arrives torn, and its checksum tells.
        replicas = tuple(
            slots if content in slots else _put(slots, self.choose(step, _steps(slots)), content)
            for slots in rank.replicas
        )
        after = replace(rank, replicas=replicas, sending=False, sent=step + 1)
        yield f"step {step} of rank {r} is replicated", self._commit(state, r, after, step)

    def _commit(self, state: State, r: int, rank: _Rank, step: int) -> State:
        """``step`` is committed if with this all its copies are complete."""
        state = _with(state, r, rank)
        # What is left of an abandoned course of the job is no copy of this step.
        everywhere = set.intersection(
            *(set(slots) for peer in state.ranks for slots in (peer.own, *peer.replicas))
        )
        if any(kept is not None and kept[0] == step for kept in everywhere):
            committed, agreed = max(state.committed, step), max(state.agreed, step)
            return replace(state, committed=committed, agreed=agreed, impaired=-1)
        return state

    def may_die(self, state: State) -> Iterator[int]:
        if state.committed < 0 and state.base < 0:
            return
        for place in range(len(state.ranks)):
            lost = {place} | ({state.impaired} if state.impaired >= 0 else set())
            if placements.survives(self.placement, lost):
                yield place

    def _alive(self, state: State, dead: Collection[int]) -> list[set[tuple[int, int]]]:
        """The complete copies of each shard on hosts that are left."""
        return [
            {
                kept
                for holder, slots in zip(self.placement.holders[r], (rank.own, *rank.replicas), strict=True)
                if holder not in dead
                for kept in slots
                if kept is not None
            }
            for r, rank in enumerate(state.ranks)
        ]

    def recovered(self, state: State, dead: int) -> int | None:
        whole = set.intersection(*self._alive(state, {dead}))
        return max(whole)[0] if whole else None

    def _regrouped(self, state: State, dead: int) -> State:
        """The job after the loss of ``dead``: all back to the newest complete step, half-written slots
        lost."""
        restored = max(set.intersection(*self._alive(state, {dead})))
        base = restored[0]
        wiped = (None,) * self.slots
        ranks = []
        for r, rank in enumerate(state.ranks):
            own = rank.own
            if r == dead:
                own = _put(wiped, 0, restored)
            elif restored not in own:
                # Its own copy was overwritten or torn: it is fetched, like the replacement's.
                own = _put(own, self.choose(base, _steps(own)), restored)
            replicas = tuple(
                wiped if holder == dead else slots
                for holder, slots in zip(self.placement.holders[r][1:], rank.replicas, strict=True)
            )
            known = -1 if self.wait or r == dead else min(rank.known, base)
            ranks.append(_Rank(own, replicas, written=base + 1, sent=base, known=known))
        agreed = -1 if self.wait else state.committed
        return State(tuple(ranks), state.committed, base, state.course + 1, agreed, dead)


def _with(state: State, r: int, rank: _Rank) -> State:
    return replace(state, ranks=(*state.ranks[:r], rank, *state.ranks[r + 1 :]))


def _put(slots: tuple[Slot, ...], at: int, content: Slot) -> tuple[Slot, ...]:
    return (*slots[:at], content, *slots[at + 1 :])


def _steps(slots: tuple[Slot, ...]) -> tuple[int, ...]:
    return tuple(slot_rules.EMPTY if kept is None else kept[0] for kept in slots)
