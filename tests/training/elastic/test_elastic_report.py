"""What a user reads of a run, from its events."""

from __future__ import annotations

import io
from contextlib import nullcontext
from typing import Any

import pytest
from rich.console import Console

from windtunnel.training.elastic import report
from windtunnel.training.elastic.events import unsound
from windtunnel.training.elastic.live.job import Job


def decided(generation: int, t: float, hosts: tuple[int, ...]) -> dict[str, Any]:
    membership = {
        "generation": generation,
        "hosts": [{"id": host} for host in hosts],
        "per_host": 2,
        "restart_all": False,
    }
    return event("decided", t, generation, membership=membership, reason="r")


def event(kind: str, t: float, generation: int, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "t": t, "generation": generation, **fields}


def restored(t: float, rank: int, tier: str) -> dict[str, Any]:
    return event("restored", t, 2, rank=rank, step=1, tier=tier, seconds=0.1)


EVENTS = [
    decided(1, 100.0, (0, 1)),
    *(event("grouped", 100.5, 1, rank=rank) for rank in range(4)),
    event("step", 101.0, 1, step=0, rank=0),
    event("step", 102.0, 1, step=1, rank=0),
    event("step", 103.0, 1, step=2, rank=0),
    event("injected", 103.1, 1, fault="kill:host=1,step=2", place=1, rank=2),
    event(
        "lost", 103.3, 1, what="host", host=1, place=1, rank=None, evidence="connection", own=False, error=""
    ),
    event("ordered", 103.3, 1, count=1, reason="1 of 2 hosts missing"),
    decided(2, 104.0, (0, 2)),
    *(event("grouped", 104.5, 2, rank=rank) for rank in range(4)),
    *(restored(104.8, rank, "memory") for rank in (0, 1)),
    *(restored(105.0, rank, "peer") for rank in (2, 3)),
    event("step", 106.0, 2, step=2, rank=0),
    event("step", 107.0, 2, step=3, rank=0),
    event("finished", 107.5, 2, status=0, reason="all ranks are done"),
]


def test_a_line_for_what_matters() -> None:
    narrator = report.Narrator()
    lines = [line for line in map(narrator.line, EVENTS) if line is not None]
    assert lines == [
        "[    0.00 s] generation 1: 4 ranks on hosts 0, 1",
        "[    3.10 s] injected: kill:host=1,step=2",
        "[    3.30 s] lost host 1 (place 1): its connection broke",
        "[    3.30 s] 1 host ordered (1 of 2 hosts missing)",
        "[    4.00 s] generation 2: 4 ranks on hosts 0, 2",
        "[    6.00 s] step 2 is done, the first of generation 2 "
        "(restored step 1: ranks 0-1 from memory; ranks 2-3 from peer)",
        "[    7.50 s] finished: all ranks are done",
    ]


def test_a_traceback_becomes_its_last_line() -> None:
    error = "ended with status 1: Traceback (most recent call last):\n  File x\nValueError: boom"
    lost = event("lost", 1.0, 1, what="worker", rank=3, place=1, evidence="exit", own=True, error=error)
    line = report.Narrator().line(lost)
    assert line is not None
    assert line.endswith("lost rank 3: ended with status 1: ValueError: boom")
    assert report.failed_rank([lost, EVENTS[6]]) is lost


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        ("note", {"message": "hello"}, "text is None, str is needed"),
        ("restored", {"rank": 0, "step": -1, "tier": "mine"}, "step is -1, a count is needed"),
        ("finished", {"status": 0}, "it is written by the supervisor alone"),
        ("mine", {"note": 1}, ""),
        ("note", {"text": " \n"}, ""),
    ],
)
def test_what_a_program_says_breaks_no_report(kind: str, fields: dict[str, Any], said: str) -> None:
    assert unsound(kind, fields) == said
    job = Job(0, 1, 0, timeout=1.0, process_state={})
    with pytest.raises(TypeError, match=said) if said else nullcontext():
        job.event(kind, **fields)
    if not said:
        report.Narrator().line(event(kind, 1.0, 1, **fields))


def test_the_table_and_the_sums() -> None:
    text = io.StringIO()
    report.print_end(EVENTS, Console(file=text, width=120))
    assert "kill:host=1,step=2" in text.getvalue()
    assert text.getvalue().count("(measured)") == 2
    sums = report.summary(EVENTS)
    (recovery,) = sums["recoveries"]
    assert {name: round(value, 3) for name, value in recovery["phases"].items()} == {
        "detect": 0.2,
        "decide": 0.7,
        "regroup": 0.5,
        "load": 0.5,
        "first_step": 1.0,
    }
    assert recovery["steps_lost"] == 1


