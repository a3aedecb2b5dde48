"""The tree against one that knows every prefix by heart, under any rules, in any order of requests."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from held import Held
from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.serving.prefixcache.policy import (
    Candidate,
    Decision,
    Eviction,
    Lookup,
    Observation,
    Retention,
    decide,
)
from windtunnel.serving.prefixcache.policy.changes import Evict, Strip
from windtunnel.serving.prefixcache.policy.rules import RULES, CacheRules, block_lru
from windtunnel.serving.prefixcache.policy.shapes import ModelShape
from windtunnel.serving.prefixcache.policy.tree import PrefixCache

HYBRID = ModelShape(kv=1, state=5, token=10.0, pairs=((0, 1.0),))
ATTENTION = ModelShape(kv=2, state=0, token=10.0, pairs=((0, 1.0),))
RULE = [*(RULES[name] for name in ("three", "radix", "ends", "seglen", "three-lru", "density")),
        CacheRules(order="flops", alpha=0.7), block_lru(2), block_lru(3, "every")]  # fmt: skip
symbols = st.lists(st.integers(0, 2), max_size=9).map(tuple)
requests = st.lists(st.tuples(symbols, symbols, st.booleans()), max_size=30)


@settings(max_examples=100)
@given(
    requests, st.sampled_from(RULE), st.sampled_from([HYBRID, ATTENTION]), st.integers(0, 70),
    st.integers(1, 3), st.data(),
)  # fmt: skip
def test_the_tree_is_what_it_says(
    asked: list[tuple[tuple[int, ...], tuple[int, ...], bool]], rules: CacheRules, shape: ModelShape,
    capacity: int, unit: int, data: st.DataObject,
) -> None:  # fmt: skip
    """Whatever is looked up is what a list of all that is held says; pinned nodes stay; bytes are exact."""
    cache = PrefixCache(shape, capacity, rules, unit=unit)
    held, pinned = Held(cache), []
    for now, (prompt, answer, pin) in enumerate(asked):
        most = len(prompt) - (unit == 1)
        match = cache.look(prompt, float(now // 2))
        assert match.depth == held.usable(prompt, most)
        held.used(match, prompt)
        if match.node and pin:
            cache.pin(match.node)
            pinned.append((match.node, prompt[: match.depth]))
        whole = prompt + answer
        end = len(whole) // match.end * match.end if match.end else 0
        copied = frozenset({*match.keep, end} - {0})
        held.do(cache.admit(whole, sorted(copied), float(now // 2)), whole, copied)
        for node, prefix in pinned:
            assert held.pieces[node].state == prefix or not shape.state
            assert held.usable(prefix, len(prefix)) == len(prefix)
        if pinned and data.draw(st.booleans()):
            cache.unpin(pinned.pop(0)[0])
    for node, _ in pinned:
        cache.unpin(node)


def test_a_state_of_another_prompt_that_ends_as_deep_is_not_taken_for_its_own() -> None:
    cache = PrefixCache(HYBRID, 14, RULES["three"])
    first, second = (0, 1, 1, 1, 1, 1, 1, 1, 1), (0, 2, 0, 0, 1, 2, 2, 2, 1)
    cache.admit(first, [9], 0.0)
    cache.pin(cache.look((*first, 3), 1.0).node)
    assert cache.admit(second, [9], 2.0) == ()  # no room beside what is in use
    roomy = PrefixCache(HYBRID, 100, RULES["three"])
    for prompt in (first, second):
        roomy.admit(prompt, [9], 3.0)
    assert [roomy.look((*prompt, 3), 4.0).depth for prompt in (first, second)] == [9, 9]


def test_what_several_share_is_copied_where_they_part_and_used_from_the_third_on() -> None:
    cache = PrefixCache(HYBRID, 10_000, RULES["marconi"])
    shared, depths = tuple(range(100, 140)), []
    for number in range(4):
        prompt = (*shared, *[number] * 10)
        match = cache.look(prompt, number)
        depths.append((match.depth, match.keep, match.end))
        cache.admit((*prompt, 7, 8), (*match.keep, len(prompt) + 2), number)
    assert depths == [(0, (), 1), (0, (40,), 1), (40, (), 1), (40, (), 1)]


def test_a_node_with_one_child_gives_its_state_and_keeps_its_childs_hits() -> None:
    """T9: its KV becomes part of the child, of which every token can still be used."""
    cache = PrefixCache(HYBRID, 30, CacheRules(("prompt", "end"), order="lru"))
    held = Held(cache)
    first, second = (1, 2, 3, 4), (1, 2, 3, 4, 5, 6, 7, 8)
    held.do(cache.admit(first, [4], 0.0), first, frozenset({4}))
    held.do(cache.admit(second, [8], 1.0), second, frozenset({8}))
    cache.look((*second, 9), 2.0)
    other = (9, 9, 9, 9, 9, 9, 9, 9)
    change = cache.admit(other, [8], 3.0)
    held.do(change, other, frozenset({8}))
    assert [type(operation) for operation in change][:1] == [Strip]
    assert cache.look((*first, 0), 4.0).depth == 0
    assert cache.look((*second, 9), 5.0).depth == 8


@pytest.mark.parametrize("shape", [HYBRID, ATTENTION])
def test_alpha_zero_is_the_least_recently_used(shape: ModelShape) -> None:
    random = np.random.default_rng(3)
    caches = [PrefixCache(shape, 300, CacheRules(order=order)) for order in ("flops", "lru")]
    gone: list[list[object]] = [[], []]
    for now in range(300):
        prompt = tuple(random.integers(0, 2, random.integers(1, 20)).tolist())
        for place, cache in enumerate(caches):
            match = cache.look(prompt, now)
            change = cache.admit((*prompt, 5), (*match.keep, len(prompt) + 1), now)
            gone[place] += [operation for operation in change if isinstance(operation, Evict | Strip)]
    assert gone[0] == gone[1] and len(gone[0]) > 50


def test_the_victim_is_the_one_that_a_look_at_all_candidates_finds() -> None:
    """The few that are shown to the policy always hold the one with the lowest score of all."""
    sizes: list[tuple[int, int]] = []

    def watched(observation: Observation) -> Decision:
        decision = decide(observation)
        if isinstance(observation, Eviction):
            node, used, worth, group = cache._index.columns()
            ages = cache._ages
            density = ages.of(group, observation.now - used) if ages is not None else used * 0
            rows = list(zip(*(column.tolist() for column in (node, used, worth, density)), strict=True))
            everyone = tuple(Candidate(*row) for row in rows)
            assert decide(replace(observation, candidates=everyone)) == decision
            least = min(candidate.used for candidate in everyone)
            assert (least, max(candidate.worth for candidate in everyone)) == (
                observation.used[0], observation.worth[1],
            )  # fmt: skip
            sizes.append((len(observation.candidates), len(rows)))
        return decision

    random = np.random.default_rng(4)
    for rules in (
        CacheRules(order="flops", alpha=0.5),
        RULES["seglen"],
        RULES["density"],
        RULES["three-lru"],
    ):
        cache = PrefixCache(HYBRID, 1500, rules, decide=watched)
        for now in range(200):
            prompt = tuple(random.integers(0, 3, random.integers(2, 60)).tolist())
            match = cache.look(prompt, now * float(random.random()))
            cache.admit(prompt, (*match.keep, len(prompt)), float(now))
    assert any(shown < count / 2 for shown, count in sizes)


def test_alpha_is_tuned_by_replay_always_to_the_same() -> None:
    """Where recency misleads (a long prompt comes back, short ones do not), alpha is raised."""

    def run() -> list[float]:
        cache, alphas = PrefixCache(HYBRID, 400, RULES["marconi"]), []
        random = np.random.default_rng(5)
        for now in range(700):
            prompt = tuple(range(100)) if now % 20 == 0 else tuple(random.integers(200, 300, 12).tolist())
            match = cache.look((*prompt, now + 1000), now)
            cache.admit(prompt, (*match.keep, len(prompt)), now)
            if (replay := cache.due()) is not None:
                alphas.append(cache.settle(replay.run()))
        return alphas

    first = run()
    assert first == run() and first and first[0] > 0


@pytest.mark.parametrize("shape", [HYBRID, ATTENTION])
def test_prompts_that_are_meant_to_hurt(shape: ModelShape) -> None:
    """Empty, of one symbol, a million symbols, the same again and again: all are served within the budget."""
    for rules in (RULES["three"], RULES["block528"], RULES["radix"]):
        cache = PrefixCache(shape, 1_500_000, rules)
        whole = np.zeros(1_000_000, np.int64)
        for now, prompt in enumerate([[], [0], whole, whole, whole[:-1], whole[:500_000], [1], [], [0]]):
            match = cache.look(prompt, now)
            assert match.depth <= max(0, len(prompt) - 1)
            cache.admit(prompt, (*match.keep, len(prompt)), now)
            assert cache.used <= cache.capacity
        assert len(cache._nodes) < 5000
    cache = PrefixCache(shape, 0, RULES["three"])
    assert cache.admit([1, 2], [2], 0) == () and cache.look([1, 2, 3], 1).depth == 0
    with pytest.raises(ValueError, match="invalid literal"):
        cache.look(["no symbol"], 2)


def test_points_of_admission() -> None:
    def kept(rules: CacheRules, unit: int = 1) -> Retention:
        decision = decide(Lookup(rules, unit, prompt=100, matched=40, usable=20))
        assert isinstance(decision, Retention)
        return decision

    assert kept(RULES["three"]) == Retention((40, 96), 1)
    assert kept(RULES["marconi"]) == Retention((40,), 1)
    assert kept(RULES["ends"]) == Retention((100,), 1)
    assert kept(block_lru(32)) == Retention((96,), 32)
    assert kept(block_lru(32, "every")) == Retention((32, 64, 96), 32)
    assert kept(CacheRules(("branch",), grid=16)) == Retention((32,), 0)
    assert kept(CacheRules(("branch",), grid=64)) == Retention((), 0)
    assert kept(block_lru(1024), unit=512) == Retention((98,), 2)


def test_states_are_copied_as_far_as_there_is_room_and_decoded_ones_where_they_count() -> None:
    asked = Lookup(CacheRules(), unit=1, prompt=100, matched=40, usable=20)
    whole = decide(asked)
    assert isinstance(whole, Retention) and len(whole.depths) == 2 and whole.end == 1
    assert decide(replace(asked, copies=1)) == Retention(whole.depths[:1], 1)
    assert decide(replace(asked, copies=-1)) == Retention((), 0), "it fills the room alone"
    assert decide(replace(asked, decoded=False)) == Retention(whole.depths, 0)
