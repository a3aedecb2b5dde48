"""What the log tells a supervisor that takes up a run: the state in which the one before it was."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from windtunnel.training.elastic.model import MemberHost, Membership
from windtunnel.training.elastic.policy.agreements import Values


@dataclass
class Past:
    """The state after the last event. ``hosts``: those that were not lost, with their agents' process ids.
    ``lost``: ranks of the present generation whose process is gone; ``suspects``: those that suspect their
    peers, with their errors. ``store``: the last store's event.
    """

    begun: bool = False
    generation: int = 0
    membership: Membership | None = None
    hosts: dict[int, tuple[MemberHost, int]] = field(default_factory=dict)
    gone: set[int] = field(default_factory=set)
    next_id: int = 0
    coming: int = 0
    own_failures: int = 0
    lost: dict[int, str] = field(default_factory=dict)
    suspects: dict[int, str] = field(default_factory=dict)
    grouped: set[int] = field(default_factory=set)
    done: dict[int, Any] = field(default_factory=dict)
    durable: dict[str, Values] = field(default_factory=dict)
    store: dict[str, Any] | None = None


def past(events: list[dict[str, Any]]) -> Past:
    """The state after ``events``.

    A run that is finished leaves nothing but its numbers: the next one in the same folder begins anew, with
    higher generations and other ids.
    """
    state = Past()
    for event in events:
        _apply(state, event)
        if event["kind"] == "finished":
            gone = state.gone | set(state.hosts)
            state = Past(generation=state.generation, gone=gone, next_id=state.next_id, store=state.store)
    return state


def _apply(state: Past, event: dict[str, Any]) -> None:
    kind = event["kind"]
    if kind == "started":
        state.begun = True
    elif kind == "host.joined":
        host = MemberHost(event["host"], event["address"], event["memory"], event["domain"])
        state.hosts[host.id] = (host, event["pid"])
        state.next_id = max(state.next_id, host.id + 1)
        state.coming = max(0, state.coming - 1)
    elif kind == "ordered":
        state.coming += event["count"]
    elif kind == "decided":
        state.membership = Membership.of(event["membership"])
        state.generation = state.membership.generation
        state.own_failures = event["own_failures"]
        for forgotten in (state.lost, state.suspects, state.grouped, state.done):
            forgotten.clear()
    elif kind == "agreed":
        state.durable[event["key"]] = {int(rank): value for rank, value in event["values"].items()}
    elif kind == "store":
        state.store = event
    elif kind == "lost" and event["what"] == "host":
        state.hosts.pop(event["host"], None)
        state.gone.add(event["host"])
    elif event.get("generation") == state.generation and state.membership is not None:
        if kind == "lost" and event["evidence"] != "suspect":
            state.lost[event["rank"]] = event["error"]
        elif kind == "suspected":
            state.suspects[event["rank"]] = event["error"]
        elif kind == "grouped":
            state.grouped.add(event["rank"])
        elif kind == "done":
            state.done[event["rank"]] = event["result"]
