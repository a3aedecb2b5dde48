"""The supervisor of an emulated job: the `Core` that decides live, told of the hosts that come and go.

Its clock is its own: between two changes lies longer than any deadline, so that each is a change by itself.
Core costs as much as it has hosts, and treats all alike that go on as they are. So of a large job it is given
a part, with sizes that are smaller by the others: some hosts at first, and more, from its beginning, where a
change strikes all of these.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from windtunnel.training.elastic.policy.core import Core
from windtunnel.training.elastic.policy.handlers import closed, hello, message
from windtunnel.training.elastic.policy.rules import Decision, Observation, Rules
from windtunnel.training.elastic.policy.state import Deadlines, LoggedState, SupervisorSettings

Recorder = Callable[[Observation, Decision], None]
What = Literal["lose", "break", "come"]
FIRST = 4
"""Places of a job that its supervisor is given at first."""
BETWEEN = 3600.0
"""Seconds between two changes, of the supervisor's clock."""
SETTINGS = SupervisorSettings(
    0, 1, lease=math.inf, settle=0.0, deadlines=Deadlines(grace=0.0, hosts=math.inf)
)
INSTANT = 1e-3


class TwinSupervisor:
    """Numbers of hosts are those of a trace: a replacement has that of the host that it comes for. In a job
    that keeps its size number n holds place n.

    ``missing``: numbers without a host. ``record``: called with all that the policy is asked and answers,
    once more where a larger part of the job is given to it.
    """

    def __init__(self, hosts: int, spares: int, rules: Rules, record: Recorder | None = None) -> None:
        self.missing: set[int] = set()
        self._hosts, self._spares, self._rules = hosts, spares, rules
        self._effects = _Effects(record)
        self._history: list[tuple[What, Sequence[int]]] = []
        self._begin(min(hosts, FIRST))

    def lose(self, numbers: Sequence[int]) -> bool:
        """These are gone. False: the job waits for hosts."""
        self.missing.update(numbers)
        return self._change("lose", numbers)

    def break_off(self, numbers: Sequence[int]) -> bool:
        """Processes of these ended, the hosts are there. False: the job waits for hosts."""
        return self._change("break", numbers)

    def come(self, number: int) -> bool:
        """A host for ``number`` has come. False: the job waits for more."""
        self.missing.discard(number)
        return self._change("come", (number,))

    def _begin(self, places: int) -> None:
        """A job of so many places, with its first hosts."""
        self._now, self._next = 0.0, 0
        rules = replace(self._rules, minimum=self._rules.minimum - (self._hosts - places))
        self._core = Core(replace(SETTINGS, places=places), rules, self._effects, 1, LoggedState(), self._now)
        for _ in range(places + self._spares):
            self._join()
        self._core.tick(self._now)

    def _join(self) -> None:
        hello(self._core, self._next, {"address": "", "memory": "", "pid": self._next}, self._now)
        self._next += 1

    def _change(self, what: What, numbers: Sequence[int]) -> bool:
        self._history.append((what, numbers))
        while not self._tell(what, numbers):
            self._begin(min(self._hosts, 2 * self._core.settings.places))
            for before in self._history[:-1]:
                self._tell(*before)
        return self._core.waiting_since is None

    def _tell(self, what: What, numbers: Sequence[int]) -> bool:
        """Tell the supervisor of a change. False: it has too few hosts for that."""
        core = self._core
        self._now += BETWEEN
        if what == "come":
            self._join()
        else:
            struck = self._struck(numbers)
            if core.settings.places < self._hosts and not set(core.places()) - {None, *struck}:
                return False
            for host in struck:
                if what == "lose":
                    closed(core, host, self._now)
                elif (place := core.place_of(core.hosts.live[host])) is not None:
                    ended = {"op": "worker", "what": "ended", "rank": place, "signal": 9}
                    message(core, host, {**ended, "generation": core.generation}, self._now)
        if self._rules.shrinks:  # it orders nothing, but what it has lost is being replaced
            there = sum(host.link is not None for host in core.hosts.live.values())
            core.coming = max(0, core.settings.places + self._spares - there)
        self._now += INSTANT
        core.tick(self._now)
        return True

    def _struck(self, numbers: Sequence[int]) -> list[int]:
        """The ids of the hosts with these numbers; of a part, or of a job that shrinks, of as many others."""
        places = self._core.places()
        there = [host for host in places if host is not None]
        there += [host for host in self._core.hosts.live if host not in there]
        if len(places) < self._hosts or self._rules.shrinks:
            return there[: len(numbers)]
        own = {number: host for number in numbers if (host := places[number]) is not None}
        others = (host for host in reversed(there) if host not in own.values())
        return [own[number] if number in own else next(others) for number in numbers]


class _Effects:
    """Nobody hears what a supervisor says; ``record`` is called with what it decides."""

    def __init__(self, record: Recorder | None) -> None:
        self._record = record

    def decision(self, generation: int, policy: str, observation: Observation, decision: Decision) -> None:
        if self._record is not None:
            self._record(observation, decision)

    def send(self, *_: Any, **__: Any) -> None:
        """Nobody hears."""

    drop = record = order = kill_launcher = send
