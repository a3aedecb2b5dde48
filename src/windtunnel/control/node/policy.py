"""When an agent that learns on a host may act on what it predicts, when it falls back, and what it learns.

The model's loop publishes what it learned, or a default where samples are bad or it is not trusted. The
actuator's never waits for it: it takes the newest prediction that has not expired, falls back where none
comes within the deadline, and stops while it finds that it harms. Each safeguard can be off alone.

Three learners are functions of a state that is handed in, and so is what is drawn at random. *Harvest*: how
many cores a primary load will need at its next peak, by a linear prediction of what each answer would cost;
too little costs `UNDER` times what too much costs. *Memory*: how often to scan, by Thompson sampling; a scan
is well timed when some regions were accessed since the last one and some were not. *Overclock*: which
frequency does most work for a joule at each activity of a load, by Q-learning.

Source: Wang et al., SOL (ASPLOS 2022); SmartHarvest (EuroSys 2021). Features, bounds and hold times are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import mul
from typing import Literal

UNDER, RATE, DIGITS = 16.0, 0.1, 4  # a state is rounded to so many, so that a log holds it whole
EMPTY, SATURATED, SLOWER = 0.05, 0.8, 1.15  # well timed is between; a slower scan costs less
EXPLORE, DISCOUNT, LEVELS, STATES = 0.1, 0.5, 3, 4  # nominal and two boosts; quarters of activity
UNKNOWN = -0.1  # reward of a boost where there is no nominal to compare it with


@dataclass(frozen=True)
class Guards:
    """Which safeguards are on: samples are validated, a model that is not trusted is replaced, predictions
    expire and have a deadline, an actuator that harms is stopped."""

    validation: bool = True
    model: bool = True
    expiry: bool = True
    actuator: bool = True


@dataclass(frozen=True)
class Schedule:
    """Seconds. ``collect``: between samples, ``samples`` to an epoch, which lasts ``longest`` at most;
    ``valid``: of a prediction; ``act``: between turns of the actuator; ``deadline``: without a prediction;
    ``assess``: between its assessments; ``hold``: before who was stopped may go on."""

    collect: float = 0.02
    samples: int = 5
    longest: float = 0.4
    valid: float = 0.3
    act: float = 0.1
    deadline: float = 0.3
    assess: float = 1.0
    hold: float = 5.0


@dataclass(frozen=True)
class Epoch:
    """The model has samples, of which ``good`` of the ``wanted`` count. ``elapsed``: seconds of the epoch;
    ``trusted``: its assessment; ``distrusted``: since when it is replaced; ``guard``: of the model."""

    now: float
    good: int
    wanted: int
    elapsed: float
    longest: float
    trusted: bool
    distrusted: float | None
    hold: float
    guard: bool = True


@dataclass(frozen=True)
class Publish:
    """``learn``: whether the model updates; ``publish``: "" for nothing yet."""

    learn: bool
    publish: Literal["", "prediction", "default"]
    distrusted: float | None = None
    reason: str = field(default="", compare=False)


@dataclass(frozen=True)
class Turn:
    """The actuator's. ``sequence``: of the newest whole prediction, 0 for none; ``applied``: of the last one
    used; ``acted``: when it last acted; ``healthy``: its assessment, None where none was due; ``mitigated``:
    since when it is stopped, or None; ``guard``: of the actuator."""

    now: float
    sequence: int
    expires: float
    applied: int
    acted: float
    healthy: bool | None
    mitigated: float | None
    deadline: float
    hold: float
    expiry: bool = True
    guard: bool = True


@dataclass(frozen=True)
class Action:
    """``predict``: act on the prediction ``sequence``; ``default``: act on none; ``mitigate``: undo and stop;
    ``resume``: begin again, with the default."""

    kind: Literal["wait", "predict", "default", "mitigate", "resume"]
    sequence: int = 0
    reason: str = field(default="", compare=False)


@dataclass(frozen=True)
class Harvest:
    """An epoch is over. ``weights``: (levels, features); ``before``: features of the epoch before it, empty
    at first; ``need``: what was forecast from them; ``peak``: most cores in use since; ``features``: of this
    epoch; ``levels``: answers, from none of ``cores`` to all."""

    weights: tuple[tuple[float, ...], ...]
    before: tuple[float, ...]
    need: float
    peak: float
    features: tuple[float, ...]
    levels: int
    cores: float


@dataclass(frozen=True)
class Forecast:
    """``need``: of the primary in the next epoch, in cores; ``harmed``: the last forecast was too low."""

    weights: tuple[tuple[float, ...], ...]
    need: float
    harmed: bool = False


@dataclass(frozen=True)
class Scanned:
    """What is known after a scan. ``hits``, ``misses``: well and badly timed scans of each period, fastest
    first; ``period``: the place of the next one; ``idle``: seconds that each region was not accessed;
    ``cold``: regions for the slow tier; ``returned``: those of before that were accessed all the same."""

    hits: tuple[int, ...] = ()
    misses: tuple[int, ...] = ()
    period: int = 0
    idle: tuple[float, ...] = ()
    cold: tuple[int, ...] = ()
    returned: int = 0


@dataclass(frozen=True)
class Memory:
    """Memory was scanned, ``waited`` seconds after the scan before it, and after ``last``. ``accessed``:
    regions since then; ``patience``: seconds after which one is cold; ``draws``: of each period's
    Beta(hits + 1, misses + 1)."""

    last: Scanned
    waited: float
    accessed: tuple[bool, ...]
    patience: float
    draws: tuple[float, ...]


@dataclass(frozen=True)
class Frequency:
    """``values``: Q, (STATES, LEVELS); ``nominal``: work for a joule at that frequency, 0 where not known,
    (STATES,); ``level``: to run at, 0 is nominal; ``state``: the quarter of activity that it was chosen at;
    ``reward``: of the epoch before, beyond nominal and as a share of it."""

    values: tuple[tuple[float, ...], ...] = ((0.0,) * LEVELS,) * STATES
    nominal: tuple[float, ...] = (0.0,) * STATES
    state: int = 0
    level: int = 0
    reward: float = 0.0


@dataclass(frozen=True)
class Overclock:
    """An epoch ran at ``level`` (which need not be the one chosen) with a share of cycles not stalled of
    ``activity``, and did ``efficiency`` work for a joule. ``draws``: two of [0, 1)."""

    last: Frequency
    level: int
    activity: float
    efficiency: float
    draws: tuple[float, float]


Observation = Epoch | Turn | Harvest | Memory | Overclock
Decision = Publish | Action | Forecast | Scanned | Frequency


def decide(observation: Observation) -> Decision:
    """All rules: of the two loops, and of the learners."""
    if isinstance(observation, Epoch):
        return _publish(observation)
    if isinstance(observation, Turn):
        return _act(observation)
    if isinstance(observation, Overclock):
        return _tuned(observation)
    return _forecast(observation) if isinstance(observation, Harvest) else _scanned(observation)


def unguarded(observation: Observation) -> Decision:
    """Without a guard that stops a loop, for ``windtunnel replay --policy unguarded``."""
    return decide(replace(observation, guard=False) if isinstance(observation, Epoch | Turn) else observation)


POLICIES: Mapping[str, Callable[[Observation], Decision]] = {"guarded": decide, "unguarded": unguarded}


def _publish(epoch: Epoch) -> Publish:
    distrusted = epoch.distrusted
    if epoch.guard and not epoch.trusted:
        distrusted = epoch.now if distrusted is None else distrusted
    elif distrusted is not None and epoch.now - distrusted >= epoch.hold:
        distrusted = None
    if epoch.good < epoch.wanted:
        if epoch.elapsed < epoch.longest:
            return Publish(False, "", distrusted, "more samples are to come")
        return Publish(False, "default", distrusted, f"{epoch.good} good samples in a whole epoch")
    if distrusted is not None:  # it goes on learning, so that it can be trusted again
        return Publish(True, "default", distrusted, "the model is not trusted")
    return Publish(True, "prediction", None, "enough good samples")


def _act(turn: Turn) -> Action:
    if turn.guard and turn.healthy is False and turn.mitigated is None:
        return Action("mitigate", reason="what was done harms")
    if turn.mitigated is not None:
        if turn.healthy and turn.now - turn.mitigated >= turn.hold:
            return Action("resume", reason=f"healthy, {turn.hold:g} s after it was stopped")
        return Action("wait", reason="stopped")
    if turn.sequence > turn.applied and (not turn.expiry or turn.now < turn.expires):
        return Action("predict", turn.sequence, "a new prediction")
    if turn.expiry and turn.now - turn.acted >= turn.deadline:
        return Action("default", reason=f"no usable prediction for {turn.deadline:g} s")
    return Action("wait", reason="nothing new")


def features(samples: Sequence[float], cores: float) -> tuple[float, ...]:
    """Of cores in use: 1, mean, largest, last, and the rise within, as shares of all ``cores``."""
    shares = (sum(samples) / len(samples), max(samples), samples[-1], samples[-1] - samples[0])
    return (1.0, *(round(share / cores, DIGITS) for share in shares))


def _forecast(epoch: Harvest) -> Forecast:
    """Learn what each answer would have cost; give the one that seems cheapest, of equals the largest."""
    weights = epoch.weights or ((0.0,) * len(epoch.features),) * epoch.levels
    step = epoch.cores / (epoch.levels - 1)
    harmed = bool(epoch.before) and epoch.need < epoch.cores and epoch.peak >= epoch.need - step / 4
    if epoch.before:
        # a load that uses all that was left to it wants more: nobody can see how much
        peak = min(1.0, max(epoch.peak, epoch.need + step if harmed else 0.0) / epoch.cores)
        power, rows = sum(map(mul, epoch.before, epoch.before)), []
        for level, row in enumerate(weights):
            excess = level / (epoch.levels - 1) - peak
            cost = excess if excess >= 0 else -UNDER * excess
            rate = RATE * (cost - sum(map(mul, row, epoch.before))) / power
            rows.append(tuple(round(w + rate * x, DIGITS) for w, x in zip(row, epoch.before, strict=True)))
        weights = tuple(rows)
    costs = [sum(map(mul, row, epoch.features)) for row in weights]
    return Forecast(weights, min(reversed(range(epoch.levels)), key=costs.__getitem__) * step, harmed)


def _scanned(scan: Memory) -> Scanned:
    """Count the scan, choose the next period, and say what is cold."""
    count, last, regions = len(scan.draws), scan.last, len(scan.accessed)
    share = sum(scan.accessed) / max(1, regions)
    timed = (share <= SATURATED or last.period == 0) and (share >= EMPTY or last.period == count - 1)
    hits, misses = list(last.hits or [0] * count), list(last.misses or [0] * count)
    (hits if timed else misses)[last.period] += 1
    comparable = len(last.idle) == regions  # none are at first, or where a sample was bad
    pairs = zip(last.idle if comparable else [0.0] * regions, scan.accessed, strict=True)
    idle = tuple(0.0 if accessed else round(before + scan.waited, DIGITS) for before, accessed in pairs)
    period = max(range(count), key=lambda place: scan.draws[place] * SLOWER**place)
    cold = tuple(region for region, seconds in enumerate(idle) if seconds >= scan.patience)
    returned = sum(scan.accessed[region] for region in last.cold) if comparable else 0
    return Scanned(tuple(hits), tuple(misses), period, idle, cold, returned)


def _tuned(epoch: Overclock) -> Frequency:
    """Learn what the level of the epoch was worth where it was chosen, and choose the next."""
    last, level = epoch.last, epoch.level
    state = min(STATES - 1, int(epoch.activity * STATES))
    nominal, values = list(last.nominal), [list(row) for row in last.values]
    if level == 0:
        rate = RATE if nominal[state] else 1.0
        nominal[state] = round(nominal[state] + rate * (epoch.efficiency - nominal[state]), DIGITS)
    reward = round(epoch.efficiency / nominal[state] - 1, DIGITS) if nominal[state] else UNKNOWN
    reward = reward if level else 0.0
    row, target = values[last.state], reward + DISCOUNT * max(values[state])
    row[level] = round(row[level] + RATE * (target - row[level]), DIGITS)
    best = max(range(LEVELS), key=values[state].__getitem__)  # of equals the slowest
    choice = int(epoch.draws[1] * LEVELS) if epoch.draws[0] < EXPLORE else best
    choice = choice if nominal[state] else 0  # where there is nothing to compare a boost with
    return Frequency(tuple(map(tuple, values)), tuple(nominal), state, choice, reward)
