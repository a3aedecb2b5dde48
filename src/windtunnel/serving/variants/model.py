"""What is known of variants and of the hosts that hold them: plain data, no clock.

A *task* (such as telling digits) is done by several *architectures*; a *variant* is one architecture in one
framework, precision, number of threads and greatest batch, and its profile says what it takes. A *replica* is
a loaded variant (live: a process). Times are seconds, memory is bytes, prices are of one currency.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

State = Literal["inactive", "active", "overloaded", "interfered"]
CPU = "cpu"


@dataclass(frozen=True, slots=True)
class Variant:
    """``load``: seconds until a replica can answer; n items take ``slope·n + intercept``; ``memory`` of a
    replica; ``price``: of one replica for a second."""

    name: str
    architecture: str
    task: str
    framework: str = "onnxruntime"
    hardware: str = CPU
    precision: str = "fp32"
    threads: int = 1
    batch: int = 1
    load: float = 0.0
    slope: float = 0.0
    intercept: float = 0.0
    memory: int = 0
    accuracy: float = 0.0
    price: float = 0.0

    def latency(self, items: float = 1) -> float:
        """Seconds of one batch of so many items."""
        return self.slope * items + self.intercept

    @property
    def rate(self) -> float:
        """Items a second of one replica in full batches."""
        return self.batch / self.latency(self.batch)

    @property
    def cost(self) -> float:
        """Of one item, in full batches."""
        return self.price / self.rate


@dataclass(frozen=True, slots=True)
class Query:
    """``name``: of a task, an architecture or a variant; how accurate, within which seconds, at which cost an
    item; ``background``: whenever there is time."""

    id: int
    name: str
    items: int = 1
    accuracy: float = 0.0
    latency: float = inf
    cost: float = inf
    background: bool = False


@dataclass(frozen=True, slots=True)
class HostReplicas:
    """Replicas of a variant on a host: items a second that are asked of them, and seconds until a request
    that comes now begins (a replica that loads is one that is waited for), in a batch with ``ahead`` items
    that wait already; ``slow``: what a batch will take, in times of the profile, by those of late and by what
    runs on the host; ``background``: requests of background jobs that wait there."""

    host: str
    state: State
    replicas: int
    rate: float = 0.0
    wait: float = 0.0
    slow: float = 1.0
    background: int = 0
    ahead: int = 0

    def answers(self, variant: Variant, items: int) -> float:
        """Seconds until a request that comes now is answered, with those that come until its batch begins."""
        batch = min(variant.batch, self.ahead + items + self.rate * self.wait)
        return self.wait + variant.latency(batch) * self.slow


@dataclass(frozen=True, slots=True)
class VariantCandidate:
    """A variant and who holds it; nobody: it is inactive."""

    variant: Variant
    replicas: tuple[HostReplicas, ...] = ()


@dataclass(frozen=True, slots=True)
class ReplicaHost:
    """``utilisation``: the part of its ``cores`` that was busy lately; ``free``: bytes; ``owner``: the
    architecture that alone may use it, where hosts are not shared."""

    name: str
    hardware: str
    cores: int
    free: int
    utilisation: float = 0.0
    owner: str = ""
