"""Whether the network is the bottleneck, and what would lift it: a verdict over emulated what-ifs.

The scaling factor of a job is what one device takes for its part of an iteration over what it takes as one of
many: 1 where communication hides altogether. The network is the bottleneck of a job that is below its target
where an endlessly fast one would give back at least half of what is lost; else something else is (calls that
have a latency, links inside of hosts, computing that waits for others).

Source: Zhang et al., Is Network the Bottleneck of Distributed Training? (NetAI 2020), sections 2 and 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

TARGET = 0.9


@dataclass(frozen=True)
class Observation:
    """``bandwidth``: of a NIC, bytes/s, and the job's scaling factor on it. ``endless``: on a network without
    end. ``by_bandwidth``, ``by_compression``: pairs of a bandwidth (a ratio) and the scaling factor there,
    rising; the ratio divides what gradients send, and costs nothing. ``target``: of the scaling factor."""

    bandwidth: float
    scaling: float
    endless: float
    by_bandwidth: tuple[tuple[float, float], ...]
    by_compression: tuple[tuple[float, float], ...]
    target: float = TARGET


@dataclass(frozen=True)
class Decision:
    """``network``: it is the bottleneck. ``bandwidth``, ``compression``: the least of those that were tried
    which reaches the target, None where none does."""

    network: bool
    bandwidth: float | None
    compression: float | None
    reason: str = field(default="", compare=False)


def decide(observation: Observation) -> Decision:
    """The verdict, and the least remedy of each kind."""
    target = observation.target
    bandwidth = _least(observation.by_bandwidth, target)
    compression = _least(observation.by_compression, target)
    if observation.scaling >= target:
        return Decision(False, bandwidth, 1.0, f"the job scales to {observation.scaling:.1%} as it is")
    lost, regained = 1 - observation.scaling, observation.endless - observation.scaling
    if regained < lost / 2:
        return Decision(
            False, bandwidth, compression,
            f"the job scales to {observation.scaling:.1%}, and on an endlessly fast one to no more than "
            f"{observation.endless:.1%}",
        )  # fmt: skip
    return Decision(
        True, bandwidth, compression,
        f"the job scales to {observation.scaling:.1%}, and on an endlessly fast one to "
        f"{observation.endless:.1%}",
    )  # fmt: skip


def _least(pairs: tuple[tuple[float, float], ...], target: float) -> float | None:
    return min((value for value, scaling in pairs if scaling >= target), default=None)


POLICIES: Mapping[str, Callable[[Observation], Decision]] = {"bottleneck": decide}
