"""Sealed manifests: exactly what was written, or an error that says why not."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.store.objects import ObjectError, OtherVersion
from windtunnel.store.objects.manifest import seal, unseal


@dataclass(frozen=True)
class Part:
    name: str
    bytes: int = 0


@dataclass(frozen=True)
class Whole:
    parts: tuple[Part, ...]
    time: float = 0.0
    note: str | None = None


wholes = st.builds(
    Whole,
    st.lists(st.builds(Part, st.text(max_size=5), st.integers()), max_size=3).map(tuple),
    st.floats(allow_nan=False, allow_infinity=False),
    st.one_of(st.none(), st.text(max_size=5)),
)


@settings(max_examples=100, deadline=None)
@given(wholes)
def test_what_is_sealed_comes_back(whole: Whole) -> None:
    assert unseal(Whole, "thing", 3, seal("thing", 3, whole), "here") == whole


@settings(max_examples=200, deadline=None)
@given(wholes, st.floats(0, 1, exclude_max=True), st.integers(0, 255))
def test_no_other_byte_passes(whole: Whole, place: float, byte: int) -> None:
    data = seal("thing", 3, whole)
    at = int(place * len(data))
    for wrong in (data[:at] + bytes([byte]) + data[at + 1 :], data[:at], data + bytes([byte])):
        if wrong != data:
            with pytest.raises(ObjectError, match="here"):
                unseal(Whole, "thing", 3, wrong, "here")


def test_what_is_not_one_is_told_apart() -> None:
    for data, text in (
        (seal("other", 3, Whole(())), "here is damaged or foreign: it is no thing"),
        (b"[]\n", "it is no thing"),
        (b"{", "here is truncated or damaged"),
        (b"[" * 100_000, "here is truncated or damaged"),
        (b'{"kind":"thing","value":NaN,"version":3}', "does not match its checksum"),
        (b'{"kind":"thing","value":1E999,"version":3}', "does not match its checksum"),
        (json.dumps({"kind": "thing", "version": 3}).encode(), "does not match its checksum"),
        (seal("thing", 3, {"parts": [], "colour": 1}), "here is no thing of this version: .*field colour"),
        (seal("thing", 3, {"time": 0.0}), "field parts"),
        (seal("thing", 3, {"parts": [], "time": "1"}), "time is '1'"),
    ):
        with pytest.raises(ObjectError, match=text):
            unseal(Whole, "thing", 3, data, "here")
    for version in (2, 4, "3"):
        with pytest.raises(OtherVersion, match=f"here has version {version!r}; version 3 is read"):
            unseal(Whole, "thing", 3, seal("thing", version, Whole(())), "here")  # type: ignore[arg-type]
