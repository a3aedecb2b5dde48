"""The two loops of an agent, without a clock, and three agents: the same objects run in the twin and live.

An agent brings a `NodeModel` and an `Actuator`; faults and safeguards are no part of either. Those here lend
idle cores, move cold memory and overclock. Their ``host`` is of `live.cpu`, of `live.memory` or of the twin.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from windtunnel.control.node import policy
from windtunnel.control.node.policy import Forecast, Frequency, Guards, Observation, Scanned, Schedule

if TYPE_CHECKING:
    import numpy as np

Ask = Callable[[Observation], Any]
Effect = Callable[[str, int, Any, Mapping[str, Any]], object]
"""Hears what was done, of which prediction (its sequence and value), and what the host then shows."""


class NodeModel(Protocol):
    """What learns. ``collect`` gives a sample, or None where none is due; ``update`` gets those of an epoch
    that are valid, and may ask the policy; what ``predict`` gives is a value of JSON, for which None stands
    as the default; ``assess``: whether the model can be trusted."""

    def collect(self, now: float) -> Any: ...
    def validate(self, sample: Any) -> bool: ...
    def update(self, samples: Sequence[Any], ask: Ask) -> None: ...
    def predict(self) -> Any: ...
    def assess(self) -> bool: ...


class Actuator(Protocol):
    """What changes the host. ``act`` gets a prediction, or None, where it must do what harms nobody;
    ``assess``: whether all is well; ``clean_up`` brings the host back to how it was, however often it is
    called. Each but ``assess`` gives what the host then shows, for the log."""

    def act(self, prediction: Any) -> Mapping[str, Any]: ...
    def assess(self) -> bool: ...
    def mitigate(self) -> Mapping[str, Any]: ...
    def clean_up(self) -> Mapping[str, Any]: ...


class Prediction(NamedTuple):
    """``expires``: on the clock of both loops, seconds."""

    sequence: int
    expires: float
    value: Any


@dataclass
class ModelLoop:
    """Collects, learns and publishes. ``began``: when the first epoch does."""

    model: NodeModel
    schedule: Schedule
    guards: Guards
    ask: Ask
    publish: Callable[[Prediction], object]
    began: float
    effect: Effect = lambda *_: None
    counts: Counter[str] = field(default_factory=Counter)
    _sequence: int = 0
    _good: list[Any] = field(default_factory=list)
    _collected: int = 0
    _distrusted: float | None = None

    def turn(self, now: float) -> None:
        """One sample, and a prediction when the policy says so."""
        sample, schedule = self.model.collect(now), self.schedule
        if sample is None:
            return
        self._collected += 1
        if not self.guards.validation or self.model.validate(sample):
            self._good.append(sample)
        else:
            self.counts["rejected"] += 1
        if self._collected < schedule.samples:
            return
        decision: policy.Publish = self.ask(policy.Epoch(
            now, len(self._good), schedule.samples, now - self.began, schedule.longest, self.model.assess(),
            self._distrusted, schedule.hold, self.guards.model,
        ))  # fmt: skip
        self.counts["distrusted"] += decision.distrusted is not None and self._distrusted is None
        self._distrusted = decision.distrusted
        if decision.learn:
            self.model.update(self._good, self.ask)
        if decision.publish:
            value = self.model.predict() if decision.publish == "prediction" else None
            self._sequence += 1
            self.publish(Prediction(self._sequence, now + schedule.valid, value))
            self.effect(decision.publish, self._sequence, value, {})
            self.counts[f"published {decision.publish}"] += 1
            self._good, self._collected, self.began = [], 0, now


@dataclass
class ActuatorLoop:
    """Acts on what is published, and never waits for it: with the default first."""

    actuator: Actuator
    schedule: Schedule
    guards: Guards
    ask: Ask
    effect: Effect = lambda *_: None
    counts: Counter[str] = field(default_factory=Counter)
    _acted: float = 0.0
    _applied: int = 0
    _assessed: float = -math.inf
    _mitigated: float | None = None

    def turn(self, now: float, prediction: Prediction | None) -> None:
        """One turn with what is in the slot, None where that is nothing whole."""
        healthy, schedule = None, self.schedule
        if now - self._assessed >= schedule.assess:
            healthy, self._assessed = self.actuator.assess(), now
        sequence, expires, value = prediction or (0, 0.0, None)
        decision: policy.Action = self.ask(policy.Turn(
            now, sequence, expires, self._applied, self._acted, healthy, self._mitigated, schedule.deadline,
            schedule.hold, self.guards.expiry, self.guards.actuator,
        ))  # fmt: skip
        if decision.kind == "wait":
            return
        value = value if decision.kind == "predict" else None
        result = self.actuator.mitigate() if decision.kind == "mitigate" else self.actuator.act(value)
        self._mitigated = now if decision.kind == "mitigate" else None
        self._applied, self._acted = decision.sequence or self._applied, now
        self.counts[decision.kind] += 1
        self.effect(decision.kind, decision.sequence, value, result)


HARMED, RETURNED, WAITS, REMOTE = 0.25, 0.2, 0.1, 0.2
"""Shares of forecasts that were too low, and of cold regions accessed, up to which a model is trusted; of its
time that a primary may wait, and of accesses that may go to the slow tier (SOL's bound)."""
MEMORY = Schedule(0.1, samples=1, longest=20, valid=1, act=0.1, deadline=12, assess=2, hold=20)
WASTED, IDLE, FASTEST = 0.02, 0.2, 2.0  # share lost to nominal, as a mean; activity; work that can be true
OVERCLOCK = Schedule(0.1, samples=10, longest=2, valid=2, act=0.1, deadline=2, assess=1, hold=60)


@dataclass
class HarvestModel:
    """Its host has ``cores`` and ``usage(now)``: those that the primary used since the last call."""

    host: Any
    levels: int = 17
    _before: tuple[float, ...] = ()
    _forecast: Forecast = field(default_factory=lambda: Forecast((), 0.0))
    _harmed: deque[bool] = field(default_factory=lambda: deque((False,) * 40, maxlen=40))

    def collect(self, now: float) -> float:
        return float(self.host.usage(now))

    def validate(self, sample: float) -> bool:
        return 0.0 <= sample <= 1.25 * float(self.host.cores)  # counters are exact to a tick only

    def update(self, samples: Sequence[float], ask: Ask) -> None:
        last, cores, peak = self._forecast, self.host.cores, max(samples)
        latest = policy.features(samples, cores)
        epoch = policy.Harvest(last.weights, self._before, last.need, peak, latest, self.levels, cores)
        self._forecast, self._before = ask(epoch), latest
        self._harmed.append(self._forecast.harmed)

    def predict(self) -> float:
        return self._forecast.need

    def assess(self) -> bool:
        return sum(self._harmed) <= HARMED * len(self._harmed)


@dataclass
class HarvestActuator:
    """Lends what the primary will not need; nothing where that is not known. Its host has ``lend(cores)``,
    which gives what may then be used; ``waited()``: the share of its time of late in which the primary wanted
    a core and had none, ``limit`` at most; and ``restore()``."""

    host: Any
    limit: float = WAITS

    def act(self, prediction: float | None) -> Mapping[str, Any]:
        return {"lent": self.host.lend(0.0 if prediction is None else self.host.cores - prediction)}

    def assess(self) -> bool:
        return bool(self.host.waited() <= self.limit)

    def mitigate(self) -> Mapping[str, Any]:
        return self.act(None)

    def clean_up(self) -> Mapping[str, Any]:
        return {"restored": self.host.restore()}


@dataclass
class MemoryModel:
    """Its host has ``scan()``: whether each region was accessed since the last scan. It begins with the first
    of ``periods``, seconds; a region is cold after ``patience`` without an access."""

    host: Any
    rng: np.random.Generator
    patience: float = 15.0
    periods: tuple[float, ...] = (0.3, 0.6, 1.2, 2.4, 4.8, 9.6)  # SOL has the ends
    _state: Scanned = field(default_factory=Scanned)
    _last: float | None = None
    _returned: deque[tuple[int, int]] = field(default_factory=lambda: deque(((0, 0),), maxlen=20))

    def collect(self, now: float) -> tuple[float, tuple[bool, ...]] | None:
        waited = 0.0 if self._last is None else now - self._last
        if self._last is not None and waited < self.periods[self._state.period]:
            return None
        self._last = now
        return waited, self.host.scan()

    def validate(self, sample: tuple[float, tuple[bool, ...]]) -> bool:
        return bool(sample[1])

    def update(self, samples: Sequence[tuple[float, tuple[bool, ...]]], ask: Ask) -> None:
        (waited, accessed), last, none = samples[-1], self._state, (0,) * len(self.periods)
        pairs = zip(last.hits or none, last.misses or none, strict=True)
        draws = tuple(round(float(self.rng.beta(hits + 1, misses + 1)), 4) for hits, misses in pairs)
        self._state = ask(policy.Memory(last, waited, accessed, self.patience, draws))
        self._returned.append((self._state.returned, len(last.cold)))

    def predict(self) -> list[int]:
        return list(self._state.cold)

    def assess(self) -> bool:
        returned, cold = (sum(row[place] for row in self._returned) for place in (0, 1))
        return returned <= RETURNED * cold


@dataclass
class MemoryActuator:
    """Sends cold regions to the slow tier; where nothing is known, nothing more. Its host has
    ``page_out(regions)``, ``bring_back()``, ``remote()``: the share of accesses that went there."""

    host: Any

    def act(self, prediction: list[int] | None) -> Mapping[str, Any]:
        return {"slow": self.host.page_out(prediction or [])}

    def assess(self) -> bool:
        return bool(self.host.remote() <= REMOTE)

    def mitigate(self) -> Mapping[str, Any]:
        return {"back": self.host.bring_back()}

    clean_up = mitigate


@dataclass
class OverclockModel:
    """Its host has ``counters()``: level of the frequency, work and joules a second, and activity."""

    host: Any
    rng: np.random.Generator
    _state: Frequency = field(default_factory=Frequency)
    _rewards: deque[float] = field(default_factory=lambda: deque((0.0,) * 20, maxlen=20))

    def collect(self, now: float) -> Any:
        return self.host.counters()

    def validate(self, sample: tuple[int, float, float, float]) -> bool:
        _, work, watts, activity = sample
        return 0 < work <= FASTEST and watts > 0 and 0 <= activity <= 1

    def update(self, samples: Sequence[tuple[int, float, float, float]], ask: Ask) -> None:
        level, *_, latest = samples[-1]  # what was before a change of level or load is left out
        alike = [each for each in samples if each[0] == level and abs(each[3] - latest) < 0.1]
        _, work, joules, activity = (sum(column) / len(alike) for column in zip(*alike, strict=True))
        draws = round(float(self.rng.random()), 4), round(float(self.rng.random()), 4)
        epoch = policy.Overclock(self._state, level, round(activity, 4), round(work / joules, 4), draws)
        self._state = ask(epoch)
        self._rewards.append(self._state.reward)

    def predict(self) -> int:
        return self._state.level

    def assess(self) -> bool:
        return sum(self._rewards) >= -WASTED * len(self._rewards)


@dataclass
class OverclockActuator:
    """Boosts unless the load is idle. Its host has ``boost(level)``, which gives the level that is then set,
    and ``activity()`` of late."""

    host: Any
    _activities: deque[float] = field(default_factory=lambda: deque((1.0,) * 100, maxlen=100))

    def act(self, prediction: int | None) -> Mapping[str, Any]:
        return {"level": self.host.boost(prediction or 0)}

    def assess(self) -> bool:
        self._activities.append(self.host.activity())
        return sorted(self._activities)[89] >= IDLE  # the 90th percentile

    def mitigate(self) -> Mapping[str, Any]:
        return self.act(None)

    clean_up = mitigate
