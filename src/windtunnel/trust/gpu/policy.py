"""Who owns a GPU, page by page: the rules that HIX puts into new instructions and checks on every access.

A broker (HIX: the GPU enclave) is bound to the device once; a user claims the device through it, one at a
time, and each claim is an epoch. Pages are registered for the owner, and each access names owner, epoch and
pages. What was written is dirty until it is scrubbed, and a dirty device is not released. A user's end resets
the device; the broker's end leaves it owned, until a cold reset has taken all that was in it.

Source: Jang et al., HIX (ASPLOS 2019): GPU enclave control structure (one owner), trusted GPU MMIO
registration (owner and page of each access), termination. Its instructions are functions here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

Range = tuple[int, int]
"""Pages, from the first to before the last."""
Kind = Literal["bind", "claim", "register", "read", "write", "scrub", "release", "reset"]


@dataclass(frozen=True)
class Table:
    """What the device knows. ``size``: its pages. ``broker``: who is bound, "" before. ``owner``: the user's
    name, "" where there is none; ``epoch``: of his claim, only ever raised. ``pages``: registered for him;
    ``dirty``: written and not scrubbed since. Both sorted, and no two ranges touch."""

    size: int
    broker: str = ""
    owner: str = ""
    epoch: int = 0
    pages: tuple[Range, ...] = ()
    dirty: tuple[Range, ...] = ()


@dataclass(frozen=True)
class Request:
    """``broker``: whose session it comes by; ``who``: the user for whom. ``epoch``: of his claim (of a reset:
    of the claim whose user has ended); ``pages``: to register, read or write."""

    kind: Kind
    broker: str
    who: str = ""
    epoch: int = 0
    pages: Range = (0, 0)


@dataclass(frozen=True)
class Observation:
    """What the device knows, and what is requested of it."""

    table: Table
    request: Request


@dataclass(frozen=True)
class Decision:
    """``table``: from now on. ``refusal``: bound, unbound, owned, foreign, stale, page or unscrubbed; ""
    where it is allowed. ``scrub``: pages that become zeros before anything else is done."""

    table: Table
    refusal: str = ""
    scrub: tuple[Range, ...] = ()
    reason: str = field(default="", compare=False)


def decide(observation: Observation) -> Decision:
    """Everything belongs to one owner, and nothing of him is left behind."""
    table, request = observation.table, observation.request

    def refuse(refusal: str, reason: str) -> Decision:
        return Decision(table, refusal, reason=reason)

    if request.kind == "bind":
        if table.broker:
            return refuse("bound", f"{table.broker} is bound until a cold reset")
        return Decision(replace(table, broker=request.broker))
    if request.broker != table.broker:
        return refuse("unbound", f"{request.broker} is not the broker of the device")
    if request.kind == "claim":
        if table.owner:
            return refuse("owned", f"{table.owner} owns the device in epoch {table.epoch}")
        return Decision(replace(table, owner=request.who, epoch=table.epoch + 1))
    if request.epoch != table.epoch or not table.owner:
        return refuse("stale", f"epoch {request.epoch} is over, or has not begun")
    if request.kind == "reset":
        return Decision(replace(table, owner="", pages=(), dirty=()), scrub=table.dirty)
    if request.who != table.owner:
        return refuse("foreign", f"{table.owner} owns the device, not {request.who}")
    if request.kind == "scrub":
        return Decision(replace(table, dirty=()), scrub=table.dirty)
    if request.kind == "release":
        if table.dirty:
            return refuse("unscrubbed", f"{len(table.dirty)} ranges of pages are not scrubbed")
        return Decision(replace(table, owner="", pages=()))
    first, end = request.pages
    if not 0 <= first < end <= table.size:
        return refuse("page", f"pages {first} to {end} are not of the device's {table.size}")
    if request.kind == "register":
        if any(first < after and end > before for before, after in table.pages):
            return refuse("page", f"some of pages {first} to {end} are registered")
        return Decision(replace(table, pages=merged([*table.pages, request.pages])))
    if not any(before <= first and end <= after for before, after in table.pages):
        return refuse("page", f"pages {first} to {end} are not registered for {request.who}")
    dirty = merged([*table.dirty, request.pages]) if request.kind == "write" else table.dirty
    return Decision(replace(table, dirty=dirty))


POLICIES: Mapping[str, Callable[[Observation], Decision]] = {"exclusive": decide}


def merged(ranges: Sequence[Range]) -> tuple[Range, ...]:
    """The same pages, sorted, in as few ranges as there can be."""
    joined: list[Range] = []
    for first, end in sorted(ranges):
        if joined and first <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((first, end))
    return tuple(joined)
