"""Sums through a switch with few slots, in a network that loses, doubles and reorders: each worker once.

The world here is plain Python: packets are in a bag, and whatever is drawn from it arrives next.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.network.aggregation.policy import (
    ATP,
    ESA,
    POLICIES,
    RULES,
    SWITCHML,
    FragmentOffer,
    OverdueFragment,
    PartialSum,
    ResendDecision,
    SlotDecision,
    SumDecision,
    SwitchRules,
    decide,
    fixed,
    priority,
    where,
)

WINDOW, FRAGMENTS, FULL = 3, 8, 0b111
SERVER, SWITCH = -1, -2


@dataclass
class Slot:
    job: int
    sequence: int
    bits: int
    level: int
    sum: Counter[int]


@dataclass
class Entry:
    sequence: int
    have: int = 0
    sum: Counter[int] = field(default_factory=Counter)


class Chaos:
    """Two jobs of three workers, a switch, and their servers."""

    def __init__(self, rules: SwitchRules, slots: int, seed: int, *, direct: bool) -> None:
        self.rules, self.direct, self.random = rules, direct, random.Random(seed)
        self.slots: list[Slot | None] = [None] * slots
        self.newest = [-1, -1]
        self.rings: list[list[Entry]] = [[Entry(-1) for _ in range(2 * WINDOW)] for _ in range(2)]
        self.done: dict[tuple[int, int], set[int]] = {(j, w): set() for j in range(2) for w in range(3)}
        self.next = dict.fromkeys(self.done, 0)
        self.bag: list[tuple[Any, ...]] = []

    def floor(self, who: tuple[int, int]) -> int:
        return next(n for n in itertools.count() if n not in self.done[who])

    def offer(self) -> None:
        """Workers send what their windows allow."""
        for who in self.done:
            if self.next[who] < min(self.floor(who) + WINDOW, FRAGMENTS):
                self.gradient(who, self.next[who], resent=False)
                self.next[who] += 1

    def gradient(self, who: tuple[int, int], sequence: int, *, resent: bool) -> None:
        kind = "resent" if resent else "gradient"
        level = 0 if resent else self.random.randrange(4)
        self.bag.append((SWITCH, kind, who[0], sequence, 1 << who[1], Counter([who[1]]), level))

    def repeat(self) -> None:
        for who in self.done:
            for sequence in set(range(self.floor(who), self.next[who])) - self.done[who]:
                self.gradient(who, sequence, resent=True)

    def step(self, loss: float, double: float) -> None:
        packet = self.bag.pop(self.random.randrange(len(self.bag)))
        if self.random.random() < loss:
            return
        if self.random.random() < double:
            self.bag.append(packet)
        if packet[0] == SWITCH:
            self.at_switch(*packet[1:])
        elif packet[0] == SERVER:
            self.at_server(*packet[1:])
        else:
            _, job, sequence, worker, sum_ = packet
            self.whole(sum_)
            self.done[job, worker].add(sequence)

    @staticmethod
    def whole(sum_: Counter[int]) -> None:
        assert sum_ == Counter(range(3)), "a worker is in it twice, or not at all"

    def tell(self, job: int, sequence: int, sum_: Counter[int], to: int = FULL) -> None:
        self.whole(sum_)
        self.bag += [(0, job, sequence, worker, sum_) for worker in range(3) if to >> worker & 1]

    def flush(self, at: int) -> None:
        slot = self.slots[at]
        assert slot is not None
        self.bag.append((SERVER, "flushed", slot.job, slot.sequence, slot.bits, slot.sum))
        if slot.bits != FULL:
            self.slots[at] = None

    def at_switch(
        self, kind: str, job: int, sequence: int, bits: int, sum_: Counter[int], level: int
    ) -> None:
        at = where(self.rules.code, job, sequence, len(self.slots), len(self.slots) // 2)
        slot = self.slots[at]
        mine = slot is not None and (slot.job, slot.sequence) == (job, sequence)
        if kind in ("result", "reminder", "known"):
            if mine and kind == "reminder":
                self.flush(at)
            elif mine:
                self.slots[at] = None
            if kind == "result":
                self.tell(job, sequence, sum_, bits)
            return
        self.newest[job] = max(self.newest[job], sequence)
        offer = FragmentOffer(
            self.rules, bits, FULL, level, kind == "resent", sequence <= self.newest[job] - WINDOW,
            slot is not None, mine,
            (self.newest[slot.job] - slot.sequence) // WINDOW if slot is not None else 0,
            slot is not None and slot.bits == FULL, slot.bits if slot else 0, slot.level if slot else 0,
        )  # fmt: skip
        decision = decide(offer)
        assert isinstance(decision, SlotDecision)
        if decision.action == "raw":
            if slot is not None:
                assert decision.level <= slot.level
                slot.level = decision.level
            self.bag.append((SERVER, kind, job, sequence, bits, sum_))
        elif decision.action == "flush":
            self.flush(at)
            self.bag.append((SERVER, kind, job, sequence, bits, sum_))
        elif decision.action != "drop":
            if decision.action == "swap":
                self.flush(at)
            before = slot.sum if mine and slot is not None else Counter()
            self.slots[at] = Slot(job, sequence, decision.there, decision.level, before + sum_)
            if decision.action == "complete":
                self.bag.append((SERVER, "gradient", job, sequence, decision.there, before + sum_))
                if self.direct:
                    self.tell(job, sequence, before + sum_)
                elif not self.rules.hold:
                    self.slots[at] = None

    def at_server(self, kind: str, job: int, sequence: int, bits: int, sum_: Counter[int], *_: int) -> None:
        entry = self.rings[job][sequence % (2 * WINDOW)]
        if sequence < entry.sequence:
            return
        if sequence > entry.sequence:
            entry.sequence, entry.have, entry.sum = sequence, 0, Counter()
        decision = decide(PartialSum(bits, entry.have, FULL))
        assert isinstance(decision, SumDecision)
        if decision.action in ("add", "complete", "take"):
            before = Counter() if decision.action == "take" else entry.sum
            entry.have, entry.sum = decision.have, before + sum_
        if self.direct and bits == FULL:
            self.bag.append((SWITCH, "known", job, sequence, 0, Counter(), 0))
        elif decision.action in ("complete", "take"):
            self.whole(entry.sum)
            self.bag.append((SWITCH, "result", job, sequence, FULL, entry.sum, 0))
        elif decision.action == "answer" and kind == "resent":
            self.bag.append((SWITCH, "result", job, sequence, bits, entry.sum, 0))

    def remind(self) -> None:
        for job, ring in enumerate(self.rings):
            for entry in ring:
                if 0 < entry.have < FULL:
                    self.bag.append((SWITCH, "reminder", job, entry.sequence, 0, Counter(), 0))


CHOICES = [
    SWITCHML,
    ATP,
    replace(ATP, hold=True),
    ESA,
    replace(ESA, priority=False),
    replace(ESA, ageing=False),
]


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(CHOICES), st.integers(2, 6), st.integers(0, 2**32), st.floats(0, 0.3), st.floats(0, 0.3),
    st.booleans(),
)  # fmt: skip
def test_every_worker_is_in_every_sum_once(
    rules: SwitchRules, slots: int, seed: int, loss: float, double: float, direct: bool
) -> None:
    if rules.static:
        slots = max(slots, 4 * WINDOW)  # a job's window is no larger than its pool, or half of it
    world = Chaos(rules, slots, seed, direct=direct)
    for turn in range(4000):
        world.offer()
        if all(len(done) == FRAGMENTS for done in world.done.values()):
            break
        if len(world.bag) < 20 and (turn % 40 == 39 or not world.bag):
            world.repeat()
            if rules.remind:
                world.remind()
        if world.bag:
            world.step(loss, double)
    else:
        raise AssertionError("they wait for each other")
    while world.bag:
        world.step(loss, 0.0)
    for slot in world.slots:  # what is still held is of a sum that everybody has: of doubles
        assert slot is None or all(slot.sequence in world.done[slot.job, worker] for worker in range(3))
    if not double and not direct and not rules.hold:
        assert world.slots == [None] * slots


def test_a_slot_is_taken_from_whom_it_is_less_urgent_to_and_nobody_holds_it_for_ever() -> None:
    refused = FragmentOffer(ESA, 1, FULL, priority=7, occupied=True, there=2, level=200)
    tries = 0
    while (decision := decide(refused)).action == "raw":  # type: ignore[union-attr]
        refused = replace(refused, level=decision.level)  # type: ignore[union-attr]
        tries += 1
    assert decision == SlotDecision("swap", 1, 7) and tries == 5
    assert POLICIES["atp"](refused) == SlotDecision("raw", 2, refused.level)
    whole = replace(refused, there=FULL, whole=True)
    assert decide(whole).action == "raw"  # type: ignore[union-attr]
    assert decide(replace(refused, behind=1)) == SlotDecision("take", 1, 7)
    assert decide(replace(whole, behind=1)).action == "raw"  # type: ignore[union-attr]
    assert decide(replace(whole, behind=2)).action == "take"  # type: ignore[union-attr]
    assert decide(replace(refused, late=True)).action == "drop"  # type: ignore[union-attr]


@given(st.sampled_from(sorted(RULES)), st.integers(0, 15), st.integers(0, 1 << 40), st.integers(16, 5000))
def test_fragments_of_a_window_do_not_meet_each_other(name: str, job: int, first: int, slots: int) -> None:
    share = slots // 16
    window = min(128, share if RULES[name].static else slots)
    places = {where(RULES[name].code, job, first + offset, slots, share) for offset in range(window)}
    assert len(places) == window and all(0 <= place < slots for place in places)
    if RULES[name].static:
        assert {place // share for place in places} == {job}


def test_one_asks_at_once_when_later_ones_came_and_then_ever_less_often() -> None:
    waits = [
        next(n for n in range(10_000) if decide(OverdueFragment(n, 100, asked, 0, 3)) == ResendDecision(True))
        for asked in range(5)
    ]
    assert waits == [100, 200, 400, 400, 400]
    assert decide(OverdueFragment(0, 100, 0, 3, 3)) == ResendDecision(True) and decide(
        OverdueFragment(0, 100, 1, 3, 3)
    ) == ResendDecision(False)


def test_the_reconstructed_priority_orders_as_the_abstract_says() -> None:
    assert priority(0, 8, 1.0, 1.0) > priority(7, 8, 1.0, 1.0)
    assert priority(0, 8, 4.0, 1.0) > priority(0, 8, 1.0, 1.0)
    assert priority(0, 8, 1.0, 1.0) > priority(0, 8, 1.0, 4.0)
    assert (priority(0, 1, 1e9, 1e-9), priority(0, 1, 0.0, 1e9)) == (255, 0)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(1, 900), st.integers(0, 2**32), st.integers(-120, 100))
def test_fixed_point_sums_are_the_sums_of_the_rounded_values(
    workers: int, size: int, seed: int, e: int
) -> None:
    rng = np.random.default_rng(seed)
    values = np.ldexp(rng.uniform(-1, 1, (workers, size)), e).astype(np.float32)
    values[rng.random((workers, size)) < 0.1] = 0.0
    blocks, room = -(-size // fixed.VALUES), fixed.headroom(workers)
    codes = np.empty((workers, blocks), np.int32)
    for row, own in zip(values, codes, strict=True):
        fixed.exponents(row, own)
    agreed, floats = codes.max(axis=0), np.empty(size, np.float32)
    for block, code in enumerate(agreed.tolist()):
        part = slice(block * fixed.VALUES, (block + 1) * fixed.VALUES)
        factor = np.ldexp(1.0, 30 - room - code)
        sums, own = np.zeros(fixed.VALUES, np.int32), np.empty(fixed.VALUES, np.int32)
        for row in values:
            fixed.to_fixed(row[part], factor, own)
            assert not fixed.add(sums, own), "log2 of the workers is room enough"
        fixed.from_fixed(sums, factor, floats[part])
        assert np.all(np.abs(values[:, part]) < np.ldexp(1.0, code))
    exact = values.astype(np.float64).sum(axis=0)
    step = np.ldexp(1.0, np.repeat(agreed, fixed.VALUES)[:size] + room - 30)
    assert np.all(np.abs(floats - exact) <= workers * step / 2 + np.abs(exact) * 2.0**-23)


def test_what_does_not_fit_is_marked_and_held_at_the_ends() -> None:
    own = np.full(fixed.VALUES, 2**31 - 1, np.int32)
    assert not fixed.add(own, np.zeros(fixed.VALUES, np.int32))
    other = np.zeros(fixed.VALUES, np.int32)
    other[7] = 1
    assert fixed.add(own, other) and own[7] == 2**31 - 1
    own[:] = -(2**31)
    assert fixed.add(own, -other) and own[7] == -(2**31)
    for bad in (np.inf, -np.inf, np.nan):
        values, code = np.ones(fixed.VALUES + 1, np.float32), np.empty(2, np.int32)
        values[3] = bad
        fixed.exponents(values, code)
        assert code.tolist() == [fixed.UNFIT, 1]


@pytest.mark.parametrize("name", sorted(RULES))
def test_a_policy_by_name_goes_by_its_own_rules(name: str) -> None:
    offer = FragmentOffer(SwitchRules(), 1, FULL, priority=9, occupied=True, there=2, level=1)
    assert POLICIES[name](offer) == decide(replace(offer, rules=RULES[name]))
    assert POLICIES[name](PartialSum(1, 6, FULL)) == SumDecision("complete", FULL)
