"""The bench's sections yield the rows that its targets are judged by."""

from __future__ import annotations

import numpy as np

from windtunnel.training.gradsync.bench.strategy import small_job, sweep
from windtunnel.training.gradsync.policy.strategy import exact, search


def test_the_search_is_held_against_the_best_of_all_choices() -> None:
    random = np.random.default_rng(5)
    for _ in range(10):
        numels, costs = small_job(random)
        assert len(numels) == len(costs.options)
        best = costs.iteration(exact(costs))
        starts = [np.full(len(numels), option) for option in range(int(costs.options.min()))]
        found = costs.iteration(search(costs, numels, starts))
        swept = costs.iteration(sweep(costs, numels))
        drawn = costs.iteration(random.integers(0, costs.options))
        assert best <= min(found, swept, drawn) * (1 + 1e-12)
        assert found <= min(map(costs.iteration, starts))
