"""The terminal's summary: narrow, complete, and honest about where figures come from."""

from pathlib import Path

import pytest
from report_examples import summary
from rich.console import Console

from windtunnel.report.terminal import print_summary


def _shown(known: dict, width: int = 140, report: Path | None = None) -> str:
    console = Console(width=width, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    print_summary(known, console, report)
    return console.export_text()


@pytest.mark.parametrize("width", [70, 100, 200])
def test_it_is_at_most_a_hundred_columns_wide(width: int) -> None:
    shown = _shown(summary(), width)
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= min(width, 100)


def test_it_answers_the_questions() -> None:
    shown = _shown(summary(), report=Path("/runs/" + "x" * 120 + "/report.html"))
    for words in (
        "2.82 s  emulated",
        "41.7 s  measured",
        "33.3 %",
        "37.5 %",
        "exposed communication: dp",
        "pipeline bubble",
        "critical path of rank 63",
        "does not fit",
        "68.2 GiB",
        "→ More microbatches",
        "stand-in, 1.0 <not computed>",
        "All times and memory are emulated",
        "/report.html",
    ):
        assert words in shown
    assert "x" * 120 + "/report.html" in shown  # a path stays in one piece


def test_bars_are_as_long_as_their_shares() -> None:
    lines = [line for line in _shown(summary()).splitlines() if "%" in line and "█" in line]
    lengths = {line.split("  ")[1].strip(): line.count("█") for line in lines}
    assert lengths["compute"] == 30
    assert lengths["exposed communication: dp"] == int(30 * 0.2214 / 2.3131)


def test_text_of_the_user_is_not_markup() -> None:
    known = summary()
    known["warnings"] = ["[bold]a[/bold] [/wrong] [0]"]
    known["ranks"][0]["name"] = "[red]pp"
    known["command"]["args"] = ["--x=[1,2]"]
    shown = _shown(known)
    assert "[bold]a[/bold] [/wrong] [0]" in shown and "[red]pp" in shown and "--x=[1,2]" in shown


def test_what_is_not_known_is_left_out() -> None:
    known = summary() | {
        "mfu": None,
        "hfu": None,
        "tokens_per_second_per_device": None,
        "ranks": [],
        "waits": [],
    }
    shown = _shown(known)
    assert "MFU" not in shown and "Device memory" not in shown and "None" not in shown
    _shown({"iteration_time_s": 1.0})


def test_of_many_classes_the_tightest_are_listed() -> None:
    known = summary()
    known["ranks"] = [
        dict(known["ranks"][0], name=f"pp={i}", headroom_bytes=float(100 - i)) for i in range(40)
    ]
    shown = _shown(known)
    assert "pp=39 " in shown and "pp=0 " not in shown and "28 more" in shown


def test_what_runs_out_of_memory_comes_first_and_in_red() -> None:
    console = Console(width=100, record=True, force_terminal=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_summary(summary(), console)
    first = console.export_text(styles=True).partition("\n")[0]
    assert "✗ out of memory: layers.15.feed_forward asks for 2.00 GiB" in first
    assert first.startswith("\x1b[1;31m")


def test_what_came_of_fail_on_is_told() -> None:
    baseline = {"name": "20261121-030405-ab12", "iteration_time_s": 2.5}
    verdict = {"fail_on": ["slower:10%"], "passed": True, "reasons": [], "baseline": baseline}
    assert "--fail-on slower:10%: passed, an iteration of 20261121-030405-ab12 takes 2.50 s" in " ".join(
        _shown(summary() | {"verdict": verdict}).split()
    )
    verdict |= {"passed": False, "reasons": ["it is too slow"]}
    assert "--fail-on slower:10%: it is too slow" in _shown(summary() | {"verdict": verdict})
