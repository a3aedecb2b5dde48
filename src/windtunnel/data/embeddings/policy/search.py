"""Which piece lies on which device, by search: spread by weight, then moved and swapped until nothing helps.

What a device's fast memory saves is a concave curve of its bytes, and the curve of pieces together is the sum
of theirs by what a byte saves. With these curves on common points, a device with another set of pieces is
priced by adding rows of a table. The price of a byte at which all fast memory as one is full (``value``)
gives each piece a *weight*, its seconds and what its bytes are worth: devices whose weights are equal take
equal times, but for what their own prices of a byte differ, which is about the square of the bytes that they
would want more or less. Weights choose the exchanges that are priced.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from windtunnel.base.errors import UserError
from windtunnel.base.units import size
from windtunnel.data.embeddings.policy.pieces import (
    Floats,
    Ints,
    Pieces,
    largest,
    least_seconds,
    pooled,
    prices,
)

POINTS = 256
"""Of the curves."""
PRICED = 48
"""Exchanges that are priced at a time."""
ROUNDS = 6_000
"""Times that the slowest device is looked at, at most; fewer where there are many pieces."""
PATIENCE = (8, 200)
"""Kicks in a row without a better plan, after which the search ends: for each piece, and at most."""
SHARPER = (8.0, 64.0, 512.0)
"""Powers of devices' seconds, the sum of which is made smaller before the slowest alone counts."""
EXACT = 1e-7
"""A gap that rounding to whole rows leaves."""


def assign(cut: Pieces, devices: int, seed: int) -> Ints:
    """Of each piece its device.

    Raises:
        UserError: no assignment was found that fits.
    """
    return _Search(cut, devices, seed).run()


def spread(cut: Pieces, devices: int, weights: Floats) -> Ints:
    """The heaviest first, each on the device with the least weight that has room for it; where that ends with
    a piece for which there is none, the largest first.

    Raises:
        UserError: neither fits.
    """
    for order in (weights, cut.total.astype(float)):
        sums, room = np.zeros(devices), np.full(devices, cut.room)
        assigned = np.zeros(len(cut), int)
        for piece in np.argsort(-order, kind="stable"):
            fits = room >= cut.total[piece]
            if not fits.any():
                break
            device = int(np.where(fits, sums, np.inf).argmin())
            assigned[piece] = device
            sums[device] += order[piece]
            room[device] -= cut.total[piece]
        else:
            return assigned
    raise UserError(
        f"memory binds: {len(cut)} shards of {size(float(cut.total.sum()))} fit no {devices} devices of"
        f" {size(cut.fast.capacity)} fast and {size(cut.backing.capacity)} slow memory; piece"
        f" {cut.name(int(piece))} of {size(float(cut.total[piece]))} found no room"
    )


