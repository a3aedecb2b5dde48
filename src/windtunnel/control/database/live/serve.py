"""The scheduler: assigns what waits to who is free, and fences workers that do not answer.

Each turn is a few transactions and nothing is kept between them, so that several schedulers may run, and one
that is killed leaves nothing behind. What fails (a policy, the disk, the server) is said, and tried again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from windtunnel.base.errors import UserError, WindtunnelError
from windtunnel.control.database.handlers import GROUP
from windtunnel.control.database.live.control import Control
from windtunnel.control.database.policy import POLICIES
from windtunnel.store.eventlog import EventLog

NAME = "control.database"
TURN = 1.0
"""Seconds between two looks at leases, and at tasks that become due."""


def serve(
    control: Control, stop: threading.Event, *, policy: str = "least", log: EventLog | None = None,
    say: Callable[[str], object] = lambda words: None,
) -> None:  # fmt: skip
    """Schedule by ``policy`` until ``stop``; decisions and what came of them go to ``log``, troubles to
    ``say``.

    Raises:
        UserError: there is no such policy.
    """
    if policy not in POLICIES:
        raise UserError(f"`policy` is {policy!r}, accepted are {', '.join(POLICIES)}")
    last = ""
    while not stop.is_set():
        try:
            with contextlib.closing(control.listen("scheduler")) as listener:
                while not stop.is_set():
                    for name in control.run("expire"):
                        say(f"worker {name} has left or was lost")
                    assign(control, policy, log)
                    last = ""
                    listener.wait(TURN, stop)
        except WindtunnelError as error:
            if str(error) != last:  # a trouble that stays is said once
                say(last := str(error))
            stop.wait(TURN)


def assign(control: Control, policy: str, log: EventLog | None = None) -> int:
    """Have the policy place all that it can: how many tasks were assigned.

    Raises:
        PolicyError: the policy failed; what it had placed before stays.
    """
    total = 0
    while placement := control.run("schedule", policy=policy):
        total += len(placement.assigned)
        if log is not None and placement.assigned:
            log.decision(NAME, policy, placement.observation, placement.decision)
            log.append("effect", capability=NAME, assigned=placement.assigned)
        if not placement.assigned or len(placement.observation.tasks) < GROUP:
            break  # all that waits was seen
    return total
