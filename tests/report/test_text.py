"""A summary in words."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_examples import summary

from windtunnel.report import text


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (text.path_label("communication:dp"), "exposed communication: dp"),
        (text.path_label("something_new"), "something new"),
    ],
)
def test_labels(shown: str, expected: str) -> None:
    assert shown == expected


@given(st.sets(st.integers(0, 60)))
def test_rank_ranges_read_back(members: set[int]) -> None:
    ranks: set[int] = set()
    for first, last in re.findall(r"(\d+)(?:-(\d+))?", text.ranks(sorted(members), most=100)):
        ranks.update(range(int(first), int(last or first) + 1))
    assert ranks == members


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


def test_out_of_memory_is_one_sentence_of_the_ranks_that_lack_most() -> None:
    lacking = [rank for rank in summary()["ranks"] if rank["oom"]]
    assert len(lacking) == 1
    said = text.worst_out_of_memory(summary())
    assert said == (
        "out of memory: layers.15.feed_forward asks for 2.00 GiB with 92.9 GiB reserved, "
        "on ranks 64-127 (pp=1); "
        "most is held by activations 46.8 GiB, then optimizer state 14.4 GiB, "
        "the largest part for optimizer state (14.4 GiB)"
    )
    more = lacking[0] | {"name": "pp=2", "count": 8, "headroom_bytes": -1}
    assert text.worst_out_of_memory(summary() | {"ranks": [*lacking, more]}).endswith(
        "; 8 more ranks run out, too"
    )
    assert text.worst_out_of_memory({"ranks": [{"name": "all"}]}) == ""
