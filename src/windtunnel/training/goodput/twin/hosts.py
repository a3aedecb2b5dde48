"""The machines of an emulated job, and what the supervisor's policy says of them."""

from __future__ import annotations

from collections.abc import Sequence

from windtunnel.training.elastic.policy.membership import Policy, Snapshot


class Members:
    """Which place is held by a machine that lives; machine m holds place m unless a spare took it."""

    def __init__(self, machines: int, spares: int, policy: Policy) -> None:
        self.machines = machines
        self.policy = policy
        self.places: list[int | None] = list(range(machines))
        self.spares = [machines + index for index in range(spares)]
        self.missing = 0  # kept, since it is asked for at every step of a flight

    def lose(self, machines: Sequence[int]) -> None:
        for place in machines:
            self.missing += self.places[place] is not None
            self.places[place] = None

    def come(self, machine: int) -> None:
        """A machine for ``machine`` has come: into its place if that is free, else it is a spare."""
        if self.places[machine] is None:
            self.places[machine] = machine
            self.missing -= 1
        else:
            self.spares.append(self.machines + len(self.spares))

    def go_on(self) -> bool:
        """Ask the policy, and do as it says. False: it waits for machines."""
        now = Snapshot(self.machines, tuple(self.places), (), tuple(self.spares), coming=self.missing)
        decision = self.policy.decide(now)
        if decision.action != "form":
            return False
        taken = min(self.missing, len(self.spares))
        if taken and len(decision.places) == self.machines:
            del self.spares[:taken]
            self.places = list(decision.places)
            self.missing = 0
        return True
