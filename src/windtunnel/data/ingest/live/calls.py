"""What workers and clients may say to a master, and what it is set to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from windtunnel.base import schema
from windtunnel.data.ingest.policy import ScalingBounds


def _name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 80 and value.isprintable()


_marks = schema.each(
    lambda item: isinstance(item, list) and len(item) == 2 and all(map(schema.integer, item))
)
_packed = schema.fields(done=schema.text, next=_marks)
_client = {"client": _name, "key": _name, "epoch": schema.count}
_asked = schema.each(lambda item: isinstance(item, list) and len(item) == 4 and _name(item[0])
                     and all(map(schema.count, item[1:])))  # fmt: skip
_state = {"held": schema.each(schema.count), "steps": schema.count, "ready": schema.count, "dry": schema.flag,
          "reading": schema.each(schema.count)}  # fmt: skip
CALLS: schema.Table = {
    "register worker": schema.fields(name=_name, address=_name, process=schema.text),
    "register client": schema.fields(
        client=_name, key=_name, world=schema.count, resume=schema.maybe(_packed),
        again=schema.maybe(_packed), epoch=schema.maybe(schema.count),
    ),
    "heartbeat worker": schema.fields(
        name=_name, produced=schema.count, busy=schema.number, cpu=schema.number, open=schema.count,
        asked=_asked,
    ),
    "heartbeat client": schema.fields(
        **_client, **_state, stalled=schema.number, fill=schema.number, uses=schema.each(_name)
    ),
    "lease": schema.fields(**_client, **_state),
    "go": schema.fields(**_client, until=schema.count),
    "again": schema.fields(
        **_client, split=schema.count, worker=_name, error=schema.text, permanent=schema.flag
    ),
    "ack": schema.fields(**_client, marks=_marks),
    "leave": schema.fields(**_client),
    "snapshot": schema.anything,
}  # fmt: skip


@dataclass(frozen=True)
class MasterSettings:
    """``workers``: how many, 0: only those that others start; None: as many as trainers need, by ``scaling``.
    ``ends``, ``policy``: see `policy`. ``on_error``: fail, or skip. Times in seconds."""

    host: str = "127.0.0.1"
    port: int = 0
    workers: int | None = None
    scaling: ScalingBounds = field(default_factory=ScalingBounds)
    policy: str = "starvation"
    ends: str = "uneven"
    on_error: str = "fail"
    every: float = 0.25
    period: float = 1.0
    worker_lease: float = 3.0
    client_lease: float = 10.0
