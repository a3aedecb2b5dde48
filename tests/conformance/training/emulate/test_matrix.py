"""The matrix of PyTorch's builds, without the gigabytes: what is compared, what is kept, and what is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matrix
import pytest
from matrix import BEGIN, BUILDS, END, HEAD, PAGE, SCRIPTS

SUMMARY: dict[str, Any] = {
    "run_id": "a", "directory": "/here", "versions": {"torch": "2.13.0+cpu"}, "iteration_time_s": 0.0125,
    "ranks": [{"rank": 0, "peak_reserved_bytes": 3 << 20, "wall_time_s": 1.0}], "warnings": [], "mfu": 0.4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "places"),
    [
        ({"run_id": "b", "versions": {}, "wall_time_s": 9.0}, []),
        ({"ranks": [SUMMARY["ranks"][0] | {"wall_time_s": 2.0}]}, ["ranks.0.wall_time_s"]),
        ({"iteration_time_s": 0.0125 + 1e-15}, ["iteration_time_s"]),
        ({"warnings": ["a word"], "more": None}, ["more", "warnings.0"]),
    ],
)
def test_only_what_a_run_says_of_itself_may_differ(change: dict[str, Any], places: list[str]) -> None:
    assert matrix.differences(SUMMARY, SUMMARY | change) == places


@pytest.mark.parametrize(
    ("odd", "status", "said"),
    [
        (None, 0, "| DDP | 2.13.0 CUDA | 12.500 ms | 3.0 MiB | yes |"),
        (SUMMARY | {"mfu": 0.5}, 1, "no (1 figures, the first is `mfu`)"),
        ("status 1: KeyError", 1, "| – | – | failed |"),
    ],
)
def test_what_differs_or_fails_is_written_and_ends_badly(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, odd: Any, status: int, said: str
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}old\n{END}\nafter\n")
    monkeypatch.setattr(matrix, "install", lambda build, into: build)
    monkeypatch.setattr(
        matrix, "emulate",
        lambda build, arguments, home: odd if odd and build == BUILDS[1] and "--pp" in arguments else SUMMARY,
    )  # fmt: skip
    assert matrix.main(["--into", str(tmp_path)], page) == status
    assert said in page.read_text()
    assert page.read_text().startswith("before\n") and page.read_text().endswith("after\n")


def test_the_page_shows_every_script_with_every_build_and_no_difference() -> None:
    lines = PAGE.read_text().split(BEGIN)[1].split(END)[0].splitlines()
    assert tuple(lines[:2]) == HEAD
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert [cell[:2] for cell in cells] == [[script, build.title] for script in SCRIPTS for build in BUILDS]
    for _, title, iteration, reserved, equal in cells:
        assert iteration.endswith(" ms") and reserved.endswith(" MiB")
        assert equal == ("yes" if title == "2.13.0 CUDA" else "–")
