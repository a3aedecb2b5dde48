"""What goes over the wire comes back the same."""

from __future__ import annotations

import json
import pickle
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.agents.sandbox.client.wire import (
    STATUS,
    TAIL,
    Collector,
    json_line,
    output_line,
    raised,
    read,
    result_line,
)
from windtunnel.agents.sandbox.daemon.service import told
from windtunnel.agents.sandbox.errors import LessError, SandboxDied, SandboxError
from windtunnel.agents.sandbox.model import (
    ImagePart,
    Lack,
    Manifest,
    RestoreReport,
    SandboxSpec,
    ShellState,
    TurnClass,
    TurnResult,
)
from windtunnel.base.errors import UserError
from windtunnel.base.plain import to_plain

PIECES = st.lists(
    st.tuples(st.sampled_from(["stdout", "stderr"]), st.binary(max_size=60) | st.text().map(str.encode))
)


@given(PIECES, st.integers(1, 50))
def test_output_comes_back_exactly_however_the_stream_is_cut(
    pieces: list[tuple[str, bytes]], cut: int
) -> None:
    whole = {
        name: b"".join(data for stream, data in pieces if stream == name) for name in ("stdout", "stderr")
    }
    result = TurnResult(whole["stdout"], whole["stderr"], 3, 0.5, note="\u2028 note")
    stream = b"".join(output_line(*piece) for piece in pieces) + result_line(
        result, {name: len(data) for name, data in whole.items()}, {"ticket": "t"}
    )
    collector = Collector()
    for at in range(0, len(stream), cut):
        collector.take(stream[at : at + cut])
    assert collector.complete() == result
    assert collector.turn == {"ticket": "t"}


def test_what_was_passed_on_is_not_kept() -> None:
    passed: list[tuple[str, bytes]] = []
    collector = Collector(lambda stream, data: passed.append((stream, data)))
    for _ in range(100):
        collector.take(output_line("stdout", b"x" * 10_000))
        assert passed.pop() == ("stdout", b"x" * 10_000) and not passed
        assert len(collector.outputs["stdout"]) <= 2 * TAIL
    collector.take(output_line("stdout", b"end"))
    collector.take(result_line(TurnResult(b"", b"", 0, 0.1), {"stdout": 1_000_003, "stderr": 0}, None))
    result = collector.complete()
    assert (len(result.stdout), result.tails, result.note) == (TAIL, ("stdout",), "")
    assert collector.complete().stdout.endswith(b"xend")


def test_a_stream_that_ends_early_or_lacks_output_is_a_fault() -> None:
    collector = Collector()
    collector.take(output_line("stdout", b"half"))
    with pytest.raises(SandboxError, match="not known"):
        collector.complete()
    with pytest.raises(SandboxError, match="lost"):
        collector.take(result_line(TurnResult(b"", b"", 0, 0.1), {"stdout": 10, "stderr": 0}, None))
    with pytest.raises(SandboxDied, match="gone"):
        Collector().take(json_line({"error": "gone", "kind": "died"}))


@pytest.mark.parametrize("kind", STATUS)
def test_every_kind_of_error_has_its_exception(kind: str) -> None:
    error = raised({"error": "words", "kind": kind, "lacks": []}, STATUS[kind])
    assert str(error) == "words"
    assert isinstance(error, UserError) == (STATUS[kind] < 410)
    assert isinstance(error, SandboxDied) == (kind == "died")


def test_what_lacks_comes_over_whole() -> None:
    lacks = (Lack("timers", "python3 (process 5 inside): timerfd 4", "it is periodic"),)
    report = RestoreReport("c1", 3, ("files",), lacks, 0.5)
    answer = json.loads(json.dumps(told(LessError("less came back", lacks, report=report))))
    error = raised(answer, STATUS[answer["kind"]])
    assert isinstance(error, LessError) and str(error) == "less came back"
    assert (error.lacks, error.report, error.manifest) == (lacks, report, None)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.lacks, again.report) == (str(error), lacks, report)


def test_what_is_late_is_a_timeout_on_both_sides() -> None:
    answer = told(TimeoutError("not done after 1 s"))
    error = raised(answer, STATUS[answer["kind"]])
    assert type(error) is TimeoutError and str(error) == "not done after 1 s"


def test_an_answer_of_somebody_else_is_told() -> None:
    assert "502" in str(raised("<html>", 502))
    assert isinstance(raised(None, 502), SandboxError)


def test_a_manifest_comes_back_the_same() -> None:
    made = Manifest(
        id="c1",
        box="a",
        turn=2,
        parent="c0",
        turn_class=TurnClass.SHELL,
        wanted=TurnClass.SHELL,
        reasons=("state of shell main",),
        created=1.5,
        files=None,
        image=ImagePart("c0", 7, ("init", "bash"), ("/a",), ("/lib",), 9, 3),
        shells=(ShellState("main", "bash", "declare -x A", "f"),),
        spec=SandboxSpec("a", environment={"A": "b"}),
        kept=("files",),
    )
    assert read(Manifest, json.loads(json.dumps(asdict(made)))) == made
    assert read(Manifest, {**json.loads(json.dumps(asdict(made))), "of a newer daemon": 1}) == made
    shown = to_plain(made)
    assert shown["turn_class"] == "shell"
    assert json.loads(json.dumps(shown))["spec"]["environment"] == {"A": "b"}
