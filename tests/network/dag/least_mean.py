"""The least mean completion time of a few small jobs, by integer programming over time slots (HiGHS).

Computing tasks of whole slots begin at slots and are not interrupted; a sending task carries any part of its
bytes in any slot; what comes after another task begins in a later slot. Times between slots are not had, so
a schedule may be a little better than this where it meets in them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_matrix

from windtunnel.network.dag.policy import GraphJob
from windtunnel.network.dag.policy.paths import alone


def least_mean(
    jobs: Sequence[GraphJob], resources: Mapping[str, float], slot: float, slots: int, limit: float = 30.0
) -> float | None:
    """Seconds, with ``slots`` of ``slot`` seconds each; None where it is not proven in ``limit`` seconds.

    Raises:
        ValueError: a job that comes, or a computing task that ends, between slots.
    """
    rows: list[tuple[dict[int, float], float]] = []  # sum of terms <= bound
    upper: list[float] = []
    whole: list[int] = []

    def variables(count: int, most: float = 1.0, *, integral: bool = True) -> range:
        first = len(upper)
        upper.extend([most] * count)
        whole.extend([int(integral)] * count)
        return range(first, first + count)

    goal: dict[int, float] = {}
    loads: dict[tuple[str, int], dict[int, float]] = {}
    for job in jobs:
        begins, done = _slots(job.begins, slot), {task.name: variables(slots + 1) for task in job.tasks}
        end = variables(1, float(slots), integral=False)[0]  # its slot
        goal[end] = slot / len(jobs)
        for task in job.tasks:  # done[k]: it has ended when slot k begins
            mine = done[task.name]
            part = variables(slots, integral=task.kind == "compute")
            takes = alone(task, resources) / slot
            length = _slots(task.size, slot) if task.kind == "compute" else 1
            upper[mine[0]] = 0.0
            rows.append(({mine[slots]: -1.0}, -1.0))
            rows.append((dict.fromkeys(part, 1.0), 1.0))  # of its size, in each slot; or where it begins
            for k in range(slots):
                if k < begins:
                    upper[part[k]] = 0.0
                rows.append(({mine[k]: 1.0, mine[k + 1]: -1.0}, 0.0))
                past = range(max(0, k + 2 - length))
                rows.append(({mine[k + 1]: 1.0} | {part[i]: -1.0 for i in past}, 0.0))
                rows += [({part[k]: 1.0, done[name][k]: -1.0}, 0.0) for name in task.after]
                under_way = range(max(0, k + 1 - length), k + 1)
                for name, times in task.loads:
                    amount = times if task.kind == "compute" else task.size * times / slot
                    for i in under_way:
                        place = loads.setdefault((name, k), {})
                        place[part[i]] = place.get(part[i], 0.0) + amount / resources[name]
            if task.kind == "network" and takes > 1.0:
                for k in range(slots):
                    upper[part[k]] = min(upper[part[k]], 1.0 / takes)
            rows.append(({end: -1.0} | dict.fromkeys(mine, -1.0), -float(slots + 1)))
    rows += [(terms, 1.0) for terms in loads.values()]
    cost = np.zeros(len(upper))
    cost[list(goal)] = list(goal.values())
    entries = [(row, at, value) for row, (terms, _) in enumerate(rows) for at, value in terms.items()]
    row, at, value = zip(*entries, strict=True)
    limits = LinearConstraint(coo_matrix((value, (row, at))).tocsr(), -np.inf, [bound for _, bound in rows])
    solution = milp(
        cost, constraints=limits, integrality=whole, bounds=Bounds(0.0, upper), options={"time_limit": limit}
    )
    if solution.status != 0:
        return None
    return float(solution.fun) - sum(job.begins for job in jobs) / len(jobs)


def _slots(seconds: float, slot: float) -> int:
    whole = round(seconds / slot)
    if abs(whole * slot - seconds) > 1e-9 * max(1.0, seconds):
        raise ValueError(f"{seconds} s are not of whole slots of {slot} s")
    return whole
