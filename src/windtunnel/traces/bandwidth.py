"""When a mobile link may send a packet: recorded links, and links that are drawn.

A trace is the times at which the link can take up to `MTU` bytes. Two formats are read. Mahimahi's: a line
for each of these times, in whole milliseconds, in order; the last one is the trace's length. CSV: the columns
``seconds,rate``, where a rate (bytes/s, or text such as 6.5 Mb/s) holds until the next row, and the last row
ends the trace. A trace that is over begins anew.

Drawn ones are Poisson processes whose rate moves. Near-stationary: as SIRA's authors saw it (IWQoS 2016; 2.9
to 10 and 6.92 Mb/s in the mean, 94.5 % of the time less than 1 Mb/s of change within a second). Driving: the
model of Sprout (NSDI 2013), Brownian motion of 200 packets/s within a second, here between 0 and 12 Mb/s, and
outages of a second every 20 s, in the mean. Lossy: the first, and one packet in a hundred gets lost.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from windtunnel.base.errors import UserError
from windtunnel.base.units import parse_quantity

MTU = 1500
STEP = 1e-3
"""Seconds that a drawn rate holds."""
LONGEST = 86_400.0
_MEAN, _LEAST, _MOST = 6.92e6 / 8 / MTU, 2.9e6 / 8 / MTU, 10e6 / 8 / MTU  # packets/s
_SWING, _BACK = 1.2e6 / 8 / MTU, 16.0  # deviation of the rate, and seconds in which it goes back
_FASTEST, _MOVES = 1000.0, 200.0  # packets/s, and within a second
_BEGINS, _ENDS = 20.0, 1.0  # mean seconds between outages, and of one


@dataclass(frozen=True)
class BandwidthTrace:
    """``times``: seconds from 0 to ``period`` at which `MTU` bytes may go, shape (opportunities,). ``loss``:
    the share of packets that is lost at random."""

    name: str
    times: NDArray[np.float64]
    period: float
    loss: float = 0.0

    def within(self, seconds: float) -> NDArray[np.float64]:
        """The opportunities before ``seconds``, over as many turns as that takes."""
        turns = np.arange(int(seconds / self.period) + 1) * self.period
        times = (turns[:, None] + self.times[None, :]).ravel()
        return times[: np.searchsorted(times, seconds)]


def read(path: Path) -> BandwidthTrace:
    """The trace in a file: CSV if it is called so, else Mahimahi's format.

    Raises:
        UserError: the file cannot be read, is empty, or a line in it is wrong.
    """
    try:
        text = path.read_text(encoding="ascii")
    except OSError as fault:
        raise UserError(f"{path}: the trace cannot be read: {fault.strerror}") from fault
    except UnicodeDecodeError as fault:
        raise UserError(f"{path}: the trace is not text; accepted is a number in each line") from fault
    times, period = _rates(path, text) if path.suffix == ".csv" else _opportunities(path, text)
    if not len(times):
        raise UserError(f"{path}: the trace lets nothing pass; accepted is one with an opportunity to send")
    return BandwidthTrace(path.stem if path.suffix == ".csv" else path.name, times, period)


def _opportunities(path: Path, text: str) -> tuple[NDArray[np.float64], float]:
    times: list[int] = []
    for number, line in enumerate(text.split("\n"), 1):
        if not (word := line.strip()):
            continue
        if not word.isdigit() or int(word) > LONGEST * 1000:
            raise UserError(
                f"{path}, line {number}: {word[:40]!r} is not accepted; use whole milliseconds up to a day"
            )
        if times and int(word) < times[-1]:
            raise UserError(
                f"{path}, line {number}: {word} comes after {times[-1]}; accepted is rising order"
            )
        times.append(int(word))
    if not times or not times[-1]:
        raise UserError(f"{path}: the trace is empty; accepted is a time in milliseconds in each line")
    return np.array(times, np.float64) / 1000, times[-1] / 1000


def _rates(path: Path, text: str) -> tuple[NDArray[np.float64], float]:
    rows = list(csv.reader(io.StringIO(text)))
    if not rows or [word.strip() for word in rows[0]] != ["seconds", "rate"]:
        raise UserError(f"{path}, line 1: the columns must be seconds,rate")
    times, rates = list[float](), list[float]()
    for number, row in enumerate(rows[1:], 2):
        try:
            at, rate = (word.strip() for word in row)
            times.append(parse_quantity(at, "seconds", zero=True))
            rates.append(parse_quantity(rate, "bytes/s", zero=True))
        except ValueError as fault:
            raise UserError(f"{path}, line {number}: {','.join(row)[:40]!r}: {fault}") from fault
        if times[-1] > LONGEST or (len(times) > 1 and times[-1] <= times[-2]):
            raise UserError(f"{path}, line {number}: {times[-1]:g} s; accepted is rising order up to a day")
    if len(times) < 2:
        raise UserError(
            f"{path}: the trace is empty; accepted are two rows or more, the last of which ends it"
        )
    ends: NDArray[np.float64] = np.array(times) - times[0]
    passed = np.concatenate([[0.0], np.cumsum(np.diff(ends) * np.array(rates[:-1]))]) / MTU
    whole = np.arange(1, int(passed[-1] + 1e-9) + 1) - 0.5
    return np.interp(whole, passed, ends).astype(np.float64), float(ends[-1])


def near_stationary(seconds: float, rng: np.random.Generator) -> BandwidthTrace:
    """The premise of SIRA."""
    keeps = np.exp(-STEP / _BACK)
    noise = _SWING * np.sqrt(1 - keeps**2) * rng.standard_normal(_steps(seconds))
    rates, rate = np.empty(len(noise)), _MEAN
    for step, moved in enumerate(noise):
        rate = min(max(_MEAN + (rate - _MEAN) * keeps + moved, _LEAST), _MOST)
        rates[step] = rate
    return _drawn("near-stationary", rates, rng)


def driving(seconds: float, rng: np.random.Generator) -> BandwidthTrace:
    """A Cox process with outages."""
    moves = _MOVES * np.sqrt(STEP) * rng.standard_normal(_steps(seconds))
    rates = np.abs(_FASTEST / 2 + np.cumsum(moves)) % (2 * _FASTEST)
    rates = np.minimum(rates, 2 * _FASTEST - rates)  # both ends throw it back
    begin = rng.exponential(_BEGINS)
    while begin < seconds:
        end = begin + rng.exponential(_ENDS)
        rates[round(begin / STEP) : round(end / STEP)] = 0.0
        begin = end + rng.exponential(_BEGINS)
    return _drawn("driving", rates, rng)


def lossy(seconds: float, rng: np.random.Generator) -> BandwidthTrace:
    """Losses that are no congestion."""
    return replace(near_stationary(seconds, rng), name="lossy", loss=0.01)


GENERATORS: Mapping[str, Callable[[float, np.random.Generator], BandwidthTrace]] = {
    "near-stationary": near_stationary,
    "driving": driving,
    "lossy": lossy,
}


def _steps(seconds: float) -> int:
    return max(round(seconds / STEP), 1)


def _drawn(name: str, rates: NDArray[np.float64], rng: np.random.Generator) -> BandwidthTrace:
    counts = rng.poisson(rates * STEP)
    begins = np.repeat(np.arange(len(rates)) * STEP, counts)
    times = np.sort(begins + STEP * rng.random(len(begins)))
    return BandwidthTrace(name, times, len(rates) * STEP)


def traces(name: str, seconds: float, seed: int) -> list[BandwidthTrace]:
    """What ``name`` means: a generator's trace, that of a file, or all in a folder, by name.

    Raises:
        UserError: it is none of them, or a file is no trace.
    """
    if name in GENERATORS:
        return [GENERATORS[name](seconds, np.random.default_rng(seed))]
    path = Path(name)
    if not path.exists():
        raise UserError(f"trace {name!r}: accepted are {', '.join(GENERATORS)}, a file, or a folder of files")
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    if not files:
        raise UserError(f"{path}: the folder is empty; accepted is one with traces in it")
    return [read(file) for file in files]
