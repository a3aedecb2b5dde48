"""The allow-list as a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from windtunnel.base.errors import UserError
from windtunnel.trust.attest import AllowList, read_allow_list

A, B = "a" * 64, "0" * 64


def test_a_file_says_what_the_dataclass_does(tmp_path: Path) -> None:
    path = tmp_path / "allow.yaml"
    path.write_text(f"roots: ['{A}']\nmeasurements: {{kernel: ['{A}', '{B}']}}\n")
    assert read_allow_list(path) == AllowList((A,), {"kernel": (A, B)})
    path.write_text("roots: []\nmeasurements: {}\nclaims: {debug: [0, 1]}\nleast: {counter: 3}\n")
    assert read_allow_list(path) == AllowList((), {}, {"debug": (0, 1)}, {"counter": 3})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("roots: []", "measurements"),
        ("roots: []\nmeasurements: {}\nmore: 1", "more"),
        ("roots: [12]\nmeasurements: {}", "roots"),
        ("roots: [abc]\nmeasurements: {}", "'abc' is no digest or key; accepted are 64 hex digits"),
        (f"roots: []\nmeasurements: {{kernel: [{A.upper()}]}}", "is no digest"),
        ("roots: []\nmeasurements: {}\nleast: {counter: many}", "counter"),
        ("- roots", "accepted is a mapping"),
    ],
)
def test_what_is_wrong_is_one_sentence(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "allow.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=words) as caught:
        read_allow_list(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
