"""Variants on hosts that are not there: load that comes as in a trace, hosts that are rented by the hour."""

from __future__ import annotations

from windtunnel.serving.variants.policy import Decision, Observation
from windtunnel.serving.variants.policy.select import NOT_LOADED, Chosen, VariantQuery
from windtunnel.serving.variants.twin.world import VariantsOutcome, VariantsSetting, queries, simulate

__all__ = ["VariantsOutcome", "VariantsSetting", "cost", "queries", "simulate"]


def cost(observation: Observation, decision: Decision) -> dict[str, float]:
    """``seconds`` until a query is answered by the profile of who was chosen, and its ``price``; ``shed``: 1
    for one that is; {} for what answers no query."""
    if not (isinstance(observation, VariantQuery) and isinstance(decision, Chosen)):
        return {}
    if decision.shed:
        return {"shed": 1.0}
    chosen = next(
        candidate for candidate in observation.candidates if candidate.variant.name == decision.variant
    )
    waits = [replicas.wait for replicas in chosen.replicas if replicas.host == decision.host]
    begins = min(waits) if waits else chosen.variant.load + NOT_LOADED
    items = observation.query.items
    return {"seconds": begins + chosen.variant.latency(items), "price": chosen.variant.cost * items}
