"""In which state a variant is on a host, looked at once a second.

The constants are those of INFaaS's published code (stanford-mast/INFaaS, MIT), which folds *overloaded*
(asked for more than it can do: load more) and *interfered* (slow though it is not: something else is on the
host) into one flag; here they are two, since what helps differs.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from windtunnel.serving.variants.model import CPU, State, Variant

LEGAL: dict[State, tuple[State, ...]] = {
    "inactive": ("active",),
    "active": ("overloaded", "interfered", "inactive"),
    "overloaded": ("active", "inactive"),
    "interfered": ("active", "overloaded", "inactive"),
}


@dataclass(frozen=True, slots=True)
class Bounds:
    """Flagged beyond: ``latency`` times the profile's while ``rate`` times what one request after another
    makes, ``queue`` seconds of work; no more flagged below ``leave`` times the profile's."""

    latency: float
    rate: float
    queue: float
    leave: float


def bounds(variant: Variant, replicas: int) -> Bounds:
    """Those of the hardware; a replica that is alone on a CPU is given more time."""
    if variant.hardware == CPU:
        return Bounds(4.0, 1.0, 1.1, 1.5) if replicas == 1 else Bounds(2.5, 0.5, 0.8, 1.5)
    short = variant.latency() < 0.010
    return Bounds(min(5.0, 0.015 / variant.latency()) if short else 1.5, 0.3, 0.8, 1.25)


@dataclass(frozen=True, slots=True)
class Measured:
    """A second of a variant on a host. ``latency``: mean seconds of its batches, of ``items`` each;
    ``rate``: items a second that came; ``outstanding``: items that wait or run."""

    variant: Variant
    state: State
    replicas: int
    rate: float = 0.0
    latency: float = 0.0
    items: float = 1.0
    outstanding: int = 0


@dataclass(frozen=True, slots=True)
class Now:
    """The state from now on."""

    state: State
    reason: str = field(default="", compare=False)


def state_of(seen: Measured) -> Now:
    """By the bounds; one who leaves a flag is active for a second before it may get another."""
    variant, was = seen.variant, seen.state
    if seen.replicas == 0:
        return Now("inactive", "no replica is loaded")
    if was == "inactive":
        return Now("active", "a replica is loaded")
    bound, single = bounds(variant, seen.replicas), 1.0 / variant.latency()
    queue = seen.outstanding / (bound.queue * seen.replicas * single)
    slow = seen.latency / (variant.slope * seen.items + variant.intercept)
    if queue > 1.0:
        return Now("overloaded", f"{seen.outstanding} items wait for {seen.replicas} replicas")
    if was == "overloaded":
        return Now("active", "the queue is short again")
    if was == "interfered":
        over = slow < bound.leave
        return Now("active" if over else "interfered", f"batches take {slow:.2g} of their profile")
    if slow > bound.latency and seen.rate > bound.rate * single:
        return Now("interfered", f"batches take {slow:.2g} of their profile, and few wait")
    return Now("active", "within its profile")
