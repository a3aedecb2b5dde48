"""Groups of devices in threads of this process, over real sockets of the loopback."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.ports import free_port
from windtunnel.base.keys import Keys
from windtunnel.edge.federated.live.exchange import ExchangeGroup, ExchangePeer, Mean
from windtunnel.edge.federated.policy import CAPABILITY, EdgeDevice, Observation, Settings, decide
from windtunnel.store.eventlog import EventLog

KEYS = Keys.new()
Vector = NDArray[np.float64]


def group(names: Sequence[str], exchange: str = "ring", **more: Any) -> ExchangeGroup:
    """With an address of its own for each."""
    members = tuple((name, f"127.0.0.1:{free_port()}") for name in names)
    return ExchangeGroup("a round", members, exchange, 1 << 24, **{"patience": 60.0, "stall": 20.0, **more})


def averaged(
    own: ExchangeGroup, vectors: Sequence[Vector], weights: Sequence[float], *,
    before: Callable[[int, ExchangePeer], None] = lambda *_: None, keys: Keys = KEYS,
) -> list[Mean | Exception]:  # fmt: skip
    """What each device of the group comes to; ``before(place, peer)`` is called when it has the model."""

    def device(place: int) -> Mean | Exception:
        try:
            with ExchangePeer(own, place, keys) as peer:
                model = peer.model(vectors[0].tobytes() if place == 0 else None)
                assert model == vectors[0].tobytes()
                before(place, peer)
                return peer.mean(vectors[place], weights[place])
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(vectors)) as pool:
        return list(pool.map(device, range(len(vectors))))


def rounds(folder: Path, count: int) -> Path:
    """The log of some rounds of nine devices in two groups: what was decided, and who was in which mean."""
    devices = tuple(EdgeDevice(f"device-{place}", 1e6 + place, 1 << place, place % 3) for place in range(9))
    with closing(EventLog(folder / "federated.jsonl")) as log:
        for number in range(1, count + 1):
            settings = Settings(groups=2, devices=8, exchange=("ring", "doubling")[number % 2])
            observation = Observation(number, 1, devices, 800.0, 1e6, settings)
            decision = decide(observation)
            log.decision(CAPABILITY, "federated", observation, decision)
            samples = {device.name: device.samples for device in devices}
            for names in decision.groups:
                weights = [samples[name] for name in names]
                means = averaged(group(names, settings.exchange), [np.ones(100)] * len(names), weights)
                totals = [mean.total for mean in means if isinstance(mean, Mean)]
                log.append("effect", names=list(names), totals=totals)
    return log.path
