"""A random course of saves, copies, commits and lost hosts: what is committed can be read again.

Four ranks in pairs with real slots; the steps of a save and of a copy happen one by one, in any order that
the rules allow, and word of a commit comes to each host when it comes. At any moment the loss of any
single host leaves, for every shard, a verified copy of the newest committed step or of a later one.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from training.checkpoint.memory.memory_cluster import content
from windtunnel.training.checkpoint.live.memory.folder import Folder, Shelf
from windtunnel.training.checkpoint.live.slot import CopyError, SlotFile, checksum_of, load
from windtunnel.training.checkpoint.model import Shard
from windtunnel.training.checkpoint.policy.slots import EMPTY, may_overwrite, slot_for

WORLD, N = 4, 64
BEGIN, WRITE, COMPLETE, PUT, RECEIVE, ACCEPT = range(6)


@dataclass
class Rank:
    """Where one rank is: the step that it saves and what comes next; its slot, and the slot of the copy."""

    step: int = 0
    phase: int = BEGIN
    own: SlotFile | None = None
    copy: SlotFile | None = None
    copied: tuple[Shelf, int] | None = None


@dataclass
class Host:
    folder: Folder
    committed: int = -1
    base: int = -1
    notices: list[int] = field(default_factory=list)


class Course(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="windtunnel-course-"))
        self.started = 0
        self.generation = 1
        self.hosts = [self.start() for _ in range(WORLD)]
        self.ranks = [Rank() for _ in range(WORLD)]
        self.committed = -1
        self.safe = False  # whether a step was committed in this generation

    def teardown(self) -> None:
        for host in self.hosts:
            host.folder.close()
        shutil.rmtree(self.root)

    def start(self) -> Host:
        self.started += 1
        return Host(Folder(self.root / f"m{self.started}", threading.Condition()))

    def shelf(self, host: int, rank: int) -> Shelf:
        folder = self.hosts[host].folder
        return folder.ensure(f"rank{rank}", WORLD, N, self.generation, -1)

    @rule(rank=st.integers(0, WORLD - 1), times=st.integers(1, 6))
    def advance(self, rank: int, times: int) -> None:
        for _ in range(times):
            if not self.take_step(rank):
                return

    def take_step(self, number: int) -> bool:
        """The next thing that a rank, or a service for it, does; False if it must wait."""
        rank, host = self.ranks[number], self.hosts[number]
        data = content(f"rank{number}", rank.step, N)
        shard = Shard(f"rank{number}", rank.step, WORLD, False, self.generation, "x", N)
        if rank.phase == BEGIN:
            # Training is synchronous: nobody computes a step before all have saved the one before.
            behind = any((r.step, r.phase) <= (rank.step - 1, COMPLETE) for r in self.ranks)
            shelf = self.shelf(number, number)
            held = shelf.slot_steps()
            if behind or not may_overwrite(rank.step, held, max(host.committed, host.base)):
                return False
            rank.own = shelf.slots[slot_for(rank.step, held)]
            rank.own.begin(shard)
        elif rank.phase == WRITE:
            assert rank.own is not None
            rank.own.data[: N // 2] = data[: N // 2]
        elif rank.phase == COMPLETE:
            assert rank.own is not None
            rank.own.data[:] = data
            rank.own.complete(checksum_of(memoryview(data)))
        elif rank.phase == PUT:
            holder = self.hosts[number ^ 1]
            shelf = self.shelf(number ^ 1, number)
            keeps = [s for s in self.shelf(number, number).slot_steps() if s not in (EMPTY, rank.step)]
            committed = max(host.committed, holder.committed)
            index = shelf.target(rank.step, committed, max(host.base, holder.base), keeps)
            if index is None:
                return False
            shelf.writing[index] = rank.step
            rank.copied, rank.copy = (shelf, index), shelf.slots[index]
            rank.copy.begin(shard)
        elif rank.phase == RECEIVE:
            assert rank.copy is not None
            rank.copy.data[: N // 2] = data[: N // 2]
        else:
            assert rank.copy is not None and rank.copied is not None
            rank.copy.data[:] = data
            rank.copy.complete(checksum_of(memoryview(data)))
            del rank.copied[0].writing[rank.copied[1]]
            rank.copied = None
            rank.step, rank.phase = rank.step + 1, BEGIN
            done = min(r.step for r in self.ranks) - 1
            if done > self.committed:
                self.committed, self.safe = done, True
                for other in self.hosts:
                    other.notices.append(done)
            return True
        rank.phase += 1
        return True

    @rule(number=st.integers(0, WORLD - 1))
    def deliver_commit(self, number: int) -> None:
        host = self.hosts[number]
        if host.notices:
            host.committed = host.notices.pop(0)

    @precondition(lambda self: self.safe)
    @rule(lost=st.integers(0, WORLD - 1))
    def lose(self, lost: int) -> None:
        self.regroup({lost})

    @precondition(lambda self: self.committed >= 0)
    @rule()
    def end_all(self) -> None:
        """All processes end, no host."""
        self.regroup(set())

    def regroup(self, lost: set[int]) -> None:
        restored = self.newest(lost)
        assert restored >= self.committed
        for number in lost:
            self.hosts[number].folder.close()
            self.hosts[number] = self.start()
        self.generation += 1
        self.committed, self.safe = restored, False
        for host in self.hosts:
            host.committed = host.base = restored
            host.notices = []
            for shelf in host.folder.shelves:
                shelf.writing.clear()
        self.ranks = [Rank(restored + 1) for _ in range(WORLD)]

    def newest(self, lost: set[int]) -> int:
        """The newest step of which the hosts that are left hold every shard; all that is complete is
        verified."""
        held: list[set[int]] = [set() for _ in range(WORLD)]
        for number, host in enumerate(self.hosts):
            for shelf in host.folder.shelves if number not in lost else ():
                for slot in shelf.slots.values():
                    header = slot.header
                    if header is not None and header.complete:
                        into = memoryview(bytearray(N))
                        load(slot.path, into)
                        assert bytes(into) == content(shelf.shard, header.shard.step, N)
                        held[int(shelf.shard[4:])].add(header.shard.step)
        return max(set.intersection(*held), default=-1)

    @invariant()
    def nothing_committed_is_lost(self) -> None:
        assert self.newest(set()) >= self.committed
        if self.safe:
            for number in range(WORLD):
                assert self.newest({number}) >= self.committed


TestTwoSlots = pytest.mark.slow(Course.TestCase)
TestTwoSlots.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


def test_a_weaker_rule_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder that gives up a step that its owner still has loses it, in a course that the rule forbids."""

    def drive() -> None:
        course = Course()
        try:
            for rank in [*range(WORLD), 0]:
                while course.take_step(rank) and course.ranks[rank].phase != BEGIN:
                    pass
            # Rank 0 has replicated step 1, rank 1 has not begun it: only step 0 is committed.
            held = course.shelf(1, 0)
            index = held.target(2, 0, -1, [0, 1])
            if index is not None:
                header = held.slots[index].header
                assert header is not None and header.complete
                held.slots[index]._put(replace(header, complete=False))
            course.nothing_committed_is_lost()
        finally:
            course.teardown()

    drive()
    monkeypatch.setattr(Shelf, "target", lambda self, step, *_: slot_for(step, self.slot_steps()))
    with pytest.raises((AssertionError, CopyError)):
        drive()
