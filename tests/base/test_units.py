"""What users write is read, and figures in words can be read back to within their last digit."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.base import units
from windtunnel.base.units import amount, parse_quantity


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("400 Gb/s", "bytes/s", 50e9),
        ("400Gbps", "bytes/s", 50e9),
        ("50 GB/s", "bytes/s", 50e9),
        ("80 GiB", "bytes", 80 * 2**30),
        ("80GB", "bytes", 80e9),
        ("2 us", "seconds", 2e-6),
        ("989 TFLOP/s", "FLOP/s", 989e12),
        ("2.5Mbit", "bytes/s", 312500.0),
        ("2G", "bytes of memory", 2**31),
        ("7MiB", "bytes of memory", 7 * 2**20),
        ("3GB", "bytes of memory", 3 * 2**30),
        ("4096", "bytes of memory", 4096),
        ("3.35e12", "bytes/s", 3.35e12),
        (5, "bytes", 5.0),
    ],
)
def test_quantities(text: object, unit: str, value: float) -> None:
    assert parse_quantity(text, unit) == pytest.approx(value)


@pytest.mark.parametrize(
    "text", ["", "x", "1.2.3 GB", "1 GB/s", "-3 GB", "inf", True, None, [1], 0, float("nan")]
)
def test_what_is_no_quantity(text: object) -> None:
    with pytest.raises(ValueError, match="accepted is a positive number of bytes, or text such as '80 GB'"):
        parse_quantity(text, "bytes")


SECONDS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "ns": 1e-9}
BYTES = {"B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}


def _read(shown: str, factors: dict[str, float]) -> float:
    number, unit = shown.rsplit(" ", 1)
    return float(number.replace(",", "")) * factors[unit]


@given(st.floats(1e-8, 1e6))
def test_seconds_read_back(value: float) -> None:
    assert _read(units.seconds(value), SECONDS) == pytest.approx(value, rel=6e-3)


@given(st.floats(100, 1e16))
def test_sizes_read_back(value: float) -> None:
    assert _read(units.size(value), BYTES) == pytest.approx(value, rel=6e-3)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (units.seconds(0.0), "0 s"),
        (units.seconds(0.99996), "1.00 s"),
        (units.seconds(2.34e-3), "2.34 ms"),
        (units.seconds(None), "–"),
        (units.size(82.4 * 2**30), "82.4 GiB"),
        (units.size(-3.3 * 2**30), "-3.30 GiB"),
        (units.size(512), "512 B"),
        (units.rate(148e9), "148 GB/s"),
        (units.decimal(1.19e17) + "FLOP", "119 PFLOP"),
        (units.share(0.4123), "41.2 %"),
        (units.count(5762.3), "5,762"),
        (units.figure(3.0, "GB"), "3 GB"),
    ],
)
def test_figures(shown: str, expected: str) -> None:
    assert shown == expected


def test_amounts() -> None:
    assert [amount(n) for n in (0, 999, 1000, 12_345_678, 2.5e12)] == [
        "0 B",
        "999 B",
        "1 kB",
        "12.3 MB",
        "2.5 TB",
    ]


def test_places_and_the_largest_unit() -> None:
    assert [units.size(size, places=1, largest="GiB") for size in (1023, 1536, 2**43)] == [
        "1,023 B",
        "1.5 KiB",
        "8,192.0 GiB",
    ]


@given(st.floats(1, 1e15))
def test_sizes_are_written_as_they_are_read(value: float) -> None:
    assert parse_quantity(units.size(value).replace(",", ""), "bytes") == pytest.approx(
        value, rel=6e-3, abs=0.5
    )
    assert parse_quantity(units.rate(value), "bytes/s") == pytest.approx(value, rel=6e-3)
    assert parse_quantity(amount(value), "bytes") == pytest.approx(value, rel=6e-3)
