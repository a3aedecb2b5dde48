"""What is wrong with the file of a session is said in one sentence: file, field, value, what is accepted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from windtunnel.base.errors import UserError
from windtunnel.base.plain import from_plain, to_plain
from windtunnel.data.ingest import session
from windtunnel.data.ingest.model import IngestSession, Transform

GOOD: dict[str, Any] = {"version": 1, "table": "t", "columns": ["a", "b"]}


def test_a_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    given = [
        {"kind": "log", "each": ["a", "b"]},
        {"kind": "cross", "inputs": ["c", "d"], "output": "e", "rows": 9},
    ]
    more = {"where": [["day", "in", [1, 2]]], "transforms": given, "storage": {"anon": True}, "drift": "fill"}
    path.write_text(yaml.safe_dump(GOOD | more))
    ingest = session.read(path)
    assert ingest.where == (("day", "in", (1, 2)),) and ingest.drift == "fill" and ingest.batch == 1024
    assert ingest.transforms == (
        Transform("log", ("a",), "a"), Transform("log", ("b",), "b"),
        Transform("cross", ("c", "d"), "e", {"rows": 9}),
    )  # fmt: skip
    assert from_plain(IngestSession, to_plain(ingest)).transforms == ingest.transforms, (
        "as it goes over the wire"
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "field version is 2, accepted is 1"),
        ({"colums": []}, "field colums is unknown, did you mean columns?"),
        ({"columns": []}, "field columns is [], accepted is a list of names"),
        ({"columns": ["a", "a"]}, "field columns has a twice"),
        ({"batch": 0}, "field batch is 0, accepted is a whole number of rows from 1 up"),
        ({"batch": True}, "field batch is True"),
        ({"seed": -1}, "field seed is -1"),
        ({"drift": "maybe"}, "field drift is 'maybe', accepted is refuse or fill"),
        ({"where": [["a", "~", 1]]}, "accepted is a list of conditions, each [column, operator, value]"),
        ({"where": [["a", "in", 1]]}, "field where.0 has 1 with in, accepted is a list"),
        ({"where": [["a", "==", [1]]]}, "field where.0 has [1] with =="),
        ({"transforms": [{"kind": "lag", "inputs": "a"}]}, "transforms.0.kind is 'lag', did you mean log?"),
        ({"transforms": [{"kind": "log"}]}, "field transforms.0 accepts either inputs"),
        (
            {"transforms": [{"kind": "log", "inputs": "a", "each": ["a"]}]},
            "field transforms.0 accepts either",
        ),
        ({"transforms": [{"kind": "log", "inputs": []}]}, "field transforms.0 has no inputs"),
        (
            {"transforms": [{"kind": "first", "inputs": "a", "m": 3}]},
            "transforms.0 (first): field n is missing",
        ),
    ],
)
def test_bad_fields(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as error:
        session.check(GOOD | change, "s.yaml")
    assert (
        str(error.value).startswith("s.yaml: ") and words in str(error.value) and "\n" not in str(error.value)
    )
