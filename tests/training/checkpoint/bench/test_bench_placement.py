"""The comparison of placements: its arithmetic, and hosts that are really killed."""

from __future__ import annotations

from itertools import combinations, islice
from pathlib import Path

import pytest

from benchmarks.training.checkpoint import placement
from benchmarks.training.checkpoint.placement import Hosts
from windtunnel.training.checkpoint.policy.placement import place, survives
from windtunnel.training.checkpoint.policy.probability import recovery


def test_the_papers_formula_is_a_lower_bound_and_exact_below_twice_the_copies() -> None:
    for copies, lost in ((2, 1), (2, 2), (2, 3), (2, 4), (2, 6), (4, 4), (4, 7), (4, 9)):
        exact = recovery(place(16, copies, "group"), lost).value
        bound = placement.union_bound(16, copies, lost)
        assert bound <= exact + 1e-12
        if lost < 2 * copies:
            assert bound == pytest.approx(exact)


def test_the_rows_without_hosts_all_meet_what_they_are_held_against() -> None:
    rows = [*placement._published(), *placement._mixed(), *placement._racks()]
    assert len(rows) == 15
    assert all(row.met is not False for row in rows)
    published = {round(row.published, 1) for row in rows if row.published is not None}
    assert published >= {93.3, 80.0, 60.0}


def test_which_hosts_are_killed() -> None:
    assert len(placement.trials(2, quick=False)) == 28
    assert placement.trials(3, quick=False) == placement.trials(3, quick=False)
    assert len(set(placement.trials(3, quick=False))) == 24


def test_killed_hosts_end_as_the_placement_says_and_nothing_stays() -> None:
    kept = place(4, 2, "group")
    with Hosts(4, 4096) as hosts:
        folder: Path = hosts._folder
        for gone in islice(combinations(range(4), 2), 3):
            hosts.save(2, "group")
            assert hosts.readable()
            hosts.kill(gone)
            assert hosts.readable() == survives(kept, gone)
    assert not folder.exists()
    assert all(host.process.poll() is not None for host in hosts._hosts)
