"""Federated learning: real groups that average over sockets, and drawn observations of all schemes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from parity import Event, Mutant, Parity, drawn
from windtunnel.base.plain import from_plain
from windtunnel.edge.federated import policy


def _federated(folder: Path) -> Sequence[Path]:
    from support.peers import rounds

    return [rounds(folder, 4), drawn(folder, policy.CAPABILITY, _observations(np.random.default_rng(5)))]


def _observations(draw: np.random.Generator) -> Iterator[tuple[str, Any]]:
    for number in range(60):
        count = int(draw.integers(4, 14))
        devices = tuple(
            policy.EdgeDevice(
                f"d{place}", float(draw.integers(1, 5)) * 1e6, int(draw.integers(1, 90)), place % 4
            )
            for place in range(count)
        )
        settings = policy.Settings(
            policy.SCHEMES[number % 4], int(draw.integers(0, 2)) * (count - 1), int(draw.integers(0, 4)),
            policy.GROUPINGS[number % 3], policy.EXCHANGES[number // 4 % 2],
        )  # fmt: skip
        yield "federated", policy.Observation(number, 7, devices, 10.0 ** draw.integers(3, 8), 1e7, settings)


def federated_effects(events: Sequence[Event]) -> list[str]:
    """Each group of a decision came to one mean, with the samples of all that are in it."""
    wrong, groups, samples = list[str](), list[list[str]](), dict[str, int]()
    for event in events:
        if event["kind"] == "decision":
            wrong += [f"{group} came to no mean" for group in groups]
            groups = [] if "drawn" in event else [list(group) for group in event["decision"]["groups"]]
            samples = {device["name"]: device["samples"] for device in event["observation"]["devices"]}
        elif event["kind"] == "effect":
            names, total = event["names"], float(sum(samples[name] for name in event["names"]))
            if names not in groups:
                wrong.append(f"{names} is no group that was decided")
            else:
                groups.remove(names)
            if event["totals"] != [total] * len(names):
                wrong.append(f"{names} has {event['totals']}, its devices {total}")
    return wrong + [f"{group} came to no mean" for group in groups]


def federated_twin(events: Sequence[Event]) -> list[tuple[Any, Any]]:
    """The twin's rounds with the devices, settings and seed of the live ones."""
    from windtunnel.edge.federated import data, models, twin

    pairs = []
    for event in events:
        if event["kind"] != "decision" or "drawn" in event:
            continue
        live = from_plain(policy.Observation, event["observation"])
        parts = np.split(
            np.arange(sum(device.samples for device in live.devices)),
            np.cumsum([device.samples for device in live.devices])[:-1],
        )
        labels = np.concatenate([np.full(device.samples, device.label) for device in live.devices])
        samples = data.Samples(np.zeros((len(labels), 4)), labels, 4)
        federation = data.Federation("recorded", samples, samples, parts)
        rounds = twin.rounds(
            federation, models.model("softmax", 4, 4), live.settings, models.LocalTraining(epochs=1),
            links=[device.link for device in live.devices], server_link=live.server_link,
            bytes_each=live.model / 20, count=live.round + 1, seed=live.seed,
        )  # fmt: skip
        decision = [decision for observation, decision, _ in rounds if observation.round == live.round]
        pairs.append((from_plain(policy.Decision, event["decision"]), decision[0] if decision else None))
    return pairs


PARITY = {
    "edge.federated": Parity(
        _federated, federated_effects, federated_twin,
        beyond=(
            "return RoundCost(sent + settings.latency, 0.0, 2 * (devices // 2) * model)",
            "return RoundCost(over_server, carried, carried)",
        ),
    )
}  # fmt: skip
MUTANTS = [
    Mutant(
        "edge.federated", "edge/federated/policy.py",
        "max(group, key=lambda device: device.link)", "min(group, key=lambda device: device.link)",
    ),
    Mutant(
        "edge.federated", "edge/federated/policy.py",
        "parts = [order[first::groups] for first in range(groups)]",
        "parts = [list(part) for part in (order[: count // groups], order[count // groups :])]",
    ),
    Mutant(
        "edge.federated", "edge/federated/live/exchange.py",
        "part[:] = part + arrived if transfer.adds else arrived", "part[:] = arrived", live=True,
    ),
]  # fmt: skip
