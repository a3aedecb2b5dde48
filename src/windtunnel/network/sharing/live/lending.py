"""What some leave, lent to others, every few milliseconds: the policy on what the kernel counts.

A loop reads what every entity sent and what was dropped, asks the policy, and writes rates that hold for a
few turns of the loop. When it dies the rates that it lent end by themselves, and every entity is back at its
own. When others set other rates meanwhile it goes on with those; when shares or interface are gone it ends.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from pathlib import Path

import numpy as np

from windtunnel.linux import LinuxError
from windtunnel.linux.system import locked
from windtunnel.network.sharing.live import native
from windtunnel.network.sharing.live.attachment import TURN, Attachment
from windtunnel.network.sharing.policy import POLICIES, Decision, Observation, SharingTenant
from windtunnel.network.sharing.policy.meter import PERIOD, WINDOW, RateMeter
from windtunnel.network.sharing.policy.units import rate_units
from windtunnel.store.eventlog import EventLog

HOLDS = 0.05
"""Seconds that lent rates hold at least: one late turn does not end them."""
TOLD = 0.02
"""Decisions are logged when a rate changed by more than this part of it."""
CAPABILITY = "network.sharing"


def looked(attachment: Attachment, meter: RateMeter, now: float) -> Observation:
    """What the kernel has counted by ``now``, without others where nothing holds them back."""
    states, names = native.read(attachment.maps, "states"), native.read(attachment.maps, "names")
    line = float(native.read(attachment.maps, "common")["line"][0])
    weighted = names["weight"] > 0
    rates = [None if math.isnan(rate) else float(rate) for rate in names["rate"][weighted]]
    entities = [
        SharingTenant(row["name"].decode(), float(row["weight"]), rate)
        for row, rate in zip(names[weighted], rates, strict=True)
    ]
    states = states[weighted]
    trouble = states["dropped"] + states["marked"]
    return meter.look(now, line, entities, states["passed"] + states["dropped"], trouble)


def lend(
    attachment: Attachment, *, policy: str = "lend", period: float = PERIOD, log: Path | None = None,
    stop: threading.Event | None = None,
) -> str:  # fmt: skip
    """Lend until ``stop`` or an end by others: why it ended, in words. ``log``: decisions that changed a
    rate.

    Raises:
        LinuxError: the interface is gone, or the kernel refused.
        LogFailed: the log cannot be written.
    """
    decide, meter, stop = POLICIES[policy], RateMeter(), stop or threading.Event()
    events = EventLog(log) if log is not None else None
    decision: Decision | None = None
    try:
        while not stop.wait(period):
            common = native.read(attachment.maps, "common")
            change = int(common["change"][0])
            if change == native.CLEARED:
                return f"the shares of {attachment.device} were cleared"
            _check_there(attachment)
            observation = looked(attachment, meter, time.monotonic())
            latest = decide(observation)
            if not _put(attachment, latest, change, period):
                continue
            if events is not None and _differs(latest, decision):
                events.decision(CAPABILITY, policy, observation, latest)
                allowed = native.read(attachment.maps, "allowed")
                events.append("effect", lent=allowed["lent"][allowed["rate"] > 0].tolist())
                decision = latest
        _end(attachment)
        return "stopped"
    finally:
        if events is not None:
            events.close()


def _put(attachment: Attachment, decision: Decision, change: int, period: float) -> bool:
    """Whether the rates were written: not when others have set other ones since they were read."""
    with locked(TURN):
        common = native.read(attachment.maps, "common")
        if int(common["change"][0]) != change:
            return False
        allowed = native.read(attachment.maps, "allowed")
        limited = np.flatnonzero(allowed["rate"])
        rates = np.array([rate_units(rate) for rate in decision.lent], "<u4")
        allowed["lent"][limited] = np.maximum(rates, allowed["rate"][limited])
        common["until"] = time.monotonic_ns() + int(1e9 * max(HOLDS, WINDOW * period))
        native.put(attachment.maps["allowed"], allowed)
        native.put(attachment.maps["common"], common)
        return True


def _end(attachment: Attachment) -> None:
    """What was lent ends now."""
    with locked(TURN):
        common = native.read(attachment.maps, "common")
        common["until"] = 0
        native.put(attachment.maps["common"], common)


def _check_there(attachment: Attachment) -> None:
    try:
        there = socket.if_nametoindex(attachment.device)
    except OSError:
        there = 0
    if there != attachment.index:
        raise LinuxError(f"the interface {attachment.device} is gone, and its shares with it")


def _differs(latest: Decision, decision: Decision | None) -> bool:
    if decision is None or len(decision.lent) != len(latest.lent):
        return True
    pairs = zip((*latest.own, *latest.lent), (*decision.own, *decision.lent), strict=True)
    return any(abs(new - old) > TOLD * old for new, old in pairs)
