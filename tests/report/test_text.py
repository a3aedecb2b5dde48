"""Figures in words can be read back to within their last digit."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.report import text

SECONDS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}
BYTES = {"B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}


def _read(shown: str, units: dict[str, float]) -> float:
    number, unit = shown.rsplit(" ", 1)
    return float(number.replace(",", "")) * units[unit]


@given(st.floats(1e-8, 1e6))
def test_seconds_read_back(value: float) -> None:
    assert _read(text.seconds(value), SECONDS) == pytest.approx(value, rel=6e-3)


@given(st.floats(100, 1e16))
def test_sizes_read_back(value: float) -> None:
    assert _read(text.size(value), BYTES) == pytest.approx(value, rel=6e-3)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (text.seconds(0.0), "0 s"),
        (text.seconds(0.99996), "1.00 s"),
        (text.seconds(2.34e-3), "2.34 ms"),
        (text.seconds(None), "–"),
        (text.size(82.4 * 2**30), "82.4 GiB"),
        (text.size(-3.3 * 2**30), "-3.30 GiB"),
        (text.size(512), "512 B"),
        (text.rate(148e9), "148 GB/s"),
        (text.decimal(1.19e17) + "FLOP", "119 PFLOP"),
        (text.share(0.4123), "41.2 %"),
        (text.count(5762.3), "5,762"),
        (text.figure(3.0, "GB"), "3 GB"),
        (text.path_label("communication:dp"), "exposed communication: dp"),
        (text.path_label("something_new"), "something new"),
    ],
)
def test_figures(shown: str, expected: str) -> None:
    assert shown == expected


@given(st.sets(st.integers(0, 60)))
def test_rank_ranges_read_back(members: set[int]) -> None:
    found: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text.ranks(sorted(members), most=100)):
        found.update(range(int(first), int(last or first) + 1))
    assert found == members


def test_many_rank_ranges_are_shortened() -> None:
    assert text.ranks(list(range(0, 100, 2))) == "0, 2, 4, … 98"


def test_the_path_begins_with_compute_and_ends_with_idle() -> None:
    path = {
        "idle": 3.0,
        "launch": 1.0,
        "communication:tp": 1.0,
        "communication:dp": 2.0,
        "compute": 1.0,
        "x": 0.0,
    }
    parts = text.path_parts({"critical_path": path})
    assert [key for key, _, _ in parts] == [
        "compute",
        "communication:dp",
        "communication:tp",
        "launch",
        "idle",
    ]
    assert sum(share for _, _, share in parts) == pytest.approx(1)


@pytest.mark.parametrize(
    ("fits", "headroom", "word"), [(True, 6, "fits"), (True, 4, "tight"), (False, 9, "does not fit")]
)
def test_verdict(fits: bool, headroom: float, word: str) -> None:
    assert text.verdict({"fits": fits, "headroom_bytes": headroom, "memory_bytes": 100}) == word


def test_what_is_not_emulated_is_named() -> None:
    words = text.provenance_sentence({"provenance": {"wall_time_s": "measured", "mfu": "emulated"}})
    assert words == "All times and memory are emulated (measured: wall time)."
