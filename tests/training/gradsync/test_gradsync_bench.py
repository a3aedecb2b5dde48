"""The bench's sections yield the rows that its targets are judged by."""

from __future__ import annotations

import numpy as np
from made_up import profile

from benchmarks.training.gradsync import accuracy
from benchmarks.training.gradsync.live import CODECS, FUSED, HOOK, rows_of
from benchmarks.training.gradsync.strategy import exact, small_job, sweep
from windtunnel.training.gradsync.model import NONE
from windtunnel.training.gradsync.policy.plan import uniform_plan
from windtunnel.training.gradsync.policy.strategy import search


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


def test_a_plan_is_judged_by_the_slowest_rank_against_the_best_choice() -> None:
    names = ("plan", NONE, *CODECS, HOOK, f"{FUSED} by layers", f"{FUSED} in its best groups")

    def arm(place: int, slower: float, name: str) -> dict[str, object]:
        predicted = 2.0 if name == "plan" else 1.0 + place
        seconds = [predicted, predicted, 2.2 if name == "plan" else predicted]
        return {
            "seconds": [slower * one for one in seconds], "nbytes": 2**20 * slower, "groups": 1,
            "used": [name], "predicted": predicted,
        }  # fmt: skip

    told = [
        {
            "error": 0.1,
            "handing": 1e-3,
            "arms": {name: arm(place, slower, name) for place, name in enumerate(names)},
        }
        for slower in (0.5, 1.0)
    ]
    rows = {row.name.removeprefix("there: "): row for row in rows_of("there", told)}
    assert rows["plan"].measured == rows["plan"].emulated == 2000
    assert "2000 to 2200 ms, 1.00 MiB" in rows["plan"].note
    assert rows["plan / best single choice (none)"].met is True
    assert rows["plan / none"].measured == 1
    assert rows["mean error of predictions"].measured == 0
    assert rows["Spearman, predicted and measured"].met is True
    told[1]["arms"]["plan"]["seconds"] = [2.1] * 3  # type: ignore[index]
    rows = {row.name.removeprefix("there: "): row for row in rows_of("there", told)}
    assert rows["plan / best single choice (none)"].met is False
    assert rows["plan / none"].met is False
    assert 0 < rows["mean error of predictions"].measured < 1  # type: ignore[operator]


def test_a_uniform_plan_has_one_option_in_the_groups_that_are_asked_for() -> None:
    given = profile([1 << 10, 1 << 20, 1 << 20, 1 << 12], 1e8)
    alone, pairs, fused = (uniform_plan(given, "dragonn:0.01", most) for most in (1, 1 << 21, None))
    assert [len(group.tensors) for group in alone.groups] == [1] * 4
    assert [len(group.tensors) for group in pairs.groups] == [2, 2]
    for plan in (alone, pairs, fused):
        assert [one.codec for one in {group.option for group in plan.groups}] == ["dragonn:0.01"]
        assert fused.forecasts[0].seconds <= plan.forecasts[0].seconds * 1.01


def test_steps_to_a_loss_are_counted_until_it_is_reached() -> None:
    job = accuracy._images(0)
    steps, loss = accuracy._reached(job, 0, 20)
    assert accuracy._needed(job, "none", 0, loss, 30) == steps <= 20
    assert accuracy._needed(job, "none", 0, -1.0, 10) == 10
