"""Traces of mobile links: two formats, what is wrong in them, and what drawn ones promise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from windtunnel.base.errors import UserError
from windtunnel.traces.bandwidth import GENERATORS, MTU, read, traces


def test_mahimahis_format_is_read_and_begins_anew(tmp_path: Path) -> None:
    (tmp_path / "link.down").write_text("1\n1\n\n4\n10\n")
    trace = read(tmp_path / "link.down")
    assert (trace.name, trace.period, trace.loss) == ("link.down", 0.01, 0.0)
    turn = [0.001, 0.001, 0.004, 0.01]
    again = [at + 0.01 for at in turn]
    assert trace.within(0.025) == pytest.approx([*turn, *again, 0.021, 0.021, 0.024])


def test_rates_become_opportunities_and_a_rate_of_zero_lets_nothing_pass(tmp_path: Path) -> None:
    (tmp_path / "link.csv").write_text("seconds,rate\n0,12 kb/s\n2,0\n5,3000\n6,0\n")
    trace = read(tmp_path / "link.csv")
    assert (trace.name, trace.period) == ("link", 6.0)
    assert trace.times == pytest.approx([0.5, 1.5, 5.25, 5.75])


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a", "", "a: the trace is empty; accepted is a time in milliseconds in each line"),
        ("a", "0\n0\n", "a: the trace is empty"),
        ("a", "5\n3\n", "a, line 2: 3 comes after 5; accepted is rising order"),
        ("a", "5\n-3\n", "a, line 2: '-3' is not accepted; use whole milliseconds up to a day"),
        ("a", "é", "a: the trace is not text"),
        ("a.csv", "time,rate\n", "line 1: the columns must be seconds,rate"),
        ("a.csv", "seconds,rate\n0,1\n", "the trace is empty; accepted are two rows or more"),
        ("a.csv", "seconds,rate\n0,1\n0,1\n", "line 3: 0 s; accepted is rising order up to a day"),
        ("a.csv", "seconds,rate\n0,quick\n", "line 2: '0,quick': accepted is a number from 0 up of bytes/s"),
        ("a.csv", "seconds,rate\n0,1,2\n", "line 2: '0,1,2': "),
        ("a.csv", "seconds,rate\n0,1\n1,0\n", "the trace lets nothing pass"),
    ],
)
def test_what_is_wrong_is_said_in_one_sentence(name: str, text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError) as said:
        read(tmp_path / name)
    assert words in str(said.value) and "\n" not in str(said.value)


def test_a_name_is_a_generator_a_file_or_a_folder(tmp_path: Path) -> None:
    assert [trace.name for trace in traces("driving", 5.0, 1)] == ["driving"]
    with pytest.raises(UserError, match="the folder is empty"):
        traces(str(tmp_path), 5.0, 1)
    for name in ("b", "a"):
        (tmp_path / name).write_text("1\n")
    assert [trace.name for trace in traces(str(tmp_path), 5.0, 1)] == ["a", "b"]
    assert [trace.name for trace in traces(str(tmp_path / "b"), 5.0, 1)] == ["b"]
    with pytest.raises(UserError, match="trace 'x': accepted are near-stationary, driving, lossy, a file"):
        traces("x", 5.0, 1)
    with pytest.raises(UserError, match="cannot be read"):
        read(tmp_path)


@pytest.mark.parametrize("name", GENERATORS)
def test_drawn_traces_are_in_order_and_the_same_for_a_seed(name: str) -> None:
    first, second, third = (GENERATORS[name](20.0, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert np.array_equal(first.times, second.times) and not np.array_equal(first.times, third.times)
    assert (
        np.all(np.diff(first.times) >= 0) and first.times[0] >= 0 and first.times[-1] <= first.period == 20.0
    )


def test_near_stationary_is_as_its_authors_say_and_driving_is_not() -> None:
    def rates(name: str) -> np.ndarray:
        times = GENERATORS[name](600.0, np.random.default_rng(3)).times
        return np.histogram(times, np.arange(0, 601))[0] * MTU * 8e-6

    still, moving = rates("near-stationary"), rates("driving")
    assert 6.4 < still.mean() < 7.4 and still.min() > 2 and still.max() < 11
    assert np.mean(abs(np.diff(still)) < 1) > 0.935
    assert np.mean(abs(np.diff(moving)) < 1) < 0.6 and moving.min() == 0
