"""Placements: what they hold, survive, and how likely, against brute force and published figures."""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import combinations
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.base.errors import UserError
from windtunnel.training.checkpoint.model import Placement
from windtunnel.training.checkpoint.policy.placement import (
    Kind,
    fatal_alike,
    pair_survives,
    place,
    survives,
)

KINDS: tuple[Kind, ...] = ("group", "ring", "mixed", "domains")


def good(placement: Placement, lost: int) -> int:
    """How many choices of ``lost`` hosts leave every shard a copy."""
    return sum(survives(placement, gone) for gone in combinations(range(len(placement.holders)), lost))


@st.composite
def placed(draw: st.DrawFn) -> tuple[Placement, list[str]]:
    places = draw(st.integers(1, 10))
    copies = draw(st.integers(1, places))
    kind = draw(st.sampled_from(KINDS if places % copies == 0 else KINDS[1:]))
    domains = draw(st.lists(st.sampled_from(["", "a", "b", "c", "d"]), min_size=places, max_size=places))
    return place(places, copies, kind, domains), domains


@given(placed())
def test_every_placement_loads_all_alike(both: tuple[Placement, list[str]]) -> None:
    placement, _ = both
    places = range(len(placement.holders))
    for p in places:
        assert placement.holders[p][0] == p
        assert len(set(placement.holders[p])) == placement.copies
        assert sum(p in holders for holders in placement.holders) == placement.copies  # all hold as much


@given(placed())
def test_domains_are_spread_as_far_as_can_be(both: tuple[Placement, list[str]]) -> None:
    placement, domains = both
    if placement.kind != "domains":
        return
    places, copies = len(domains), placement.copies
    named = [domain or f"(place {p})" for p, domain in enumerate(domains)]
    largest = max(named.count(domain) for domain in named)
    if largest <= places // copies:
        assert all(len({named[p] for p in held}) == copies for held in placement.holders)
    weak = not all(
        survives(placement, [p for p in range(places) if named[p] == domain]) for domain in set(named)
    )
    if places % copies == 0 and copies > 1:
        # beyond this the shards of the domain have no room outside
        assert weak == (largest > (copies - 1) * places // copies)


@pytest.mark.parametrize("places", range(1, 9))
@pytest.mark.parametrize("kind", KINDS)
def test_every_loss_of_a_few_hosts(places: int, kind: Kind) -> None:
    """Any m - 1 losses are survived, and a loss is fatal exactly if it takes a whole copy set."""
    domains = [f"rack {p % 3}" for p in range(places)]
    for copies in range(1, places + 1):
        if kind == "group" and places % copies:
            continue
        placement = place(places, copies, kind, domains)
        sets = {frozenset(held) for held in placement.holders}
        for lost in range(places + 1):
            for gone in combinations(range(places), lost):
                alive = survives(placement, gone)
                assert alive == all(set(held) - set(gone) for held in placement.holders)
                assert alive or any(copy_set <= set(gone) for copy_set in sets)
                assert alive or lost >= copies
        if places > 1:
            assert pair_survives(placement) == pytest.approx(good(placement, 2) / comb(places, 2))


def test_figures_of_the_paper() -> None:
    def percent(kind: Kind, copies: int, lost: int) -> float:
        return round(100 * good(place(16, copies, kind), lost) / comb(16, lost), 1)

    assert [percent("group", 2, k) for k in (2, 3, 4)] == [93.3, 80.0, 61.5]
    assert [percent("ring", 2, k) for k in (2, 3, 4)] == [86.7, 62.9, 36.3]
    assert percent("group", 4, 4) == 99.8


@given(placed(), st.fractions(0, Fraction(1, 100), max_denominator=1000))
def test_independent_losses_are_little_more_than_enumerated(
    both: tuple[Placement, list[str]], chance: Fraction
) -> None:
    placement, domains = both
    places = len(domains)
    bad = [comb(places, k) - good(placement, k) for k in range(places + 1)]
    fatal = float(sum(n * chance**k * (1 - chance) ** (places - k) for k, n in enumerate(bad)))
    assert fatal <= fatal_alike(placement, float(chance)) * (1 + 1e-9) <= 1.11 * fatal + 1e-30


@pytest.mark.parametrize(
    ("places", "copies", "kind", "domains", "words"),
    [
        (4, 5, "group", (), "copies is 5; with 4 hosts 1 to 4"),
        (4, 0, "ring", (), "copies is 0"),
        (0, 1, "ring", (), "places is 0"),
        (7, 2, "group", (), "2 does not divide 7; choose placement 'mixed', or copies of 7"),
        (6, 4, "group", (), "copies of 2, 3, 6"),
        (4, 2, "domains", ("a",), "4 hosts; 1 are given"),
        (4, 2, "star", (), "placement is 'star'; accepted are group, ring, mixed, domains"),
    ],
)
def test_refused(places: int, copies: int, kind: Kind, domains: tuple[str, ...], words: str) -> None:
    with pytest.raises(UserError, match=re.escape(words)):
        place(places, copies, kind, domains)
