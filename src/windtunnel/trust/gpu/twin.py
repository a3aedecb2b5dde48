"""The emulated device: the same rules on the same table, and what decisions cost. `schemes` prices jobs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from windtunnel.trust.gpu.policy import Decision, Observation, Request, Table, decide
from windtunnel.trust.gpu.schemes import SCHEMES

PAGE = 1 << 16
"""Bytes of a page."""
ERASE = 1e12
"""Bytes/s of writing zeros: inference, half of what an H100's memory takes."""


def decisions(size: int, requests: Iterable[Request]) -> Iterator[Decision]:
    """What a device of ``size`` pages decides, request after request, from power on."""
    table = Table(size)
    for request in requests:
        decision = decide(Observation(table, request))
        table = decision.table
        yield decision


def cost(observation: Observation, decision: Decision) -> dict[str, float]:
    """Seconds that a decision costs on an H100: what is read or written is copied by the scheme h100-cc, what
    is scrubbed is written; and pages refused."""
    first, end = observation.request.pages
    copied = (end - first) * PAGE if observation.request.kind in ("read", "write") else 0
    erased = sum(after - before for before, after in decision.scrub) * PAGE
    seconds = SCHEMES["h100-cc"].copy(copied) if copied and not decision.refusal else 0.0
    return {"seconds": seconds + erased / ERASE, "refused": float(bool(decision.refusal))}
