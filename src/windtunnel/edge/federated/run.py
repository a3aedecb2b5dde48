"""Schemes beside each other on the same samples, devices and seeds, kept as a run; and what a round costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from windtunnel.base.errors import UserError
from windtunnel.edge.federated.data import federation
from windtunnel.edge.federated.models import LocalTraining, model
from windtunnel.edge.federated.policy import CAPABILITY, SCHEMES, RoundCost, Settings, best_groups, cost
from windtunnel.edge.federated.twin import EmulatedRound, rounds
from windtunnel.store.eventlog import NAME, EventLog
from windtunnel.store.runs import Store

TAIL = 10
"""Rounds at the end whose mean accuracy is a scheme's: it swings from round to round."""


@dataclass(frozen=True)
class SchemeOutcome:
    """One scheme and seed. ``accuracy``: mean of the last `TAIL` rounds, 0 to 1. All is emulated but the
    learning, which is computed."""

    scheme: str
    seed: int
    groups: int
    accuracy: float
    rounds: list[EmulatedRound]


@dataclass(frozen=True)
class FederatedPlan:
    """A round of one scheme by formula, ``pays``: whether it is shorter than FedAvg's."""

    scheme: str
    groups: int
    cost: RoundCost
    pays: bool


def plan(
    *, devices: int, model_bytes: float, server_link: float, device_link: float, groups: int = 0,
    settings: Settings | None = None,
) -> list[FederatedPlan]:  # fmt: skip
    """What a round of each scheme costs where all devices take part; ``groups`` 0: as many as are best.

    Raises:
        UserError: a number is out of its range.
    """
    if devices < 2 or not 0 <= groups <= devices:
        raise UserError(
            f"`devices` {devices}, `groups` {groups}: accepted are two devices or more, and no more groups"
        )
    base = settings or Settings()
    plans, fixed = list[FederatedPlan](), {"fedavg": devices, "gossip": (devices + 1) // 2}
    for scheme in SCHEMES:
        own = replace(base, scheme=scheme)
        count = fixed.get(scheme) or groups
        count = count or best_groups(own, devices, model_bytes, server_link, device_link)
        price = cost(own, devices, count, model_bytes, server_link, device_link)
        plans.append(
            FederatedPlan(scheme, count, price, bool(plans) and price.seconds < plans[0].cost.seconds)
        )
    return plans


def run(
    *, data: str, split: str, schemes: Sequence[str], model_name: str = "softmax", devices: int, groups: int,
    sample: int = 0, count: int = 60, seeds: int = 1, server_link: float, device_link: float,
    bytes_each: float = 4.0, training: LocalTraining | None = None, settings: Settings | None = None,
    progress: Callable[[str, float], None] = lambda *_: None,
) -> tuple[str, list[SchemeOutcome]]:  # fmt: skip
    """The run's id, and each scheme with each seed. ``sample``: devices that train in a round, 0 for all.

    Raises:
        UserError: an option is out of its range, or the samples cannot be had.
    """
    if count < 1 or seeds < 1:
        raise UserError(f"`rounds` {count}, `seeds` {seeds}; accepted are whole numbers from 1 up")
    base, training = settings or Settings(), training or LocalTraining()
    requests = [replace(base, scheme=scheme, groups=groups, devices=sample) for scheme in schemes]
    inputs = {"data": data, "split": split, "schemes": [*schemes], "model": model_name, "devices": devices}
    outcomes = list[SchemeOutcome]()
    store_run = Store.open().begin(CAPABILITY, inputs, 0)
    with store_run.failing(), closing(EventLog(store_run.directory / NAME)) as log:
        for seed in range(seeds):
            samples = federation(data, split, devices, np.random.default_rng((seed, 2)))
            shape = model(model_name, samples.train.x.shape[1], samples.train.classes)
            for own in requests:
                progress(f"{own.scheme}, seed {seed}", len(outcomes) / (seeds * len(requests)))
                completed, number = [], 0
                for observation, decision, done in rounds(
                    samples, shape, own, training, links=[device_link] * devices, server_link=server_link,
                    bytes_each=bytes_each, count=count, seed=seed,
                ):  # fmt: skip
                    log.decision(CAPABILITY, "federated", observation, decision)
                    completed.append(done)
                    number = len(decision.groups)
                accuracy = float(np.mean([done.accuracy for done in completed[-TAIL:]]))
                outcomes.append(SchemeOutcome(own.scheme, seed, number, accuracy, completed))
        store_run.finish({"outcomes": [summary(outcome) for outcome in outcomes]})
    return store_run.id, outcomes


def summary(outcome: SchemeOutcome) -> dict[str, Any]:
    """One outcome with the figures of its last round."""
    last = {name: value for name, value in vars(outcome.rounds[-1]).items() if name != "vector"}
    return vars(outcome) | {"rounds": len(outcome.rounds), "last": last}
