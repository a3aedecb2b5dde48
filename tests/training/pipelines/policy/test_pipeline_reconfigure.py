"""Losses and joins: the published examples, and sequences of random ones that keep what was promised."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import permutations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from pipeline_oracles import even_set, held_by

from windtunnel.base.errors import UserError
from windtunnel.training.pipelines.model import Layout, Reconfiguration, TemplateSet
from windtunnel.training.pipelines.policy.compose import compose, step_seconds
from windtunnel.training.pipelines.policy.reconfigure import reconfigure, transfers
from windtunnel.training.pipelines.policy.templates import largest_size

LAYERS = 12
BYTES = [float(1 + layer % 5) for layer in range(LAYERS)]


def layout_of(*pipelines: Collection[int]) -> Layout:
    return Layout(tuple(map(tuple, pipelines)), (1,) * len(pipelines))


def by_rules(
    set: TemplateSet, layout: Layout, lost: Collection[int], joined: tuple[int, ...] = ()
) -> Reconfiguration:
    return reconfigure(set, layout, lost, joined, microbatches=24, layer_bytes=BYTES, search=False)


def hosts(change: Reconfiguration) -> list[list[int]]:
    return [sorted(pipeline) for pipeline in change.layout.pipelines]


FOUR = layout_of([0, 1], [2, 3, 4], range(5, 9), range(9, 14))

# The first three are published with the artifact's rules; the others follow from the same rules by hand.
EXAMPLES = [
    ([2], "simple", [[0, 1], [3, 4], [5, 6, 7, 8], [9, 10, 11, 12, 13]]),
    ([1], "borrow", [[0, 13], [2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]),
    (range(1, 12), "merge", [[0, 12, 13]]),
    ([0, 1], "simple", [[2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12, 13]]),
    ([1, 2, 3], "borrow", [[0, 13], [4, 12], [5, 6, 7, 8], [9, 10, 11]]),
    ([1, 9, 10, 11], "borrow", [[0, 8], [12, 13], [2, 3, 4], [5, 6, 7]]),
    ([1, 2, 7, 8, 9, 10, 11], "merge", [[0, 3, 4], [5, 6], [12, 13]]),
    ([1, 3, 4, 7, 8, 11, 12, 13], "merge", [[0, 2], [5, 6], [9, 10]]),
    ([*range(8), 9, 10, 11], "merge", [[8, 12, 13]]),
    ([*range(12)], "simple", [[12, 13]]),
]


@pytest.mark.parametrize(("lost", "how", "after"), EXAMPLES)
def test_examples(lost: Collection[int], how: str, after: list[list[int]]) -> None:
    change = by_rules(even_set(2, 4, 1), FOUR, lost)
    assert (change.how, sorted(hosts(change))) == (how, sorted(after))
    assert sum(change.layout.microbatches) == 24


def test_short_pipelines_join_before_full_ones() -> None:
    templates = even_set(3, 3, 1)
    change = by_rules(templates, layout_of([0, 1, 2], [3, 4, 5], [6, 7, 8]), [1, 2, 4, 5])
    assert (change.how, hosts(change)) == ("merge", [[0, 3, 6, 7, 8]])
    change = by_rules(templates, layout_of([0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]), [2, 5, 8])
    # 2 + 2 + 2 + 3 hosts: two short ones make four, which can then yield to the third.
    assert (change.how, [len(p) for p in hosts(change)]) == ("merge", [3, 3, 3])


def test_joins() -> None:
    templates = even_set(2, 3, 1)
    two = layout_of([0, 1], [2, 3])
    assert hosts(by_rules(templates, two, [], (7,))) == [[2, 3], [0, 1, 7]]
    assert hosts(by_rules(templates, two, [], (7, 8))) == [[0, 1], [2, 3], [7, 8]]
    change = by_rules(templates, two, [1], (7,))
    assert hosts(change) == [[0, 7], [2, 3]] and change.how == "join"
    # The new host takes the place of the lost one, and copies its layers alone.
    assert change.layout.pipelines[0] == (0, 7)
    assert [(t.layer, t.target) for t in change.transfers] == [(layer, 7) for layer in range(6, 12)]


def test_a_join_after_everything_was_idle() -> None:
    templates = even_set(2, 3, 1)
    down = reconfigure(templates, layout_of([0, 1], [2, 3]), [0, 2, 3], microbatches=4, layer_bytes=BYTES)
    assert down.how == "none" and down.layout == Layout((), ())
    assert down.lost == tuple(range(6))
    up = reconfigure(templates, down.layout, [], (1, 9), microbatches=4, layer_bytes=BYTES)
    assert hosts(up) == [[1, 9]] and up.lost == tuple(range(LAYERS))


def test_nothing_happened() -> None:
    change = reconfigure(
        even_set(2, 3, 1), layout_of([0, 1], [2, 3]), [77], microbatches=6, layer_bytes=BYTES
    )
    assert change == Reconfiguration(Layout(((0, 1), (2, 3)), (3, 3)), "none")


def test_the_search_is_taken_only_where_it_is_cheaper() -> None:
    templates = even_set(2, 4, 1)
    local = by_rules(templates, FOUR, [2])
    free = reconfigure(templates, FOUR, [2], microbatches=24, layer_bytes=BYTES)
    assert free.how == "search"
    assert step_seconds(templates, free.layout) < step_seconds(templates, local.layout)


def test_bad_input() -> None:
    with pytest.raises(UserError, match="host 1 joins, but runs already"):
        by_rules(even_set(2, 3, 1), layout_of([0, 1]), [], (1,))
    with pytest.raises(UserError, match="microbatches is 0"):
        reconfigure(even_set(2, 3, 1), layout_of([0, 1]), [], microbatches=0, layer_bytes=BYTES)


def check_change(
    set: TemplateSet, before: Layout, change: Reconfiguration, alive: frozenset[int], microbatches: int
) -> None:
    """Everything that must hold of any change."""
    after = change.layout
    old, new = held_by(set, before), held_by(set, after)
    left = frozenset[int]().union(*(old[host] for host in old if host in alive))
    assert change.lost == tuple(sorted(frozenset(range(LAYERS)) - left))
    used = [host for pipeline in after.pipelines for host in pipeline]
    assert len(used) == len(frozenset(used)) and frozenset(used) <= alive
    if len(alive) < set.n0:
        assert after == Layout((), ()) and change.how == "none"
        return
    if microbatches * largest_size(set) >= len(alive) and microbatches >= len(alive) // set.n0:
        assert frozenset(used) == alive
    assert all(set.n0 <= len(pipeline) <= largest_size(set) for pipeline in after.pipelines)
    assert sum(after.microbatches) == microbatches and min(after.microbatches) >= 1
    # Each layer that a host newly has comes exactly once, from a host that had it and is alive.
    copies = [(copy.target, copy.layer) for copy in change.transfers]
    needed = {
        (host, layer)
        for host, layers in new.items()
        for layer in layers - old.get(host, frozenset()) - frozenset(change.lost)
    }
    assert len(copies) == len(frozenset(copies)) and frozenset(copies) == needed
    for copy in change.transfers:
        assert copy.source in alive and copy.layer in old[copy.source]
        assert copy.nbytes == BYTES[copy.layer]
    # Hosts stand where they have most already: no other order of a changed pipeline keeps more bytes.
    for pipeline in frozenset(after.pipelines) - frozenset(before.pipelines):
        if len(pipeline) <= 5:
            layers = [new[host] for host in pipeline]
            assert kept_bytes(old, pipeline, layers) == max(
                kept_bytes(old, order, layers) for order in permutations(pipeline)
            )


def kept_bytes(
    old: Mapping[int, frozenset[int]], order: Sequence[int], layers: Sequence[frozenset[int]]
) -> float:
    """What hosts in this order have already of the layers at each position."""
    return sum(
        BYTES[layer]
        for host, here in zip(order, layers, strict=True)
        for layer in old.get(host, frozenset()) & here
    )


class Losses(RuleBasedStateMachine):
    """A job that loses hosts and gets others, again and again."""

    @initialize(
        n0=st.integers(1, 4),
        more=st.integers(0, 3),
        f=st.integers(0, 2),
        extra=st.integers(0, 6),
        search=st.booleans(),
    )
    def start(self, n0: int, more: int, f: int, extra: int, search: bool) -> None:
        self.set = even_set(n0, n0 + more, f)
        hosts = (f + 1) * n0 + extra
        self.microbatches, self.search, self.next = 40, search, hosts
        self.alive = frozenset(range(hosts))
        self.layout = compose(self.set, range(hosts), self.microbatches)

    def change(self, lost: frozenset[int], joined: tuple[int, ...]) -> None:
        args = {"microbatches": self.microbatches, "layer_bytes": BYTES, "search": self.search}
        before, pipelines = self.layout, len(self.layout.pipelines)
        idle = tuple(self.alive - lost - frozenset(held_by(self.set, before)))
        change = reconfigure(self.set, before, lost, (*joined, *idle), **args)
        assert change == reconfigure(self.set, before, sorted(lost, reverse=True), (*idle, *joined), **args)
        self.alive = (self.alive - lost) | frozenset(joined)
        check_change(self.set, before, change, self.alive, self.microbatches)
        if len(lost) < pipelines:
            assert change.lost == ()
        if len(self.alive) >= (self.set.failures + 1) * self.set.n0:
            assert len(change.layout.pipelines) > self.set.failures
        self.layout = change.layout
        if change.lost or not change.layout.pipelines:  # A checkpoint brings it back, with new hosts.
            self.alive |= frozenset(range(self.next, self.next + self.set.n0))
            self.next += self.set.n0
            self.layout = compose(self.set, sorted(self.alive), self.microbatches)

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self.change(frozenset(data.draw(st.sets(st.sampled_from(sorted(self.alive)), max_size=5))), ())

    @rule(count=st.integers(1, 5))
    def join(self, count: int) -> None:
        self.next += count
        self.change(frozenset(), tuple(range(self.next - count, self.next)))

    @rule(data=st.data(), count=st.integers(1, 3))
    def replace(self, data: st.DataObject, count: int) -> None:
        lost = frozenset(data.draw(st.sets(st.sampled_from(sorted(self.alive)), min_size=1, max_size=3)))
        self.next += count
        self.change(lost, tuple(range(self.next - count, self.next)))

    @invariant()
    def every_layer_runs(self) -> None:
        if hasattr(self, "layout"):
            held = held_by(self.set, self.layout)
            for pipeline in self.layout.pipelines:
                assert frozenset[int]().union(*(held[host] for host in pipeline)) == frozenset(range(LAYERS))


Losses.TestCase.settings = settings(max_examples=60, stateful_step_count=15, deadline=None, derandomize=True)
TestLosses = Losses.TestCase


def test_a_host_that_comes_after_a_merge_brings_the_copies_back() -> None:
    templates = even_set(2, 3, 2)
    args = {"microbatches": 40, "layer_bytes": BYTES, "search": False}
    merged = reconfigure(templates, compose(templates, range(6), 40), [0], **args)
    assert merged.how == "merge" and len(merged.layout.pipelines) == 2
    assert len(reconfigure(templates, merged.layout, [], [6], **args).layout.pipelines) == 3


def test_sources_share_the_load() -> None:
    templates = even_set(1, 4, 3)
    before = layout_of([0], [1], [2], [3])
    copies, lost = transfers(templates, before, layout_of([0], [1], [2], [3], [4]), range(5), [1.0] * LAYERS)
    assert lost == ()
    assert sorted(copy.source for copy in copies) == sorted([0, 1, 2, 3] * 3)


def test_a_large_layer_is_given_out_first() -> None:
    templates = even_set(1, 2, 1)
    sizes = [1.0] * 11 + [11.0]
    copies, _ = transfers(templates, layout_of([0], [1]), layout_of([0], [1], [2]), range(3), sizes)
    sent = {source: sum(c.nbytes for c in copies if c.source == source) for source in (0, 1)}
    assert sent == {0: 11.0, 1: 11.0}
