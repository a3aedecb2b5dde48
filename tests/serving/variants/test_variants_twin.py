"""Hosts and queries that are not there: the same input has one outcome, and the policies' order holds."""

from __future__ import annotations

from collections import Counter

import numpy as np

from benchmarks.serving.variants.twin import pin
from windtunnel.serving.variants.model import Query
from windtunnel.serving.variants.policy import POLICIES, Decision, Observation
from windtunnel.serving.variants.policy.scale import LEGAL, Measured, Now
from windtunnel.serving.variants.policy.select import Chosen, VariantQuery
from windtunnel.serving.variants.twin import VariantsOutcome, VariantsSetting, cost, queries, simulate
from windtunnel.serving.variants.twin.catalogue import catalogue

VARIANTS = tuple(variant for variant in catalogue(6) if variant.hardware != "inferentia")
COUNTS = np.full(90, 12.0)


def outcome(policy: str, watch: list[tuple[Observation, Decision]] | None = None) -> VariantsOutcome:
    def decide(observation: Observation) -> Decision:
        decision = POLICIES[policy](observation)
        if watch is not None:
            watch.append((observation, decision))
        return decision

    asked = queries(COUNTS, VARIANTS, np.random.default_rng(3), bounds=(0.02, 0.3))
    own = policy in ("individual", "static")
    setting = VariantsSetting(VARIANTS, {"cpu": 1}, pinned=pin(VARIANTS, 0.02), own=own, warm=40.0)
    return simulate(asked, 90.0, setting, decide)


def test_one_input_has_one_outcome_every_query_an_end_and_states_their_order() -> None:
    watched: list[tuple[Observation, Decision]] = []
    first, second = outcome("cheapest", watched), outcome("cheapest")
    assert first == second
    running = first.came - len(first.latencies) - first.shed  # at the end, at most three
    assert 0 <= running <= first.late + 3
    kinds = Counter(type(observation).__name__ for observation, _ in watched)
    assert all(kinds[name] for name in ("VariantQuery", "Waiting", "Measured", "Load", "Fleet"))
    for observation, decision in watched:
        if isinstance(observation, Measured) and isinstance(decision, Now):
            assert decision.state == observation.state or decision.state in LEGAL[observation.state]
        if isinstance(observation, VariantQuery) and isinstance(decision, Chosen):
            assert cost(observation, decision)["shed" if decision.shed else "seconds"] > 0


def test_shared_variants_cost_a_part_of_hosts_of_ones_own() -> None:
    ours, theirs = outcome("cheapest"), outcome("individual")
    assert theirs.price > 1.5 * ours.price
    assert ours.late < 0.1 * ours.came


def test_who_asks_for_what_there_is_not_is_refused_and_counted() -> None:
    asked = iter([(50.0, Query(0, "alexnet", accuracy=0.99))])
    emulated = simulate(asked, 90.0, VariantsSetting(VARIANTS, {"cpu": 1}, warm=40.0), POLICIES["infaas"])
    assert (emulated.came, emulated.late, emulated.shed) == (1, 1, 0)
