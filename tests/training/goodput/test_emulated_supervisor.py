"""The supervisor's own state machine in emulated time: a part of a large job decides as the whole."""

from __future__ import annotations

from typing import Any
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.training.elastic.policy.rules import Change, Rules, Wait
from windtunnel.training.goodput.twin import supervisor
from windtunnel.training.goodput.twin.supervisor import TwinSupervisor


@given(data=st.data(), hosts=st.integers(2, 40), spares=st.integers(0, 2))
@settings(max_examples=30, deadline=None)
def test_a_part_of_a_job_decides_as_the_whole(data: st.DataObject, hosts: int, spares: int) -> None:
    on_loss: Any = data.draw(st.sampled_from(["replace", "restart", "shrink", "shrink-restart"]))
    rules = Rules(on_loss, minimum=data.draw(st.integers(1, hosts)))
    if rules.shrinks:
        spares = 0
    with mock.patch.object(supervisor, "FIRST", hosts):
        whole = TwinSupervisor(hosts, spares, rules)
    with mock.patch.object(supervisor, "FIRST", 1):
        part = TwinSupervisor(hosts, spares, rules)
    for _ in range(data.draw(st.integers(1, 25))):
        alive = sorted(set(range(hosts)) - whole.missing)
        what = data.draw(
            st.sampled_from(["lose"] * bool(alive) + ["break"] * bool(alive) + ["come"] * bool(whole.missing))
        )
        if what == "come":
            number = data.draw(st.sampled_from(sorted(whole.missing)))
            assert whole.come(number) == part.come(number)
            continue
        numbers = data.draw(st.lists(st.sampled_from(alive), min_size=1, max_size=5, unique=True))
        if what == "lose":
            assert whole.lose(numbers) == part.lose(numbers)
        else:
            assert whole.break_off(numbers) == part.break_off(numbers)
        assert whole.missing == part.missing


def test_a_host_that_came_and_is_lost_while_others_are_waited_for_is_ordered_again() -> None:
    orders: list[int] = []

    def record(observation: Any, decision: Any) -> None:
        if isinstance(observation, Change) and isinstance(decision, Wait):
            orders.append(decision.order)

    job = TwinSupervisor(2, 0, Rules("replace"), record)
    assert not job.lose([0, 1]) and not job.come(1) and not job.lose([1])
    assert not job.come(0) and job.come(1)
    assert [count for count in orders if count] == [2, 1]
    assert not job.missing
