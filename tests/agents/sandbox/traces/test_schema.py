"""The file of a trace: what is wrong is told in a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from windtunnel.agents.sandbox.model import TurnClass
from windtunnel.agents.sandbox.traces import TraceTurn, load
from windtunnel.base.errors import UserError

HEADER = {"kind": "agent-session", "version": 1, "source": "b", "licence": "c", "name": "a"}
WRONG = {
    "turn": (2, "field turn: 2 is not accepted; use 1"),
    "command": (3, "field command: 3 is not accepted; use text"),
    "think": (-1, "field think: -1 is not accepted"),
    "expect_exit": (True, "field expect_exit: True"),
    "tags": ([1], "field tags"),
    "true_class": ("some", "use none, shell, files, full"),
    "timeout": (0, "field timeout: 0"),
    "colour": ("red", "unknown field colour"),
    "kind": ("failures", "field kind: 'failures' is not accepted; use \"agent-session\""),
    "version": (2, "field version: 2 is not accepted; use 1"),
    "name": ("A b", "field name: 'A b'"),
    "workdir": ("here", "an absolute path"),
    "environment": ({"A B": "c"}, "names of letters"),
    "probes": ({"a": 1}, "field probes"),
    "source": (None, "line 1: field source is missing"),
}
OF_HEADER = ("kind", "version", "name", "workdir", "environment", "probes", "source")


def written(path: Path, header: dict[str, Any], turn: dict[str, Any]) -> Path:
    path.write_text(json.dumps(header) + "\n" + json.dumps(turn) + "\n")
    return path


@pytest.mark.parametrize("field", WRONG)
def test_a_wrong_field_is_named_with_its_line(field: str, tmp_path: Path) -> None:
    value, said = WRONG[field]
    header, turn = dict(HEADER), {"turn": 1, "command": "ls"}
    changed = header if field in OF_HEADER else turn
    changed[field] = value
    if value is None:
        del changed[field]
    path = written(tmp_path / "one.jsonl", header, turn)
    with pytest.raises(UserError) as caught:
        load(path)
    line = 1 if changed is header else 2
    assert f"{path}, line {line}: " in str(caught.value) and said in str(caught.value)


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


def test_a_turn_says_what_it_is(tmp_path: Path) -> None:
    turn = {"turn": 1, "command": "ls", "true_class": "files", "expect_exit": 1, "tags": ["peek"]}
    trace = load(written(tmp_path / "one.jsonl", {**HEADER, "environment": {"A": "b c"}}, turn))
    assert trace.turns == (TraceTurn(1, "ls", expect_exit=1, tags=("peek",), true_class=TurnClass.FILES),)
    assert trace.opening() == "export A='b c'\nmkdir -p /workspace && cd /workspace\n"
