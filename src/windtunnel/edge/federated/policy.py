"""Who trains in a round, in which groups, how a group comes to its mean, and what that costs.

In federated learning the server's link is the bottleneck: FedAvg sends the model over it to each device, and
takes it back from each. FedP2P sends it to one device of a group, the *leader*; the group passes it on, each
device trains, the group averages among itself over its own links, and the leader alone sends the mean back.
With the same devices and weights one round gives the same model; the server carries ``devices / groups``
times less, and devices more.

A group's mean comes by a *schedule*: steps of transfers between its places, where what a transfer carries is
what its sender held before the step. Both kinds are exact sums for any size: a ring (reduce-scatter, then
all-gather, each device sends 2 (Q - 1) / Q models), and recursive doubling (log2 Q exchanges of a whole
model; where Q is no power of two the places beyond fold into others first).

Source: Chou et al., Efficient and Less Centralized Federated Learning (ECML-PKDD 2021, arXiv 2106.06627);
McMahan et al., FedAvg (AISTATS 2017); Liu et al., Client-Edge-Cloud Hierarchical FL (ICC 2020). The times are
of our own cost model: links are full duplex, and a group's slowest link holds all of its ring.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf

import numpy as np

from windtunnel.base.errors import UserError

CAPABILITY = "edge.federated"
SCHEMES = ("fedavg", "fedp2p", "hierarchical", "gossip")
GROUPINGS = ("random", "bandwidth", "labels")
EXCHANGES = ("ring", "doubling")
WEIGHTINGS = ("samples", "uniform")


@dataclass(frozen=True, slots=True)
class EdgeDevice:
    """``link``: bytes/s in either direction. ``samples``: that it trains on. ``label``: its most frequent."""

    name: str
    link: float
    samples: int = 1
    label: int = 0


@dataclass(frozen=True, slots=True)
class Settings:
    """``devices``: that train in a round, 0 for all. ``groups``: 0 for as many as make the round shortest.
    ``latency``: seconds of one transfer, whatever it carries. ``weighting``: what a device counts in a mean:
    its samples, or 1; it is the same for all schemes."""

    scheme: str = "fedp2p"
    devices: int = 0
    groups: int = 0
    grouping: str = "random"
    exchange: str = "ring"
    weighting: str = "samples"
    latency: float = 0.01

    def __post_init__(self) -> None:
        accepted = {
            "scheme": SCHEMES, "grouping": GROUPINGS, "exchange": EXCHANGES, "weighting": WEIGHTINGS,
        }  # fmt: skip
        for name, values in accepted.items():
            if getattr(self, name) not in values:
                raise UserError(f"`{name}` {getattr(self, name)!r}; accepted are {', '.join(values)}")
        if min(self.devices, self.groups) < 0 or not 0 <= self.latency < inf:
            raise UserError("`devices`, `groups` and `latency`: accepted are numbers from 0 up")


@dataclass(frozen=True, slots=True)
class Observation:
    """What a server knows before a round. ``model``: bytes; ``server_link``: bytes/s in either direction."""

    round: int
    seed: int
    devices: tuple[EdgeDevice, ...]
    model: float
    server_link: float
    settings: Settings


@dataclass(frozen=True, slots=True)
class Decision:
    """``groups``: names of devices, each group's leader first."""

    groups: tuple[tuple[str, ...], ...]


def decide(observation: Observation) -> Decision:
    """The devices of a round, drawn without replacement, in their groups.

    Raises:
        UserError: there are fewer devices than groups, or than a round asks for.
    """
    settings, devices = observation.settings, observation.devices
    count = settings.devices or len(devices)
    if not 0 < count <= len(devices):
        raise UserError(f"`devices` {count}: there are {len(devices)}")
    random = np.random.default_rng((observation.seed, observation.round))
    drawn = [devices[place] for place in sorted(random.choice(len(devices), count, replace=False))]
    if settings.scheme == "fedavg":
        return Decision(tuple((device.name,) for device in drawn))
    if settings.scheme == "gossip":
        groups = (count + 1) // 2
    else:
        slowest = min(device.link for device in drawn)
        groups = settings.groups or best_groups(
            settings, count, observation.model, observation.server_link, slowest
        )
    if groups > count:
        raise UserError(f"`groups` {groups}: {count} devices train in a round")
    order = [drawn[place] for place in random.permutation(count)]
    if settings.grouping == "labels":  # like devices go to different groups
        order.sort(key=lambda device: device.label)
        parts = [order[first::groups] for first in range(groups)]
    else:
        if settings.grouping == "bandwidth":  # a slow device holds its own kind back
            order.sort(key=lambda device: -device.link)
        parts = [[order[place] for place in part] for part in np.array_split(np.arange(count), groups)]
    return Decision(tuple(_led(part) for part in parts))


