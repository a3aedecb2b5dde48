"""The hosts of an emulated job, under the ids that a supervisor would give them, and what its policy says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from windtunnel.training.elastic.policy.rules import (
    Change,
    Decision,
    Fail,
    Form,
    Keep,
    Observation,
    Rules,
    Wait,
    after_change,
)


class Members:
    """Which host is at each place, which are spares, which are to come.

    A trace numbers the hosts that a job began with, and a replacement keeps the number. Ids are never used
    again. In a job that keeps its size number n stands for whoever holds place n; in one that shrinks places
    close up, and number n is the host that came for it.

    ``record``: called with all that the policy is asked and answers.
    """

    def __init__(
        self,
        hosts: int,
        spares: int,
        rules: Rules,
        record: Callable[[Observation, Decision], None] | None = None,
    ) -> None:
        self.hosts, self.rules, self.record = hosts, rules, record
        self.numbers: list[int | None] = list(range(hosts))
        self.places: list[int | None] = list(range(hosts))
        self.spares = list(range(hosts, hosts + spares))
        self.missing = 0  # numbers without a host; kept, since it is asked for at every step of a run
        self._coming = 0
        self._next = hosts + spares

    def lose(self, numbers: Sequence[int]) -> bool:
        """These are gone. False: the job waits for hosts."""
        for number in numbers:
            host = self.numbers[number]
            if host is not None:
                self.numbers[number] = None
                self.missing += 1
                if host in self.spares:
                    self.spares.remove(host)
                else:
                    self.places[number if not self.rules.shrinks else self.places.index(host)] = None
        return self._ask(())

    def break_off(self, numbers: Sequence[int]) -> bool:
        """Processes of these ended, the hosts are there. False: the job waits for hosts."""
        hosts = {self.numbers[number] for number in numbers} - {None}
        return self._ask([place for place, host in enumerate(self.places) if host in hosts])

    def come(self, number: int) -> bool:
        """A host for ``number`` has come. False: the job waits for more."""
        host, self._next = self._next, self._next + 1
        self._coming = max(0, self._coming - 1)
        self.spares.append(host)
        if self.rules.shrinks and self.numbers[number] is None:
            self.numbers[number] = host
            self.missing -= 1
        return self._ask(())

    def _ask(self, broken: Sequence[int]) -> bool:
        now = Change(
            rules=self.rules,
            wanted=self.hosts,
            places=tuple(self.places),
            broken=tuple(broken),
            spares=tuple(self.spares),
            # a job that shrinks orders nothing, but what it has lost is being replaced
            coming=self.missing if self.rules.shrinks else self._coming,
        )
        decision = after_change(now)
        if self.record is not None:
            self.record(now, decision)
        match decision:
            case Form():
                taken = set(decision.places)
                self.spares = [host for host in self.spares if host not in taken]
                self.places = list(decision.places)
                if not self.rules.shrinks:
                    self.numbers, self.missing = list(decision.places), 0
            case Wait():
                self._coming += decision.order
            case Keep() | Fail():
                pass
        return isinstance(decision, Form | Keep)
