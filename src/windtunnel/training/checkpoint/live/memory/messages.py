"""Every request to a memory service with its fields: what is not in here is refused (`base.schema`)."""

from __future__ import annotations

import dataclasses
from typing import Any

from windtunnel.base.schema import (
    Table,
    anything,
    count,
    each,
    fields,
    flag,
    integer,
    maybe,
    number,
    text,
)
from windtunnel.training.checkpoint.model import Shard

_CHECKS = {"str": text, "int": count, "bool": flag}
_SHARD = fields(**{field.name: _CHECKS[str(field.type)] for field in dataclasses.fields(Shard)})


def _until(value: Any) -> bool:
    return number(value) or value == float("inf")


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
    "list": anything,
}
_RANK = {"rank": count, "generation": count}
FROM_RANK: Table = {
    **FROM_PEER,
    "hello": fields(**_RANK),
    "reserve": fields(slots=count, copies=count, placement=fields(kind=maybe(text)), layout=text, **_RANK),
    "saved": fields(shard=text, slot=count, step=integer, replicate=flag, **_RANK),
    "wait": fields(step=integer, seconds=number, **_RANK),
    "restored": fields(step=integer, course=count, **_RANK),
    "window": fields(until=_until, **_RANK),
    "locate": fields(shard=text, step=integer, world=maybe(count), place=maybe(count), **_RANK),
    "health": anything,
    "traffic": anything,
    "persist": fields(step=integer, url=text, keep=count, **_RANK),
    "places": anything,
}
