"""Layers, stages, templates and pipelines as plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerProfile:
    """What one layer costs for one microbatch on one device.

    ``forward``, ``backward``: seconds. ``state_bytes``: all that training keeps of it (parameters, gradients,
    optimizer). ``activation_bytes``: kept for each microbatch in flight.
    """

    name: str
    forward: float
    backward: float
    state_bytes: float = 0.0
    activation_bytes: float = 0.0


@dataclass(frozen=True)
class Stage:
    """Layers ``first`` .. ``last - 1``; ``time``: seconds a microbatch."""

    first: int
    last: int
    time: float


@dataclass(frozen=True)
class Template:
    """How to cut the model over hosts, a stage for each.

    ``time``: seconds for 4 microbatches a stage (Oobleck, section 4.2).
    """

    stages: tuple[Stage, ...]
    time: float

    @property
    def hosts(self) -> int:
        return len(self.stages)


@dataclass(frozen=True)
class TemplateSet:
    """Templates for ``n0`` .. ``n0 + len(templates) - 1`` hosts, in this order.

    ``failures``: hosts that may be lost at once with a copy of every layer left (f).
    """

    n0: int
    failures: int
    templates: tuple[Template, ...]

    def of(self, hosts: int) -> Template:
        """The template for ``hosts`` hosts.

        Raises:
            KeyError: there is none.
        """
        if not self.n0 <= hosts < self.n0 + len(self.templates):
            raise KeyError(hosts)
        return self.templates[hosts - self.n0]


@dataclass(frozen=True)
class Layout:
    """What runs: each pipeline's hosts (ids, in the order of its template), and its microbatches a
    step."""

    pipelines: tuple[tuple[int, ...], ...]
    microbatches: tuple[int, ...]


@dataclass(frozen=True)
class Transfer:
    """A layer's state goes from one host to another (ids); ``nbytes`` of it."""

    layer: int
    source: int
    target: int
    nbytes: float


@dataclass(frozen=True)
class Reconfiguration:
    """What follows from a change of the hosts.

    ``how``: "simple", "borrow", "merge", "join", "search", "compose" (at the start) or
    "none". ``transfers``: layers to copy. ``lost``:
    layers of which no copy is left (then only a checkpoint helps).
    """

    layout: Layout
    how: str
    transfers: tuple[Transfer, ...] = ()
    lost: tuple[int, ...] = ()
