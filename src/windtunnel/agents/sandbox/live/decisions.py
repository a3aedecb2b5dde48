"""Where the live world asks the policy: what was seen and what was answered are written down together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import overload

from windtunnel.agents.sandbox.policy import (
    CAPABILITY,
    POLICIES,
    BringBack,
    Decision,
    Keep,
    Look,
    Notice,
    Observation,
    PolicyName,
    Restore,
    SaveOrder,
)
from windtunnel.agents.sandbox.views import Event
from windtunnel.base.plain import from_plain
from windtunnel.store import eventlog


class Decider:
    """One policy, and the log of what it decides of sandbox ``box`` in ``folder`` (empty: of the host).

    A decision that cannot be logged (the disk is full, say) holds all the same: it is reported as an event of
    kind failed, and only a replay will miss it.
    """

    def __init__(self, box: str, policy: PolicyName, folder: Path, report: Callable[[Event], None]) -> None:
        self.policy = policy
        self._box, self._path, self._report = box, folder / eventlog.NAME, report

    @overload
    def decide(self, observation: Look) -> Keep: ...
    @overload
    def decide(self, observation: Notice) -> SaveOrder: ...
    @overload
    def decide(self, observation: Restore) -> BringBack: ...
    def decide(self, observation: Observation) -> Decision:
        decision = POLICIES[self.policy](observation)
        try:
            # opened each time: sandboxes are many, and a folder may be removed and made again
            log = eventlog.EventLog(self._path)
            try:
                log.decision(CAPABILITY, self.policy, observation, decision)
            finally:
                log.close()
        except eventlog.LogFailed as error:
            self._report(Event("failed", self._box, f"a decision is not in the log: {error}"))
        return decision

    def decided(self) -> list[tuple[Observation, Decision]]:
        """What was seen and decided so far, in order."""
        return [
            (from_plain(Observation, event["observation"]), from_plain(Decision, event["decision"]))
            for event in eventlog.decisions(self._path)
        ]
