"""The inner loop of the planner: the best cut for one bottleneck time, over all numbers of stages at once.

For the slowest stage's time ``w`` the published formula splits into one term for each stage (``j``: stages
from this one to the end, itself included; ``N``: microbatches):

    before the slowest:  w_i          the slowest itself:  (N + 1 - j) w          after it:  2 w_i

so two tables, filled from the end of the model, hold the optimum: ``after[j, r, p]``, the least cost of
layers ``p``.. on the last ``r`` devices in ``j`` stages that are all faster than ``w``; and ``whole[j, r,
p]``, the same with the slowest among them and none slower before it, without the term ``N w``. Only ``N w``
depends on the number of stages, so one pass serves all of them, and the memory of a stage (which holds a
microbatch for each stage from it to the end) depends on ``j`` alone. Everything is in integers: equal stages
are equal, and ties are seen.

Plain Python that Numba can compile: small searches run as they are, large ones compiled. All tables are
flat; entry ``(j, r, p)`` lies at ``(j * (devices + 1) + r) * (layers + 1) + p``.
"""

from __future__ import annotations

from typing import Any

INFINITE = 1 << 62

# A table of integers: a list, or an array of int64 when compiled.
Table = Any


def fill(
    w: int,
    layers: int,
    most: int,
    devices: int,
    per_host: int,
    in_flight: int,
    power: Table,
    time: Table,
    state: Table,
    activation: Table,
    memory: int,
    after: Table,
    whole: Table,
) -> None:
    """Fill both tables for the slowest time ``w``, for up to ``most`` stages.

    ``power``: devices that a stage may have. ``time[d * (layers + 1) + p]``: what the first ``p`` layers
    take on ``power[d]`` devices. ``state``, ``activation``: bytes of the first ``p`` layers. ``memory``: of
    one device. ``in_flight``: no stage holds more microbatches than that.
    """
    width = layers + 1
    for i in range((devices + 1) * width):
        after[i] = INFINITE
        whole[i] = INFINITE
    after[layers] = 0
    for j in range(1, most + 1):
        held = min(j, in_flight)
        for r in range(devices + 1):
            here = (j * (devices + 1) + r) * width
            for p in range(width):
                after[here + p] = INFINITE
                whole[here + p] = INFINITE
            if r < j or r > j * per_host:
                continue
            room = (r - 1) % per_host + 1
            for d in range(len(power)):
                if power[d] > room:
                    break
                there = ((j - 1) * (devices + 1) + r - power[d]) * width
                limit = memory * power[d]
                for p in range(layers - j + 1):
                    best = after[here + p]
                    best_whole = whole[here + p]
                    for q in range(p + 1, layers - j + 2):
                        took = time[d * width + q] - time[d * width + p]
                        if took > w:
                            break
                        if state[q] - state[p] + (activation[q] - activation[p]) * held > limit:
                            break
                        if took < w:
                            if after[there + q] + 2 * took < best:
                                best = after[there + q] + 2 * took
                        elif after[there + q] < INFINITE and after[there + q] + (1 - j) * w < best_whole:
                            best_whole = after[there + q] + (1 - j) * w
                        if whole[there + q] < INFINITE and whole[there + q] + took < best_whole:
                            best_whole = whole[there + q] + took
                    after[here + p] = best
                    whole[here + p] = best_whole
