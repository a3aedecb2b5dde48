"""The matrix of PyTorch's builds, without the gigabytes: what is compared, what is kept, and what is told."""

from __future__ import annotations

import copy
import subprocess
from pathlib import Path
from typing import Any

import matrix
import pytest
from matrix import BEGIN, BUILDS, END, HEAD, PAGE, SCRIPTS, Build

SUMMARY: dict[str, Any] = {
    "run_id": "a", "created_at": "now", "directory": "/here", "versions": {"torch": "2.13.0+cpu"},
    "wall_time_s": 1.0, "capture_time_s": 0.5, "peak_rss_bytes": 3, "iteration_time_s": 0.0125,
    "ranks": [{"rank": 0, "peak_reserved_bytes": 3 << 20, "wall_time_s": 1.0}], "warnings": [],
}  # fmt: skip


def test_only_what_a_run_says_of_itself_may_differ() -> None:
    own = SUMMARY | {
        "run_id": "b", "created_at": "then", "directory": "/there", "versions": {"torch": "2.13.0+cu130"},
        "wall_time_s": 9.0, "capture_time_s": 7.0, "peak_rss_bytes": 8,
    }  # fmt: skip
    assert list(matrix.differences(SUMMARY, own)) == []
    for change, place in (
        (lambda one: one["ranks"][0].update(peak_reserved_bytes=4 << 20), "ranks.0.peak_reserved_bytes"),
        (lambda one: one["ranks"][0].update(wall_time_s=2.0), "ranks.0.wall_time_s"),
        (lambda one: one.update(iteration_time_s=0.0125 + 1e-15), "iteration_time_s"),
        (lambda one: one.update(iteration_time_s=0), "iteration_time_s"),
        (lambda one: one["warnings"].append("a word"), "warnings"),
        (lambda one: one.pop("ranks"), "ranks"),
        (lambda one: one.update(more=None), "more"),
    ):
        other = copy.deepcopy(own)
        change(other)
        assert list(matrix.differences(SUMMARY, other)) == [place]


def test_one_build_never_stands_for_another() -> None:
    cpu, cuda = Build.parse("2.13.0-cpu"), Build.parse("2.13.0-cuda")
    assert (cpu.requirement, cuda.requirement) == ("torch===2.13.0+cpu", "torch===2.13.0")
    for text in ("2.13.0", "2.13.0-rocm", "cuda-2.13.0", "-cpu"):
        with pytest.raises(SystemExit) as stopped:
            matrix.main([text])
        assert stopped.value.code == 2


@pytest.fixture
def page(tmp_path: Path) -> Path:
    path = tmp_path / "page.md"
    path.write_text(f"before\n{BEGIN}old\n{END}\nafter\n")
    return path


def results_of(monkeypatch: pytest.MonkeyPatch, given: Any) -> None:
    """Nothing is installed and nothing runs: ``given(build, arguments)`` is what comes out."""
    monkeypatch.setattr(matrix, "install", lambda build, into: into / build.name)
    monkeypatch.setattr(matrix, "emulate", lambda where, arguments, home: given(where.name, arguments))


def test_equal_builds_are_written_and_end_well(
    monkeypatch: pytest.MonkeyPatch, page: Path, tmp_path: Path
) -> None:
    results_of(monkeypatch, lambda build, arguments: SUMMARY | {"run_id": build})
    for _ in range(2):
        assert matrix.main(["--into", str(tmp_path)], page) == 0
    lines = page.read_text().split(BEGIN)[1].split(END)[0].splitlines()
    assert lines[:2] == list(HEAD) and len(lines) == 2 + len(SCRIPTS) * len(BUILDS)
    assert lines[2:5] == [
        "| DDP | 2.13.0 CPU | 12.500 ms | 3.0 MiB | – |",
        "| DDP | 2.13.0 CUDA | 12.500 ms | 3.0 MiB | yes |",
        "| DDP | 2.15.0 CUDA | 12.500 ms | 3.0 MiB | – |",
    ]
    assert page.read_text().startswith("before\n") and page.read_text().endswith("after\n")


def test_a_difference_is_told_and_fails(monkeypatch: pytest.MonkeyPatch, page: Path, tmp_path: Path) -> None:
    def given(build: str, arguments: Any) -> Any:
        return SUMMARY | ({"mfu": 0.5} if build == "2.13.0-cuda" and "--tp" in arguments else {"mfu": 0.4})

    results_of(monkeypatch, given)
    assert matrix.main(["--into", str(tmp_path)], page) == 1
    told = [line for line in page.read_text().splitlines() if "no (1 figures, the first is `mfu`)" in line]
    assert len(told) == sum("--tp" in arguments for arguments in SCRIPTS.values())


def test_a_failure_is_told_and_fails(
    monkeypatch: pytest.MonkeyPatch, page: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results_of(monkeypatch, lambda build, arguments: "status 1: KeyError" if "--pp" in arguments else SUMMARY)
    assert matrix.main(["--into", str(tmp_path)], page) == 1
    assert page.read_text().count("| – | – | failed |") == len(BUILDS)
    assert "PP 2 × TP 2 × FSDP2, 2.15.0 CUDA: status 1: KeyError" in capsys.readouterr().err


def test_other_builds_are_not_written(monkeypatch: pytest.MonkeyPatch, page: Path, tmp_path: Path) -> None:
    results_of(monkeypatch, lambda build, arguments: SUMMARY)
    before = page.read_text()
    assert matrix.main(["2.14.1-cuda", "--into", str(tmp_path)], page) == 0
    assert page.read_text() == before


def test_what_is_installed_is_found_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands: list[list[str]] = []
    status = [1]

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        if command[1:3] == ["-m", "venv"]:
            Path(command[3]).mkdir(exist_ok=True)
        return subprocess.CompletedProcess(command, status[0] if "install" in command else 0)

    monkeypatch.setattr(matrix.subprocess, "run", run)
    build = BUILDS[1]
    assert matrix.main([build.name, "--into", str(tmp_path)]) == 2, "pip failed"
    status[0] = 0
    assert matrix.install(build, tmp_path) == tmp_path / build.name
    assert sum("torch===2.13.0" in command for command in commands) == 2
    commands.clear()
    assert matrix.install(build, tmp_path) == tmp_path / build.name
    assert commands == []


def test_a_full_disk_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(matrix.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 2e9}))
    assert matrix.main(["2.15.0-cuda", "--into", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("matrix: 2.15.0 CUDA takes 6 GB, and ")


def test_the_page_shows_every_script_with_every_build_and_no_difference() -> None:
    lines = PAGE.read_text().split(BEGIN)[1].split(END)[0].splitlines()
    assert tuple(lines[:2]) == HEAD
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert [cell[:2] for cell in cells] == [[script, build.title] for script in SCRIPTS for build in BUILDS]
    for _, title, iteration, reserved, equal in cells:
        assert iteration.endswith(" ms") and reserved.endswith(" MiB")
        assert equal == ("yes" if title == "2.13.0 CUDA" else "–")
