"""Faults at named points: texts, strokes that count once over processes, and what strikes."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from windtunnel.base.errors import UserError
from windtunnel.linux import faults

ACCEPTED = {"kill": ("rank", "step"), "slow": ("rank", "rate")}


def test_a_text_is_taken_apart() -> None:
    assert faults.fields("kill:rank=3,step=5", ACCEPTED) == ("kill", {"rank": "3", "step": "5"})
    assert faults.fields(" kill ", ACCEPTED) == ("kill", {})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("burn:rank=1", "unknown action 'burn'; accepted: one of kill, slow"),
        ("kill:rate=1", "unknown field 'rate=1'; accepted: name=value with one of rank, step"),
        ("kill:rank", "unknown field 'rank'"),
        ("kill:rank=1,rank=2", "rank is given twice"),
    ],
)
def test_what_is_not_understood_is_refused(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        faults.fields(text, ACCEPTED)


def test_a_stroke_is_claimed_by_one_of_many(tmp_path: Path) -> None:
    strokes = [faults.InjectionCounts(tmp_path / "faults") for _ in range(8)]
    won: list[bool] = []
    threads = [
        threading.Thread(target=lambda counts=counts: won.append(counts.claim(0, 0))) for counts in strokes
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == [False] * 7 + [True]
    assert (strokes[3].count(0), strokes[3].count(1)) == (1, 0)
    assert strokes[3].claim(0, 1)
    assert strokes[5].count(0) == 2


def test_a_process_is_struck() -> None:
    code = "from windtunnel.linux import faults; faults.inject('kill', 'x')"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == -9


def test_an_injected_error_names_its_text() -> None:
    with pytest.raises(faults.InjectedError, match="injected: raise:rank=1"):
        faults.inject("raise", "raise:rank=1")


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_nth_call_of_a_method_is_a_point(when: str) -> None:
    done: list[int] = []

    class Worker:
        def work(self, number: int) -> int:
            done.append(number)
            return number

    faults.inject_at(Worker, "work", when, 2, "raise")
    assert Worker().work(1) == 1
    with pytest.raises(faults.InjectedError):
        Worker().work(2)
    assert done == ([1] if when == "before" else [1, 2])
    assert Worker().work(3) == 3
