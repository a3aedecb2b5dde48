"""What is counted of a variant on a host from second to second, the same way live and in the twin."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from windtunnel.serving.variants.model import Held, Query, State, Variant
from windtunnel.serving.variants.policy.scale import Running
from windtunnel.serving.variants.policy.select import wait_of
from windtunnel.serving.variants.policy.states import Measured


@dataclass(kw_only=True)
class Watched:
    """``came`` and ``late``: items of this second; ``batches``: (items, seconds) of those that ended in it;
    ``hardest``: the least latency and the greatest accuracy that were asked for in it. ``rate``: items a
    second, and ``slow``: times of batches over the profile's, both averaged over seconds. ``running``: items
    in replicas."""

    state: State = "inactive"
    running: int = 0
    votes: int = 0
    came: int = 0
    late: int = 0
    rate: float = 0.0
    slow: float = 1.0
    batches: list[tuple[int, float]] = field(default_factory=list)
    hardest: tuple[float, float] = (inf, 0.0)

    def asked(self, query: Query) -> None:
        """A request must be answered as it says."""
        self.hardest = min(self.hardest[0], query.latency), max(self.hardest[1], query.accuracy)

    def second(self, variant: Variant, replicas: int, waiting: int) -> Measured:
        """What the second was like, taken into the averages; ``waiting``: items that no replica has yet."""
        count = max(1, len(self.batches))
        items = sum(one for one, _ in self.batches) / count
        took = sum(seconds for _, seconds in self.batches) / count
        self.rate = 0.5 * self.rate + 0.5 * self.came
        if self.batches:
            profile = sum(variant.latency(one) for one, _ in self.batches) / count
            self.slow = 0.5 * self.slow + 0.5 * took / profile
        outstanding = waiting + self.running
        return Measured(
            variant, self.state, replicas, float(self.came), took, max(1.0, items), outstanding
        )  # fmt: skip

    def forget(self) -> None:
        """The second is over."""
        self.came, self.late, self.batches, self.hardest = 0, 0, [], (inf, 0.0)

    def as_held(
        self, variant: Variant, host: str, *, ready: int, idle: int, waiting: int, loading: list[float],
        now: float, crowd: float,
    ) -> Held:  # fmt: skip
        """As selection sees it. ``loading``: when each replica that is being loaded will be ready; ``crowd``:
        cores of the host that would be wanted at once, for each that there is."""
        wait = wait_of(variant, waiting, ready, idle, max(0.0, min(loading, default=0.0) - now))
        state = "active" if self.state == "inactive" else self.state
        return Held(host, state, ready + len(loading), self.rate, wait, max(self.slow, crowd))

    def as_running(self, variant: Variant, replicas: int) -> Running:
        """As the autoscaler sees it."""
        return Running(variant, replicas, self.rate, self.late, self.state, *self.hardest, self.votes)
