"""The controller of a multicast: it plans, tells every rack its rules, and plans anew when a rack is lost.

A rack that is lost (killed, hung up, out of disk) takes its transmitter along: another of its group relays
for it, and what went missing meanwhile is asked for. The others get the file; who did not is told. Lost are
all racks that only lost ones feed, and everything when the source is.
"""

from __future__ import annotations

import hashlib
import secrets
import select
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from windtunnel.base.errors import HostError, UserError
from windtunnel.network.multicast.live.racks import Message, Racks
from windtunnel.network.multicast.policy import MulticastRequest, Rounds, SplitterFabric, decide, rules
from windtunnel.store.eventlog import EventLog

_ENDED = "rack {}: its process has ended"


@dataclass
class MulticastReport:
    """``seconds``: until the last rack had all; ``racks``: what each that has it has counted; ``lost``: the
    others, and why."""

    nbytes: int
    seconds: float = 0.0
    racks: dict[int, Message] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)

    def total(self, name: str) -> int:
        return sum(int(rack.get(name, 0)) for rack in self.racks.values())


def send(
    racks: Racks, file: Path, source: int = 0, *, out: Path | None = None, loss: float = 0.0, seed: int = 0,
    log: Path | None = None, deadline: float = 600.0,
) -> MulticastReport:  # fmt: skip
    """Send ``file`` from a rack to all others, into ``out``/rack-N where one is given, else into memory.

    Raises:
        UserError: the file cannot be read, or there is no such rack.
        HostError: the source is lost, or a rack is cut off from it.
    """
    try:
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        size = file.stat().st_size
    except OSError as error:
        raise UserError(f"{file}: cannot be read ({error.strerror}), accepted is a readable file") from None
    events = EventLog(log) if log is not None else None
    planned_lost = set(racks.lost)  # when it was planned last
    rounds = _planned(racks, source, events)
    message: Message = {
        "op": "take", "p": racks.shuffle.p, "token": secrets.randbits(64), "size": size, "digest": digest,
        "source": source, "file": str(file.resolve()), "out": str(out.resolve()) if out else "", "loss": loss,
        "rate": racks.rate, "seed": seed, "log": str(log) if log else "",
    }  # fmt: skip
    for rack, own in _rules(racks, rounds).items():
        racks.tell(rack, message | own)
    sent, ready, began, last = MulticastReport(size), set[int](), 0.0, time.monotonic() + deadline
    waiting = select.poll()
    for rack, control in enumerate(racks.controls):
        if rack not in racks.lost:
            waiting.register(control.fileno(), select.POLLIN)
    of = {control.fileno(): rack for rack, control in enumerate(racks.controls)}
    try:
        while len(sent.racks) + len(racks.lost) < racks.shuffle.racks - 1:
            if time.monotonic() > last:
                late = sorted(set(of.values()) - set(sent.racks) - racks.lost - {source})
                raise HostError(f"racks {', '.join(map(str, late))} do not have it after {deadline:g} s")
            for fd, _ in waiting.poll(1000):
                rack, response = of[fd], racks.hear(of[fd])
                if response is None or response["op"] == "failed":
                    waiting.unregister(fd)
                    racks.lost.add(rack)
                    sent.lost[rack] = response["why"] if response else _ENDED.format(rack)
                elif response["op"] == "ready":
                    ready.add(rack)
                elif response["same"]:
                    sent.racks[rack] = response
                else:
                    raise HostError(
                        f"rack {rack} has something else than was sent: its digest is not {digest}"
                    )
            for rack in racks.lost:
                sent.lost.setdefault(rack, _ENDED.format(rack))
                sent.racks.pop(rack, None)
            if source in racks.lost:
                raise HostError(f"the source is lost: {sent.lost[source]}")
            if racks.lost != planned_lost:
                planned_lost = set(racks.lost)
                for rack, own in _rules(racks, _planned(racks, source, events)).items():
                    racks.tell(rack, {"op": "rules"} | own)
            if not began and ready | racks.lost >= set(of.values()):
                began = time.monotonic()
                racks.tell(source, {"op": "go"})
    finally:
        for rack in of.values():
            racks.tell(rack, {"op": "end"})
    for rack in set(of.values()) - racks.lost:
        while (response := racks.hear(rack)) is not None and response["op"] != "ended":
            pass
        sent.racks[rack] = response or {}
    sent.seconds = max((rack.get("at", began) for rack in sent.racks.values()), default=began) - began
    return sent


def _planned(racks: Racks, source: int, events: EventLog | None) -> Rounds:
    gone = sorted(racks.lost)
    members = tuple(rack for rack in range(racks.shuffle.racks) if rack not in (source, *gone))
    fabric = SplitterFabric(
        racks.shuffle.p, racks.shuffle.k, (MulticastRequest(source, members),), tuple(gone)
    )
    try:
        rounds = decide(fabric)
    except UserError as error:
        if not gone:
            raise
        raise HostError(f"racks {', '.join(map(str, gone))} are lost: {error}") from None
    if events is not None:
        events.decision("network.multicast", "packed", fabric, rounds)
    return rounds


def _rules(racks: Racks, rounds: Rounds) -> dict[int, dict[str, Any]]:
    """What each rack is told."""
    ((tree,),) = rounds.rounds
    hops = {rack: hop for rack, _, hop in tree.listeners}
    return {
        rack: {"feeder": own.feeder, "hop": hops.get(rack, 0), "relay": own.relay, "gone": sorted(racks.lost)}
        for rack, (own,) in rules([tree]).items()
    }