def test_checkpoints_that_are_not_in_storage_are_named() -> None:
    """What was wanted after the step that a later generation went back to is wanted no more."""
    wanted = [event("storage.wanted", 101.0, 1, step=step) for step in (3, 7, 11, 5, 9)]
    there = [event("persisted", 102.0, 1, step=step) for step in (3, 11)]
    failed = event("storage.failed", 103.0, 1, step=5, error="it is full")
    assert report.Narrator().line(failed) == "[    0.00 s] step 5 is not in storage: it is full"
    events = [*EVENTS, *wanted, *there, failed]
    assert report.summary(events)["stored"] == {"wanted": [3, 5, 9], "durable": [3]}
    text = io.StringIO()
    report.print_end(events, Console(file=text, width=120))
    assert "2 of 3 checkpoints due to storage are not there: steps 5, 9" in text.getvalue()
    assert report.summary(EVENTS)["stored"] == {"wanted": [], "durable": []}


def test_a_fault_that_did_not_strike_is_named() -> None:
    late = "kill:host=1,step=99"
    begun = event("started", 99.0, 0, config={"faults": ["kill:host=1,step=2", late]})
    text = io.StringIO()
    report.print_end([begun, *EVENTS], Console(file=text, width=120))
    assert f"\n{late} did not strike: no rank came there" in f"\n{text.getvalue()}"
    assert report.summary([begun, *EVENTS])["not_struck"] == [late]


def test_a_run_without_steps_or_failures_says_little() -> None:
    text = io.StringIO()
    report.print_end([EVENTS[0], EVENTS[-1]], Console(file=text))
    assert text.getvalue() == ""


def test_text_with_brackets_and_narrow_terminals() -> None:
    """gloo's messages hold what rich would take for markup; a failure's text is folded, never cut."""
    error = "Traceback (most recent call last):\nRuntimeError: [/a/gloo/b.cc:78] Connection closed by [::1]:7"
    suspect = event(
        "lost", 103.2, 1, what="worker", host=1, place=1, rank=3, evidence="suspect", own=False, error=error
    )
    events = [*EVENTS[:8], suspect, *EVENTS[9:]]
    text = io.StringIO()
    report.print_end(events, Console(file=text, width=80))
    assert "…" not in text.getvalue()
    assert "rank 3 lost its peers" in text.getvalue()
    line = report.Narrator().line(suspect)
    assert line is not None
    assert line.endswith("rank 3 lost its peers: RuntimeError: Connection closed by [::1]:7")


def test_a_run_that_goes_on_from_storage_says_so() -> None:
    narrator = report.Narrator()
    events = [
        EVENTS[0],
        *(event("restored", 100.4, 1, rank=rank, step=9, tier="storage", seconds=0.1) for rank in range(4)),
        event("step", 101.0, 1, step=10, rank=0),
    ]
    lines = [line for line in map(narrator.line, events) if line]
    said = "step 10 is done, the first of generation 1 (restored step 9: ranks 0-3 from storage)"
    assert lines[1].endswith(said)


def test_a_script_without_run_is_told_what_happens() -> None:
    narrator = report.Narrator()
    lines = [narrator.line(e) for e in (EVENTS[0], decided(2, 101.0, (0, 1)))]
    assert lines[1] is not None
    assert "every process anew, since the script does not call windtunnel.training.elastic.run" in lines[1]


def test_what_is_guaranteed_is_said_at_the_start_and_in_the_summary() -> None:
    assert report.summary(EVENTS)["guarantee"] == (
        "not sure to be bit-identical: no step was saved by a PeerCheckpointer"
    )
    sure = event("guarantee", 100.9, 1, doubts=[], any_world=False)
    at = 5
    assert EVENTS[at]["kind"] == "step"
    assert report.guarantee([*EVENTS[:at], sure, *EVENTS[at:]]) == "bit-identical"
    doubtful = event("guarantee", 101.5, 1, doubts=["a is not saved", "b is"], any_world=False)
    again = event("guarantee", 105.5, 2, doubts=["b is", "c"], any_world=False)
    narrator = report.Narrator()
    lines = [narrator.line(record) for record in (EVENTS[0], sure, doubtful, again)]
    assert lines[1] is None
    assert lines[2] is not None and lines[2].endswith("may differ in bits: a is not saved; b is")
    assert lines[3] is not None and lines[3].endswith("may differ in bits: c")
    guarantee = report.guarantee([*EVENTS, sure, doubtful, again])
    assert guarantee == "not sure to be bit-identical: a is not saved; b is; c"


def test_another_number_of_ranks_gives_other_bits_but_for_templates() -> None:
    shrunk = [
        *EVENTS[:8],
        decided(2, 104.0, (0,)),
        event("step", 106.0, 2, step=2, rank=0),
    ]
    for any_world, expected in (
        (True, "bit-identical"),
        (False, "not sure to be bit-identical: the number of ranks changed (4, 2)"),
    ):
        said = event("guarantee", 100.9, 1, doubts=[], any_world=any_world)
        assert report.guarantee([*shrunk, said]) == expected
