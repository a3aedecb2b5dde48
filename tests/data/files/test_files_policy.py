"""Who leads, who is in the chain, when writers wait: the rules."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from windtunnel.data.files.policy import (
    HIGH,
    LEASE,
    LOW,
    WIDEST,
    ChainChange,
    ChainPeer,
    ChainView,
    PipelineLoad,
    PipelineSchedule,
    decide,
)

NAMES = ("a", "b", "c")


def peers(silent: float = 0.0, **fields: object) -> tuple[ChainPeer, ...]:
    base = {"written": 10, "epoch": 4, "leads": False, "able": True}
    return tuple(ChainPeer(name, silent, **(base | fields)) for name in ("b", "c"))  # type: ignore[arg-type]


def leader(**fields: object) -> ChainView:
    base = {"me": "a", "written": 10, "epoch": 4, "chain": NAMES, "peers": peers(), "least": 2, "leads": True,
            "able": True}  # fmt: skip
    return ChainView(**(base | fields))  # type: ignore[arg-type]


def follower(
    me: str, written: dict[str, int], silent: float, able: bool = True, leads: bool = True
) -> ChainView:
    others = tuple(
        ChainPeer(
            name, silent if name == "a" else 0.0, written[name], 4, leads and name == "a", able or name != "a"
        )
        for name in NAMES
        if name != me
    )
    return ChainView(me, written[me], 4, NAMES, others, 2, False, True)


def test_a_primary_whose_hosts_all_answer_goes_on() -> None:
    assert decide(leader()) == ChainChange("keep", 4, NAMES, True)
    assert decide(leader(least=4)) == ChainChange("keep", 4, NAMES, False)


def test_a_silent_host_is_left_out_and_a_new_one_comes_last() -> None:
    quiet = (ChainPeer("b", LEASE * 1.01, 10, 4, False, True), peers()[1])
    assert decide(leader(peers=quiet)) == ChainChange("change", 5, ("a", "c"), True)
    assert decide(leader(peers=peers(silent=2 * LEASE))) == ChainChange("change", 5, ("a",), False)
    assert decide(leader(broken=True)) == ChainChange("change", 5, NAMES, True)
    assert decide(leader(joining="d")) == ChainChange("change", 5, (*NAMES, "d"), True)
    assert decide(leader(joining="b")) == ChainChange("change", 5, ("a", "c", "b"), True)


def test_the_host_with_most_of_the_log_takes_over() -> None:
    written = {"a": 12, "b": 10, "c": 11}
    assert decide(follower("c", written, 2 * LEASE)) == ChainChange("change", 5, ("c", "b"), True)
    assert decide(follower("b", written, 2 * LEASE)).act == "keep"
    assert decide(follower("b", written | {"b": 11}, 2 * LEASE)) == ChainChange("change", 5, ("b", "c"), True)
    assert decide(follower("c", written | {"b": 11}, 2 * LEASE)).act == "keep"
    assert decide(follower("c", written, 0.0)).act == "keep"


def test_a_primary_that_does_not_lead_may_lead_again_only_if_it_is_able() -> None:
    written = {"a": 12, "b": 10, "c": 11}
    assert decide(follower("c", written, 0.0, leads=False)).act == "keep"  # the first has more, and answers
    assert decide(leader(leads=False, written=12)) == ChainChange("change", 5, NAMES, True)
    assert decide(follower("c", written, 0.0, able=False, leads=False)) == ChainChange(
        "change", 5, ("c", "b"), True
    )
    assert decide(leader(leads=False, able=False, written=12)).act == "keep"


def test_a_newer_epoch_is_read() -> None:
    assert decide(leader(peers=peers(epoch=5))).act == "read"
    assert decide(leader(chain=("b", "c"))).act == "read"


@given(
    st.lists(
        st.tuples(st.floats(0, 3), st.integers(0, 5), st.booleans(), st.booleans()), min_size=3, max_size=3
    ),
    st.integers(0, 7),
)
def test_two_hosts_that_hear_each_other_never_both_take_over(
    hosts: list[tuple[float, int, bool, bool]], reach: int
) -> None:
    """Each sees the same of all others, but not all are within reach; ``leads`` only of the first."""
    takers = []
    for index, me in enumerate(NAMES):
        _, written, leads, able = hosts[index]
        others = tuple(
            ChainPeer(name, 0.0 if reach & 1 << (index + place - 1) else 9.0, hosts[place][1], 4,
                 hosts[place][2] and place == 0, hosts[place][3])
            for place, name in enumerate(NAMES)
            if name != me
        )  # fmt: skip
        view = ChainView(me, written, 4, NAMES, others, 2, leads and index == 0, able)
        decision = decide(view)
        if decision.act == "change":
            assert decision.chain[0] == me and decision.epoch == 5
            takers.append(me)
    if reach == 7:
        assert len(takers) <= 1


def test_placement_and_width() -> None:
    assert decide(PipelineLoad("linefs", (1,))) == PipelineSchedule((1,), True, 1, False)
    assert decide(PipelineLoad("serial", (1,))) == PipelineSchedule((1,), False, 1, False)
    assert decide(PipelineLoad("host", (1,))) == PipelineSchedule((), True, 1, False)
    assert decide(PipelineLoad("linefs", queued=0.75, width=WIDEST)).width == WIDEST
    assert decide(PipelineLoad("linefs", queued=0.75, width=2)).width == 3
    assert decide(PipelineLoad("linefs", queued=0.25, width=2)).width == 2
    assert decide(PipelineLoad("linefs", queued=0.0, width=2)).width == 1
    assert decide(PipelineLoad("serial", queued=0.75, width=2)).width == 1


def test_writers_wait_between_the_marks() -> None:
    middle = (HIGH + LOW) / 2
    assert not decide(PipelineLoad("linefs", used=middle)).wait
    assert decide(PipelineLoad("linefs", used=middle, waiting=True)).wait
    assert decide(PipelineLoad("linefs", used=HIGH + 0.01)).wait
    assert not decide(PipelineLoad("linefs", used=LOW, waiting=True)).wait