def _led(group: list[EdgeDevice]) -> tuple[str, ...]:
    leader = max(group, key=lambda device: device.link)
    return (leader.name, *(device.name for device in group if device is not leader))


POLICIES: Mapping[str, Callable[[Observation], Decision]] = {"federated": decide}


@dataclass(frozen=True, slots=True)
class VectorTransfer:
    """``chunk`` of the sender's vector to the receiver, who adds it to its own, or puts it in its place."""

    sender: int
    receiver: int
    chunk: int
    adds: bool


Schedule = tuple[tuple[VectorTransfer, ...], ...]


def schedule(exchange: str, size: int) -> tuple[int, Schedule]:
    """In how many chunks a vector is cut, and the steps after which each of ``size`` places has the sum."""
    return (size, _ring(size)) if exchange == "ring" else (1, _doubling(size))


def _ring(size: int) -> Schedule:
    return tuple(
        tuple(
            VectorTransfer(place, (place + 1) % size, (place + turn - step) % size, turn == 0)
            for place in range(size)
        )
        for turn in (0, 1)
        for step in range(size - 1)
    )


def _doubling(size: int) -> Schedule:
    power = 1 << (size.bit_length() - 1)
    beyond = range(size - power)
    steps = [tuple(VectorTransfer(power + place, place, 0, True) for place in beyond)]
    for bit in range(power.bit_length() - 1):
        steps.append(tuple(VectorTransfer(place, place ^ 1 << bit, 0, True) for place in range(power)))
    steps.append(tuple(VectorTransfer(place, power + place, 0, False) for place in beyond))
    return tuple(step for step in steps if step)


@dataclass(frozen=True, slots=True)
class RoundCost:
    """Of one round by formula: seconds without training, bytes over the server's link and over all links."""

    seconds: float
    server_bytes: float
    all_bytes: float


def cost(
    settings: Settings, devices: int, groups: int, model: float, server: float, device: float
) -> RoundCost:
    """What a round of ``devices`` in ``groups`` costs: a ``model`` in bytes, links in bytes/s, all of one
    speed. The server's link is shared by those that it sends to at one time."""
    size = -(-devices // groups) if settings.scheme in ("fedp2p", "hierarchical") else 1
    leaders = groups if size > 1 else devices
    sent = model / device
    over_server = 2 * (max(leaders * model / server, sent) + settings.latency)
    carried = 2 * leaders * model
    if settings.scheme == "gossip":
        return RoundCost(sent + settings.latency, 0.0, 2 * (devices // 2) * model)
    if size == 1:
        return RoundCost(over_server, carried, carried)
    members = devices - groups
    if settings.scheme == "hierarchical":  # the leader's own link carries all
        within = 2 * ((size - 1) * sent + settings.latency)
        return RoundCost(over_server + within, carried, carried + 2 * members * model)
    chunks, steps = schedule(settings.exchange, size)
    within = sent + settings.latency + len(steps) * (sent / chunks + settings.latency)
    moved = groups * sum(len(step) for step in steps) * model / chunks
    return RoundCost(over_server + within, carried, carried + members * model + moved)


def best_groups(settings: Settings, devices: int, model: float, server: float, device: float) -> int:
    """The number of groups whose round is shortest by `cost`; of equal ones the least."""
    numbers = range(1, max(1, devices // 2) + 1)
    return min(numbers, key=lambda groups: cost(settings, devices, groups, model, server, device).seconds)
