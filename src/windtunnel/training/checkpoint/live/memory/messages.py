"""What ranks of a host call of its memory service (`base.rpc`), and what peers ask of it (`transfer`)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Protocol

from windtunnel.base.schema import Table, count, each, fields, flag, integer, maybe, text
from windtunnel.training.checkpoint.live.slot import CopyError
from windtunnel.training.checkpoint.model import Copy, Shard
from windtunnel.training.checkpoint.policy.placement import Kind
from windtunnel.training.checkpoint.settings import Mode

_CHECKS = {"str": text, "int": count, "bool": flag}
_SHARD = fields(**{field.name: _CHECKS[str(field.type)] for field in dataclasses.fields(Shard)})

FROM_PEER: Table = {
    "prepare": fields(generation=count, shard=text, world=count, capacity=count, slots=count),
    "layout": fields(generation=count, digest=text),
    "layout?": fields(digest=text),
    "put": fields(
        generation=count,
        committed=integer,
        base=integer,
        keeps=each(integer),
        slots=count,
        capacity=count,
        shard=_SHARD,
    ),
    "get": fields(shard=text, step=integer, world=maybe(count)),
}
"""Every request of a peer with its fields: what is not in here is refused (`base.schema`)."""


class StaleGeneration(Exception):
    """The service knows a newer membership than this rank, which will hear of it, too."""


ERRORS = (StaleGeneration, CopyError)
"""What a rank may get beside a `UserError`."""


@dataclass(frozen=True)
class Caller:
    """Who calls: a rank of the job as it was in ``generation``."""

    rank: int
    generation: int


@dataclass(frozen=True)
class Pace:
    """In mode "idle" only what windows leave room for is sent. ``chunk``: bytes of the largest chunk (one
    sub-buffer of the staging memory). ``bandwidth``: bytes/s; None: as fast as it goes, and in mode idle as
    measured. ``startup``: seconds that each chunk costs beside."""

    mode: Mode = "concurrent"
    chunk: int = 4 << 20
    bandwidth: float | None = None
    startup: float = 0.0


@dataclass(frozen=True)
class Reservation:
    """Slots for shards of ``nbytes`` bytes that have the layout ``digest``: ``slots`` of each, here and with
    those who hold their ``copies`` (the one here counted). ``kind``, ``domains``: as in `placement.place`."""

    digest: str
    nbytes: dict[str, int]
    slots: int
    copies: int
    kind: Kind
    domains: tuple[str, ...]
    pace: Pace


@dataclass(frozen=True)
class Reserved:
    """The files of each shard's slots, and the memory that all takes, in words."""

    paths: dict[str, list[str]]
    needs: str


@dataclass(frozen=True)
class Welcome:
    """The file with the newest committed step, and what peers want to see that one knows."""

    board: str
    secret: str
    tls: tuple[str, ...]


class Ranks(Protocol):
    """A call raises StaleGeneration where the service is in another generation than the caller."""

    def hello(self, caller: Caller) -> Welcome: ...

    def reserve(self, caller: Caller, reservation: Reservation, layout: bytes) -> Reserved: ...

    def saved(self, caller: Caller, shard: str, slot: int, step: int, replicate: bool) -> int: ...

    def restored(self, caller: Caller, step: int, course: int) -> None: ...

    def wait(self, caller: Caller, step: int, seconds: float) -> bool: ...

    def window(self, caller: Caller, until: float) -> None: ...

    def persist(self, caller: Caller, step: int, url: str, keep: int) -> None: ...

    def copies(self) -> list[Copy]: ...

    def locate(self, shard: str, step: int, world: int | None, place: int | None) -> str:
        """The file of a copy at this host (``place`` None: this one), or the address of its holder."""

    def layout(self, digest: str) -> bytes: ...

    def addresses(self) -> list[str]:
        """Of all hosts' services."""

    def traffic(self) -> list[tuple[int, int, int]]:
        """By step: bytes that were sent, and how many of them within windows."""
