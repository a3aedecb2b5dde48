"""A step is what the job calls one, however many calls of however many optimisers it takes. Steps need not be
alike: what is captured and reported is the sequence of them that repeats."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from capturing import SCRIPTS, capture, operator_names, session, steady_events

import windtunnel as wt
from windtunnel.report import text
from windtunnel.training.emulate.graph import EventKind, Phase, Slice
from windtunnel.training.emulate.options import Options
from windtunnel.training.emulate.program import OptimizerCalls, Period, Script, find_period
from windtunnel.training.emulate.run import emulate

PERIODS = "periods.py"
ONE = "h100-sxm:1x1"


def notes_of(slice_: Slice) -> list[str]:
    return [f"{note.text} ({note.of})" for note in slice_.notes]


def calls(slice_: Slice) -> int:
    return int((steady_events(slice_)["kind"] == EventKind.COLLECTIVE).sum())


def test_diloco_talks_once_in_so_many_steps() -> None:
    first, other = capture(PERIODS, "case_diloco", "8", ranks=(0, 1), cluster="h100-sxm:1x2")
    assert first.settled and not first.notes
    assert first.kinds == other.kinds == (0, 0, 0, 0, 0, 0, 0, 1)
    assert len(other.steps) == len(first.steps) == 17, "the second outer step, without set-up of its own"
    assert calls(first) == calls(other) == 2, "weight and bias, once in the period"


def test_the_generator_of_a_wgan_runs_after_its_critics_steps() -> None:
    (slice_,) = capture(PERIODS, "case_wgan", "5", cluster=ONE)
    assert slice_.settled and slice_.kinds == (0, 0, 0, 0, 1)
    assert Counter(steady_events(slice_)["kind"].tolist())[EventKind.STEP] == 6


def test_a_rollout_belongs_to_one_of_its_updates() -> None:
    (slice_,) = capture(PERIODS, "case_grpo", "2", cluster=ONE)
    assert slice_.settled and slice_.kinds == (0, 1)
    forwards = [
        operator_names(slice_, slice_.events[begin:end]).count("aten.addmm.default")
        for begin, end in slice_.steps[-2:]
    ]
    assert sorted(forwards) == [1, 17]


def test_a_checkpoint_now_and_then_is_part_of_the_period() -> None:
    (slice_,) = capture(PERIODS, "case_saves", "6", cluster=ONE)
    assert slice_.settled and slice_.kinds == (0, 0, 0, 0, 0, 1)
    assert any("checkpoint.save" in note for note in notes_of(slice_))


def test_a_script_that_ends_with_its_second_period_is_cut_alike_for_all_ranks() -> None:
    first, other = capture(PERIODS, "case_epochs", "20", ranks=(0, 1), cluster="h100-sxm:1x2")
    assert first.settled and first.ended and len(first.steps) == len(other.steps)
    assert len(first.events) == len(other.events) == first.steps[-1][1]
    assert len(first.after) == len(other.after) > 0, "what the steps behind it call"


def test_a_graph_after_the_warm_up_is_told_and_its_warm_up_is_not_taken_for_the_job() -> None:
    (slice_,) = capture(PERIODS, "case_graph", "4", cluster=ONE)
    (note,) = notes_of(slice_)
    assert note.startswith("what the script does after 4 steps is not in the report: periods.py:")
    assert "torch.cuda.CUDAGraph cannot be emulated" in note


@pytest.mark.parametrize("warm_up", [3, 4, 5, 9])
def test_what_comes_after_a_warm_up_is_reported(warm_up: int) -> None:
    (slice_,) = capture(PERIODS, "case_warms_up", str(warm_up), cluster=ONE)
    assert slice_.settled and slice_.kinds == (0,)
    assert "aten.fill_.Scalar" in operator_names(slice_, steady_events(slice_))


@pytest.mark.parametrize("case", ["plain", "reads", "streams"])
def test_steps_that_are_alike_are_run_once_and_no_more(case: str) -> None:
    with session(PERIODS, f"case_{case}", "5", cluster="h100-sxm:1x2") as capture_session:
        first, other = capture_session.capture([0, 1])
    assert first.settled and len(first.steps) == len(other.steps) == 2
    assert len(capture_session.seconds) == 2, "each rank ran once"


def test_the_program_may_say_where_steps_end() -> None:
    wt.step()  # nothing comes of it here
    first, other = capture(PERIODS, "case_marks", "3", ranks=(0, 1), cluster="h100-sxm:1x2")
    for slice_ in (first, other):
        assert slice_.kinds == (0,) and len(slice_.steps) == 2
        assert Counter(steady_events(slice_)["kind"].tolist())[EventKind.STEP] == 3
    (slice_,) = capture(PERIODS, "case_marks_without_optimizer", "3", cluster=ONE)
    assert slice_.settled and not slice_.notes
    assert operator_names(slice_, steady_events(slice_)).count("aten.addmm.default") == 3


def test_a_bound_that_cuts_the_period_is_told() -> None:
    (slice_,) = capture(PERIODS, "case_diloco", "8", cluster=ONE, steps=12)
    (note,) = notes_of(slice_)
    assert note.startswith("12 steps were run, and no sequence of them came twice: the mean of 8 is reported")
    (slice_,) = capture(PERIODS, "case_grows", "0", cluster=ONE, steps=4)
    (note,) = notes_of(slice_)
    assert note.startswith("4 steps were run, and no sequence of them came twice: the last one is reported")


def test_more_steps_than_are_looked_at_may_be_asked_for() -> None:
    (slice_,) = capture(PERIODS, "case_saves", "40", cluster=ONE, steps=60)
    assert slice_.period == 40 and slice_.kinds.count(1) == 1


def test_what_was_never_reached_is_named() -> None:
    (slice_,) = capture(PERIODS, "case_diloco", "40", cluster=ONE)
    seldom, unused = notes_of(slice_)
    assert seldom.startswith("what comes seldomer than the steps that are looked at is not in the report")
    assert seldom.endswith("in case_diloco, once in 40)") and "periods.py:" in seldom
    assert unused.startswith("an optimiser is never called") and "in case_diloco" in unused


def test_steps_that_cannot_be_looked_at_are_named() -> None:
    (slice_,) = capture(PERIODS, "case_counts_calls", "0", cluster=ONE)
    (note,) = notes_of(slice_)
    assert note.startswith("what the script does after 6 steps is not in the report: periods.py:")
    assert "--steps runs more steps as they are" in note
    (slice_,) = capture(PERIODS, "case_counts_calls", "0", cluster=ONE, steps=8)
    assert slice_.settled and not slice_.notes


@pytest.mark.parametrize(
    ("kinds", "before", "length", "repeats"),
    [
        ("s", 0, 1, False),
        ("sab", 2, 1, False),
        ("saa", 1, 1, True),
        ("sabab", 1, 2, True),
        ("saaaaaaabaaaaaaab", 1, 8, True),
        ("saaabaa", 1, 4, False),
        ("swwwgrr", 5, 1, True),
        ("saafaabaabaab", 4, 3, True),
        ("sabcdef", 6, 1, False),
    ],
)
def test_a_period_is_the_shortest_story(kinds: str, before: int, length: int, repeats: bool) -> None:
    assert find_period(kinds) == Period(before, length, repeats)


def test_the_report_has_every_kind_of_step_and_their_mean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path))
    script = Script(SCRIPTS / PERIODS, ("case_diloco", "4"))
    done = emulate(script, cluster="h100-sxm:2x2", pictures=True)
    summary, result = done.summary, done.result
    assert summary.period is not None and summary.period.repeats
    usual, outer = summary.period.kinds
    assert (usual.count, usual.steps, outer.count, outer.steps) == (3, (1, 2, 3), 1, (4,))
    assert outer.iteration_time_s > usual.iteration_time_s
    seconds = [kind.count * kind.iteration_time_s for kind in summary.period.kinds]
    assert summary.period.seconds == pytest.approx(sum(seconds))
    assert summary.iteration_time_s == pytest.approx(sum(seconds) / 4)
    assert sum(summary.critical_path.values()) == pytest.approx(summary.iteration_time_s)
    assert outer.more[0] == "all_reduce of 16.0 KiB over world" and not usual.more
    weight = next(collective for collective in summary.collectives if collective.bytes == 64 * 64 * 4)
    assert weight.count == 1 and weight.seconds_total == pytest.approx(weight.seconds_each / 4)
    (rank,) = summary.ranks
    assert rank.peak_allocated_bytes == max(kind.peak_allocated_bytes for kind in summary.period.kinds)
    assert summary.model_flops_per_iteration == 4 * 3 * (2 * 4 * 64 * 64) - 4 * (2 * 4 * 64 * 64)
    rows = text.period(summary.to_json())
    assert [row["steps"] for row in rows] == ["3 of 4", "1 of 4"]
    page = (done.directory / "report.html").read_text()
    assert "The steps that repeat" in page and "all_reduce of 16.0 KiB over world" in page
    begin, end = result.timing.window
    assert np.isclose(end - begin, summary.period.seconds)


def test_a_job_of_like_steps_has_no_period(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path))
    script = Script(SCRIPTS / PERIODS, ("case_plain", "0"))
    done = emulate(script, cluster="h100-sxm:1x2", pictures=False)
    assert done.summary.period is None and done.summary.steps_captured == 2
    same = emulate(script, cluster="h100-sxm:1x2", options=Options(steps=6), pictures=False)
    own = {"command", "run_id", "created_at", "directory", "capture_time_s", "wall_time_s", "peak_rss_bytes"}
    a, b = (
        {name: value for name, value in dataclasses.asdict(run.summary).items() if name not in own}
        for run in (done, same)
    )
    assert a == b


# What a step has: forward passes of a layer, and calls of optimisers.
STEPS = {
    "scheduled": (1, 1), "gan": (2, 2),
    "while_backward_runs": (3, 6), "group_by_group": (2, 2), "closure": (2, 1), "lbfgs": (1, 1),
    "without_modules": (1, 1), "buckets": (1, 1),
}  # fmt: skip


def forwards_and_calls(slice_: Slice) -> tuple[int, int]:
    events = steady_events(slice_)
    issued = Counter(
        (slice_.operators[e["ref"]].name, int(e["phase"])) for e in events if e["kind"] == EventKind.OP
    )
    assert not [name for name, phase in issued if "addmm" in name and phase == Phase.OPTIMIZER]
    forwards = sum(n for (name, phase), n in issued.items() if name == "aten.addmm.default")
    return forwards, Counter(events["kind"].tolist())[EventKind.STEP]


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_what_the_job_calls_one(name: str) -> None:
    (slice_,) = capture(PERIODS, f"case_{name}", cluster=ONE)
    assert forwards_and_calls(slice_) == STEPS[name]
    assert slice_.settled and len(slice_.steps) == (3 if name == "lbfgs" else 2)
    assert not slice_.notes or name == "lbfgs"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("once", "the script ended after one step: its set-up is part of what is reported"),
        ("by_hand", "the script ended without an optimiser step: all of it is reported as one step"),
    ],
)
def test_a_script_without_steps_is_told_so(name: str, said: str) -> None:
    (slice_,) = capture(PERIODS, f"case_{name}", cluster=ONE)
    (note,) = slice_.notes
    assert note.text.startswith(said) and len(slice_.steps) == 1


def ends(calls: list[str]) -> Iterator[int]:
    """At which calls steps end; each call is told by the letters of the parameters that it updates."""
    optimizer_calls: OptimizerCalls[int] = OptimizerCalls()
    for number, letters in enumerate(calls):
        yield from optimizer_calls.add(frozenset(map(ord, letters)), number)


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ("a a a", [0, 1, 2]),
        ("a b a b a b", [1, 3, 5]),
        ("ab cd ab cd", [1, 3]),
        ("a b c a b c a", [2, 5]),
        ("a a b a", [0, 1]),
        ("abc bcd abc", [0, 1, 2]),
        ("a", []),
        ("a b", []),
    ],
)
def test_a_step_ends_before_a_parameter_is_updated_again(calls: str, expected: list[int]) -> None:
    assert list(ends(calls.split())) == expected