@dataclass(frozen=True, eq=False)
class _Curves:
    """By piece and point: bytes of the segments that save at least so much a byte, and what they save."""

    nbytes: Floats
    saves: Floats
    slow: Floats

    @classmethod
    def of(cls, cut: Pieces, value: float) -> _Curves:
        """Every end of a segment is a point where there are few; else most points lie near ``value``."""
        count = len(cut.piece)
        ends = np.arange(1, count + 1)
        if count > POINTS:
            density = np.minimum.accumulate(cut.saves / cut.nbytes)
            near = np.geomspace(4, 0.25, POINTS * 3 // 4) * value
            ends = np.concatenate(
                [np.searchsorted(-density, -near), np.linspace(1, count, POINTS // 4).astype(int)]
            )
            ends = np.unique(np.clip(ends, 1, count))
        point = 1 + np.searchsorted(ends, np.arange(count), side="right")
        shape = (len(cut), len(ends) + 1)
        nbytes, saves = np.zeros(shape), np.zeros(shape)
        np.add.at(nbytes, (cut.piece, point), cut.nbytes)
        np.add.at(saves, (cut.piece, point), cut.saves)
        return cls(nbytes.cumsum(1), saves.cumsum(1), cut.slow)


class _Search:
    """``where``: of each piece its device; of each device its curve, its slow seconds, its bytes and its
    seconds."""

    def __init__(self, cut: Pieces, devices: int, seed: int) -> None:
        self.cut, self.devices = cut, devices
        self.rng = np.random.default_rng(seed)
        self.capacity, self.room = cut.fast.capacity, cut.room
        self.bound = max(pooled(cut, devices), float(largest(cut).max()))
        value = float(prices(cut, np.zeros(len(cut), int), 1, devices * cut.fast.capacity)[0])
        self.curves = curves = _Curves.of(cut, value)
        gains = curves.saves - value * curves.nbytes
        self.weights = curves.slow - gains.max(1)
        self.fast_bytes = curves.nbytes[np.arange(len(cut)), gains.argmax(1)]
        density = cut.saves / cut.nbytes
        near = float(cut.nbytes[(density < 1.5 * value) & (density > value / 1.5)].sum())
        self.bend = 0.5 * devices * value * (1.5 - 1 / 1.5) / near if near else 0.0
        """Seconds that a device loses for the square of the bytes that it would want more, or less, than it
        has: half of how fast the value of a byte falls."""
        self._set(spread(cut, devices, self.weights))

    def _set(self, where: Ints) -> None:
        self.where = where.copy()
        shape = (self.devices, self.curves.nbytes.shape[1])
        self.nbytes, self.saves = np.zeros(shape), np.zeros(shape)
        np.add.at(self.nbytes, where, self.curves.nbytes)
        np.add.at(self.saves, where, self.curves.saves)
        self.slow = np.bincount(where, self.cut.slow, self.devices).astype(float)
        self.total = np.bincount(where, self.cut.total, self.devices).astype(float)
        self.over = np.bincount(where, self.fast_bytes, self.devices) - self.capacity
        self.seconds = self._seconds(self.nbytes, self.saves, self.slow)

    def _seconds(self, nbytes: Floats, saves: Floats, slow: Floats) -> Floats:
        """Of devices with these curves (a row each), the fast memory being used best."""
        place = np.minimum((nbytes <= self.capacity).sum(1), nbytes.shape[1] - 1)
        row = np.arange(len(nbytes))
        low, high = nbytes[row, place - 1], nbytes[row, place]
        part = np.clip((self.capacity - low) / np.maximum(high - low, 1.0), 0, 1)
        before = saves[row, place - 1]
        return slow - before - part * (saves[row, place] - before)

    def run(self) -> Ints:
        """The best assignment found, by exact seconds."""
        best, score = self.where.copy(), self._exact()
        if self.devices == 1 or len(self.cut) == 1:
            return best
        rounds = max(300, ROUNDS * 400 // (400 + len(self.cut)))
        for sharp in SHARPER:
            self._settle(sharp, rounds)
        most = min(PATIENCE[1], PATIENCE[0] * len(self.cut))
        patience, balanced, height = 0, self.where.copy(), np.inf
        while rounds > 0 and score > self.bound * (1 + EXACT) and patience < most:
            while rounds > 0 and self._better(int(self.seconds.argmax()), np.inf):
                rounds -= 1
            rounds -= 1
            if self.seconds.max() <= height:
                balanced, height = self.where.copy(), self.seconds.max()
                exact = self._exact()
                patience = patience + 1 if exact >= score * (1 - EXACT) else 0
                if exact < score:
                    best, score = balanced, exact
            else:
                patience += 1
                self._set(balanced)
            self._kick()
        return best

    def _settle(self, sharp: float, rounds: int) -> None:
        """Exchanges of any devices, until none has one that helps: so all become faster, not the slowest."""
        while rounds > 0:
            helped = 0
            for device in self.rng.permutation(self.devices):
                helped += self._better(int(device), sharp)
                rounds -= 1
            if not helped:
                return

    def _exact(self) -> float:
        return float(least_seconds(self.cut, self.where, self.devices, self.capacity).max())

    def _pair(self, first: Floats, other: Floats, sharp: float) -> Floats:
        """How bad it is that two devices take so long: the longer of them, or by a power of both, which also
        counts the faster."""
        if sharp == np.inf:
            return np.maximum(first, other)
        first, other = (np.minimum(some / self.scale, 2) ** sharp for some in (first, other))
        return first + other

    def _better(self, hot: int, sharp: float) -> bool:
        """Take one piece off the device ``hot``, perhaps for another, if the two are better off then."""
        mine = np.flatnonzero(self.where == hot)
        others = np.flatnonzero(self.where != hot)
        if not len(mine):
            return False
        self.scale = float(self.seconds.max()) or 1.0
        # after the pieces of other devices: nothing comes back, one column for each device
        device = np.concatenate([self.where[others], np.arange(self.devices)])
        nothing = np.zeros(self.devices)
        moved, nbytes, swelling = (
            some[mine][:, None] - np.concatenate([some[others], nothing])
            for some in (self.weights, self.fast_bytes, self.cut.total)
        )
        bent = self.bend * nbytes
        mine_after = self.seconds[hot] - moved + bent * (nbytes - 2 * self.over[hot])
        theirs = self.seconds[device] + moved + bent * (nbytes + 2 * self.over[device])
        after = self._pair(np.maximum(mine_after, 0), np.maximum(theirs, 0), sharp)
        after[
            (device == hot)[None, :]
            | (self.total[device] + swelling > self.room)
            | (self.total[hot] - swelling > self.room)
        ] = np.inf
        if sharp != np.inf:
            after -= self._pair(self.seconds[hot], self.seconds[device], sharp)
        flat = after.ravel()
        chosen = np.argpartition(flat, PRICED)[:PRICED] if len(flat) > PRICED else np.arange(len(flat))
        chosen = chosen[np.isfinite(flat[chosen])]
        if not len(chosen):
            return False
        give, column = mine[chosen // len(device)], chosen % len(device)
        to, swap = device[column], column < len(others)
        take = np.where(swap, others[np.minimum(column, len(others) - 1)] if len(others) else 0, -1)
        curves = self.curves
        change = [some[give] - np.where(swap.reshape(-1, *[1] * (some.ndim - 1)), some[take], 0)
                  for some in (curves.nbytes, curves.saves, curves.slow)]  # fmt: skip
        mine_after = self._seconds(
            self.nbytes[hot] - change[0], self.saves[hot] - change[1], self.slow[hot] - change[2]
        )
        theirs = self._seconds(
            self.nbytes[to] + change[0], self.saves[to] + change[1], self.slow[to] + change[2]
        )
        change_of = self._pair(mine_after, theirs, sharp) - self._pair(
            self.seconds[hot], self.seconds[to], sharp
        )
        best = int(change_of.argmin())
        if change_of[best] >= -1e-9 * (self.scale if sharp == np.inf else 1):
            return False
        self._move(int(give[best]), int(to[best]))
        if take[best] >= 0:
            self._move(int(take[best]), hot)
        self.seconds[[hot, int(to[best])]] = mine_after[best], theirs[best]
        return True

    def _move(self, piece: int, to: int) -> None:
        came, self.where[piece] = self.where[piece], to
        for mine, some in (
            (self.nbytes, self.curves.nbytes), (self.saves, self.curves.saves), (self.slow, self.curves.slow),
            (self.total, self.cut.total), (self.over, self.fast_bytes),
        ):  # fmt: skip
            mine[came] -= some[piece]
            mine[to] += some[piece]

    def _kick(self) -> None:
        """A few pieces of the slowest device and of others change places."""
        hot = int(self.seconds.argmax())
        touched = {hot}
        for _ in range(int(self.rng.integers(2, 5))):
            mine = np.flatnonzero(self.where == hot)
            piece = int(self.rng.integers(len(self.cut)))
            to = int(self.rng.integers(self.devices))
            if len(mine) and self.rng.random() < 0.5:
                piece = int(self.rng.choice(mine))
            if self.total[to] + self.cut.total[piece] <= self.room and self.where[piece] != to:
                touched |= {to, int(self.where[piece])}
                self._move(piece, to)
        some = np.array(sorted(touched))
        self.seconds[some] = self._seconds(self.nbytes[some], self.saves[some], self.slow[some])
