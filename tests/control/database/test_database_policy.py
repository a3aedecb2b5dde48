"""Policies place what fits, gangs whole, and let nothing pass where they say so."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.control.database.policy import POLICIES, Observation, Task, Worker

TASKS = st.lists(
    st.builds(
        Task, id=st.integers(1, 60), slots=st.integers(1, 4), priority=st.integers(0, 3),
        data=st.sampled_from(["", "a", "b"]), gang=st.sampled_from(["", "", "", "g", "h"]),
    ),
    max_size=12, unique_by=lambda task: task.id,
)  # fmt: skip
WORKERS = st.lists(
    st.builds(
        Worker, name=st.sampled_from("uvwxyz"), free=st.integers(1, 6), slots=st.just(6),
        data=st.sampled_from(["", "a"]),
    ),
    min_size=1, max_size=6, unique_by=lambda worker: worker.name,
)  # fmt: skip


def placed(policy: str, tasks: list[Task], workers: list[Worker]) -> dict[int, str]:
    decision = POLICIES[policy](Observation(tuple(tasks), tuple(workers)))
    return {assignment.task: assignment.worker for assignment in decision.assignments}


@pytest.mark.parametrize("policy", list(POLICIES))
@given(tasks=TASKS, workers=WORKERS)
def test_what_is_placed_fits_and_gangs_are_whole(
    policy: str, tasks: list[Task], workers: list[Worker]
) -> None:
    decision = POLICIES[policy](Observation(tuple(tasks), tuple(workers)))
    ids = [assignment.task for assignment in decision.assignments]
    assert len(set(ids)) == len(ids)
    known, used = {task.id: task for task in tasks}, Counter[str]()
    for assignment in decision.assignments:
        used[assignment.worker] += known[assignment.task].slots
    free = {worker.name: worker.free for worker in workers}
    assert all(used[name] <= free[name] for name in used)
    for gang in {task.gang for task in tasks if task.gang}:
        members = {task.id for task in tasks if task.gang == gang}
        assert members & set(ids) in (set(), members)
    single = [task for task in tasks if not task.gang and task.id not in ids]
    if policy in ("least", "fifo", "locality"):
        assert all(task.slots > max(free[name] - used[name] for name in free) for task in single)


def test_each_policy_has_its_way() -> None:
    workers = [Worker("b", 3, 4, "x"), Worker("a", 2, 4), Worker("c", 1, 4)]
    tasks = [Task(1), Task(2), Task(3, data="x"), Task(4, priority=9)]
    assert placed("least", tasks, workers) == {1: "b", 2: "b", 3: "a", 4: "b"}
    assert placed("fifo", tasks, workers) == {1: "b", 2: "b", 3: "b", 4: "a"}
    assert placed("locality", tasks, workers) == {1: "b", 2: "b", 3: "b", 4: "a"}
    assert placed("priority", tasks[3:] + tasks[:3], [Worker("c", 1, 4)]) == {4: "c"}


def test_nothing_passes_a_higher_priority_or_a_gang() -> None:
    large, small = Task(1, slots=4, priority=1), Task(2)
    assert placed("least", [large, small], [Worker("a", 2, 4)]) == {2: "a"}
    assert placed("priority", [large, small], [Worker("a", 2, 4)]) == {}
    gang = [Task(1, gang="g"), Task(2, gang="g"), Task(3, gang="g")]
    assert placed("least", [*gang, Task(4)], [Worker("a", 2, 4)]) == {4: "a"}
    assert placed("gang", [*gang, Task(4)], [Worker("a", 2, 4)]) == {}
    assert placed("gang", [Task(1, slots=9), Task(4)], [Worker("a", 2, 4)]) == {4: "a"}
    assert set(placed("gang", [*gang, Task(4)], [Worker("a", 2, 4), Worker("b", 1, 4)])) == {1, 2, 3}
