"""The loop: read the queue and what entities sent, ask the policy, give windows that hold a few turns.

It only reads of the interface: no queue, filter or address is changed. When it dies, however it does, what it
gave ends within `HOLDS`, and the kernel takes back the congestion control and what makes connections use it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from windtunnel.base.errors import UserError
from windtunnel.linux import network, queues
from windtunnel.network.hostrate.live import native
from windtunnel.network.hostrate.policy import POLICIES, Decision, WindowShare
from windtunnel.network.hostrate.policy.meter import WindowMeter
from windtunnel.network.hostrate.spec import HostrateSpec
from windtunnel.store.eventlog import EventLog

CAPABILITY = "network.hostrate"
HOLDS, TURNS = 0.05, 10
"""Seconds, and turns, that a window holds at least."""
TOLD = 0.2
"""Decisions are logged when the window changed by more than this part of it."""


class WindowEnforcer(Protocol):
    """Who counts what entities send, and holds them back."""

    def counts(self) -> tuple[native.Array, native.Array]: ...
    def give(self, shares: tuple[WindowShare, ...], round_: int, holds: float) -> list[list[int]]:
        """Lets the shares hold for ``holds`` seconds; what is then in force for each entity, as it holds."""
        ...


def run(
    device: str, spec: HostrateSpec, *, policy: str = "weights", log: Path | None = None,
    stop: threading.Event | None = None, ready: Callable[[str], object] = lambda _: None,
) -> None:  # fmt: skip
    """Hold back new connections of the entities until ``stop``. ``ready`` is called with the name of the
    congestion control once they have it; whoever sets that on a socket of his takes part as well.

    Raises:
        UserError: there is no such interface, or it has no queue; a cgroup that is not there.
        LinuxError: the kernel lacks something or refused; the interface went.
        LogFailed: the log cannot be written.
    """
    if reason := network.missing():
        raise UserError(
            f"network hostrate: {reason.replace('network namespaces', 'a congestion control in BPF')};"
            " accepted without it are own sockets, by windtunnel.network.hostrate.live.own"
        )
    senders = native.Senders(spec)
    try:
        control(device, spec, senders, policy=policy, log=log, stop=stop, ready=lambda: ready(senders.name))
    finally:
        senders.close()


def control(
    device: str, spec: HostrateSpec, holder: WindowEnforcer, *, policy: str = "weights",
    log: Path | None = None, stop: threading.Event | None = None, ready: Callable[[], object] = lambda: None,
) -> None:  # fmt: skip
    """The loop over any ``holder``. Raises as `run` does."""
    decide, meter, stop = (
        POLICIES[policy],
        WindowMeter(spec.settings, spec.weights),
        stop or threading.Event(),
    )
    queue = queues.Backlog(device)
    events = EventLog(log) if log is not None else None
    decision: Decision | None = None
    try:
        kind, _ = queue.read()
        if kind == "noqueue":
            raise UserError(
                f"{device} has no queue; accepted is an interface with one, such as tbf or pfifo_fast"
            )
        ready()
        while not stop.wait(spec.period):
            backlog = queue.read()[1] / (spec.packet + 14)
            observation = meter.look(time.monotonic(), backlog, *holder.counts())
            latest = decide(observation)
            meter.took(latest)
            clamps = holder.give(latest.shares, meter.round, max(HOLDS, TURNS * spec.period))
            if events is not None and _differs(latest, decision):
                events.decision(CAPABILITY, policy, observation, latest)
                events.append("effect", clamps=clamps)
                decision = latest
    finally:
        queue.close()
        if events is not None:
            events.close()


def _differs(new: Decision, decision: Decision | None) -> bool:
    if decision is None or [share.free for share in new.shares] != [share.free for share in decision.shares]:
        return True
    return abs(new.total - decision.total) > TOLD * decision.total
