"""Who is in a chain, in which order, and who copies from whom: for all that members may answer."""

from __future__ import annotations

from itertools import pairwise, permutations

from hypothesis import given
from hypothesis import strategies as st

from windtunnel.data.group.policy import POLICIES, SLOT, MemberState, Observation, decide

NAMES = "abcdef"
standing = st.builds(
    MemberState, st.just(""), st.sampled_from("xyz"), st.booleans() | st.just(True),
    fenced=st.integers(0, 3), epoch=st.integers(0, 3), sequence=st.integers(0, 4), steady=st.booleans(),
    torn=st.sampled_from([False, False, True]), size=st.just(4096), room=st.sampled_from([0, SLOT * 8]),
)  # fmt: skip


@st.composite
def observations(draw: st.DrawFn) -> Observation:
    members = draw(st.lists(standing, min_size=1, max_size=6))
    named = tuple(
        MemberState(**{**member.__dict__, "name": NAMES[place]}) for place, member in enumerate(members)
    )
    return Observation(4, named, draw(st.sampled_from(["", "x", "y"])), draw(st.integers(1, 3)), 64)


def alike(chain: tuple[str, ...], domain: dict[str, str]) -> int:
    return sum(domain[name] == domain[other] for name, other in pairwise(chain))


@given(observations(), st.sampled_from(sorted(POLICIES)))
def test_whoever_answers_is_in_the_chain_or_there_is_none(observation: Observation, policy: str) -> None:
    decision = POLICIES[policy](observation)
    here = {member.name: member for member in observation.members if member.answers}
    assert set(decision.dropped) == {member.name for member in observation.members} - here.keys()
    whole = [member for member in here.values() if not member.torn]
    if len(here) < observation.least or not whole:
        assert not decision.chain and decision.reason
        return
    assert sorted(decision.chain) == sorted(here)
    source = here[decision.source]
    assert not source.torn
    assert (source.epoch, source.sequence) == max((member.epoch, member.sequence) for member in whole)
    assert decision.sequence == source.sequence
    assert decision.window == (8 if any(member.room for member in here.values()) else 64)


@given(observations())
def test_a_region_that_may_differ_from_the_source_is_compared(observation: Observation) -> None:
    decision = decide(observation)
    here = {member.name: member for member in observation.members}
    for name in decision.chain:
        member, source = here[name], here[decision.source]
        if name != decision.source and (
            member.torn
            or (member.epoch, member.sequence) != (source.epoch, source.sequence)
            or (not member.steady and member.fenced)
        ):
            assert name in decision.compare
    assert decision.source not in decision.compare


@given(observations())
def test_no_order_has_fewer_neighbours_of_one_domain(observation: Observation) -> None:
    decision = decide(observation)
    domain = {member.name: member.domain for member in observation.members}
    if not decision.chain:
        return
    if local := [name for name in decision.chain if domain[name] == observation.coordinator]:
        assert decision.chain[0] in local
    begins = observation.coordinator if local else None
    best = min(
        alike(order, domain)
        for order in permutations(decision.chain)
        if begins is None or domain[order[0]] == begins
    )
    assert alike(decision.chain, domain) == best


def test_new_regions_are_not_compared_and_equal_ones_neither() -> None:
    new = tuple(MemberState(name, "x", size=4096) for name in "ab")
    assert decide(Observation(1, new)).compare == ()
    same = tuple(MemberState(name, "x", True, 1, 1, 7, True, size=4096) for name in "ab")
    assert decide(Observation(2, same)).compare == ()
    again = (same[0], MemberState("b", "x", True, 1, 1, 7, False, size=4096))
    assert decide(Observation(2, again)).compare == ("b",)
    copied_to = (new[0], MemberState("b", "x", True, 1, 0, 0, True, True, 4096))
    assert decide(Observation(2, copied_to)).compare == ("b",)


def test_why_there_is_no_chain_is_told() -> None:
    torn = (MemberState("a", "x", torn=True, size=4096),)
    assert "none has a whole region" in decide(Observation(1, torn)).reason
    sizes = (MemberState("a", "x", size=4096), MemberState("b", "x", size=8192))
    assert "a has 4096, b has 8192" in decide(Observation(1, sizes)).reason
    gone = (MemberState("a", "x", size=4096), MemberState("b", "x", False))
    assert decide(Observation(1, gone, least=2)).reason == "1 of 2 members answer, 2 are needed"
    assert decide(Observation(1, (gone[1],), least=0)).chain == ()
