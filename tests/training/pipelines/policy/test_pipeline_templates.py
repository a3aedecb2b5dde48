"""Template sets: which numbers of hosts they cover, what they say of it, and their files."""

from __future__ import annotations

import pytest
from pipeline_oracles import even_set, layers, sums

from windtunnel.base.errors import UserError
from windtunnel.training.pipelines.policy.planner import fits
from windtunnel.training.pipelines.policy.templates import (
    count_needed,
    covered,
    guarantee,
    largest_size,
    minimum_hosts,
    template_set,
)


def most_pipelines(most: int, sizes: range) -> list[int]:
    """The most pipelines that use exactly 0, 1, .. ``most`` hosts, -1 where none do."""
    best = [0] + [-1] * most
    for hosts in range(1, most + 1):
        best[hosts] = max(
            (best[hosts - s] + 1 for s in sizes if s <= hosts and best[hosts - s] >= 0), default=-1
        )
    return best


def test_every_number_of_hosts_is_covered_with_the_published_sizes() -> None:
    checked = 0
    for n0 in range(1, 8):
        for f in range(5):
            for hosts in range((f + 1) * n0, 45):
                best = most_pipelines(hosts, range(n0, hosts - f * n0 + 1))
                assert all(best[left] >= f + 1 for left in range((f + 1) * n0, hosts + 1))
                checked += hosts - (f + 1) * n0 + 1
    assert checked > 10_000


@pytest.mark.parametrize("n0", range(1, 8))
@pytest.mark.parametrize("f", range(4))
def test_fewest_templates(n0: int, f: int) -> None:
    def covers(count: int) -> bool:
        best = most_pipelines(60, range(n0, n0 + count))
        return all(best[hosts] >= f + 1 for hosts in range((f + 1) * n0, 61))

    assert covers(count_needed(n0, f))
    assert count_needed(n0, f) == 1 or not covers(count_needed(n0, f) - 1)


@pytest.mark.parametrize("n0", range(1, 6))
@pytest.mark.parametrize("count", range(1, 6))
def test_covered_is_what_sums_say(n0: int, count: int) -> None:
    templates = even_set(n0, count, 1)
    for hosts in range(1, 20):
        longest = max((len(each) for each in sums(hosts, range(n0, n0 + count))), default=0)
        assert covered(templates, hosts) == (longest >= 1)


@pytest.mark.parametrize(("hosts", "failures"), [(3, 0), (4, 0), (6, 1), (9, 2), (12, 1), (14, 3)])
@pytest.mark.parametrize("memory", [12.0, 7.0, 5.0])
def test_sizes_of_a_set(hosts: int, failures: int, memory: float) -> None:
    profile = layers([1.0] * 12, state=1.0)
    n0 = minimum_hosts(profile, memory)
    assert n0 == {12.0: 1, 7.0: 2, 5.0: 3}[memory]
    if hosts < (failures + 1) * n0:
        with pytest.raises(UserError, match=f"{failures + 1} copies"):
            template_set(profile, hosts, failures, memory)
        return
    templates = template_set(profile, hosts, failures, memory)
    assert [t.hosts for t in templates.templates] == list(range(n0, n0 + len(templates.templates)))
    # Everything that a merge can lead to has a template, and so has every size that is of use.
    assert largest_size(templates) >= min(hosts, 2 * n0 - 1)
    every = template_set(profile, hosts, failures, memory, largest=hosts)
    assert largest_size(every) == min(12, hosts, max(2 * n0 - 1, hosts - failures * n0))
    assert largest_size(templates) == min(largest_size(every), 4 * n0)
    short = template_set(profile, hosts, failures, memory, largest=n0)
    assert largest_size(short) >= min(hosts, 2 * n0 - 1)
    said = f"any {failures} hosts" if failures else "may take the last copy of a layer"
    assert said in guarantee(templates, hosts)[0]


def test_minimum() -> None:
    # State and one activation over the memory are 2 hosts; but the first stage holds two microbatches.
    profile = layers([1.0] * 4, state=4.0, activation=2.0)
    assert minimum_hosts(profile, 12.0) == 3
    assert not fits(profile, 2, 12.0)
    assert minimum_hosts(profile, 1e9) == 1


def test_a_model_that_fits_nowhere_says_why() -> None:
    with pytest.raises(UserError, match="layers need 36 bytes"):
        minimum_hosts(layers([1.0] * 3, state=12.0), 10.0)
    with pytest.raises(UserError, match="fits no number of hosts up to 2"):
        template_set(layers([1.0] * 9, state=1.0), 2, 0, 3.0)


def test_a_negative_number_of_failures() -> None:
    with pytest.raises(UserError, match="failures is -1"):
        template_set(layers([1.0]), 2, -1, 1.0)


def test_guarantees_in_words() -> None:
    templates = even_set(2, 4, 2)
    enough = guarantee(templates, 9)[0]
    assert "From 6 to 9 hosts" in enough and "any 2 hosts" in enough
    assert "1 may be lost at once, not the 2 wanted" in guarantee(templates, 5)[0]
    assert "do not hold" in guarantee(templates, 1)[0]
    # seven hosts are no sum of 4 and 5: one pipeline runs, and hosts are idle
    assert "at most 1 pipelines: 0 may be lost" in guarantee(even_set(4, 2, 1), 7)[0]
