"""The file of a trace: what is written is read again, and what is wrong is told in a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.agents.sandbox.model import TurnClass
from windtunnel.agents.sandbox.traces import shipped
from windtunnel.agents.sandbox.traces.schema import Trace, TraceTurn, load, save
from windtunnel.base.errors import UserError

TEXT = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"))
TURN = st.builds(
    TraceTurn,
    turn=st.just(0),
    command=TEXT,
    think=st.floats(0, 1e6),
    shell=TEXT,
    expect_exit=st.none() | st.integers(0, 255),
    expect_stdout=st.none() | st.text(),
    tags=st.lists(TEXT, max_size=3).map(tuple),
    true_class=st.none() | st.sampled_from(TurnClass),
    timeout=st.floats(0.01, 1e6),
)


@given(
    turns=st.lists(TURN, min_size=1, max_size=5),
    prelude=TEXT,
    environment=st.dictionaries(st.sampled_from(["A", "B_2"]), TEXT),
)
def test_what_is_written_is_read(
    turns: list[TraceTurn], prelude: str, environment: dict[str, str], tmp_path_factory: Any
) -> None:
    numbered = tuple(TraceTurn(**{**vars(turn), "turn": number}) for number, turn in enumerate(turns, 1))
    trace = Trace("a", "b", "c", numbered, prelude=prelude, environment=environment, probes={"x": prelude})
    path = tmp_path_factory.mktemp("trace") / "one.jsonl"
    save(trace, path)
    assert load(path) == trace
    assert [child.name for child in path.parent.iterdir()] == ["one.jsonl"]


HEADER = {"kind": "agent-session", "version": 1, "source": "b", "licence": "c", "name": "a"}
WRONG_TURN = {
    "turn": (2, "field turn: 2 is not accepted; use 1"),
    "command": (3, "field command: 3 is not accepted; use text"),
    "think": (-1, "field think: -1 is not accepted"),
    "shell": (None, "field shell: None"),
    "expect_exit": (True, "field expect_exit: True"),
    "expect_stdout": (["x"], "field expect_stdout"),
    "expect_match": ("(", "a regular expression"),
    "tags": ([1], "field tags"),
    "true_class": ("some", "use none, shell, files, full"),
    "timeout": (0, "field timeout: 0"),
    "colour": ("red", "unknown field colour"),
}
WRONG_HEADER = {
    "kind": ("failures", "field kind: 'failures' is not accepted; use \"agent-session\""),
    "version": (2, "field version: 2 is not accepted; use 1"),
    "name": ("A b", "field name: 'A b'"),
    "source": (1, "field source"),
    "workdir": ("here", "an absolute path"),
    "environment": ({"A B": "c"}, "names of letters"),
    "probes": ({"a": 1}, "field probes"),
    "needs": ("bash", "field needs"),
    "colour": ("red", "unknown field colour"),
}


def written(path: Path, header: dict[str, Any], turn: dict[str, Any]) -> Path:
    path.write_text(json.dumps(header) + "\n" + json.dumps(turn) + "\n")
    return path


@pytest.mark.parametrize("field", WRONG_TURN)
def test_wrong_field_of_a_turn(field: str, tmp_path: Path) -> None:
    value, said = WRONG_TURN[field]
    path = written(tmp_path / "one.jsonl", HEADER, {"turn": 1, "command": "ls", field: value})
    with pytest.raises(UserError) as caught:
        load(path)
    assert f"{path}, line 2: " in str(caught.value) and said in str(caught.value)


@pytest.mark.parametrize("field", WRONG_HEADER)
def test_wrong_field_of_the_header(field: str, tmp_path: Path) -> None:
    value, said = WRONG_HEADER[field]
    path = written(tmp_path / "one.jsonl", {**HEADER, field: value}, {"turn": 1, "command": "ls"})
    with pytest.raises(UserError) as caught:
        load(path)
    assert f"{path}, line 1: " in str(caught.value) and said in str(caught.value)


@pytest.mark.parametrize("field", HEADER)
def test_missing_field_of_the_header(field: str, tmp_path: Path) -> None:
    rest = {name: value for name, value in HEADER.items() if name != field}
    with pytest.raises(UserError, match=f"line 1: field {field} is missing"):
        load(written(tmp_path / "one.jsonl", rest, {"turn": 1, "command": "ls"}))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "is empty"),
        (b"\n\n", "is empty"),
        (b"{", "line 1: not JSON"),
        (b"[1]\n", "line 1: .* is not a JSON object"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[" * 100_000, "line 1: not JSON"),
        (json.dumps(HEADER).encode(), "has no turns"),
        (json.dumps(HEADER).encode() + b'\n{"turn": 1, "command": "a\\u0000"}', "without NUL"),
        (json.dumps(HEADER).encode() + b'\n{"turn": 1, "command": "a", "think": NaN}', "field think"),
    ],
)
def test_broken_files_are_sentences(data: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    path.write_bytes(data)
    with pytest.raises(UserError, match=said):
        load(path)


def test_absent_and_unwritable_files_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        load(tmp_path / "absent.jsonl")
    with pytest.raises(UserError, match="cannot be written"):
        save(Trace("a", "b", "c", (TraceTurn(1, "ls"),)), tmp_path / "absent" / "one.jsonl")


def test_a_moved_trace_moves_back() -> None:
    for trace in shipped():
        moved = trace.moved("/elsewhere")
        assert "/workspace" not in moved.opening()
        assert moved.moved("/workspace") == trace
