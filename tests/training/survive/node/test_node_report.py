"""What a user reads of a run, from its events."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from windtunnel.training.survive import report


def decided(generation: int, t: float, nodes: tuple[int, ...]) -> dict[str, Any]:
    membership = {
        "generation": generation,
        "nodes": [{"id": node} for node in nodes],
        "per_node": 2,
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
    event("injected", 103.1, 1, fault="kill:node=1,step=2", place=1, rank=2),
    event(
        "lost", 103.3, 1, what="node", node=1, place=1, rank=None, evidence="connection", own=False, error=""
    ),
    event("ordered", 103.3, 1, count=1, reason="1 machines are missing"),
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
        "[    0.00 s] generation 1: 4 ranks on machines 0, 1",
        "[    3.10 s] injected: kill:node=1,step=2",
        "[    3.30 s] lost machine 1 (place 1): its connection broke",
        "[    3.30 s] 1 machine ordered (1 machines are missing)",
        "[    4.00 s] generation 2: 4 ranks on machines 0, 2",
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


def test_the_table_and_the_sums() -> None:
    text = io.StringIO()
    report.print_end(EVENTS, Console(file=text, width=120))
    assert "kill:node=1,step=2" in text.getvalue()
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


def test_a_run_without_steps_or_failures_says_little() -> None:
    text = io.StringIO()
    report.print_end([EVENTS[0], EVENTS[-1]], Console(file=text))
    assert text.getvalue() == ""
