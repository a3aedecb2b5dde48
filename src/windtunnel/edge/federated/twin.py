"""Federated learning of thousands of devices in one process: the models are real, the links are not.

What a device learns is computed, for all devices of a round at once (`models`); groups are the policy's
(`decide`); what a round takes is a replay of its transfers as fluid flows over the server's link and each
device's own, full duplex. A group goes through its phases by itself: the model comes down, is passed on in a
chain, all train, the group's schedule runs step by step, its mean goes up; the round ends with the last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from windtunnel.edge.federated.data import Federation
from windtunnel.edge.federated.models import FederatedModel, Floats, LocalTraining, train
from windtunnel.edge.federated.policy import Decision, EdgeDevice, Observation, Settings, decide, schedule
from windtunnel.engines.flows import World

SERVER = -1
Sending = tuple[int, int, float]
"""Sender, receiver (places of devices, or `SERVER`) and bytes."""


@dataclass(frozen=True)
class EmulatedRound:
    """``seconds``: emulated, since the first round began. Bytes: all that the server's link, and all links
    together, carried since then. ``vector``: (size,), the model at its end."""

    number: int
    accuracy: float
    seconds: float
    server_bytes: float
    all_bytes: float
    vector: Floats = field(repr=False)


def rounds(
    federation: Federation, model: FederatedModel, settings: Settings, training: LocalTraining, *,
    links: Sequence[float], server_link: float, bytes_each: float, count: int, seed: int,
) -> Iterator[tuple[Observation, Decision, EmulatedRound]]:  # fmt: skip
    """``count`` rounds of ``settings`` from one initial model. ``links``: of each device, bytes/s.
    ``bytes_each``: of a parameter on a link."""
    random = np.random.default_rng((seed, 1))
    parts, labels = federation.parts, federation.train.y
    devices = tuple(
        EdgeDevice(f"device-{place}", link, len(part), int(np.bincount(labels[part]).argmax()))
        for place, (part, link) in enumerate(zip(parts, links, strict=True))
    )
    places = {device.name: place for place, device in enumerate(devices)}
    vector = model.initial(np.random.default_rng((seed, 0)))
    own = np.tile(vector, (len(devices), 1)) if settings.scheme == "gossip" else None
    seconds, carried = 0.0, Counter[str]()
    size = bytes_each * model.size
    for number in range(1, count + 1):
        observation = Observation(number, seed, devices, size, server_link, settings)
        decision = decide(observation)
        groups = [[places[name] for name in group] for group in decision.groups]
        members = np.concatenate(groups)
        begin = np.tile(vector, (len(members), 1)) if own is None else own[members]
        trained = train(model, begin, federation, members, training, random=random)
        weights = np.array(
            [len(parts[place]) if settings.weighting == "samples" else 1 for place in members], float
        )
        ends = np.cumsum([len(group) for group in groups])[:-1]
        means = [
            np.average(vectors, axis=0, weights=counted)
            for vectors, counted in zip(np.split(trained, ends), np.split(weights, ends), strict=True)
        ]
        if own is None:
            total = [part.sum() for part in np.split(weights, ends)]
            vector = np.average(means, axis=0, weights=total)
        else:
            for group, mean in zip(groups, means, strict=True):
                own[group] = mean
            vector = own.mean(axis=0)
        took, moved = replay(groups, settings, size, links, server_link, training.compute)
        seconds += took
        carried.update(moved)
        accuracy = model.accuracy(vector, federation.test.x, federation.test.y)
        yield (
            observation,
            decision,
            EmulatedRound(number, accuracy, seconds, carried["server"], carried["all"], vector),
        )


def cost(observation: Observation, decision: Decision) -> dict[str, float]:
    """What a round of these groups takes, without training: seconds, and bytes."""
    places = {device.name: place for place, device in enumerate(observation.devices)}
    groups = [[places[name] for name in group] for group in decision.groups]
    links = [device.link for device in observation.devices]
    took, moved = replay(groups, observation.settings, observation.model, links, observation.server_link)
    return {"seconds": took, "server bytes": moved["server"], "all bytes": moved["all"]}


def replay(
    groups: Sequence[Sequence[int]], settings: Settings, size: float, links: Sequence[float],
    server_link: float, compute: float = 0.0,
) -> tuple[float, dict[str, float]]:  # fmt: skip
    """Seconds of a round, and the bytes that the ``server``'s link and ``all`` links carried in it."""
    used = {place: number for number, place in enumerate(place for group in groups for place in group)}
    rates = [link for place in used for link in (links[place], links[place])]
    world = World([server_link, server_link, *rates])
    carried = {"server": 0.0, "all": 0.0}
    waiting: dict[int, int] = {}  # the group of a flow
    left = [0] * len(groups)
    phases = [_phases(group, settings, size) for group in groups]

    def begin(group: int) -> None:
        phase = next(phases[group], None)
        if phase is None:
            return
        flows = []
        for sender, receiver, amount in phase:
            out = 0 if sender == SERVER else 2 + 2 * used[sender]
            into = 1 if receiver == SERVER else 3 + 2 * used[receiver]
            flows.append(world.start(amount, [out, into], after=settings.latency))
            carried["all"] += amount
            carried["server"] += amount if SERVER in (sender, receiver) else 0.0
        if not phase:
            flows.append(world.start(compute, [], cap=1.0))
        waiting.update(dict.fromkeys(flows, group))
        left[group] = len(flows)

    for group in range(len(groups)):
        begin(group)
    while waiting:
        for flow in world.advance():
            group = waiting.pop(flow)
            left[group] -= 1
            if not left[group]:
                begin(group)
    return world.now, carried


def _phases(group: Sequence[int], settings: Settings, size: float) -> Iterator[list[Sending]]:
    """What a group does, one after the other: the transfers of one time; an empty list is the training."""
    leader, *members = group
    gossip, star = settings.scheme == "gossip", settings.scheme == "hierarchical"
    if not gossip:
        yield [(SERVER, leader, size)]
        if members:
            senders = [leader] * len(members) if star else group
            yield [(sender, member, size) for sender, member in zip(senders, members, strict=False)]
    yield []
    if members and star:
        yield [(member, leader, size) for member in members]
    elif members:
        chunks, steps = schedule("doubling" if gossip else settings.exchange, len(group))
        for step in steps:
            yield [(group[transfer.sender], group[transfer.receiver], size / chunks) for transfer in step]
    if not gossip:
        yield [(leader, SERVER, size)]
