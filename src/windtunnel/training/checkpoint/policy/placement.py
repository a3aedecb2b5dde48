"""Where the copies of every host's shards lie (GEMINI, Wang et al., SOSP 2023, section 4).

The first copy is always at home. The places that hold one shard are its *copy set*; a loss of several
hosts at once is survived iff no copy set lies wholly among them. The fewer distinct copy sets there are,
the fewer losses are fatal, so

- ``group``: places in groups of ``copies``, each holds all shards of its group: N/m sets, the fewest
  possible;
- ``ring``: each place also holds the shards of those before it: N sets, for any N;
- ``mixed``: groups, and one ring of the last m + (N mod m) places where m does not divide N;
- ``domains``: as few sets as may be, under the condition that what fails together (a rack, a power feed)
  holds as few members of a copy set as possible.

Groups across domains: sort the places by domain and deal them out to the N/m groups like cards. A group gets
two places of one domain only if that domain has more than N/m places, and a whole group falls into one domain
only if it has more than (m-1)N/m, where no placement that loads all places alike could avoid it: the shards
of the domain need a copy outside, and those outside have room for (m-1) each.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Literal, get_args

from windtunnel.base.errors import UserError
from windtunnel.training.checkpoint.model import Placement

Kind = Literal["group", "ring", "mixed", "domains"]


def place(places: int, copies: int, kind: Kind, domains: Sequence[str] = ()) -> Placement:
    """Who holds what, for ``places`` hosts and ``copies`` copies of each shard, the one at home included.

    ``domains``: for kind ``domains``, the failure domain of every place; ``""`` is one of its own.

    Raises:
        UserError: more copies than places, a size that ``group`` cannot do, or domains that do not fit.
    """
    if kind not in get_args(Kind):
        raise UserError(f"placement is {kind!r}; accepted are {', '.join(get_args(Kind))}")
    if places < 1:
        raise UserError(f"places is {places}; at least 1 is needed")
    if not 1 <= copies <= places:
        raise UserError(f"copies is {copies}; with {places} hosts 1 to {places} are possible")
    everyone = list(range(places))
    if kind == "ring":
        rings = [everyone]
    elif kind == "domains":
        if len(domains) != places:
            raise UserError(
                f"placement 'domains' needs the failure domain of each of {places} hosts; "
                f"{len(domains)} are given"
            )
        rings = _across(places, copies, domains)
    elif kind == "group" and places % copies:
        fitting = [m for m in range(2, places + 1) if places % m == 0]
        raise UserError(
            f"placement 'group' needs copies to divide the hosts, and {copies} does not divide {places}; "
            f"choose placement 'mixed', or copies of {', '.join(map(str, fitting[:4]))}"
        )
    else:
        rings = _mixed(everyone, copies)
    return Placement(kind, copies, _rings(rings, places, copies))


def survives(placement: Placement, lost: Collection[int]) -> bool:
    """Whether every shard has a copy left after the hosts at the places ``lost`` are gone."""
    gone = set(lost)
    # a shard's first copy is at home: only shards of places that are gone can be lost
    return not any(gone.issuperset(placement.holders[place]) for place in gone)


def _rings(rings: Sequence[Sequence[int]], places: int, copies: int) -> tuple[tuple[int, ...], ...]:
    """In each ring every member's shards lie with it and the next ones; a ring of ``copies`` is a group."""
    holders: list[tuple[int, ...]] = [()] * places
    for ring in rings:
        for at, member in enumerate(ring):
            holders[member] = tuple(ring[(at + step) % len(ring)] for step in range(copies))
    return tuple(holders)


def _mixed(order: Sequence[int], copies: int) -> list[list[int]]:
    """Groups of ``copies`` in this order; what is left over joins the last one, as a ring."""
    groups = len(order) // copies
    cuts = [group * copies for group in range(groups)] + [len(order)]
    return [list(order[begin:end]) for begin, end in pairwise(cuts)]


def _own(domains: Sequence[str]) -> list[str]:
    """Unknown domains are told apart: nothing is known to fail with them."""
    return [domain or f"(place {at})" for at, domain in enumerate(domains)]


def _across(places: int, copies: int, domains: Sequence[str]) -> list[list[int]]:
    """The best of three ways: fewest copy sets inside a domain, fewest pairs in one domain, fewest sets."""
    named = _own(domains)
    sizes = Counter(named)
    order = sorted(range(places), key=lambda p: (-sizes[named[p]], named[p], p))
    groups = places // copies
    dealt = [order[column::groups] for column in range(groups)]
    # One ring of the rest: the leftover cards of the columns all go to the last, not one to each of several.
    rest = places % copies
    extra = [column.pop() for column in dealt[:rest]] if rest <= groups else []
    gathered = [*dealt[:-1], [*dealt[-1], *extra]] if extra else []
    dealt = [order[column::groups] for column in range(groups)]
    # One ring in strides: neighbours in it stand at least places // copies apart in the order by domain.
    strided = _strided(order, copies)
    ways = [way for way in (gathered, dealt, strided) if way]

    def fault(way: list[list[int]]) -> tuple[int, int, int]:
        holders = _rings(way, places, copies)
        inside = [Counter(named[p] for p in holder_ranks) for holder_ranks in holders]
        whole = sum(len(count) == 1 for count in inside)
        pairs = sum(n * (n - 1) for count in inside for n in count.values())
        return whole, pairs, len({frozenset(holder_ranks) for holder_ranks in holders})

    return min(ways, key=fault)


def _strided(order: Sequence[int], copies: int) -> list[list[int]]:
    """Rings in which one goes ``len(order) // copies`` on in ``order``; they split where the stride divides.

    Empty where a ring would have fewer than ``copies`` members.
    """
    stride = max(1, len(order) // copies)
    visited: set[int] = set()
    rings = []
    for start in range(len(order)):
        ring = []
        at = start
        while at not in visited:
            visited.add(at)
            ring.append(order[at])
            at = (at + stride) % len(order)
        if ring:
            rings.append(ring)
    return rings if all(len(ring) >= copies for ring in rings) else []


def pair_survives(placement: Placement) -> float:
    """Probability that memory suffices where two hosts are lost at once, each pair equally likely: only a
    copy set of two lies in a pair."""
    count, copies = len(placement.holders), placement.copies
    if copies > 2 or count < 2:
        return 1.0
    fatal = len({frozenset(holders) for holders in placement.holders}) if copies == 2 else math.comb(count, 2)
    return 1.0 - fatal / math.comb(count, 2)


def fatal_alike(placement: Placement, chance: float) -> float:
    """Probability that memory does not suffice where all hosts are lost independently with one ``chance``
    within the time in which losses count as simultaneous: the union bound over all copy sets (GEMINI, section
    4, corollary 1), which is too high by as little as two of them are lost at once."""
    sets = {frozenset(holders) for holders in placement.holders}
    return min(1.0, len(sets) * chance**placement.copies)
