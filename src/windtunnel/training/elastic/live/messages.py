"""Every message of the control plane with its fields: what is not in here is not heard (`base.schema`).

What the values of an agreement, the result of a rank and the further fields of an event are is the program's
affair; all else is checked before anybody acts on it.
"""

from __future__ import annotations

from typing import Any

from windtunnel.base.schema import (
    Check,
    Table,
    anything,
    count,
    each,
    fields,
    flag,
    integer,
    maybe,
    number,
    numbered,
    positive,
    text,
)
from windtunnel.training.elastic.policy.checkpoints import FAILED, WANTED

HOST = fields(id=count, address=text, memory=text, domain=text)
MEMBERSHIP = fields(
    generation=count,
    epoch=count,
    hosts=each(HOST, least=1),
    per_host=lambda value: count(value) and value > 0,
    store=text,
    cause=text,
    restart_all=flag,
)
POST = fields(generation=count, key=text, values=numbered(anything))


def _event(kind: Check) -> Check:
    about = fields(kind=kind, t=maybe(number), generation=maybe(count))
    needs = {"grouped": "rank", "step": "step", WANTED: "step", FAILED: "step"}

    def passes(message: Any) -> bool:
        if not about(message) or "self" in message:
            return False
        needed = needs.get(message.get("kind") or message["op"])
        return needed is None or count(message.get(needed))

    return passes


FROM_AGENT: Table = {
    "hello": fields(
        host=maybe(count),
        address=text,
        memory=text,
        domain=maybe(text),
        pid=count,
        generation=maybe(count),
        epoch=maybe(count),
        workers=maybe(numbered(maybe(count))),
        posts=maybe(each(POST)),
    ),
    "beat": anything,
    "post": POST,
    "ask": fields(key=text),
    "event": _event(text),
    "worker": fields(
        rank=count,
        generation=count,
        pid=maybe(count),
        what=text,
        status=maybe(integer),
        signal=maybe(count),
        error=maybe(text),
    ),
    "suspect": fields(rank=count, generation=count, error=maybe(text)),
    "reached": fields(round=count, silent=each(count)),
    "done": fields(rank=count, generation=count),
    "kill-launcher": anything,
}
FROM_SUPERVISOR: Table = {
    "welcome": fields(epoch=maybe(count), host=count, beat=maybe(positive)),
    "membership": fields(epoch=maybe(count), membership=MEMBERSHIP, place=maybe(count), mine=each(count)),
    "decided": fields(epoch=maybe(count), generation=count, key=text, values=numbered(anything)),
    "answer": fields(epoch=maybe(count), key=text, values=maybe(numbered(anything))),
    "look": fields(epoch=maybe(count), round=count, hosts=numbered(text), within=positive),
    "fence": fields(epoch=maybe(count), rank=count, pid=maybe(count)),
    "end": fields(epoch=maybe(count), status=count),
    "beat": fields(epoch=maybe(count)),
}
FROM_WORKER: Table = {
    "hello": anything,
    "beat": fields(step=maybe(integer)),
    "post": fields(generation=count, key=text, rank=maybe(count)),
    "ask": fields(generation=count, key=text),
    "event": _event(maybe(text)),
    "step": _event(maybe(text)),
    "suspect": fields(generation=count, rank=maybe(count), error=maybe(text)),
    "done": fields(generation=maybe(count), rank=maybe(count)),
    "failed": fields(error=text),
    "inject": fields(action=text, shard=maybe(text), rate=maybe(number)),
}
