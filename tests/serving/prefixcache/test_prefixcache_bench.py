"""The bench's worlds: sessions of a seed, Mooncake's form, an oracle that nobody beats."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from windtunnel.base.errors import UserError
from windtunnel.serving.prefixcache import bench
from windtunnel.serving.prefixcache.bench.rows import GB, ORACLE, OURS, _held, emulated
from windtunnel.serving.prefixcache.bench.sessions import KINDS, mooncake, sessions


@pytest.mark.parametrize("kind", KINDS)
def test_sessions_come_from_their_seed(kind: str) -> None:
    asked = sessions(kind, 12, 0.5, 3, unit=16)
    again = sessions(kind, 12, 0.5, 3, unit=16)
    assert [(one.arrival, one.whole.tolist()) for one in asked] == [
        (one.arrival, one.whole.tolist()) for one in again
    ]
    assert all(one.arrival < one.done and one.tokens <= 32_768 for one in asked)
    assert all((one.whole[: len(one.prompt)] == one.prompt).all() for one in asked)
    assert sorted(asked, key=lambda one: one.arrival) == asked
    least, most = KINDS[kind].turns
    assert len(asked) <= 12 * most and (kind == "agent" or len(asked) >= 12 * least)
    assert len({one.prompt[0] for one in asked}) <= len(KINDS[kind].systems)


def line(**changes: object) -> str:
    told = {"timestamp": 27_500, "input_length": 1100, "output_length": 500, "hash_ids": [0, 1, 9]}
    return json.dumps({**told, **changes})


def test_mooncakes_form(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join([line(), line(timestamp=0), line(timestamp=1, hash_ids=[0, 1, 8])]))
    asked = mooncake(path)
    assert [one.arrival for one in asked] == [0.0, 0.001, 27.5]
    assert asked[0].prompt.tolist() == [0, 1, 9] and asked[0].tokens == 1100
    assert [len(one.whole) for one in asked] == [4] * 3, "1,600 tokens"
    assert asked[0].whole[:2].tolist() == [0, 1]
    unknown = np.concatenate([one.whole[2:] for one in asked])
    assert len(set(unknown.tolist())) == 6 and unknown.max() < 0, "what was decoded does not recur"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "line 1 is not of Mooncake's form"),
        ('{"timestamp": 1}', "line 1 is not of Mooncake's form: 'input_length'"),
        ("[]", "line 1 is not of Mooncake's form"),
        (line(hash_ids=[1]), "line 1: 1 hash_ids do not fit 1100 tokens of input"),
        (line(hash_ids=["a", "b", "c"]), "line 1: 3 hash_ids do not fit"),
        (line(input_length=-1), "line 1: field input_length is -1, not of"),
        (line(hash_ids=None), "line 1: field hash_ids is None, not of Mooncake's form"),
    ],
)
def test_a_trace_of_another_form_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=words):
        mooncake(path)
    with pytest.raises(UserError, match=r"none\.jsonl: cannot be read"):
        mooncake(tmp_path / "none.jsonl")


def test_no_policy_saves_more_than_the_oracle_and_rows_say_so() -> None:
    asked = sessions("chat short", 60, 1.0, 5, unit=16)
    names = ("none", "every32", "block528", "radix", "marconi", "three-lru", OURS, ORACLE)
    found = {name: emulated(name, asked, 4 * GB, 16) for name in names}
    assert found["none"].hits == 0
    assert all(one.flops <= found[ORACLE].flops for one in found.values())
    assert found["radix"].flops < found[OURS].flops
    assert all(one.peak <= 4 * GB for one in found.values())
    rows = list(_held("chats", "chat", asked, (4,), (4.5, 1.4), "LMSys", names, 16))
    [gap] = [row for row in rows if "oracle eviction" in row.name]
    assert gap.emulated == found[OURS].flops / found[ORACLE].flops and gap.met == (gap.emulated >= 0.9)
    [least] = [row for row in rows if "vLLM+" in row.name]
    assert least.published == 4.5 and least.emulated == found[OURS].hits / found["every32"].hits


def test_a_trace_is_taken_by_the_section_that_wants_one(tmp_path: Path) -> None:
    [told] = bench.run(("mooncake",), quick=True)
    assert "give --trace conversation_trace.jsonl" in told.note
    with pytest.raises(
        UserError, match=r"--trace .* is of no section that runs here; accepted with mooncake"
    ):
        bench.run(("speed",), trace=tmp_path / "trace.jsonl")
