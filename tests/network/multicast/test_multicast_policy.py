"""Trees reach every member once, with N / p transmissions at most, around failures, and never collide."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.base.errors import UserError
from windtunnel.network.multicast.policy import (
    MulticastRequest,
    Rounds,
    SplitterFabric,
    decide,
    disjoint,
    one_at_a_time,
    rules,
    static_trees,
)
from windtunnel.network.multicast.policy.check import faults
from windtunnel.network.multicast.policy.shuffle import Shuffle, shuffle_of

SIZES = [(2, 1), (2, 2), (2, 3), (3, 2), (4, 2)]


def everyone(source: int, shuffle: Shuffle) -> MulticastRequest:
    return MulticastRequest(source, tuple(rack for rack in range(shuffle.racks) if rack != source))


@pytest.mark.parametrize(("p", "k"), [*SIZES, (2, 4), (3, 3), (8, 2)])
def test_all_racks_hear_every_source_within_2k_less_1_hops_by_one_relay_a_group(p: int, k: int) -> None:
    shuffle = Shuffle(p, k)
    trees = static_trees(p, k)
    assert faults(SplitterFabric(p, k, tuple(tree.request for tree in trees)),
                  Rounds(tuple((tree,) for tree in trees))) == []  # fmt: skip
    for tree in trees:
        assert tree.hops == 2 * k - 1
        groups = Counter(shuffle.group(rack) for rack in tree.transmitters)
        assert len(tree.transmitters) <= shuffle.racks // p and set(groups.values()) == {1}
    sent = Counter(rack for tree in trees for rack in tree.transmitters)
    assert max(sent.values()) - min(sent.values()) <= 1  # relays are balanced
    by_rack = rules(trees)
    assert max(map(len, by_rack.values())) == shuffle.racks  # one for each source
    assert all(len({rule.source for rule in own}) == len(own) for own in by_rack.values())


@pytest.mark.parametrize(("p", "k"), [(2, 2), (2, 3), (3, 2)])
def test_a_tree_beside_another_takes_a_hop_more_where_both_need_one_relay_first(p: int, k: int) -> None:
    """Of every two sources: in the first k hops a group has one rack with the data, and one transmitter."""
    shuffle = Shuffle(p, k)

    def needed(source: int) -> set[int]:
        racks, reach = {source}, {source}
        for _ in range(k - 1):
            racks = {to for rack in racks for to in shuffle.fed_by(rack)}
            reach |= racks
        return reach

    for pair in combinations(range(shuffle.racks), 2):
        decision = decide(SplitterFabric(p, k, tuple(everyone(source, shuffle) for source in pair)))
        for trees in decision.rounds:
            shared = len(trees) == 2 and needed(pair[0]) & needed(pair[1])
            assert max(tree.hops for tree in trees) == (2 * k if shared else 2 * k - 1)


@pytest.mark.parametrize(("p", "k"), SIZES)
def test_the_shuffle_feeds_every_rack_from_one_group(p: int, k: int) -> None:
    shuffle = Shuffle(p, k)
    fed = Counter(to for rack in range(shuffle.racks) for to in shuffle.fed_by(rack))
    assert set(fed) == set(range(shuffle.racks)) and set(fed.values()) == {p}
    for group in range(shuffle.groups):
        members = shuffle.members(group)
        assert len(members) == p and {shuffle.group(rack) for rack in members} == {group}
        (outputs,) = {tuple(shuffle.fed_by(rack)) for rack in members}
        assert {shuffle.feeding_group(rack) for rack in outputs} == {group}


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SIZES), st.data())
def test_members_take_it_once_and_what_is_packed_is_disjoint(
    size: tuple[int, int], data: st.DataObject
) -> None:
    shuffle = Shuffle(*size)
    racks = st.integers(0, shuffle.racks - 1)
    drawn = data.draw(st.lists(st.tuples(racks, st.sets(racks, min_size=1)), min_size=1, max_size=6))
    asked = tuple(
        MulticastRequest(source, tuple(sorted(members - {source})), float(number))
        for number, (source, members) in enumerate(drawn)
        if members - {source}
    )
    dead = data.draw(st.sets(racks, max_size=shuffle.p - 1)) - {request.source for request in asked}
    fibre = st.tuples(racks, st.integers(0, shuffle.p - 1)).map(
        lambda pair: (pair[0], shuffle.fed_by(pair[0])[pair[1]])
    )
    fabric = SplitterFabric(
        *size, asked, tuple(sorted(dead)), tuple(sorted(data.draw(st.sets(fibre, max_size=2))))
    )
    try:
        decision = decide(fabric)
    except UserError as error:
        assert "is cut off from rack" in str(error)
        return
    assert faults(fabric, decision) == []
    assert len(decision.rounds) <= len(asked) == len(one_at_a_time(fabric).rounds)
    for trees in decision.rounds:
        assert len(trees) <= shuffle.p and disjoint(trees)
        delivered = {
            (rule.source, rack) for rack, own in rules(trees).items() for rule in own if rule.deliver
        }
        assert delivered == {(tree.request.source, to) for tree in trees for to in tree.request.members}


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([(2, 2), (2, 3), (3, 2), (4, 2)]), st.data())
def test_all_but_one_of_a_group_may_fail(size: tuple[int, int], data: st.DataObject) -> None:
    shuffle = Shuffle(*size)
    members = shuffle.members(data.draw(st.integers(0, shuffle.groups - 1)))
    left = data.draw(st.sampled_from(list(members)))
    dead = tuple(rack for rack in members if rack != left)
    source = data.draw(st.sampled_from([rack for rack in range(shuffle.racks) if rack not in dead]))
    fabric = SplitterFabric(*size, (everyone(source, shuffle),), dead)
    decision = decide(fabric)
    assert faults(fabric, decision) == []
    with pytest.raises(UserError, match=r"cannot send|is cut off"):
        decide(replace(fabric, failed_transmitters=tuple(members)))


def test_broken_fibres_are_gone_around_by_two_relays_and_each_rack_listens_to_one() -> None:
    shuffle = Shuffle(2, 2)
    group = shuffle.group(2)  # of racks 0 and 2 of the first column
    first, second = shuffle.members(group)
    cut = ((first, shuffle.fed_by(first)[0]), (second, shuffle.fed_by(second)[1]))
    fabric = SplitterFabric(2, 2, (everyone(1, shuffle),), (), cut)
    decision = decide(fabric)
    assert faults(fabric, decision) == []
    assert {first, second} <= set(decision.rounds[0][0].transmitters)


def test_p_broadcasts_at_once_are_a_bound_and_no_promise() -> None:
    shuffle = Shuffle(2, 2)
    rounds = Counter()
    for pair in combinations(range(8), 2):
        fabric = SplitterFabric(2, 2, tuple(everyone(source, shuffle) for source in pair))
        decision = decide(fabric)
        assert faults(fabric, decision) == []
        rounds[len(decision.rounds)] += 1
    assert rounds == {1: 20, 2: 8}
    three = SplitterFabric(2, 2, tuple(everyone(source, shuffle) for source in (0, 3, 5)))
    assert len(decide(three).rounds) >= 2


def test_the_checker_names_what_is_wrong() -> None:
    shuffle = Shuffle(2, 2)
    fabric = SplitterFabric(2, 2, (everyone(0, shuffle), everyone(1, shuffle)))
    decision = one_at_a_time(fabric)
    (first,), (second,) = decision.rounds
    assert any(
        "a transmitter is in two trees" in fault for fault in faults(fabric, Rounds(((first, second),)))
    )
    assert faults(fabric, Rounds(((first,),))) == ["the trees are not those of the requests"]
    short = replace(first, listeners=first.listeners[:-1])
    assert any("does not get it" in fault for fault in faults(fabric, Rounds(((short,), (second,)))))
    twice = replace(first, listeners=(*first.listeners, first.listeners[0]))
    assert any("takes it twice" in fault for fault in faults(fabric, Rounds(((twice,), (second,)))))
    silent = replace(first, transmitters=first.transmitters[:1])
    assert any("does not send" in fault for fault in faults(fabric, Rounds(((silent,), (second,)))))
    dead = replace(fabric, failed_fibres=((first.listeners[0][1], first.listeners[0][0]),))
    assert any("no fibre leads" in fault for fault in faults(dead, decision))


@pytest.mark.parametrize(
    ("racks", "splitter", "message"),
    [
        (
            9,
            2,
            "9 do not fit splitters of 2, which need k * 2^k racks; the nearest accepted are 8 and",
        ),
        (30, 3, "the nearest accepted are 18 and 81"),
        (1, 2, "the nearest accepted are 2"),
        (8, 1, "splitter: 1 outputs, accepted are 2 or more"),
    ],
)
def test_other_numbers_of_racks_are_refused_with_the_nearest(racks: int, splitter: int, message: str) -> None:
    with pytest.raises(UserError) as caught:
        shuffle_of(racks, splitter)
    assert message in str(caught.value)
    assert shuffle_of(24, 2) == Shuffle(2, 3)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (MulticastRequest(0, (8,)), "rack 8 is not one of 0 to 7"),
        (MulticastRequest(1, (1, 2)), "rack 1 is the source and among the members"),
        (MulticastRequest(3, (1,)), "rack 3 cannot send, its transmitter has failed"),
    ],
)
def test_requests_that_cannot_be_are_named(request_: MulticastRequest, message: str) -> None:
    with pytest.raises(UserError, match=message):
        decide(SplitterFabric(2, 2, (request_,), (3,)))
